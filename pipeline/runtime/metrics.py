"""A run's counters in Ray's metrics, which Prometheus reads from the node of the driver.

Entry point: `RunMetrics`. Ray adds `ray_` before the names, and `_total` after those of counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from urllib.parse import quote

from ray.util import metrics

from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import Progress

# A task with more labels has no counter for each of them.
MAX_LABELS = 100

COUNTERS = {
    "assay_documents": ("Documents answered.", ()),
    "assay_rows": ("Rows of committed shards by status.", ("status",)),
    "assay_answers": ("Answers of committed shards by task and label.", ("task", "label")),
    "assay_tokens": ("Tokens that models read for committed shards.", ("kind",)),
    "assay_label_seconds": ("Seconds of the workers for committed shards, without loading.", ()),
    "assay_phase_seconds": ("Seconds of the driver by phase.", ("phase",)),
}
GAUGES = {
    "assay_shards_done": ("Finished shards of the input.", ()),
    "assay_shards_missing": ("Shards of the input that are not finished.", ()),
    "assay_documents_missing": ("Documents of this run that are not answered yet.", ()),
}
SPEC = "spec"  # the tag of every metric: the name of the spec
# Ray sends tags as ASCII; all other characters, and `%`, are percent-encoded.
_PLAIN = "".join(chr(code) for code in range(32, 127)).replace("%", "")


class RunMetrics:
    """The metrics of one run.

    Args:
        spec: The name of the spec.
        plan: The shards of the input, and the work that is missing.
    """

    def __init__(self, spec: str, plan: Plan) -> None:
        self._tags = {SPEC: tag(spec)}
        self._counters = {
            name: metrics.Counter(name, text, (SPEC, *tags))
            for name, (text, tags) in COUNTERS.items()
        }
        self._gauges = {
            name: metrics.Gauge(name, text, (SPEC, *tags)) for name, (text, tags) in GAUGES.items()
        }
        self._items = Counter(work.shard.id for work in plan.work_items)  # left, by shard
        self._shards = len(plan.shards)
        self._missing = len(self._items)
        self._answered = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by phase
        self._set_shards()

    def committed(self, counts: ShardCounts) -> None:
        """Counts one committed shard. Only its cost, if it is not a shard of the plan."""
        is_planned = counts.sid in self._items
        for status, rows in counts.n.by("rows").items() if is_planned else ():
            # — only the kind of an error: its details would make a time series for each file
            kind = ":".join(status.split(":")[:2])
            self._add("assay_rows", rows, {"status": kind})
        for task, by_label in counts.n.labels.items():
            if is_planned and len(by_label) <= MAX_LABELS:
                for label, rows in by_label.items():
                    self._add("assay_answers", rows, {"task": task, "label": label})
        self._add("assay_tokens", counts.n.total_of("prefix_tokens"), {"kind": "document"})
        self._add("assay_tokens", counts.n.total_of("question_tokens"), {"kind": "question"})
        self._add("assay_label_seconds", counts.n.total_of("label_ms") / 1_000, {})
        if is_planned:
            self._items[counts.sid] -= 1
            if self._items[counts.sid] == 0:
                self._missing -= 1
                self._set_shards()

    def tick(self, progress: Progress, seconds: Mapping[str, float]) -> None:
        """Counts what is new in the seconds of each phase, and in the documents answered."""
        for phase, in_phase in seconds.items():
            self._add("assay_phase_seconds", in_phase - self._seconds[phase], {"phase": phase})
        self._seconds.update(seconds)
        if progress.verb != "labelled":
            return
        # — a shard whose worker died is answered again: a counter must not fall
        self._add("assay_documents", progress.answered - self._answered, {})
        self._answered = max(self._answered, progress.answered)
        missing = progress.documents - progress.answered
        self._gauges["assay_documents_missing"].set(missing, self._tags)

    def _set_shards(self) -> None:
        self._gauges["assay_shards_missing"].set(self._missing, self._tags)
        self._gauges["assay_shards_done"].set(self._shards - self._missing, self._tags)

    def _add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        if value > 0:
            escaped = {key: tag(text) for key, text in tags.items()}
            self._counters[name].inc(value, self._tags | escaped)


def tag(text: str) -> str:
    """The text as the value of a tag, percent-encoded beyond printable ASCII."""
    return quote(text, safe=_PLAIN, errors="surrogatepass")
