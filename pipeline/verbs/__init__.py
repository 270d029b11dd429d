"""What commands do, without their output; `filters`, `integrity` and `review` have the rest."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic_core.core_schema import CoreSchema, any_schema


class _Unchecked:
    """A value of any type, which pydantic does not validate."""

    def __get_pydantic_core_schema__(self, _type: Any, _handler: Any) -> CoreSchema:
        return any_schema()


Value = TypeVar("Value")
# A field that is not in the JSON form.
ForPeople = Annotated[Value, Field(exclude=True), _Unchecked()]
