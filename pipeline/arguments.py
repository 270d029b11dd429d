"""The words of the command: its verbs, their arguments, and values that are written in one word.

Knows argparse. Knows nothing of what a verb does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import Problem, SpecError

Verb = Callable[[argparse.Namespace], int]


def parser(functions: Mapping[str, Verb]) -> argparse.ArgumentParser:
    """The command's parser; `verb` of what it parses is the verb's function."""
    command = argparse.ArgumentParser(prog="assay", description="Label a corpus, not a request.")
    verbs = command.add_subparsers(required=True, metavar="VERB")
    for name, (purpose, arguments) in _VERBS.items():
        verb = verbs.add_parser(name, help=purpose, description=purpose)
        verb.add_argument("spec", metavar="SPEC", help="the YAML file that says what to label")
        verb.add_argument("--json", action="store_true", help="print one JSON value")
        verb.set_defaults(verb=functions[name])
        arguments(verb.add_argument)
    return command


def _run(add: Callable[..., Any]) -> None:
    add(
        "--address",
        metavar="A",
        help="a running Ray cluster, or http://HEAD:8265 to submit to it; else one is started",
    )
    add(
        "--insecure-cluster",
        action="store_true",
        help="submit even where anyone who reaches the cluster can run programs on it",
    )
    add(
        "--installed",
        action="store_true",
        help="submit without pinned versions: the cluster has assay's dependencies",
    )
    add("--dry-run", action="store_true", help="say what would be computed")
    add("--retry-failed", action="store_true", help="try failed rows again, too")
    add("--publish-partial", action="store_true", help="a snapshot of what is complete, if not all")


def _check(add: Callable[..., Any]) -> None:
    add("--prompts", action="store_true", help="show each task's canonical prompt")
    add("--documents", type=int, metavar="N", help="how many to prove exactness on")


def _plan(add: Callable[..., Any]) -> None:
    add("--workers", type=int, metavar="N", help="how many there will be; else one")
    add("--price", type=float, metavar="P", help="of one worker's hour, in any currency")
    add("--rate", type=float, metavar="R", help="documents a second of one worker; else measured")
    add("--documents", type=int, metavar="N", help="how many to measure on, here")


def _gold(add: Callable[..., Any]) -> None:
    add("--gold", required=True, metavar="FILE", help="csv, jsonl, parquet, or another output")
    add("--id", metavar="COLUMN", help="of gold, by which it is joined; else the spec's id")
    add("--text", metavar="COLUMN", help="of gold: joined by the text, where there is no id")
    add("--column", action="append", metavar="TASK=COLUMN", help="the gold of a task")
    add("--value", action="append", metavar="GOLD=LABEL", help="what the gold calls a label")
    add("--task", action="append", metavar="TASK", help="these tasks alone")


def _eval(add: Callable[..., Any]) -> None:
    _gold(add)
    add("--precision", type=float, metavar="P", help="give thresholds of this precision")
    add("--recall", type=float, metavar="R", help="give thresholds of this recall")
    add("--gate", action="append", metavar="GATE", help="'toxic.f1 >= 0.8': else exit 1")
    add("--resamples", type=int, metavar="N", help="for the intervals")
    add("--html", metavar="FILE", help="write a page with plots")


def _fit(add: Callable[..., Any]) -> None:
    _gold(add)
    add("--layers", metavar="N,N|all", help="which to fit; else a few, spread over the decoder")
    add("--document", action="store_true", help="read documents themselves, ask no question")
    add("--to", metavar="PLACE", help="FILE.safetensors, or a folder; else where the spec says")
    add("--folds", type=int, metavar="N", help="of cross-validation")
    add("--rows", metavar="N,N", help="also a learning curve: figures after so many rows")


def _calibrate(add: Callable[..., Any]) -> None:
    add("--task", required=True, metavar="T", help="the task's name")
    add("--method", required=True, choices=["batch", "temperature", "isotonic"])
    add("--to", required=True, metavar="PATH", help="the file, at any fsspec path")
    add("--gold", metavar="FILE", help="right labels: csv, jsonl or parquet")
    add("--snapshot", type=int, metavar="N", help="of these answers; else the last")


def _filter(add: Callable[..., Any]) -> None:
    add("--to", required=True, metavar="URL", help="where the filtered corpus goes")
    add("--dropped", metavar="URL", help="where what is dropped goes; else to --to")
    add("--on-error", choices=("fail", "keep", "drop"), help="documents without an answer")
    add("--by", action="append", default=[], metavar="COLUMN", help="count by the input's column")


def _diff(add: Callable[..., Any]) -> None:
    for side in ("A", "B"):
        add(side.lower(), metavar=side, help="the number of a snapshot")
    add("--by", choices=("path",), help="flip rates by the input's files")


def _gc(add: Callable[..., Any]) -> None:
    add("--keep", type=int, required=True, metavar="N", help="snapshots of each spec")
    add("--delete", action="store_true", help="remove it; not while a run is on")


def _bench(add: Callable[..., Any]) -> None:
    add("--rounds", type=int, metavar="N", help="paired rounds")
    add("--tokens", type=int, metavar="N", help="tokens of each document")


_VERBS: dict[str, tuple[str, Callable[[Callable[..., Any]], None]]] = {
    "run": ("bring the output up to date; run again = only what is missing", _run),
    "check": ("prove the model, the labels and the storage", _check),
    "plan": ("what would be computed, how long, what it costs", _plan),
    "eval": ("judge the answers by gold labels; exit 1 if a gate fails", _eval),
    "fit": ("fit trained readouts to gold labels", _fit),
    "calibrate": ("make a task's calibration file of its answers", _calibrate),
    "filter": ("write the kept documents, and the dropped ones apart", _filter),
    "diff": ("what changed between two snapshots or versions of a task", _diff),
    "verify": ("read a finished output again and prove it whole", lambda _add: None),
    "gc": ("name what nothing needs any more; --delete removes it", _gc),
    "bench": ("measure speed against the alternatives, in one run", _bench),
}


def numbers_of(place: str, written: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in written.split(",")] if written else []
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise SpecError([Problem(place, "write whole numbers, as in 20,50,100", wrong[0])])
    return tuple(int(part) for part in parts)


def mapping_of(place: str, written: Sequence[str] | None) -> dict[str, str]:
    """`left=right`, each with another left."""
    pairs = pairs_of(place, written)
    mapped = dict(pairs)
    if len(mapped) < len(pairs):
        raise SpecError([Problem(place, "one of them is named twice; name each once", written)])
    return mapped


def pairs_of(place: str, written: Sequence[str] | None) -> list[tuple[str, str]]:
    """`left=right`, each; the last sign divides, for a gold value may hold one."""
    pairs = [each.rpartition("=") for each in written or ()]
    wrong = [Problem(place, "write LEFT=RIGHT", f"{a}{s}{b}") for a, s, b in pairs if not (a and b)]
    if wrong:
        raise SpecError(wrong)
    return [(left, right) for left, _, right in pairs]
