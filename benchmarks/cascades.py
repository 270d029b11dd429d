"""What `cascade: auto` saves on three corpora, and whether its promise holds there.

    python -m benchmarks.cascades models/smollm2-135m-instruct.gguf [--sets spam] [--documents N]
        [--tokens N] [--joined N] [--agree SHARE] [--to FILE]

A readout of the last layer is fitted to labels of the set: the whole model, whose answers are good
enough to be worth imitating. Then two runs label the set, each with an output of its own: the whole
model alone, and with a cascade in front of it, which begins from nothing. Seconds are those of the
whole command, with the start of Ray and of the engines. The agreement is that of the two outputs on
all documents, beside what the certificate promises and proves.

The sets are all texts of the packages of `benchmarks.annotators`: comments, mails (of a campaign or
thread, too, all), and posts to all newsgroups, labelled by whether the group is about computers.
`--joined N` makes long documents: N texts with the same label are one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.annotators import CACHE, mails, posts, toxicity
from benchmarks.timing import processor
from pipeline.hashes import sha256_hex
from pipeline.ledger.dataset import open_labels
from pipeline.runtime.limits import usable_cores

FITTED = 1_000  # documents whose labels the whole model's readout is fitted to
TASK = "label"
SETS: Mapping[str, Callable[[], Sequence[tuple[str, str]]]] = {
    "toxicity": toxicity,
    "spam": lambda: [(mail.text, dict(mail.gold)["spam"]) for mail in mails()],
    "news": lambda: [
        (text, "computers" if group.startswith("comp.") else "other")
        for text, group in posts("train", "test")
    ],
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A set, labelled by the whole model and by a cascade."""

    set: str
    documents: int
    promised: float
    whole_s: float
    cascade_s: float
    certificate: str  # in words
    layer: int | None
    max_tokens: int | None
    agreement: float  # of all documents, the share with the same label

    def __str__(self) -> str:
        return (
            f"{self.set:10}{self.documents:>8,}{self.promised:>7}{self.whole_s:>9.0f}"
            f"{self.cascade_s:>9.0f}{self.cascade_s / self.whole_s:>7.2f}{self.agreement:>9.4f}"
            f"  {self.certificate}"
        )


def compared(name: str, options: argparse.Namespace, folder: Path) -> Compared:
    """Fits, labels twice, and compares."""
    documents = [*_documents(SETS[name](), options.joined)][: options.documents]
    columns = [pa.array(column) for column in zip(*documents, strict=True)]
    table = pa.Table.from_arrays(columns, names=["id", "text", TASK])
    pq.write_table(table.select(["id", "text"]), folder / "documents.parquet")
    pq.write_table(table.slice(0, FITTED).select(["id", TASK]), folder / "gold.parquet")
    task = {"name": TASK, "question": None, "labels": sorted({label for *_, label in documents})}
    whole: dict[str, Any] = {
        "name": "whole",
        "model": {"path": str(Path(options.model).resolve()), "device": "cpu"},
        "input": {"path": str(folder / "documents.parquet"), "text": "text", "id": "id"},
        "gold": {"path": str(folder / "gold.parquet"), "id": "id"},
        "documents": {"max_tokens": options.tokens, "too_long": "head"},
        "output": str(folder / "whole"),
        "tasks": [{**task, "readout": str(folder / f"{TASK}.safetensors")}],
    }
    _assay("fit", whole, folder, "--layers", str(options.layer), "--to", str(folder))
    whole_s, _ = _assay("run", whole, folder)
    promise: dict[str, Any] = {"agree": options.agree}
    taught = [{**own, "cascade": promise} for own in whole["tasks"]]
    cascade = {**whole, "name": "cascade", "output": str(folder / "cascade"), "tasks": taught}
    cascade_s, result = _assay("run", cascade, folder)
    proved = result["certificates"][TASK]
    labels = [_labels(folder / of) for of in ("whole", "cascade")]
    same = [labels[1][id] == label for id, label in labels[0].items()]
    return Compared(
        set=name,
        documents=len(same),
        promised=options.agree,
        whole_s=whole_s,
        cascade_s=cascade_s,
        certificate=proved["reason"] or _words(proved),
        layer=proved["layer"],
        max_tokens=proved["max_tokens"],
        agreement=sum(same) / len(same),
    )


def _labels(output: Path) -> dict[str, str]:
    """The label of each document, by id."""
    table = pa.table(open_labels(output, [TASK]))
    rows = zip(table["doc_id"].to_pylist(), table[TASK].to_pylist(), strict=True)
    return {id: row["label"] for id, row in rows}


def _words(proved: dict[str, Any]) -> str:
    share = proved["shares"]["agree"]
    return (
        f"layer {proved['layer']} (cost {proved['cost']:.2f}, first tokens {proved['max_tokens']}) "
        f"decides {proved['decided']:.0%}; proved {share['proved']:.4f} "
        f"({share['errors']} errors in {share['trials']:,})"
    )


def _documents(labelled: Sequence[tuple[str, str]], joined: int) -> Iterator[tuple[str, str, str]]:
    """Ids, texts and labels, in the order of the texts' hashes."""
    by_label: dict[str, list[str]] = {}
    for text, label in labelled:
        by_label.setdefault(label, []).append(text)
    texts = {
        "\n\n".join(own[start : start + joined]): label
        for label, own in by_label.items()
        for start in range(0, len(own), joined)
    }
    by_hash = {sha256_hex(text.encode(), 16): (text, label) for text, label in texts.items()}
    yield from ((key, *by_hash[key]) for key in sorted(by_hash))


def _assay(
    verb: str, spec: dict[str, Any], folder: Path, *options: str
) -> tuple[float, dict[str, Any]]:
    """The seconds and the result of a command; CalledProcessError where it fails."""
    file = folder / f"{spec['name']}.yaml"
    file.write_text(json.dumps(spec))
    began = time.monotonic()
    command = [sys.executable, "-m", "pipeline", verb, str(file), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return time.monotonic() - began, result


def main() -> None:
    """Prints a line for each set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file or model folder")
    parser.add_argument("--sets", nargs="+", default=[*SETS], choices=SETS)
    parser.add_argument("--documents", type=int, help="the first N by hash (default: all)")
    parser.add_argument("--tokens", type=int, default=256, help="of a document, that are read")
    parser.add_argument("--joined", type=int, default=1, help="texts of one label in a document")
    parser.add_argument("--layer", type=int, default=30, help="the decoder's last one")
    parser.add_argument("--agree", type=float, default=0.98)
    parser.add_argument("--to", type=Path, help="the figures, as JSON lines")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"{processor()}, {usable_cores()} cores")
    print("set       documents  agree  whole s  with it  ratio  in truth  the certificate")
    for name in options.sets:
        with tempfile.TemporaryDirectory(prefix="assay-cascades-") as folder:
            row = compared(name, options, Path(folder))
        print(row, flush=True)
        if options.to:
            with options.to.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
