"""The flags of the command: one for each field of the library's options. Entry point: `with_flags`.

A flag has the name, the default and the help of its field. The tables below have the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from cyclopts import Parameter
from pydantic_core.core_schema import any_schema

SpecFile = Annotated[str, Parameter("SPEC", help="YAML file that says what to label.")]
AsJson = Annotated[bool, Parameter("--json", help="Print one JSON value instead of tables.")]
Verb = TypeVar("Verb", bound=Callable[..., Any])


def _whole_number(_: Any, tokens: Sequence[Any]) -> int:
    """`4` as a whole number; 4.0 and 1e3 are refused."""
    try:
        value = int(tokens[0].value)
    except ValueError:
        raise ValueError("write a whole number") from None
    if abs(value) > _MOST:  # so that no library's 64-bit number overflows
        raise ValueError(f"write a whole number up to {_MOST}")
    return value


_MOST = 2**31 - 1
_WHOLE = Parameter(metavar="N", converter=_whole_number, n_tokens=1)
# Flags with another name than their field, or with values of another form; and arguments without
# a flag.
_FLAGS = {
    "after": Parameter("B", help="Number of the later snapshot (default: the last)."),
    "before": Parameter("A", help="Number of the earlier snapshot (default: the one before)."),
    "data": Parameter("DATA", help="File, folder or glob of documents, local or at a URL."),
    "n": Parameter(("--n", "-n")),
    "older_than_days": Parameter("--older-than"),
    "order": Parameter("--by"),
    "tasks": Parameter("--task"),
}
# What the help shows in place of a value; for a whole number it is N.
_PLACEHOLDERS = {
    "ADDRESS": ("address",),
    "COST": ("max_cost",),
    "COLUMN": ("columns", "id", "text"),
    "DAYS": ("older_than_days",),
    "FILE": ("against", "gold"),
    "GROUP": ("by",),
    "HOURS": ("max_hours",),
    "LABEL": ("positive",),
    "LAYERS": ("layers",),
    "MODEL": ("model",),
    "ORDER": ("order",),
    "PATH": ("to",),
    "PRICE": ("price",),
    "SHARE": ("hold_out", "sample"),
    "SQL": ("where",),
    "TASK": ("task", "tasks"),
    "X": ("confidence", "precision", "recall"),
}
_PLACEHOLDER_OF = {name: shown for shown, names in _PLACEHOLDERS.items() for name in names}


def flag_of(name: str) -> str:
    """The flag of an option of the library, by its field or parameter."""
    names = _FLAGS[name].name if name in _FLAGS else ()
    return next(iter(names or ()), f"--{name.replace('_', '-')}")


def with_flags(verb: Verb) -> Verb:
    """The function of a verb, whose parameters the parser reads with the tables of this module.

    A parameter whose type is a class of options has a flag for each field.
    """
    hints = get_type_hints(verb, include_extras=True)
    verb.__annotations__ = {name: _flag(name, hint) for name, hint in hints.items()}
    return verb


def _flag(name: str, hint: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return Annotated[_parsed(hint), Parameter("*")]
    if int in (hint, *get_args(hint)):
        hint = Annotated[hint, _WHOLE]
    elif name in _PLACEHOLDER_OF:
        hint = Annotated[hint, Parameter(metavar=_PLACEHOLDER_OF[name])]
    return Annotated[hint, _FLAGS[name]] if name in _FLAGS else hint


def _parsed(options: Any) -> type:
    """A class with the same fields, annotated for the parser; a call of it gives `options`."""
    hints = {name: _flag(name, hint) for name, hint in get_type_hints(options).items()}
    content = {
        "__slots__": (),
        "__annotations__": hints,
        "__new__": lambda _class, **values: options(**values),
        # — the parser lets pydantic check that a value is of this class
        "__get_pydantic_core_schema__": classmethod(lambda *_: any_schema()),
    }
    return type(options.__name__, (options,), content)


def words_of(options: Any) -> tuple[str, ...]:
    """The options that differ from their defaults, as words of a command line, one for each."""
    words = []
    for field in fields(options):
        value, flag = getattr(options, field.name), flag_of(field.name)
        if value != field.default:
            values = value if isinstance(value, tuple) else (value,)
            words += [flag if each is True else f"{flag}={each}" for each in values]
    return tuple(words)
