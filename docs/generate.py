"""Pages that are made from the code: the spec, the command, its JSON and the Python API.

Each begins with the file of its name in this folder, so that links to it open without a build, too.
mkdocs calls `on_files`. `PAGES` maps a page to the function that returns its text, so that a test
can make the pages without mkdocs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = Path(__file__).parent
VERB = re.compile(r"^[\s│]+([a-z][a-z-]+)\s{2,}\S", re.MULTILINE)
# What public functions return. These classes have no public constructor.
RESULTS = ("LabelDataset", "Outcome", "Plan", "Progress")  # without a public constructor
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
LINE_CHARS = 80
# The types of what each verb prints with `--json`; those after the first need an option.
OUTPUTS = {
    "init": ("verbs.init.Proposal",),
    "run": ("verbs.run.RunResult", "verbs.forecast.Forecast"),
    "check": ("verbs.check.Findings",),
    "status": ("verbs.status.Status", "verbs.status.Snapshots"),
    "review": ("verbs.review.Reviewed",),
    "eval": ("verbs.evaluate.Evaluation",),
    "fit": ("verbs.fit.Fit", "verbs.cascade.ChosenThresholds"),
    "export": ("verbs.export.ExportResult", "verbs.export.Examples"),
    "filter": ("filters.result.FilterResult",),
    "report": ("verbs.corpus_report.CorpusReport",),
    "diff": ("integrity.diff.Comparison",),
    "verify": ("integrity.verify.VerifyResult",),
    "gc": ("integrity.gc.GcResult",),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site with the generated pages."""
    from mkdocs.structure.files import File

    for name, text in PAGES.items():
        if introduction := files.get_file_from_path(name):
            files.remove(introduction)
        files.append(File.generated(config, name, content=text()))
    return files


def spec_page() -> str:
    """Every key of a spec: type, default, bounds and purpose, from the pydantic model."""
    from pipeline.spec.schema import JobSpec

    schema = JobSpec.model_json_schema()
    introduction = (FOLDER / "spec.md").read_text()
    return "\n".join([introduction, *_model("", schema, dict(schema["$defs"]))])


def _model(
    place: str, model: Mapping[str, Any], models: dict[str, Mapping[str, Any]]
) -> Iterator[str]:
    """The section of one model, then those of the models that its keys hold.

    `models` are those without a section yet, by name.
    """
    yield f"## {place or 'Top level'}\n\n{model.get('description', '')}\n"
    yield "| key | type | default | purpose |\n|---|---|---|---|"
    inner = {}
    for key, field in model["properties"].items():
        default = "required"
        if key not in model.get("required", ()):
            default = f"`{json.dumps(field.get('default'), ensure_ascii=False)}`"
        names = _references(field)
        if names and default not in ("required", "`null`"):
            default = "see below"
        for name in names:
            below = f"{place}.{key}".lstrip(".")
            if len(names) > 1:  # of a task, its form
                below += f", {name.removesuffix('Task').lower()}"
            inner[below] = name
        described = [field, *(models[name] for name in names if name in models)]
        purpose = next((part["description"] for part in described if "description" in part), "")
        text = _cell(" ".join(purpose.split()))
        yield f"| `{key}` | {_type(field)} | {default} | {text} |"
    yield ""
    sections = {section: models.pop(name) for section, name in inner.items() if name in models}
    shown: dict[str, Any] = {}
    for section, of_key in sections.items():
        yield from _model(section, _others(of_key, shown), models)
        shown |= of_key["properties"]


