"""Pages that are made from the code: the keys of a spec, the command, its JSON and the Python API.

    python docs/generate.py

writes them into `docs/reference/`, with a JSON schema of the spec for editors. They are committed,
and a test fails if one of them is out of date. `REFERENCE` maps a file to the function that
returns its text.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from importlib import import_module
from inspect import cleandoc
from operator import or_
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

FOLDER = Path(__file__).parent / "reference"
# What public functions return. These classes have no public constructor.
RESULTS = ("LabelDataset", "Outcome", "Plan", "Progress")
LINE_CHARS = 80
SECTION = re.compile(r"^(Args|Returns|Raises|Examples):\n((?:    .*\n?|\n)+)", re.MULTILINE)
OPTION = re.compile(r"^\* `([^`]+)`: (.*(?:\n +\S.*)*)", re.MULTILINE)
# The types of what each verb prints with `--json`; those after the first need an option.
OUTPUTS = {
    "init": ("verbs.init.Proposal",),
    "run": ("verbs.run.RunResult", "verbs.forecast.Forecast"),
    "check": ("verbs.check.Findings",),
    "status": ("verbs.status.Status", "verbs.status.Snapshots"),
    "review": ("verbs.review.Reviewed",),
    "eval": ("verbs.evaluate.Evaluation",),
    "fit": ("verbs.fit.Fit",),
    "export": ("verbs.label_table.ExportResult", "verbs.export.Examples"),
    "filter": ("filters.result.FilterResult",),
    "report": ("verbs.corpus_report.CorpusReport",),
    "diff": ("integrity.diff.Comparison",),
    "verify": ("integrity.verify.VerifyResult",),
    "gc": ("integrity.gc.GcResult",),
}
EXIT_CODES = {
    0: "complete",
    1: "failed, or a gate or a proof failed",
    2: "the spec or an argument is wrong: one line for each problem, with place, fix and value",
    3: "incomplete: run the same command again",
    4: "refused: an unsafe store or cluster",
}
JSON_OPTION = (
    "`--json` prints one JSON value in place of text ([schemas](json.md)). `assay "
    "--install-completion` lets the shell complete verbs and options; start a new shell after it."
)


def keys_page() -> str:
    """Every key of a spec: type, default, bounds and purpose, from the pydantic model."""
    schema = spec_schema()
    introduction = (
        "# Keys of a spec\n\nMade from `pipeline/spec/` by `docs/generate.py`. [Spec](../spec.md) "
        "explains how to use the keys; `spec.schema.json` beside this page is for editors.\n"
    )
    return "\n".join([introduction, *_model("", schema, dict(schema["$defs"]))])


def spec_schema() -> dict[str, Any]:
    """The JSON schema of a spec, for editors."""
    from pipeline.spec.schema import JobSpec

    schema = JobSpec.model_json_schema()
    tasks, models = schema["properties"]["tasks"]["items"], schema["$defs"]
    tasks["anyOf"] = tasks.pop("oneOf")  # a task of labels alone has the form of two kinds
    models["ClassifierTask"]["required"].remove("labels")  # the languages have a default
    # — a stage takes the name and the labels of its task, which a schema cannot express
    models["CascadeSpec"]["properties"]["stages"]["items"] = {"type": "object"}
    draft = {"$schema": GenerateJsonSchema.schema_dialect}
    return {**draft, **schema, "title": "Spec of assay"}


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
    """The help of each verb, as Markdown."""
    from pipeline.cli import app

    made: str = app.generate_docs(usage_name="assay")
    made = re.sub(r"^(assay [a-z]+) -m \w+", r"\1", made, flags=re.MULTILINE)  # of `python -m`
    first, *verbs = re.split(r"^(?=## `?assay )", made, flags=re.MULTILINE)
    introduction, _, summary = first.partition("\n**")
    text = introduction.partition("## Table of Contents")[0].replace("# assay\n", "# Command\n", 1)
    exits = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    summary = summary.partition("**About this command**")[0]
    table = f"| exit code | meaning |\n|---|---|\n{exits}\n\n{JSON_OPTION}\n"
    verbs = [verb for verb in verbs if not verb.startswith(("## assay --", "## `assay --"))]
    return _tidy("".join([text, table, f"\n**{summary}", *verbs]))


def _tidy(text: str) -> str:
    """Markdown with tables in place of lists of options, and without empty lines in a row."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    rows = OPTION.sub(lambda match: f"| `{_cell(match[1])}` | {_cell(_joined(match[2]))} |", lines)
    rows = rows.replace("**Arguments**:\n", "| argument | purpose |\n|---|---|")
    rows = rows.replace("**Parameters**:\n", "| option | purpose |\n|---|---|")
    return re.sub(r"\n{3,}", "\n\n", rows).strip() + "\n"


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
    parts = [
        "# JSON\n\nThe JSON schema of what each command prints with `--json`. An object has "
        "exactly these keys. A number that is not defined is null.\n"
    ]
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
    """Every public name, then errors, then results, from the source files."""
    import pipeline

    tree = ast.parse(Path(pipeline.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    order = sorted(pipeline.__all__, key=lambda name: (name in RESULTS, name[-5:] == "Error", name))
    parts = [
        "# Python\n\n`pipeline` exports these names; no others are public. [Recipes]"
        "(../recipes.md) has examples.\n"
    ]
    return "\n".join([*parts, *(_public(name, homes[name]) for name in order)])


def _public(name: str, module: str) -> str:
    """The section of a class or a function."""
    tree = ast.parse(Path(*module.split(".")).with_suffix(".py").read_text())
    node = next(each for each in tree.body if getattr(each, "name", None) == name)
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), name
    parts = [f"## {name}\n", _described(node)]
    if isinstance(node, ast.ClassDef):
        members = [] if name == "JobSpec" else [*_members(node, constructed=name not in RESULTS)]
        parts += [*members, ""] if members else []
    return "\n".join(parts)


def _described(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The signature and the docstring, as Markdown."""
    signature = ""
    if isinstance(node, ast.FunctionDef):
        signature = f"```text\n{_signature(node)}\n```\n\n"
    text = cleandoc(ast.get_docstring(node) or "")
    introduction = SECTION.sub("", f"{text}\n").strip()
    parts = [introduction]
    for section, content in SECTION.findall(f"{text}\n"):
        body = cleandoc(f"\n{content}")
        if section == "Examples":
            parts.append(f"```python\n{body}\n```")
        elif section == "Returns":
            parts.append(f"**Returns** {_joined(body)}")
        else:
            entries = re.split(r"^(?=\w+: )", body, flags=re.MULTILINE)
            parts.append(f"**{section}**\n\n" + "\n".join(map(_entry, filter(None, entries))))
    return signature + "\n\n".join(parts) + "\n"


def _signature(node: ast.FunctionDef) -> str:
    """The call, on one line or with one line for each argument."""
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({arguments}){returns}"
    if len(line) <= LINE_CHARS:
        return line
    inner = re.split(r", (?=\*|\w+(?::|=))", arguments)
    return "\n".join([f"{node.name}(", *(f"    {each}," for each in inner), f"){returns}"])


def _members(node: ast.ClassDef, *, constructed: bool) -> Iterator[str]:
    """A line for each public field and property, then a section for each public method."""
    methods = []
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                default = f" = {ast.unparse(each.value)}" if each.value and constructed else ""
                field = f"{name}: {ast.unparse(each.annotation)}{default}"
                yield f"- `{field}`{text and f': {_joined(text)}'}"
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                if "property" in map(ast.unparse, each.decorator_list):
                    yield f"- `{name}`: {_joined(ast.get_docstring(each) or '')}"
                elif ast.get_docstring(each):
                    methods.append(f"\n### {node.name}.{name}\n\n{_described(each)}")
    yield from methods


def _entry(text: str) -> str:
    name, _, purpose = text.partition(": ")
    return f"- `{name}`: {_joined(purpose)}"


def _joined(text: str) -> str:
    return " ".join(text.split())


REFERENCE: dict[str, Callable[[], str]] = {
    "keys.md": keys_page,
    "commands.md": command_page,
    "json.md": json_page,
    "python.md": api_page,
    "spec.schema.json": lambda: _json(spec_schema()) + "\n",
}


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parents[1]))
    for file, text in REFERENCE.items():
        (FOLDER / file).write_text(text())
