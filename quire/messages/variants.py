"""`Variants`: base of the dataclasses of which a field of a message may hold any."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Variants:
    """Their fields' names tell them apart, for they travel as their fields. No two may have the same names."""

    __slots__ = ()

    @classmethod
    def kinds(cls) -> tuple[type[Any], ...]:
        """The dataclasses. Subclasses of a base with `slots` are no list of them: each is made twice."""
        raise NotImplementedError

    @classmethod
    def kind_of(cls, value: object) -> type[Any]:
        """The one that has the fields of plain data. Raises: ValueError."""
        names = set(value) if isinstance(value, dict) else None
        for kind in cls.kinds():
            if names == {field.name for field in fields(kind)}:
                return kind
        raise ValueError(f"no {cls.__name__} has these fields")
