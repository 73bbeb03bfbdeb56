"""Which layers of a model see all tokens and which a window, and which rotate: the rules of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quire.config.config_keys import ConfigKeys
from quire.errors import counted


class LayerKind(StrEnum):
    """What the queries of a layer see, as `layer_types` names it."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of an attention layer."""

    num_heads: int
    """Of queries."""
    num_kv_heads: int
    head_size: int
    values_are_keys: bool = False
    """Whether values are what keys are before their norm and rotation, instead of a product of their own."""
    value_size: int | None = None
    """Of a value head of the checkpoint, where it is narrower than a key: its weights are filled up with zeros, so all
    heads have `head_size` (`models/variants/narrow_values.py`)."""

    @property
    def query_size(self) -> int:
        """Features of a token's queries."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Features of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def num_unused(self) -> int:
        """Features of each value head that are always zero."""
        return 0 if self.value_size is None else self.head_size - self.value_size


HeadsRule = Callable[[ConfigKeys, Heads], Mapping["LayerKind", Heads]]
"""From a config and the heads that Llama's keys name to those of each kind of layer."""
ReadRule = Callable[[ConfigKeys, tuple["LayerKind", ...]], tuple[int | None, ...]]
"""From a config and the kind of each layer to the layer whose keys and values it reads; None for its own."""
LayerRule = Callable[[ConfigKeys, int], tuple[LayerKind, ...]]
"""From a config and a number of layers to the kind of each layer."""
RotationRule = Callable[[ConfigKeys, tuple[LayerKind, ...]], tuple[bool, ...]]
"""From a config and the kind of each layer to whether it rotates queries and keys."""


def heads_alike(keys: ConfigKeys, heads: Heads) -> Mapping[LayerKind, Heads]:
    """All layers have the same heads."""
    return dict.fromkeys(LayerKind, heads)


def all_full(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """No layer has a window."""
    return (LayerKind.FULL,) * num_layers


def all_sliding(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """Every layer has the window, if the config gives one."""
    return (LayerKind.SLIDING,) * num_layers


def full_every(period: int) -> LayerRule:
    """Every `period`-th layer is full."""
    return lambda keys, num_layers: _full_every(period, num_layers)


def first_full_of(period: int) -> LayerRule:
    """The first of every `period` layers is full."""
    return lambda keys, num_layers: tuple(
        LayerKind.SLIDING if index % period else LayerKind.FULL for index in range(num_layers)
    )


def full_by_pattern(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """As many layers as `sliding_window_pattern` says, of which the last one is full, over and over."""
    return _full_every(keys.count("sliding_window_pattern"), num_layers)


def full_below(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """The first `max_window_layers` layers are full."""
    first = keys.raw.get("max_window_layers", keys.defaults["max_window_layers"])
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        keys.refuse("max_window_layers", first, "must be a whole number, 0 or more")
    return tuple(LayerKind.SLIDING if index >= first else LayerKind.FULL for index in range(num_layers))


def sliding_every_other(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """Of the first `max_window_layers` layers, those of even index have the window."""
    below = full_below(keys, num_layers)
    return tuple(
        LayerKind.SLIDING if kind is LayerKind.FULL and index % 2 == 0 else LayerKind.FULL
        for index, kind in enumerate(below)
    )


def listed_or(rule: LayerRule) -> LayerRule:
    """The kinds that `layer_types` lists, or a rule's where config.json has no such list."""

    def kinds(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
        listed = keys.raw.get("layer_types")
        return rule(keys, num_layers) if listed is None else _listed(keys, listed, num_layers)

    return kinds


def listed_among(*others: str) -> LayerRule:
    """The kinds that `layer_types` lists. Layers of other kinds have no attention, so it does not matter which."""

    def kinds(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
        listed = keys.raw.get("layer_types")
        known = [LayerKind.FULL if kind in others else kind for kind in listed] if isinstance(listed, list) else listed
        return _listed(keys, known, num_layers)

    return kinds


def all_rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Every layer rotates."""
    return (True,) * len(kinds)


def none_rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """No layer rotates."""
    return (False,) * len(kinds)


def sliding_rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Layers with a window rotate, and the others only where no layer has one."""
    has_window = keys.optional_count("sliding_window") is not None
    return tuple(not has_window or kind is LayerKind.SLIDING for kind in kinds)


def none_read(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[int | None, ...]:
    """Every layer attends over keys and values of its own."""
    return (None,) * len(kinds)


def last_read(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[int | None, ...]:
    """The last `num_kv_shared_layers` layers read the last one before them that is of their kind."""
    name, count = keys.find(("num_kv_shared_layers",))
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < len(kinds):
        keys.refuse(name, count, f"must be a whole number from 0 to {len(kinds) - 1}")
    own = kinds[: len(kinds) - count]
    last = {kind: index for index, kind in enumerate(own)}
    missing = sorted(set(kinds) - set(own))
    if missing:
        keys.refuse(name, count, f"must leave a layer of {missing[0]} that keeps keys and values for the others")
    return (None,) * len(own) + tuple(last[kind] for kind in kinds[len(own) :])


def _full_every(period: int, num_layers: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind.SLIDING if number % period else LayerKind.FULL for number in range(1, num_layers + 1))


def _listed(keys: ConfigKeys, listed: object, num_layers: int) -> tuple[LayerKind, ...]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        keys.refuse("layer_types", listed, f"must list one type per layer, for {counted(num_layers, 'layer')}")
    known = [kind.value for kind in LayerKind]
    if not all(isinstance(kind, str) and kind in known for kind in listed):
        keys.refuse("layer_types", listed, f"may name only {' and '.join(known)}")
    return tuple(map(LayerKind, listed))
