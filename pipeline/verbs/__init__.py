"""One module for each command."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

Value = TypeVar("Value")
ForPeople = Annotated[Value, Field(exclude=True)]  # a field that is not in the JSON form
