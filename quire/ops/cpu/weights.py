"""Weights as structures of the library name them."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu.dtypes import WEIGHT_DTYPES
from quire.ops.cpu.quantized import FORMATS
from quire.ops.operands import LinearWeight


def words_of(weight: LinearWeight, bias: Tensor | None = None) -> list[int]:
    """A `qr_weight`. It refers to the tensors, and keeps none of them."""
    packed, scales, corrections = (weight.tensors.get(name) for name in ("packed", "scales", "corrections"))
    assert packed is not None
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (packed, scales, corrections, bias)]
    if weight.format == "dense":
        return [*addresses, WEIGHT_DTYPES[packed.dtype], 0, 0]
    return [*addresses, 0, *FORMATS[weight.format]]