def _others(model: Mapping[str, Any], shown: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model without the keys that the section of another form of it has shown."""
    same = [key for key, field in model["properties"].items() if shown.get(key) == field]
    if not same:
        return model
    others = {key: model["properties"][key] for key in model["properties"] if key not in same}
    also = f"\n\nAlso, as above: {', '.join(f'`{key}`' for key in same)}."
    return {**model, "properties": others, "description": model["description"] + also}


def _references(field: Mapping[str, Any]) -> list[str]:
    """The names of the models in a field."""
    return list(dict.fromkeys(re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(field))))


def _type(field: Mapping[str, Any]) -> str:
    """The type in words, with its bounds."""
    if "$ref" in field:
        return "mapping, below"
    if kinds := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(kind) for kind in kinds))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    match field.get("type"):
        case "array":
            return f"list of {_type(field['items'])}"
        case "object":
            values = field.get("additionalProperties")
            return f"mapping to {_type(values)}" if isinstance(values, dict) else "mapping"
        case kind:
            return " ".join([str(kind or "any"), ", ".join(_bounds(field))]).strip()


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for name, sign in signs.items():
        if name in field:
            yield f"{sign} {field[name]}"
    if "pattern" in field:
        yield f"`{_cell(field['pattern'])}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def command_page() -> str:
    """What `assay --help` and `assay VERB --help` print."""
    summary = _help()
    parts = [(FOLDER / "commands.md").read_text(), f"```text\n{summary}\n```\n"]
    for verb in verbs(summary):
        parts.append(f"## assay {verb}\n\n```text\n{_help(verb)}\n```\n")
    return "\n".join(parts)


def verbs(summary: str) -> list[str]:
    """The commands that the help lists."""
    return list(dict.fromkeys(VERB.findall(summary)))


def _help(*verb: str) -> str:
    command = [sys.executable, "-m", "pipeline", *verb, "--help"]
    environment = {**os.environ, **PLAIN}
    printed = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, cwd=FOLDER.parent
    )
    lines = printed.stdout.replace("python -m pipeline", "assay").splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()


class _Closed(GenerateJsonSchema):
    """JSON schemas whose objects have all of their keys and no other."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return {**super().dataclass_schema(schema), "additionalProperties": False}

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().dict_schema(schema)
        names = made.get("propertyNames", {}).get("enum")
        return {**made, "required": names} if names else made

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"type": "null"}]}  # NaN is null

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def output_schema(verb: str) -> dict[str, Any]:
    """The JSON schema of what the verb prints with `--json`."""
    paths = (path.rpartition(".") for path in OUTPUTS[verb])
    types = [getattr(import_module(f"pipeline.{module}"), name) for module, _, name in paths]
    adapter: TypeAdapter[Any] = TypeAdapter(reduce(or_, types))
    return adapter.json_schema(mode="serialization", schema_generator=_Closed)


def json_page() -> str:
    """The JSON schema of what each verb prints with `--json`."""
    parts = [(FOLDER / "json.md").read_text()]
    for verb in OUTPUTS:
        parts.append(f"## assay {verb}\n\n```json\n{_json(output_schema(verb))}\n```\n")
    return "\n".join(parts)


def _json(value: Any, indent: str = "") -> str:
    """JSON in which an object or a list that fits is one line."""
    line, inner = json.dumps(value, ensure_ascii=False), f"{indent}  "
    if len(indent) + len(line) <= LINE_CHARS or not isinstance(value, dict | list):
        return line
    if isinstance(value, list):
        return _lines("[", [_json(item, inner) for item in value], "]", indent)
    items = [f"{json.dumps(key)}: {_json(item, inner)}" for key, item in value.items()]
    return _lines("{", items, "}", indent)


def _lines(start: str, items: list[str], end: str, indent: str) -> str:
    separated = f",\n{indent}  ".join(items)
    return f"{start}\n{indent}  {separated}\n{indent}{end}"


def api_page() -> str:
    """Every public name, then errors, then results. Nothing heavy is imported."""
    import pipeline

    parts = [(FOLDER / "api.md").read_text()]
    tree = ast.parse(Path(pipeline.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    without_constructor = "    options:\n      merge_init_into_class: false\n"
    for name in sorted(pipeline.__all__, key=lambda name: (name in RESULTS, name[-5:] == "Error")):
        options = without_constructor if name in RESULTS else ""
        parts.append(f"::: {homes[name]}.{name}\n{options}")
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "spec.md": spec_page,
    "commands.md": command_page,
    "json.md": json_page,
    "api.md": api_page,
}
