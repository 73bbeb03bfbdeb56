"""Rotary position embedding: tables of cosines and sines, shared by all layers that rotate alike.

The frequencies follow transformers' modeling_rope_utils number by number. Where transformers lets the length of the
running batch choose them (dynamic, longrope), quire chooses once, from `max_model_len`: a request's tokens must not
depend on what else runs. Up to the original context length both agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.layers.rope import RopeConfig, RopeType, attention_factor
from quire.ops.threads import one_thread
from quire.utils.math import round_up

_WHOLE_VECTORS = 32
"""Rows are computed in multiples of this, so that torch treats the last position like all others."""


@lru_cache(maxsize=4)
def rotary_table(rope: RopeConfig, max_model_len: int, device: str = "cpu") -> Tensor:
    """Cosines, then sines, of every position. Shapes: -> [max_model_len, rotary_dim] float32."""
    inv_freq = _FREQUENCIES[rope.type](rope, max_model_len)
    positions = torch.arange(round_up(max_model_len, _WHOLE_VECTORS), dtype=torch.float32)
    angles = positions.unsqueeze(1) * (-inv_freq if rope.is_backward else inv_freq)
    table = _cos_sin(angles) * attention_factor(rope)
    return table[:max_model_len].contiguous().to(device)


@one_thread()
def _cos_sin(angles: Tensor) -> Tensor:
    """On one thread: the first cosines of a process, taken by two at once, may come out otherwise on the second, for
    the library below torch finds out there and then which code it runs. One process in six had another table from its
    middle on, and a restarted core other logprobs.
    """
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _powers(rope: RopeConfig, theta: float) -> Tensor:
    return theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / (rope.odd_dim or rope.rotary_dim))


def _default(rope: RopeConfig, max_model_len: int) -> Tensor:
    return 1.0 / _powers(rope, rope.theta)


def _linear(rope: RopeConfig, max_model_len: int) -> Tensor:
    return 1.0 / _powers(rope, rope.theta) / rope.factor


def _dynamic(rope: RopeConfig, max_model_len: int) -> Tensor:
    """NTK-aware scaling of the base, for contexts as long as the engine allows."""
    dim, length = rope.odd_dim or rope.rotary_dim, max(max_model_len, rope.max_position)
    stretch = (rope.factor * length / rope.max_position) - (rope.factor - 1)
    return 1.0 / _powers(rope, rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, max_model_len: int) -> Tensor:
    """Long waves are stretched, short ones kept, those between interpolated."""
    inv_freq = _default(rope, max_model_len)
    length, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > length / low, inv_freq / rope.factor, inv_freq)
    smooth = (length / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * stretched / rope.factor + smooth * stretched
    medium = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(medium, smoothed, stretched)


def _yarn(rope: RopeConfig, max_model_len: int) -> Tensor:
    """Peng et al. 2023: interpolate slow dimensions, extrapolate fast ones, ramp between them."""
    powers = _powers(rope, rope.theta)
    low, high = _yarn_dimension(rope, rope.beta_fast), _yarn_dimension(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_dimension(rope: RopeConfig, rotations: float) -> float:
    """The dimension that turns `rotations` times over the original context."""
    turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
    return rope.rotary_dim * turns / (2 * math.log(rope.theta))


def _longrope(rope: RopeConfig, max_model_len: int) -> Tensor:
    """Ding et al. 2024: one factor per dimension, from the long list once the engine allows long contexts."""
    factors = rope.long_factor if max_model_len > rope.original_max_position else rope.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(rope, rope.theta))


def _proportional(rope: RopeConfig, max_model_len: int) -> Tensor:
    """The fastest pairs turn, and the others do not."""
    inv_freq = _linear(rope, max_model_len)
    inv_freq[int(rope.share * rope.rotary_dim // 2) :] = 0.0
    return inv_freq


_FREQUENCIES: MappingProxyType[RopeType, Callable[[RopeConfig, int], Tensor]] = MappingProxyType(
    {
        RopeType.DEFAULT: _default,
        RopeType.LINEAR: _linear,
        RopeType.DYNAMIC: _dynamic,
        RopeType.LLAMA3: _llama3,
        RopeType.YARN: _yarn,
        RopeType.LONGROPE: _longrope,
        RopeType.PROPORTIONAL: _proportional,
    }
)
