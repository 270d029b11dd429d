"""The labels of a task: their names, and the texts or classes that mean them.

Entry point: `Labels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Annotated
from urllib.parse import quote

from pydantic import AfterValidator, BeforeValidator, Field

# A task with more labels has no column for each of them; `top_k` is the number that is kept.
MOST_COLUMNS = 1_000
# What the parts of a task of kind `multi` answer, and the texts of each.
YES, NO = "yes", "no"
YES_OR_NO = {YES: ("Yes", "yes"), NO: ("No", "no")}
# Before the name of a class, in a head whose classes do not exclude each other: its opposite.
NOT = "not "
SLOT = "{label}"  # in the question of a task of kind `multi`
ANSWER = "{answer}"  # in a question: what follows it begins the answer
# The classes of lid.176.ftz (Joulin et al., 2016).
_LANGUAGES = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb
    ckb co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu
    gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la
    lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne
    new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk
    sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal
    xmf yi yo yue zh
"""
LANGUAGES = tuple(_LANGUAGES.split())


def _as_verbalizers(labels: object) -> object:
    """A plain list of labels -> each label with its name as its only verbalizer."""
    if isinstance(labels, Mapping):
        return labels
    if not isinstance(labels, list | tuple):
        raise ValueError("write a list of labels, or each label with its texts: {name: [text]}")
    odd = [label for label in labels if not isinstance(label, str | int | float)]
    if odd:
        fix = "a list holds names of labels; write null in quotes, and {name: [text]} for texts"
        raise ValueError(f"{fix}: {odd}")
    names = list(map(str, labels))
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{repeated} listed more than once; list each label once")
    return {name: (name,) for name in names}


def _distinct(labels: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    texts = Counter(text for verbalizers in labels.values() for text in verbalizers)
    if repeated := [text for text, count in texts.items() if count > 1]:
        raise ValueError(f"{repeated} occurs more than once; write each text once")
    return labels


_Text = Annotated[str, Field(min_length=1)]
_Verbalizers = dict[_Text, Annotated[tuple[_Text, ...], Field(min_length=1)]]
Labels = Annotated[
    _Verbalizers,
    BeforeValidator(_as_verbalizers, json_schema_input_type=list[str | float] | _Verbalizers),
    Field(min_length=2),
    AfterValidator(_distinct),
]


def scores_fix(labels: Sequence[str]) -> str | None:
    """The fix of labels that are not the numbers of a score in rising order; None if they are."""
    numbers = []
    for label in labels:
        try:
            numbers.append(float(label))
        except ValueError:
            return f"a score's labels are numbers; {label!r} is not a number; write [0, 1, 2, 3]"
    if not all(map(isfinite, numbers)):
        return "a score's labels are finite numbers; write [0, 1, 2, 3]"
    if any(high <= low for low, high in pairwise(numbers)):
        return f"a score's labels rise; write {[str(n) for n in sorted(set(labels), key=float)]}"
    return None


def equal_in_sql(labels: Iterable[str]) -> tuple[str, str] | None:
    """The first two labels that DuckDB takes for one column; it ignores the case of ASCII alone."""
    by_lower_case: dict[bytes, str] = {}
    for label in labels:
        other = by_lower_case.setdefault(label.encode(errors="surrogatepass").lower(), label)
        if other != label:
            return other, label
    return None


def part_file(folder: str, label: str) -> str:
    """The readout of one label in the folder that a task of kind `multi` names."""
    return f"{folder.rstrip('/')}/{quote(label, safe='')}.safetensors"


def task_of(name: str) -> str:
    """The task whose part has this name, `TASK.LABEL`; the name itself of a whole task."""
    return name.partition(".")[0]


def with_slot(question: str) -> str:
    """The question of a task of kind `multi` as it is asked of each label.

    Examples:
        >>> with_slot("What is it about?"), with_slot("Is it about {label}?")
        ('What is it about? {label}: yes or no', 'Is it about {label}?')
    """
    if SLOT in question:
        return question
    asked, mark, begun = question.partition(ANSWER)
    return f"{asked.rstrip()} {SLOT}: yes or no{mark}{begun}"
