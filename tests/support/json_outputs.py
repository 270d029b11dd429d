"""What a verb prints with `--json` satisfies the schema in the manual, in every test.

Entry point: `validate_outputs`; `generate` is the module that makes the manual's pages.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib import import_module
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

GENERATE = Path(__file__).parents[2] / "docs" / "generate.py"
_spec = importlib.util.spec_from_file_location("generate", GENERATE)
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def validate_outputs(patch: pytest.MonkeyPatch) -> None:
    """From now on, a verb of this process that prints JSON of another form raises an error."""
    module = import_module("pipeline.cli.app")
    json_value = module.json_value

    def validated(result: object) -> Any:
        value = json_value(result)
        if verb := _running_verb():
            validator(verb).validate(value)
        return value

    patch.setattr(module, "json_value", validated)


@cache
def validator(verb: str) -> Draft202012Validator:
    """The validator of what the verb prints with `--json`."""
    return Draft202012Validator(generate.output_schema(verb))


def _verbs() -> dict[CodeType, str]:
    app = import_module("pipeline.cli").app
    return {app[verb].default_command.__code__: verb for verb in app if not verb.startswith("-")}


def _running_verb() -> str | None:
    """The verb that was called, which may call another; None for a command of benchmarks."""
    callers = [frame.f_code for frame, _ in walk_stack(None)]
    return next((_verbs()[code] for code in reversed(callers) if code in _verbs()), None)
