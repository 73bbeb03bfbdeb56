"""Which shape a tensor of a GGUF file has once it is changed (see `Change`), and what that takes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.config.arch import ModelArch
from quire.config.gguf.architectures import Change
from quire.config.layers.recurrent_mixers import GatedDeltaSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One change, for a tensor of one shape."""

    kind: Change
    shape: Shape
    """What it gives."""
    sizes: tuple[int, ...] = ()
    """What `loader.gguf.changes` needs of the model."""
    is_arithmetic: bool = False
    """Whether it is for numbers alone, and gives float32."""


def change_of(kind: Change, shape: Shape, part: str, arch: ModelArch, *, is_plain: bool) -> TensorChange | None:
    """How a tensor changes; None where it stays as it is, or has a shape that whoever reads it refuses."""
    change = _RULES[kind](kind, shape, arch, part)
    return change if change is None or is_plain or kind not in _OF_NUMBERS else None


def _turns(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    heads = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}[part]
    is_known = heads and shape[0] % (2 * heads) == 0
    return TensorChange(kind=kind, shape=shape, sizes=(heads,)) if is_known else None


def _by_head(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    heads, kv_heads = arch.num_heads, arch.num_kv_heads
    is_known = heads and shape[0] == (heads + 2 * kv_heads) * arch.head_size
    return TensorChange(kind=kind, shape=shape, sizes=(heads, kv_heads)) if is_known else None


def _transposed(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    return TensorChange(kind=kind, shape=shape[::-1]) if len(shape) == 2 else None


def _offset(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    offset = int(arch.norms.offset)
    return TensorChange(kind=kind, shape=shape, sizes=(offset,), is_arithmetic=True) if offset else None


def _decay(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange:
    """Of each head, or of each channel and number of its state."""
    flat = shape[:1] if shape[1:] == (1,) else shape
    return TensorChange(kind=kind, shape=flat, is_arithmetic=True)


def _in_shape(
    new_shape: Callable[[Shape], Shape],
) -> Callable[[Change, Shape, ModelArch, str], TensorChange | None]:
    def rule(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
        given = new_shape(shape)
        return TensorChange(kind=kind, shape=given) if math.prod(given) == math.prod(shape) else None

    return rule


def _tiled(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    """Of a product, or of the channels of a convolution behind it."""
    spec = _linear_attention(arch)
    if spec is None:
        return None
    size, wanted = shape[0] - spec.inner_size, 2 * spec.num_value_heads * spec.key_size
    if size <= 0 or size % (2 * spec.key_size) or wanted % size:
        return None
    rest = (1, *shape[1:]) if part == "ssm_conv1d" else shape[1:]
    return TensorChange(kind=kind, shape=(wanted + spec.inner_size, *rest), sizes=(size // 2, wanted // size))


def _pairs(kind: Change, shape: Shape, arch: ModelArch, part: str) -> TensorChange | None:
    spec = _linear_attention(arch)
    if spec is None or shape[0] != 2 * spec.num_value_heads:
        return None
    return TensorChange(kind=kind, shape=(shape[0] // 2, *shape[1:]), sizes=(spec.num_key_heads,))


def _linear_attention(arch: ModelArch) -> GatedDeltaSpec | None:
    return next((mixer for mixer in arch.recurrences if isinstance(mixer, GatedDeltaSpec)), None)


_OF_NUMBERS = (Change.TRANSPOSED, Change.FLAT, Change.ROW, Change.CHANNELS)
"""What is not done to quantised rows. Those that are stored [out, in] are known to be so by whoever reads them."""
_RULES: Mapping[Change, Callable[[Change, Shape, ModelArch, str], TensorChange | None]] = MappingProxyType(
    {
        Change.TURNS: _turns,
        Change.BY_HEAD: _by_head,
        Change.TRANSPOSED: _transposed,
        Change.OFFSET: _offset,
        Change.DECAY: _decay,
        Change.FLAT: _in_shape(lambda shape: (math.prod(shape),)),
        Change.ROW: _in_shape(lambda shape: (1, shape[-1])),
        Change.CHANNELS: _in_shape(lambda shape: (shape[0], 1, shape[-1])),
        Change.TILED: _tiled,
        Change.FIRST_OF_PAIRS: _pairs,
        Change.SECOND_OF_PAIRS: _pairs,
    }
)
