"""Scores of a corpus on a page: histograms, and a threshold to move.

Entry points: `histograms`, and `slider` with its `SCRIPT`, which counts what the page has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.filters.tally import THRESHOLDS
from pipeline.report.console import Grid, escape_controls
from pipeline.report.page import safe, table
from pipeline.verbs.corpus_report import ScoreCounts

SLIDER_GROUPS = 8  # the largest ones
BARS = 50  # of a histogram
MOST_FIGURES = 3  # of a task
LEAST_SHARE = 0.01  # of the documents of a figure, above the lowest bar
# Pixels of a figure; the axis begins below 1, so that a bar of one document has a height.
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 328, 10, 140
_LOG_BELOW_ONE = 0.3
# `above(counts, n)`: the documents whose score is above threshold n, as `Histogram` counts them.
SCRIPT = """
const data = JSON.parse(document.getElementById('counts').textContent);
const choice = document.getElementById('score'), slider = document.getElementById('threshold');
const above = (counts, n) => counts.slice(n + 1).reduce((sum, count) => sum + count, 0);
const number = (n) => n.toLocaleString('en-US');
function show() {
  const score = data[choice.value], n = Number(slider.value);
  document.getElementById('at').textContent = (n / 1000).toFixed(3);
  const row = (name, counts) => {
    const all = counts.reduce((sum, count) => sum + count, 0), dropped = above(counts, n);
    const share = all ? (100 * dropped / all).toFixed(1) + '%' : '-';
    return [name, number(all), number(all - dropped), number(dropped), share];
  };
  const groups = Object.entries(score.counts).map(([name, counts]) => row(name, counts));
  const rows = [row('all', score.sizes[0]), ...(groups.length > 1 ? groups : [])];
  const body = document.querySelector('#consequences tbody');
  body.replaceChildren(...rows.map((cells) => {
    const line = document.createElement('tr');
    cells.forEach((cell, index) => {
      const part = document.createElement('td');
      part.textContent = cell;
      if (index) part.className = 'n';
      line.append(part);
    });
    return line;
  }));
  const [chars, tokens] = [score.sizes[1], score.sizes[2]].map((each) => number(above(each, n)));
  document.getElementById('sizes').textContent =
    `Above the threshold: ${chars} characters and ${tokens} tokens.`;
}
choice.addEventListener('change', () => { slider.value = data[choice.value].start; show(); });
slider.addEventListener('input', show);
show();
"""


def histograms(scores: Sequence[ScoreCounts]) -> str:
    """The figures of a task: of two labels the first, else the labels with most to show.

    A label has something to show if one document in a hundred scores above the lowest bar.
    """
    # — of two labels the second mirrors the first
    candidates = scores[:1] if len(scores) == 2 else scores
    above = [int(_bars(score)[1:].sum()) for score in candidates]
    most = sorted(range(len(candidates)), key=lambda n: -above[n])[:MOST_FIGURES]
    drawn = [
        histogram(candidates[n])
        for n in sorted(most)
        if above[n] >= LEAST_SHARE * max(1, sum(candidates[n].sizes[0]))
    ]
    if not drawn:
        return ""
    left_out = len(candidates) - len(drawn)
    more = f"<p>{left_out:,} more labels; --json has their counts.</p>" if left_out else ""
    return f"<div class='figures'>{''.join(drawn)}</div>{more}"


def histogram(score: ScoreCounts) -> str:
    """Bars of equal width on a logarithmic axis, so that a bar of one document is visible."""
    bars = _bars(score).tolist()
    decades = max(1, len(str(max(bars))) - (str(max(bars)).strip("0") == "1"))
    unit = (_BOTTOM - _TOP) / (decades + _LOG_BELOW_ONE)

    def y(count: int) -> float:
        return _BOTTOM - unit * (math.log10(count) + _LOG_BELOW_ONE)

    width = (_RIGHT - _LEFT) / BARS
    grid = "".join(
        f"<line x1='{_LEFT}' x2='{_RIGHT}' y1='{y(10**n):.1f}' y2='{y(10**n):.1f}' "
        f"stroke='#ccc'/><text x='{_LEFT - 4}' y='{y(10**n) + 4:.1f}' "
        f"text-anchor='end'>{10**n:,}</text>"
        for n in range(decades + 1)
    )
    drawn = "".join(
        f"<rect x='{_LEFT + width * bar:.1f}' y='{y(count):.2f}' width='{width * 0.85:.1f}' "
        f"height='{_BOTTOM - y(count):.2f}' fill='#1f5fa8'>"
        f"<title>{bar / BARS:.2f} to {(bar + 1) / BARS:.2f}: {count:,}</title></rect>"
        for bar, count in enumerate(bars)
        if count
    )
    axis = "".join(
        f"<text x='{_LEFT + share * (_RIGHT - _LEFT):.0f}' y='{_BOTTOM + 15}' "
        f"text-anchor='middle'>{share:g}</text>"
        for share in (0, 0.5, 1)
    )
    highest = max(range(BARS), key=bars.__getitem__)
    name = safe(f"p of {score.label} ({score.task}), {sum(bars):,} documents")
    where = f"{bars[highest]:,} at {highest / BARS:.2f} to {(highest + 1) / BARS:.2f}"
    return (
        f"<figure><svg viewBox='0 0 {_RIGHT + 12} {_BOTTOM + 20}' role='img' font-size='11' "
        f"fill='#222' aria-label='{name}'>{grid}{drawn}"
        f"<line x1='{_LEFT}' x2='{_RIGHT}' y1='{_BOTTOM}' y2='{_BOTTOM}' stroke='#222'/>{axis}"
        f"</svg><figcaption>{name}; the highest bar has {where}; logarithmic scale</figcaption>"
        "</figure>"
    )


def _bars(score: ScoreCounts) -> NDArray[np.int64]:  # [bars]
    counts = np.asarray(score.sizes[0], np.int64)
    cells = np.r_[counts[0] + counts[1], counts[2:]]  # — a score of 0 is in the first bar
    bars: NDArray[np.int64] = cells.reshape(BARS, -1).sum(axis=1)
    return bars


def slider(scores: Sequence[ScoreCounts]) -> Iterator[str]:
    """A threshold that the reader moves, and what is then dropped; it needs `SCRIPT`."""
    options = "".join(
        f"<option value='{number}'>{safe(f'{each.task}: p of {each.label}')}</option>"
        for number, each in enumerate(scores)
    )
    starts = [round(each.threshold * (len(THRESHOLDS) - 1)) for each in scores]
    data = [
        {"counts": _largest_groups(each.counts), "sizes": each.sizes, "start": start}
        for each, start in zip(scores, starts, strict=True)
    ]
    yield (
        "<p>The documents above a threshold. The probabilities are raw, not calibrated.</p>"
        "<div class='controls'><label for='score'>Score</label>"
        f"<select id='score'>{options}</select>"
        "<label for='threshold'>Threshold</label><input type='range' id='threshold' min='0' "
        f"max='{len(THRESHOLDS) - 1}' value='{starts[0]}'>"
        "<output id='at' for='threshold score'></output></div>"
        "<p id='sizes' role='status'></p><div id='consequences'>"
    )
    first = scores[0].sizes[0]
    dropped = sum(first[starts[0] + 1 :])
    row = ("all", f"{sum(first):,}", f"{sum(first) - dropped:,}", f"{dropped:,}")
    share = f"{dropped / max(1, sum(first)):.1%}"
    yield table(Grid("", ("group", "documents", "kept", "dropped", "share"), [(*row, share)]))
    # — no text can end the element
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    yield f"</div><script type='application/json' id='counts'>{encoded}</script>"


def _largest_groups(counts: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    largest = sorted(counts.items(), key=lambda each: -sum(each[1]))
    shown = {escape_controls(name): each for name, each in largest[:SLIDER_GROUPS]}
    if others := largest[SLIDER_GROUPS:]:
        rest = np.sum([each for _, each in others], axis=0).tolist()
        shown[f"{len(others):,} smaller groups"] = rest
    return shown
