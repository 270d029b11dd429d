"""The design of a sample that people label: the stratum of each text, and the size of each stratum.

Entry points: `keep_design` when a sample is drawn, `find_design` when its labels are read. The
output keeps the design. So the file for people shows nothing that depends on a document's score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.resampling import Sampling
from pipeline.gold.files import GoldRows, gold_error
from pipeline.hashes import canonical_json, parse_versioned_json, sha256_hex, validated
from pipeline.ledger.keys import audit_key, parse_key
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

# Columns of the file for people: the key of a row, and the name of the design.
HASH, SAMPLE = "content_hash", "_sample"
FORMAT = 1
_ID_DIGITS = 16


@dataclass(frozen=True, slots=True)
class SampleDesign:
    """How a stratified random sample of the texts of a snapshot was drawn."""

    snapshot: int
    strata: Mapping[str, int]  # by content hash, of the drawn texts
    sizes: Mapping[int, int]  # by stratum, texts of the snapshot

    @property
    def texts(self) -> int:
        """The texts that the sample was drawn from."""
        return sum(self.sizes.values())

    def weights(self, labelled: Collection[str]) -> dict[str, float]:
        """The number of texts that each of these labelled texts represents.

        Drawn texts without a label are taken to be like the labelled ones of their stratum.
        """
        count = Counter(self.strata[content_hash] for content_hash in labelled)
        return {
            content_hash: self.sizes[stratum] / count[stratum]
            for content_hash in labelled
            for stratum in [self.strata[content_hash]]
        }

    def sampling(
        self,
        hashes: Sequence[str],  # [rows]: of labelled texts
        documents: NDArray[np.int64] | int = 1,  # [rows]: of the corpus with the text
    ) -> Sampling:
        """How rows with these texts were drawn."""
        texts = self.weights(hashes)
        return Sampling(
            weights=np.array([texts[text_hash] for text_hash in hashes]) * documents,
            strata=np.array([self.strata[text_hash] for text_hash in hashes], np.int64),
        )


def keep_design(store: Store, design: SampleDesign) -> str:
    """Writes the design to the output, and returns its name; the same design has the same name."""
    content = asdict(design) | {"format": FORMAT}
    content["sizes"] = {str(stratum): size for stratum, size in design.sizes.items()}
    data = canonical_json(content)
    name = sha256_hex(data, _ID_DIGITS)
    store.create(audit_key(name), data)
    return name


def find_design(rows: GoldRows, spec: JobSpec) -> SampleDesign | None:
    """The design of the sample that a gold file is; None of a file that is not such a sample.

    SpecError if its names of the design or the keys of its rows were changed, or if the output does
    not have the design.
    """
    if SAMPLE not in rows.columns:
        return None
    names = rows.columns[SAMPLE]
    if not rows.rows:
        raise gold_error(rows.path, "has no rows; draw a sample and label it")
    odd = next((row for row, name in enumerate(names) if name != names[0]), None)
    if odd is not None:
        fix = f"the column {SAMPLE} has another value than in row 1; put each sample in its own "
        fix += "file, and do not edit this column"
        raise SpecError([Problem(rows.place(odd), fix, names[odd])])
    design = _stored_design(rows.path, str(names[0]), spec)
    keys = rows.columns.get(HASH, [None] * rows.rows)
    odd = next((row for row, key in enumerate(keys) if key not in design.strata), None)
    if odd is not None:
        fix = f"its {HASH} is not one of the sample; restore the column {HASH}"
        raise SpecError([Problem(rows.place(odd), fix, keys[odd])])
    return design


def _stored_design(path: str, name: str, spec: JobSpec) -> SampleDesign:
    """The design with this name in the spec's output; SpecError if there is none."""
    store, key = open_store(spec.output, spec.storage_options), audit_key(name)
    # — a name that was edited could be another path
    if parse_key(key) is None or not any(stored.key == key for stored in store.list(key)):
        fix = f"{store.url} has no design of this sample ({SAMPLE} {name}); name the spec whose "
        fix += "output the sample was drawn from"
        raise gold_error(path, fix)
    return validated(SampleDesign, parse_versioned_json(store.read(key), FORMAT))
