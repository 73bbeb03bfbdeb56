"""Typed reads from a parsed config.json; an error names the key, its value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeGuard

from quire.errors import ConfigError, shown

MAX_COUNT = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30
"""Of numbers above zero: what float32 can hold, with room for products."""

CONTEXT = "max_position_embeddings"
"""What may have other values under other names: those of tokenizers' limits are such."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class ConfigKeys:
    """A raw config. A key may have several spellings: the first one present counts."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any] = NOTHING,
        spellings: Mapping[str, str] = NOTHING,
    ) -> None:
        """`defaults` has what a key means that is left out; a family that knows an optional key has one for it.

        `spellings` has what a family calls a key, which counts before the key itself.
        """
        self.raw = raw
        self.source = source
        self.defaults = defaults
        self.spellings = spellings

    def refuse(self, key: str, value: object, problem: str) -> NoReturn:
        """Raise the error for one key."""
        what = "is missing" if value is None else f"is {shown(value)}"
        raise ConfigError(f"{self.source}: {key} {what}; it {problem}. Correct the file or use another model.")

    def names(self, key: str) -> tuple[str, ...]:
        """What a key may be called, in the order in which it counts."""
        return (self.spellings[key], key) if key in self.spellings else (key,)

    def find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """(spelling, value) of the first spelling that is present and not null; a missing key has the value None."""
        names = [name for key in keys for name in self.names(key)]
        for source in (self.raw, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return name, source[name]
        return names[0], None

    def given(self, key: str) -> tuple[str, Any]:
        """(spelling, value) of a key for which null has a meaning of its own: None where the config says null."""
        for source in (self.raw, self.defaults):
            for name in self.names(key):
                if name in source:
                    return name, source[name]
        return key, None

    def check_alike(self, *names: str) -> None:
        """Refuse a config that has one value under several names, and not the same.

        transformers takes the last that it finds, whatever the family's own key says.
        """
        given = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        first = next(iter(given), "")
        for name, value in given.items():
            if value != given[first]:
                self.refuse(name, value, f"must be {shown(given[first])}, like {first}, which is another name for it")

    def count(self, *spellings: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """A whole number above zero."""
        for key in spellings:
            if key != CONTEXT:
                self.check_alike(*self.names(key))
        name, value = self.find(spellings)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self.refuse(name, value, f"must be a whole number above 0, at most {most}")
        return value

    def positive(self, *spellings: str, default: float | None = None) -> float:
        """A number above zero that float32 can hold."""
        name, value = self.find(spellings)
        value = default if value is None else value
        if not is_number(value) or not SMALLEST <= value <= LARGEST:
            self.refuse(name, value, f"must be a number above 0, from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def several_positive(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers above zero that float32 can hold."""
        name, listed = self.find((name,))
        is_list = isinstance(listed, list) and len(listed) == count
        if not is_list or not all(is_number(value) and SMALLEST <= value <= LARGEST for value in listed):
            self.refuse(name, listed, f"must list {count} numbers above 0, from {SMALLEST:g} to {LARGEST:g}")
        return tuple(map(float, listed))

    def optional_positive(self, name: str) -> float | None:
        """A number above zero; None where the config says null or the family has no such key."""
        name, value = self.given(name)
        if value is None:
            return None
        if not is_number(value) or not SMALLEST <= value <= LARGEST:
            self.refuse(name, value, f"must be null or a number above 0, from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false; null counts as absent."""
        _, value = self.find((name,))
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(name, value, "must be true or false")
        return value

    def text(self, *spellings: str) -> str:
        """A string."""
        name, value = self.find(spellings)
        if not isinstance(value, str):
            self.refuse(name, value, "must be a string")
        return value

    def optional_count(self, name: str) -> int | None:
        """A whole number above zero; None where the config says null or the family has no such key."""
        name, value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
            self.refuse(name, value, f"must be null or a whole number above 0, at most {MAX_COUNT}")
        return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether JSON gave a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
