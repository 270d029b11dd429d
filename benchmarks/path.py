"""The functions of assay that one document passes, in their order: how to begin reading the code.

`python -m benchmarks.path jobs/specs/demo.yaml` labels the first documents of the spec's input
without Ray, in this process, and prints each function of `pipeline` between the plan of the work
and the published files: once each, at the depth of its first call, with its file. The functions of
the model (`pipeline/inference`) are counted apart.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pipeline
from pipeline.cache import cache_dir
from pipeline.ledger.cells import record_specs
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.worker import label_shard, load_readers
from pipeline.spec.parse import load_spec
from pipeline.stores.store import open_store

PACKAGE = Path(pipeline.__file__).parent
ENGINE = "inference"
# Frames that are no functions with a name of their own.
UNNAMED = ("<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<module>")


def passed(call: Callable[[], object]) -> dict[tuple[str, str], int]:
    """The functions of the package that a call passes, in their order: file, name -> depth."""
    passed_functions: dict[tuple[str, str], int] = {}
    depth = 0

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        if code.co_name not in UNNAMED:
            file = str(Path(code.co_filename).relative_to(PACKAGE.parent))
            passed_functions.setdefault((file, code.co_qualname), depth)

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return passed_functions


def main() -> None:
    """Labels one shard of the spec, and prints what it passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="a spec whose model is at hand")
    spec = load_spec(parser.parse_args().spec)
    folder = Path(tempfile.mkdtemp())
    try:
        spec = spec.model_copy(update={"output": str(folder / "out"), "storage_options": {}})
        job = make_job(spec, place(spec.model, this_machine()), cache_dir())
        store = open_store(spec.output, {})
        work, *_ = plan(job, store).work_items
        record_specs(store, job.versions)
        readers = load_readers(job, asks=True)
        passed_functions = passed(lambda: label_shard(job, readers, store, work))
    finally:
        shutil.rmtree(folder)
    for (file, name), depth in passed_functions.items():
        print(f"{'  ' * (depth - 1) + name:<58}  {file}")
    own = [file for file, _ in passed_functions if f"/{ENGINE}/" not in file]
    print(f"outside the engine: {len(own)} functions in {len({*own})} files")
    print(f"of the engine: {len(passed_functions) - len(own)}")


if __name__ == "__main__":
    main()
