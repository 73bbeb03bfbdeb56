"""How linear weights are kept: as the checkpoint has them, in the model's dtype, or rounded without calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from quire.layers.weights import Rows
from quire.ops.contracts.operands import BlockRows, BlockTable, LinearWeight, StoredRows
from quire.ops.contracts.ops import Ops
from quire.ops.shared.dequantize import dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Formats of `Ops.quantize_linear` for weights that are not quantised; None keeps the model's dtype."""

    body: str | None = None
    """Of the layers."""
    head: str | None = None
    """Of the output head, whose errors go straight into the logits."""
    dequantizes: bool = False
    """Quantised weights become numbers of the model's dtype."""

    def pack(self, ops: Ops, parts: Sequence[Rows], dtype: torch.dtype, *, is_head: bool) -> LinearWeight:
        """Lay out the parts of a linear weight."""
        if not self.dequantizes and any(isinstance(part, StoredRows) for part in parts):
            return ops.pack_quantized([part.to(dtype) if isinstance(part, Tensor) else part for part in parts])
        format = self.head if is_head else self.body
        numbers = [plain(part) for part in parts]
        return ops.pack_linear(numbers, dtype=dtype) if format is None else ops.quantize_linear(numbers, format=format)

    def table(self, rows: Rows, dtype: torch.dtype, device: str) -> Tensor | BlockTable:
        """A copy of a table of embeddings: numbers of `dtype`, or blocks of a GGUF file, whose rows become such."""
        if isinstance(rows, BlockRows) and not self.dequantizes:
            return BlockTable(rows=replace(rows, blocks=rows.blocks.to(device, copy=True)), dtype=dtype)
        return copied(rows, dtype, device)


def plain(rows: Rows) -> Tensor:
    """Rows as numbers: as they are, or float32 where they were quantised."""
    return rows if isinstance(rows, Tensor) else dequantize(rows)


def copied(rows: Rows, dtype: torch.dtype, device: str) -> Tensor:
    """A copy in `dtype` on a device; quantised rows a few at a time."""
    if isinstance(rows, Tensor):
        return rows.to(device, dtype, copy=True)
    out = torch.empty(rows.shape, dtype=dtype, device=device)
    copy_rows(out, rows)
    return out


def copy_rows(out: Tensor, rows: Rows) -> None:
    """Copy rows as numbers into the first ones of `out`, a few at a time where they are quantised."""
    for begin in range(0, rows.shape[0], COPIED_ROWS):
        some = rows[begin : begin + COPIED_ROWS]
        out[begin : begin + some.shape[0]] = plain(some)


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
