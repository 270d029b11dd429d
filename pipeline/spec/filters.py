"""Which documents `assay filter` keeps. Entry point: `FilterSpec`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, model_validator

from pipeline.spec.locations import StorageOptions
from pipeline.spec.model import Frozen

Score = Annotated[str, Field(min_length=1)]
Group = Annotated[str, Field(min_length=1)]


class DropTopSpec(Frozen):
    """Drops the documents with the highest scores. Documents with the score of the threshold stay,
    so at most this share is dropped."""

    share: float = Field(gt=0, lt=1)
    """Largest share of the documents that is dropped."""
    of: Score
    """Score: an SQL expression over the tasks' columns that is a number: `toxic.p.toxic`."""
    by: Group | None = None
    """Groups, each of which loses this share: a task, whose labels are the groups, or an SQL
    expression such as `doc.source`. Default: all documents together."""
    smallest: NonNegativeInt = 100
    """A group with fewer documents has the threshold of all documents."""


class ThresholdsSpec(Frozen):
    """Drops the documents whose score is above the threshold of their group."""

    of: Score
    """Score, as in `drop_top`."""
    by: Group | None = None
    """Groups, as in `drop_top`. Default: `otherwise` is for all documents."""
    at: dict[str, FiniteFloat] = Field(default={})
    """Threshold of each group."""
    otherwise: FiniteFloat = Field()
    """Threshold of other groups."""


class FilterSpec(Frozen):
    """Which documents `assay filter` keeps."""

    keep: str | None = Field(default=None, min_length=1)
    """Boolean SQL expression over the tasks' columns, such as `toxic.p.toxic < 0.5`, and over
    columns of the input, which are texts: `doc.source = 'web'`. Documents for which it is true are
    kept, unless `drop_top` or `thresholds` drops them."""
    drop_top: DropTopSpec | None = None
    """Drops the documents with the highest scores. Default: none."""
    thresholds: ThresholdsSpec | None = None
    """Drops documents whose score is above the threshold of their group. Default: none."""
    policy: str | None = Field(default=None, min_length=1)
    """Path or URL of the `policy.json` of another filter, in place of these: the same rule with the
    same thresholds. Default: none."""
    on_error: Literal["fail", "keep", "drop"] = "fail"
    """What happens to documents without an answer: the filter fails, keeps them or drops them."""
    storage_options: StorageOptions | None = None
    """Options of the fsspec file systems of `--to` and `--dropped`. Default: the output's."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> FilterSpec:
        rules = [
            key for key in ("keep", "drop_top", "thresholds") if getattr(self, key) is not None
        ]
        if self.policy is not None and rules:
            raise ValueError(f"a policy brings its own rule; remove it, or {rules[0]}")
        if self.policy is None and not rules:
            raise ValueError("write keep, drop_top, thresholds or policy")
        return self
