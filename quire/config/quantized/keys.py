"""The keys of a quantization_config, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from quire.errors import ConfigError, shown


class Keys:
    """A quantization_config, read key by key. All methods raise ConfigError for a value that quire does not read."""

    def __init__(self, given: Mapping[str, Any], source: str) -> None:
        self.given = given
        self.source = source

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Say what a key has, and what it may have."""
        value = shown(self.given.get(key))
        raise ConfigError(
            f"{self.source}: quantization_config.{key} is {value}; quire reads {wanted}. Use another checkpoint of the "
            "model, or the original with --quantization int8 or int4."
        )

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, known: Collection[str], default: str) -> str:
        """One of the known words; null is the default."""
        value = self.given.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            self.refuse(key, " or ".join(known))
        return value

    def refuse_any(self, keys: Sequence[str], wanted: str) -> None:
        """Refuse what one of the keys asks for, unless it is nothing."""
        for key in keys:
            if self.given.get(key):
                self.refuse(key, wanted)

    def group_sizes(self, *rules: str) -> tuple[frozenset[int], bool]:
        """Those of all layers, and those that tables of rules give some of them, and whether rows may be whole, for
        which numbers below 1 stand."""
        tables = [self.given, *(table for key in rules for table in self.table(key).values())]
        sizes = [table["group_size"] for table in tables if isinstance(table, Mapping) and "group_size" in table]
        if not all(size is None or type(size) is int for size in sizes):
            self.refuse("group_size", "a whole number of input features, or -1")
        given = frozenset(size for size in sizes if size is not None and size > 0)
        return given, len(given) == 0 or any(size is None or size < 1 for size in sizes)

    def blocks(self) -> frozenset[tuple[int, int]]:
        """Rows and columns that share a scale, as weight_block_size says; those of DeepSeek-V3 where it does not."""
        value = self.given.get("weight_block_size")
        return frozenset({(128, 128) if value is None else self.block(value, "weight_block_size")})

    def block(self, value: Any, key: str) -> tuple[int, int]:
        """Two whole numbers."""
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            self.refuse(key, "the rows and columns of a block, as [128, 128]")
        return value[0], value[1]

    def table(self, key: str) -> Mapping[str, Any]:
        """An object that need not be there."""
        value = self.given.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return value or {}

    def check_bits(self, key: str, known: tuple[int, ...]) -> None:
        """One of the known numbers, the first of which need not be said."""
        value = self.given.get(key, known[0])
        if value not in known or isinstance(value, bool):
            self.refuse(key, " or ".join(map(str, known)))
