"""Weights as structures of the library name them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.config.memory.weights.formats import BY_NAME, Codes
from quire.errors import ConfigError
from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu.library import word
from quire.ops.cpu.runtime.dtypes import WEIGHT_DTYPES

CODES = {
    Codes.INT8: 1,
    Codes.INT4: 2,
    Codes.LEVELS: 3,
    Codes.FLOAT8: 4,
    Codes.INT5: 5,
    Codes.INT6: 6,
    Codes.INT2: 7,
    Codes.INT3: 8,
}
"""By `qr_format`."""
TENSORS = ("packed", "scales", "zero_points", "offsets", "levels", "order")
"""Of `LinearWeight.tensors`, in the order of `qr_weight`."""

_written: WeakKeyDictionary[LinearWeight, Tensor] = WeakKeyDictionary()
"""The `qr_weight`s of linear layers: graphs refer to them, as long as their model lives."""


def words_of(weight: LinearWeight, bias: Tensor | None = None) -> list[int]:
    """A `qr_weight`. It refers to the tensors, and keeps none of them."""
    if weight.format == "mixed":
        formats = ", ".join(part.format for part in weight.parts)
        raise ConfigError(
            f"one expert or head has rows of different formats ({formats}), which the kernels cannot compute: "
            "its gate and up projections must have the same format"
        )
    tensors = [weight.tensors.get(name) for name in TENSORS]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, bias)]
    if weight.format == "dense":
        return [*addresses, WEIGHT_DTYPES[weight.tensors["packed"].dtype], 0, 0, weight.out_features, word(1.0), 0]
    format, unit = BY_NAME[weight.format], weight.tensors.get("unit")
    unit_word = word(1.0 if unit is None else unit.item())
    return [*addresses, 0, CODES[format.codes], format.group, weight.out_features, unit_word, format.num_nested]


def written(weight: LinearWeight) -> tuple[int, int]:
    """Address and number of the `qr_weight`s of a linear layer, which live as long as it does."""
    words = _written.get(weight)
    parts: Sequence[LinearWeight] = weight.parts or (weight,)
    if words is None:
        words = _written[weight] = torch.tensor([value for part in parts for value in words_of(part)])
    return words.data_ptr(), len(parts)
