"""How linear weights are kept: as the checkpoint has them, in the model's dtype, or rounded without calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.layers.weights import Rows
from quire.ops.dequantize import dequantize
from quire.ops.functional import pack_linear, pack_quantized, quantize_linear
from quire.ops.operands import LinearWeight, QuantizedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Formats of `functional.quantize_linear` for weights that are not quantised; None keeps the model's dtype."""

    body: str | None = None
    """Of the layers."""
    head: str | None = None
    """Of the output head, whose errors go straight into the logits."""
    dequantizes: bool = False
    """Quantised weights become numbers of the model's dtype."""

    def pack(self, parts: Sequence[Rows], dtype: torch.dtype, *, is_head: bool) -> LinearWeight:
        """Lay out the parts of a linear weight."""
        if not self.dequantizes and any(isinstance(part, QuantizedRows) for part in parts):
            return pack_quantized([part if isinstance(part, QuantizedRows) else part.to(dtype) for part in parts])
        format = self.head if is_head else self.body
        numbers = [plain(part) for part in parts]
        return pack_linear(numbers, dtype=dtype) if format is None else quantize_linear(numbers, format=format)


def plain(rows: Rows) -> Tensor:
    """Rows as numbers: as they are, or float32 where they were quantised."""
    return dequantize(rows) if isinstance(rows, QuantizedRows) else rows


def copied(rows: Rows, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype`; quantised rows a few at a time."""
    if not isinstance(rows, QuantizedRows):
        return rows.to(dtype, copy=True)
    out = torch.empty(rows.shape, dtype=dtype)
    for begin in range(0, out.shape[0], COPIED_ROWS):
        some = slice(begin, begin + COPIED_ROWS)
        out[some] = dequantize(rows[some])
    return out


COPIED_ROWS = 4096
STORED = WeightScheme()
"""Weights stay as the checkpoint has them."""
DENSE = WeightScheme(dequantizes=True)
SCHEMES: Mapping[str | None, WeightScheme] = MappingProxyType(
    {
        None: STORED,
        "int8": WeightScheme(body="int8", head="int8"),
        "int4": WeightScheme(body="int4_g128", head="int8"),
    }
)
"""By `--quantization`."""
