"""Rotary position embedding, as config.json describes it.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`; both are the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from quire.config.config_keys import LARGEST, SMALLEST, ConfigKeys, is_number
from quire.config.layers.layer_kinds import LayerKind
from quire.log import get_logger
from quire.utils.lazy import nearest
from quire.utils.math import round_up

log = get_logger(__name__)

SHARE = "partial_rotary_factor"
"""The share of each head that is rotated, of families that have a default for it."""

UNREAD_OF_TWO: Mapping[str, Any] = MappingProxyType({"truncate": None})
"""Keys that transformers does not find where each kind of layer has a rotation of its own."""


class RopeType(StrEnum):
    """How rotary frequencies are stretched beyond the context the model was first trained with."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that a type does not use keep their defaults."""

    type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    rotary_dim: int
    """Leading elements of each head that are rotated."""
    odd_dim: int | None = None
    """`rotary_dim` before it was rounded up to an even number, if it was odd: frequencies are computed from it."""
    factor: float = 1.0
    original_max_position: int
    """Context length before stretching."""
    max_position: int
    """Context length after stretching."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cosines and sines; None derives it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0
    """proportional: of the pairs of a head that turn; all of them have their places in it."""
    is_backward: bool = False
    """Whether it turns the other way round."""
    normed_factor: float = 1.0
    """The attention factor of heads that are normed after the rotation. The norm cancels it, so it only scales the
    norm's epsilon."""


def yarn_scale(factor: float, mscale: float) -> float:
    """How much larger yarn makes the product of a query and a key, for a context stretched by `factor`: its root."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.type not in (RopeType.YARN, RopeType.LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type is RopeType.YARN:
        return _yarn_attention_factor(rope)
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor, 1.0)


_SPELLINGS = {"su": RopeType.LONGROPE, **{kind.value: kind for kind in RopeType}}
_NEEDS_FACTOR = (RopeType.LINEAR, RopeType.DYNAMIC, RopeType.LLAMA3)


def rotation_of(keys: ConfigKeys) -> tuple[str, Any]:
    """(key, value) of the rotation that a config gives, None for none. In transformers, `rope_scaling` counts first."""
    given = ((name, keys.raw.get(name)) for name in ("rope_scaling", "rope_parameters"))
    return next(((name, value) for name, value in given if value not in (None, {})), ("rope_parameters", None))


def unless_given(parameters: Mapping[str, Any]) -> Callable[[ConfigKeys], Mapping[str, Any]]:
    """The rotation of a family's configs that give none, as its `FamilySpec.derived`."""

    def derived(keys: ConfigKeys) -> Mapping[str, Any]:
        _, given = rotation_of(keys)
        return {"rope_parameters": parameters} if given is None else {}

    return derived


def read_ropes(
    keys: ConfigKeys,
    head_sizes: Mapping[LayerKind, int],
    max_position: int,
    aliases: Mapping[str, str],
    sliding_theta: str | None,
) -> dict[LayerKind, RopeConfig]:
    """How each kind of layer rotates its heads. `aliases` are a family's own spellings of a type.

    A family with `sliding_theta`, the key of the base of layers with a window, stretches the others only; for such a
    family `rope_parameters` has an object for each kind of layer.
    Raises: ConfigError naming the key, its value and the remedy.
    """
    if sliding_theta is None:
        rope = _parameters(keys, _one_object(keys), "rope_parameters", "rope_theta")
        of_size = {size: _rope(keys, rope, size, max_position, aliases) for size in set(head_sizes.values())}
        return {kind: of_size[head_sizes[kind]] for kind in LayerKind}
    full, sliding = _two_objects(keys)
    parameters = {
        LayerKind.FULL: _parameters(keys, full, "rope_parameters.full_attention", "rope_theta"),
        LayerKind.SLIDING: _parameters(keys, sliding, "rope_parameters.sliding_attention", sliding_theta),
    }
    return {kind: _rope(keys, rope, head_sizes[kind], max_position, aliases) for kind, rope in parameters.items()}


def single_rope(keys: ConfigKeys, given: Mapping[str, Any], name: str, head_size: int, max_position: int) -> RopeConfig:
    """The rotation that an object of the config called `name` describes, theta and share included.

    Raises: ConfigError naming the key, its value and the remedy.
    """
    return _rope(keys, ConfigKeys(given, f"{keys.source}: {name}", {}), head_size, max_position, {})


def _one_object(keys: ConfigKeys) -> Mapping[str, Any]:
    name, given = rotation_of(keys)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        keys.refuse(name, given, "must be null or an object with a rope_type")
    if any(isinstance(value, Mapping) for value in given.values()):
        keys.refuse(name, given, "must be one object for all layers; separate ones per layer type are not supported")
    return given


