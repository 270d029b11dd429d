"""A run's counters in Ray's metrics, which Prometheus reads from the node of the driver.

Entry point: `RunMetrics`. Ray adds `ray_` before the names, and `_total` after those of counters.
"""

from __future__ import annotations

from urllib.parse import quote

from ray.util import metrics

from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.plan import Plan

# A task with more labels has no counter for each of them.
MAX_LABELS = 100

COUNTERS = {
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
    """The metrics of one run of the spec with this name, which has this plan."""

    def __init__(self, spec: str, plan: Plan) -> None:
        self._tags = {SPEC: tag(spec)}
        self._counters = {
            name: metrics.Counter(name, text, (SPEC, *tags))
            for name, (text, tags) in COUNTERS.items()
        }
        self._gauges = {
            name: metrics.Gauge(name, text, (SPEC, *tags)) for name, (text, tags) in GAUGES.items()
        }
        self._shards = len(plan.shards)
        self._missing = {work.shard.id for work in plan.work_items}

    def committed(self, counts: ShardCounts) -> None:
        """Counts one committed shard."""
        self._missing.discard(counts.sid)
        for status, rows in counts.n.by("rows").items():
            # — only the kind of an error: its details would make a time series for each file
            self._add("assay_rows", rows, status=":".join(status.split(":")[:2]))
        for task, by_label in counts.n.labels.items():
            for label, rows in by_label.items() if len(by_label) <= MAX_LABELS else ():
                self._add("assay_answers", rows, task=task, label=label)
        self._add("assay_tokens", counts.n.total_of("prefix_tokens"), kind="document")
        self._add("assay_tokens", counts.n.total_of("question_tokens"), kind="question")
        self._add("assay_label_seconds", counts.n.total_of("label_ms") / 1_000)

    def tick(self, phase: str, seconds: float, documents_missing: int) -> None:
        """Counts seconds of a phase, and sets the numbers of what is missing."""
        self._add("assay_phase_seconds", seconds, phase=phase)
        missing = len(self._missing)
        self._gauges["assay_shards_missing"].set(missing, self._tags)
        self._gauges["assay_shards_done"].set(self._shards - missing, self._tags)
        self._gauges["assay_documents_missing"].set(documents_missing, self._tags)

    def _add(self, name: str, value: float, **tags: str) -> None:
        if value > 0:
            escaped = {key: tag(text) for key, text in tags.items()}
            self._counters[name].inc(value, self._tags | escaped)


def tag(text: str) -> str:
    """The text as the value of a tag, percent-encoded beyond printable ASCII."""
    return quote(text, safe=_PLAIN, errors="surrogatepass")
