"""Laws of an output under any history: right answers, each document once, and no needless question.

A history is a sequence of changes of input and spec, each with a run that may have a condition, be
killed, have company, or have a clock that is an hour off. The oracles are a dictionary of texts,
and what the output had before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from changing_corpus import TOPIC, Corpus, asked_of, decided, kill
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.ledger.snapshots import last_shards, last_snapshot, snapshot_numbers
from pipeline.ledger.text_index import LEAST_SOURCES
from pipeline.runtime.outcome import Outcome

BANDS = [(0.2, 0.8), (0.4, 0.6), (-1.0, 1.5), (0.3, 0.7)]
FILES = st.sampled_from("abc")
NUMBERS = st.integers(0, 9)
CHANGES = st.one_of(
    st.tuples(st.just("nothing")),
    st.tuples(st.just("write"), FILES, st.lists(NUMBERS, max_size=6)),
    st.tuples(st.just("delete"), FILES),
    st.tuples(st.just("copy"), FILES, FILES),
    st.tuples(st.just("join")),
    st.tuples(st.just("move"), st.sampled_from(["x", "y", "z"])),
    st.tuples(st.just("shards"), st.sampled_from([600, 1_500, 100_000])),
    st.tuples(st.just("thresholds"), st.sampled_from(BANDS)),
    st.tuples(st.just("when"), st.sampled_from([None, 0.2, 0.5, 0.8])),
    st.tuples(st.just("break"), st.sampled_from(["first", "second", "topic"]), NUMBERS),
    st.tuples(st.just("mend")),
)
OPTIONS = st.sampled_from(
    [
        *[{}] * 4,
        {"sample": "50%"},
        {"sample": "80%"},
        {"where": "text like '%1%' or text like '%4%'"},
        {"where": "text not like '%2%'"},
        {"retry_failed": True},
    ]
)
RUNS = st.one_of(
    st.tuples(st.just("run"), OPTIONS),
    st.tuples(st.just("run"), OPTIONS),
    st.tuples(st.just("killed"), OPTIONS, st.integers(1, 40)),
    st.tuples(st.just("two runs"), OPTIONS, st.integers(1, 30)),
    st.tuples(st.just("clock"), OPTIONS, st.sampled_from([-1, 1])),
    st.tuples(st.just("other spec"), OPTIONS),
    st.tuples(st.just("gc"), st.sampled_from(["job", "other"])),
)

# Each kind of change and of run, also in `make test`, which draws few histories.
EVERY_KIND: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (("write", "b", [1, 2, 7, 0, 7]), ("killed", {}, 5)),
    (("thresholds", (0.4, 0.6)), ("run", {"sample": "50%"})),
    (("break", "first", 3), ("two runs", {}, 6)),
    (("copy", "b", "c"), ("killed", {"where": "text not like '%2%'"}, 3)),
    (("when", 0.5), ("other spec", {"sample": "80%"})),
    (("mend",), ("run", {"retry_failed": True})),
    (("move", "x"), ("killed", {}, 4)),
    (("shards", 600), ("clock", {}, 1)),
    (("delete", "c"), ("clock", {}, -1)),
    (("join",), ("gc", "job")),
    (("nothing",), ("two runs", {"retry_failed": True}, 2)),
]


def text(number: int) -> str:
    return f"text {number} says so." if number else ""


@dataclass
class History:
    """An output, and what is known of it."""

    corpus: Corpus
    other: Corpus  # the same input and output, another spec
    band: tuple[float, float] = BANDS[0]
    bound: float | None = None  # the topic is asked of documents that are more toxic
    ever_broken: set[tuple[str, str]] = field(default_factory=set)

    def change(self, kind: str, *values: Any) -> None:
        corpus, files = self.corpus, self.corpus.files
        match kind, values:
            case "write", (name, numbers):
                corpus.write(name, [text(number) for number in numbers])
            case "delete", (name,) if name in files:
                corpus.delete(name)
            case "copy", (source, target):
                corpus.write(target, files.get(source, [text(1)]))
            case "join", ():
                corpus.write("a", corpus.delete(*files))
            case "move", (folder,) if folder != corpus.input.name:
                corpus.move(folder)
            case "shards", (size,):
                corpus.shard_bytes = size
            case "thresholds", (band,):
                self.band = band
            case "when", (bound,):
                self.bound = bound
            case "break", (question, number):
                corpus.broken.add((question, text(number)))
            case "mend", ():
                corpus.broken.clear()
        if not any(files.values()):
            corpus.write("a", [text(0)])
        self.ever_broken |= corpus.broken
        when = {} if self.bound is None else {"when": f"toxic.p.toxic > {self.bound}"}
        corpus.others = [{**TOPIC, **when}]
        corpus.decide(*self.band)
        self.other.input, self.other.shard_bytes = corpus.input, corpus.shard_bytes
        self.other.files, self.other.all_texts = files, corpus.all_texts

    def needed(self, corpus: Corpus, texts: Mapping[str, str]) -> set[tuple[str, str]]:
        """What has to be asked about these documents, whether it was or not."""
        different = {each for each in texts.values() if each}
        needed = asked_of(different, *self.band) if corpus is self.corpus else set()
        needed |= {("first", each) for each in different} - needed
        bound = self.bound if corpus is self.corpus else None
        return needed | {
            ("topic", each)
            for each in different
            if bound is None or decided(each, *self.band)[1] > bound
        }

    def inside(self, options: Mapping[str, Any]) -> dict[str, str]:
        """The documents that the condition of a run accepts."""
        sample, where = options.get("sample"), options.get("where")
        texts = self.corpus.texts
        if sample is None and where is None:
            return texts
        by_text = {of: digest for digest, of in self.corpus.all_texts.items()}
        chosen: dict[str, Callable[[str], bool]] = {
            "text like '%1%' or text like '%4%'": lambda of: "1" in of or "4" in of,
            "text not like '%2%'": lambda of: "2" not in of,
        }
        return {
            name: of
            for name, of in texts.items()
            if (sample is None or int(by_text[of], 16) < int(sample[:-1]) / 100 * 2**128)
            and (where is None or chosen[where](of))
        }

    def run(self, corpus: Corpus, kind: str, options: dict[str, Any], number: int = 0) -> None:
        """One run or two at once; or one that is killed, and publishes nothing.

        The number is that of the create at which this happens, or of the hours of a wrong clock.
        """
        texts, before, runs = self.inside(options), corpus.stored(), 1
        shard_texts = corpus.shard_texts()
        # — of the spec's last snapshot, or else of the current one
        published = last_shards(corpus.store, corpus.name) or last_shards(corpus.store, None)
        if kind == "killed":
            outcome = corpus.run_until(number, kill, **options)
        elif kind == "two runs":
            runs = 2
            outcome = corpus.run_until(number, lambda: complete(corpus, options), **options)
        elif kind == "clock":
            now = time.time
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("time.time", lambda: now() + 3_600 * number)
                outcome = corpus.run(**options)
        else:
            outcome = corpus.run(**options)
        assert set(corpus.asked) <= self.needed(corpus, texts)
        if outcome is None:
            return
        is_retry = bool(options.get("retry_failed"))
        known = (before, shard_texts, published)
        self.check_asked(corpus, outcome, *known, runs=runs, is_retry=is_retry)
        assert outcome.complete
        assert outcome.limit is None or outcome.asked == len(texts)
        assert set(corpus.asked) - corpus.stored().keys() <= corpus.broken
        if outcome.snapshot is None:
            assert outcome.limit is not None and outcome.kept is not None
        elif outcome.snapshot == snapshot_numbers(corpus.store)[0]:
            broken = corpus.broken if is_retry else self.ever_broken
            shown = corpus.texts if outcome.limit is None else texts
            corpus.check(*self.band, texts=shown, broken=broken)

    def check_asked(
        self,
        corpus: Corpus,
        outcome: Outcome,
        before: Mapping[tuple[str, str], set[str]],
        shard_texts: Mapping[str, set[str]],
        published: Collection[str] | None,
        *,
        runs: int,
        is_retry: bool,
    ) -> None:
        """A text is asked once in each shard that cannot have the answer from the output.

        The output has it in the shard itself, or, for a shard that the last snapshot does not show,
        in one of few shards that it shows. Of these with the text and with labels, one is looked
        into, which may lack this answer. A retry asks again in each shard.
        """
        shards = {
            shard.id: corpus.files[Path(shard.path).stem][shard.piece.start_row :][: shard.rows]
            for shard in outcome.plan.shards
        }
        for (question, of), count in corpus.asked.items():
            answered = before.get((question, of), set())
            sources = {
                sid for (each, _), sids in before.items() if each == question for sid in sids
            }
            asking = {sid for sid, texts in shards.items() if of in texts} - answered
            lacking = {sid for sid, texts in shard_texts.items() if of in texts} - answered
            shown = {*published} if published is not None else set()
            if answered & shown and len(sources) <= LEAST_SOURCES and not is_retry:
                asking = {sid for sid in asking if sid in shown or lacking & shown}
            assert count <= runs * len(asking), (question, of, count)

    def collect(self, corpus: Corpus) -> None:
        """Garbage collection by one spec takes nothing that a last snapshot of any spec shows."""
        numbers = [last_snapshot(corpus.store, each.name) for each in (self.corpus, self.other)]
        before = {number: corpus.rows(snapshot=number) for number in numbers if number}
        corpus.collect()
        assert all(corpus.rows(snapshot=number) == rows for number, rows in before.items())
        assert corpus.collect(delete=False) == ()


def complete(corpus: Corpus, options: Mapping[str, Any]) -> None:
    """A whole run of the same spec; what it asks counts too."""
    asked = corpus.asked.copy()
    assert corpus.run(**options).complete
    corpus.asked.update(asked)


@settings(
    max_examples=settings().max_examples // 5,  # a history is a dozen runs
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@example(steps=EVERY_KIND)
@given(steps=st.lists(st.tuples(CHANGES, RUNS), min_size=1, max_size=6))
def test_after_any_history_the_answers_are_right_and_none_was_asked_for_needlessly(
    new_corpus: Callable[[], Corpus], steps: list[tuple[tuple[Any, ...], tuple[Any, ...]]]
) -> None:
    corpus, other = new_corpus(), new_corpus()
    corpus.broken.clear()
    corpus.stages = [{"question": "first"}, {"question": "second"}]
    other.folder, other.name = corpus.folder, "other"
    other.others = [TOPIC]
    history = History(corpus, other)
    history.change("write", "a", range(6))
    for change, (kind, *how) in steps:
        history.change(*change)
        if kind == "gc":
            history.collect(corpus if how == ["job"] else other)
        else:
            history.run(other if kind == "other spec" else corpus, kind, *how)
    history.change("mend")
    for each in (other, corpus):
        history.run(each, "run", {"retry_failed": True})
    history.collect(other)
    assert history.needed(corpus, corpus.texts) <= corpus.stored().keys()
    for each in (other, corpus):
        created = each.run().tally.n["created",]
        assert (created, each.asked.total()) == (0, 0)