def _two_objects(keys: ConfigKeys) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Of full layers, and of layers with a window."""
    given = keys.raw.get("rope_parameters")
    by_kind = {} if given is None else given
    if not isinstance(by_kind, Mapping) or not all(_is_of_kind(name, value) for name, value in by_kind.items()):
        keys.refuse("rope_parameters", given, f"must have one object for each of {' and '.join(LayerKind)}")
    full, sliding = (by_kind.get(kind) or {} for kind in (LayerKind.FULL, LayerKind.SLIDING))
    return {**full, **_scaling(keys), **UNREAD_OF_TWO}, {**sliding, **UNREAD_OF_TWO}


def _scaling(keys: ConfigKeys) -> Mapping[str, Any]:
    scaling = keys.raw.get("rope_scaling")
    if scaling is None:
        return {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        keys.refuse("rope_scaling", scaling, "must be null or an object with a rope_type")
    return scaling


def _is_of_kind(name: str, value: object) -> bool:
    return name in set(LayerKind) and (value is None or isinstance(value, Mapping))


def _parameters(keys: ConfigKeys, given: Mapping[str, Any], name: str, theta: str) -> ConfigKeys:
    """The parameters of one rotation; what they leave out is at the top of the config."""
    defaults = {
        "rope_theta": keys.positive(theta, default=10_000.0),
        SHARE: keys.positive(SHARE, default=1.0),
    }
    return ConfigKeys(given, f"{keys.source}: {name}", defaults)


def _rope(
    keys: ConfigKeys, rope: ConfigKeys, head_size: int, max_position: int, aliases: Mapping[str, str]
) -> RopeConfig:
    kind = _rope_type(rope, aliases)
    size = head_size if kind is RopeType.PROPORTIONAL else _rotated_size(keys, rope, head_size, kind)
    rotary_dim = round_up(size, 2)
    original = _original_max_position(keys, rope, kind, max_position)
    factor = rope.positive("factor", default=None if kind in _NEEDS_FACTOR else max_position / original)
    if factor < 1:
        rope.refuse("factor", factor, "must be 1 or more")
    return RopeConfig(
        type=kind,
        theta=rope.positive("rope_theta"),
        rotary_dim=rotary_dim,
        odd_dim=size if size % 2 else None,
        factor=factor,
        original_max_position=original,
        max_position=max_position,
        attention_factor=rope.optional_positive("attention_factor"),
        low_freq_factor=rope.positive("low_freq_factor", default=None if kind is RopeType.LLAMA3 else 1.0),
        high_freq_factor=_high_freq_factor(rope, kind),
        beta_fast=rope.positive("beta_fast", default=32.0),
        beta_slow=rope.positive("beta_slow", default=1.0),
        mscale=_unless_zero(rope, "mscale"),
        mscale_all_dim=_unless_zero(rope, "mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        share=_share(rope, head_size) if kind is RopeType.PROPORTIONAL else 1.0,
        short_factor=_factors(rope, kind, "short_factor", rotary_dim),
        long_factor=_factors(rope, kind, "long_factor", rotary_dim),
    )


def _unless_zero(rope: ConfigKeys, name: str) -> float | None:
    """A number above zero; None for null and for 0, which mean the same."""
    return None if rope.raw.get(name) == 0 else rope.optional_positive(name)


def _rotated_size(keys: ConfigKeys, rope: ConfigKeys, head_size: int, kind: RopeType) -> int:
    """The elements of a head that are rotated: `rotary_dim` or a share, of a family that knows it, or all."""
    name, given = keys.find(("rotary_dim",))
    has_share = name not in keys.defaults
    if not has_share:
        size = keys.count(name)
    else:
        name, given = SHARE, rope.positive(SHARE)
        size = int(head_size * given) if SHARE in keys.defaults else _whole(rope, head_size, kind)
    may_be_odd = has_share and kind is not RopeType.YARN
    if not 0 < round_up(size, 2) <= head_size or (size % 2 and not may_be_odd):
        rope.refuse(name, given, f"must rotate an even part of each head's {head_size} elements")
    return size


def _whole(rope: ConfigKeys, head_size: int, kind: RopeType) -> int:
    """The size of a head, of a family that rotates whole heads.

    transformers ignores a share of such families, and fails with one where the rotation is stretched.
    """
    share = rope.positive(SHARE)
    if share != 1 and kind is not RopeType.DEFAULT:
        rope.refuse(SHARE, share, "must be 1: models of this family rotate whole heads")
    if share != 1:
        log.warning("config.json sets %s, which this family ignores in transformers, too source=%s", SHARE, rope.source)
    return head_size


def _share(rope: ConfigKeys, head_size: int) -> float:
    share = rope.positive(SHARE)
    if share > 1 or head_size % 2:
        rope.refuse(SHARE, share, f"must be at most 1, of heads of an even size ({head_size})")
    return share


def _rope_type(rope: ConfigKeys, aliases: Mapping[str, str]) -> RopeType:
    value = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if not isinstance(value, str) or aliases.get(value, value) not in _SPELLINGS:
        known = [kind.value for kind in RopeType]
        hint = nearest(value, known) if isinstance(value, str) else ""
        rope.refuse("rope_type", value, f"must be one of {', '.join(known)}{hint}")
    return _SPELLINGS[aliases.get(value, value)]


def _original_max_position(keys: ConfigKeys, rope: ConfigKeys, kind: RopeType, max_position: int) -> int:
    """transformers lets the top-level key win over the one among the rope parameters; Phi-3 assumes 4096."""
    if kind in (RopeType.DEFAULT, RopeType.LINEAR, RopeType.DYNAMIC, RopeType.PROPORTIONAL):
        return max_position
    name = "original_max_position_embeddings"
    if keys.raw.get(name) is not None:
        return keys.count(name)
    return rope.count(name, default=keys.defaults.get(name, max_position))


def _high_freq_factor(rope: ConfigKeys, kind: RopeType) -> float:
    if kind is not RopeType.LLAMA3:
        return 4.0
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", high, f"must exceed low_freq_factor ({low:g})")
    return high


def _factors(rope: ConfigKeys, kind: RopeType, name: str, rotary_dim: int) -> tuple[float, ...]:
    if kind is not RopeType.LONGROPE:
        return ()
    value = rope.raw.get(name)
    valid = isinstance(value, list) and all(is_number(item) and SMALLEST <= item <= LARGEST for item in value)
    if value is None or not valid or len(value) != rotary_dim // 2:
        rope.refuse(name, value, f"must list {rotary_dim // 2} numbers above 0, one per rotated pair")
    return tuple(float(item) for item in value)
