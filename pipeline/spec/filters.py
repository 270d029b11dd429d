"""Which documents `assay filter` keeps. Entry point: `FilterSpec`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from pipeline.spec.locations import Location, StorageOptions
from pipeline.spec.model import Frozen


class DropTopSpec(Frozen):
    """Drops the documents with the highest scores. Documents with the score of the threshold stay,
    so at most this share is dropped."""

    share: float = Field(gt=0, lt=1)
    """Largest share of the documents that is dropped."""
    of: str = Field(min_length=1)
    """Score: an SQL expression over the tasks' columns that is a number: `toxic.p.toxic`."""
    by: str | None = Field(default=None, min_length=1)
    """Groups, each of which loses this share: a task, whose labels are the groups, or an SQL
    expression such as `doc.source`. Default: all documents together."""
    smallest: NonNegativeInt = 100
    """A group with fewer documents has the threshold of all documents."""


class JoinSpec(Frozen):
    """A table beside the answers, such as duplicates or flags that another tool has found. A rule
    names its columns as `joined.COLUMN`, which are null for a document without a row there."""

    path: Location
    """File, folder or glob of Parquet, CSV or JSON lines, opened with `input.storage_options`."""
    on: Literal["doc_id", "content_hash"] = "doc_id"
    """Column of the table that identifies the document of a row. Two rows of one document must be
    equal."""


class FilterSpec(Frozen):
    """Which documents `assay filter` keeps."""

    keep: str | None = Field(default=None, min_length=1)
    """Boolean SQL expression over the tasks' columns, such as `toxic.p.toxic < 0.5`, and over
    columns of the input, which are texts: `doc.source = 'web'`. Documents for which it is true are
    kept, unless `drop_top` drops them."""
    drop_top: DropTopSpec | None = None
    """Drops the documents with the highest scores. Default: none."""
    join: JoinSpec | None = None
    """A table whose columns the rule may name. Default: none."""
    on_error: Literal["fail", "keep", "drop"] = "fail"
    """What happens to documents without an answer: the filter fails, keeps them or drops them."""
    storage_options: StorageOptions | None = None
    """Options of the fsspec file system of `--to`. Default: the output's."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> FilterSpec:
        if self.keep is None and self.drop_top is None:
            raise ValueError("write keep or drop_top")
        return self
