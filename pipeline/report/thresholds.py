"""Scores of a corpus on a page: histograms, and a threshold to move.

Entry points: `histogram`, and `slider` with its `SCRIPT`, which counts with the page's own numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.filters.tally import THRESHOLDS
from pipeline.report.console import Grid, escape_controls
from pipeline.report.page import safe, table
from pipeline.verbs.corpus_report import ScoreCounts

SLIDER_GROUPS = 8  # the largest ones
BARS = 50  # of a histogram
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


def histogram(score: ScoreCounts) -> str:
    """Bars of equal width; the highest is as high as the figure."""
    counts = np.asarray(score.sizes[0], np.int64)
    cells = np.r_[counts[0] + counts[1], counts[2:]]  # — a score of 0 is in the first bar
    bars = cells.reshape(BARS, -1).sum(axis=1)
    heights = bars / max(1, int(bars.max())) * 100
    drawn = "".join(
        f"<rect x='{2 * bar}' y='{100 - height:.2f}' width='1.8' height='{height:.2f}'/>"
        for bar, height in enumerate(heights.tolist())
        if height
    )
    name = safe(f"p of {score.label} ({score.task}), {int(bars.sum()):,} documents")
    return (
        f"<figure><svg viewBox='0 0 100 100' preserveAspectRatio='none' fill='#1f5fa8' role='img' "
        f"aria-label='{name}'>{drawn}</svg><figcaption>{name}; from 0 to 1, the highest bar has "
        f"{int(bars.max()):,}</figcaption></figure>"
    )


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
