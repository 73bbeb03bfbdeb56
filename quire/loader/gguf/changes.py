"""What is done to a tensor of a GGUF file to give the one that a checkpoint of transformers has: see `Change`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.gguf.architectures import Change
from quire.config.layers.mixers import GatedDeltaSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """One change, for a tensor of one shape."""

    shape: Shape
    """What it gives."""
    compute: Callable[[Tensor], Tensor]
    """Rows of numbers, or of bytes where they are quantised, to as many."""
    is_arithmetic: bool = False
    """Whether it is for numbers alone, and gives float32."""


def values_of(change: Change, shape: Shape, part: str, arch: ModelArch, *, is_plain: bool) -> Values | None:
    """How a tensor changes; None where it stays as it is, or has a shape that whoever reads it refuses."""
    return _VALUES[change](shape, part, arch, is_plain)


def _turns(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    heads = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}[part]
    return (
        None
        if not heads or shape[0] % (2 * heads)
        else Values(shape=shape, compute=lambda rows: in_halves(rows, heads))
    )


def _by_head(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_size
    if not heads or shape[0] != (heads + 2 * kv_heads) * size:
        return None
    return Values(shape=shape, compute=lambda rows: by_head(rows, heads, kv_heads))


def _transposed(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    """Blocks of quantised rows cannot be transposed, and whoever reads them knows that they are not."""
    return Values(shape=shape[::-1], compute=Tensor.t) if is_plain and len(shape) == 2 else None


def _offset(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    offset = arch.norms.offset
    return Values(shape=shape, compute=lambda weight: weight.float() - offset, is_arithmetic=True) if offset else None


def _decay(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    """Of each head, or of each channel and number of its state."""
    flat = shape[:1] if shape[1:] == (1,) else shape
    return Values(shape=flat, compute=lambda rate: rate.float().neg().log(), is_arithmetic=True)


def _in_shape(new_shape: Callable[[Shape], Shape]) -> Callable[[Shape, str, ModelArch, bool], Values | None]:
    def values(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
        given = new_shape(shape)
        fits = is_plain and math.prod(given) == math.prod(shape)
        return Values(shape=given, compute=lambda rows: rows.reshape(given)) if fits else None

    return values


def _tiled(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
    """Of a product, or of the channels of a convolution behind it."""
    spec = next((mixer for mixer in arch.recurrences if isinstance(mixer, GatedDeltaSpec)), None)
    if spec is None:
        return None
    size = shape[0] - spec.inner_size
    times = spec.num_value_heads * spec.key_size * 2 // max(size, 1)
    if size <= 0 or size % 2 or size * times != spec.num_value_heads * spec.key_size * 2:
        return None
    rest = (1, *shape[1:]) if part == "ssm_conv1d" else shape[1:]
    whole = (times * size + spec.inner_size, *rest)
    return Values(shape=whole, compute=lambda rows: repeated(rows, size // 2, times).reshape(-1, *rows.shape[1:]))


def _of_pairs(which: int) -> Callable[[Shape, str, ModelArch, bool], Values | None]:
    def values(shape: Shape, part: str, arch: ModelArch, is_plain: bool) -> Values | None:
        spec = next((mixer for mixer in arch.recurrences if isinstance(mixer, GatedDeltaSpec)), None)
        if spec is None or shape[0] != 2 * spec.num_value_heads:
            return None
        heads = spec.num_key_heads
        return Values(
            shape=(shape[0] // 2, *shape[1:]),
            compute=lambda rows: rows.view(heads, 2, -1, *rows.shape[1:])[:, which].flatten(0, 1),
        )

    return values


_VALUES: Mapping[Change, Callable[[Shape, str, ModelArch, bool], Values | None]] = MappingProxyType(
    {
        Change.TURNS: _turns,
        Change.BY_HEAD: _by_head,
        Change.TRANSPOSED: _transposed,
        Change.OFFSET: _offset,
        Change.DECAY: _decay,
        Change.FLAT: _in_shape(lambda shape: (math.prod(shape),)),
        Change.ROW: _in_shape(lambda shape: (1, shape[-1])),
        Change.TILED: _tiled,
        Change.FIRST_OF_PAIRS: _of_pairs(0),
        Change.SECOND_OF_PAIRS: _of_pairs(1),
        Change.CHANNELS: _in_shape(lambda shape: (shape[0], 1, shape[-1])),
    }
)


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads whose halves take turns, the first half before the second. Shapes: rows [N, ...] -> [N, ...]."""
    heads = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def by_head(rows: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Rows of all queries, keys and values, as those of each KV head in turn: its queries, its key, its value.

    Shapes: rows [N, ...] -> [N, ...].
    """
    each = num_heads // num_kv_heads
    heads = rows.view(num_heads + 2 * num_kv_heads, -1, *rows.shape[1:])
    order = [
        place
        for head in range(num_kv_heads)
        for place in (
            *range(each * head, each * (head + 1)),
            num_heads + head,
            num_heads + num_kv_heads + head,
        )
    ]
    return heads[order].reshape(rows.shape)


def repeated(rows: Tensor, size: int, times: int) -> Tensor:
    """The first `size` rows so many times, the next ones likewise, then the others. Shapes: rows [N, ...]."""
    both = [rows[:size], rows[size : 2 * size]]
    return torch.cat([*(part for part in both for _ in range(times)), rows[2 * size :]])


def keys_and_values(keys: Tensor, values: Tensor) -> Tensor:
    """The product of latents that gives the keys and values of each head, of those for keys (transposed) and values.

    Shapes: keys [H, C, U], values [H, W, C] -> [H * (U + W), C].
    """
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
