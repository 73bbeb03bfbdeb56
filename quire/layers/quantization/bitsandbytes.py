"""Weights as bitsandbytes stores them (arXiv 2208.07339 for 8 bits, 2305.14314 for nf4 and nested scales)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.quantized.bitsandbytes import State, read_state
from quire.config.quantized.stored import StoredFormat, refuse
from quire.layers.quantization.bits import along_rows
from quire.ops.contracts.operands import QuantizedRows
from quire.utils.math import cdiv

LARGEST = 127
"""What stands for the largest magnitude of a row."""
ROW_MAJOR = 0
"""The weight_format that is not interleaved for one kind of GPU."""


def unpack_bnb_8bit(format: StoredFormat, stored: Mapping[str, Tensor]) -> QuantizedRows:
    """Each row times its largest magnitude / 127."""
    layout = stored.get("weight_format")
    if layout is not None and int(layout) != ROW_MAJOR:
        raise refuse(format.name, f"has the layout {int(layout)} of a GPU's kernels; quire reads rows (0)")
    scales = stored["SCB"].to(torch.float32).view(-1, 1) / LARGEST
    return QuantizedRows(values=stored["weight"], bits=8, scales=scales, group_size=format.shape[1])


def unpack_bnb_4bit(format: StoredFormat, stored: Mapping[str, Tensor]) -> QuantizedRows:
    """Codes of nf4 or fp4 with a scale for each block of a row."""
    state = read_state(format.name, bytes(stored["quant_state"].tolist()))
    (rows, columns), size = state.shape, state.group_size  # blocks go on over the ends of rows
    packed = stored["weight"].contiguous().view(torch.uint8)
    codes = along_rows(packed.view(-1, 1), 4).view(-1, 2).flip(1).reshape(rows, columns)  # high bits first
    levels = tuple(stored["quant_map"].to(torch.float32).tolist())
    if len(levels) != 16:
        raise refuse(format.name, f"has a quant_map of {len(levels)} levels, not of 16")
    begins = torch.arange(0, rows * columns, size)
    scales = _scales(format, stored, state)[begins // state.block].view(rows, columns // size)
    return QuantizedRows(values=codes.to(torch.int8), bits=4, scales=scales, group_size=size, levels=levels)


def _scales(format: StoredFormat, stored: Mapping[str, Tensor], state: State) -> Tensor:
    """Of all blocks, one after the other; they may be quantised themselves, in blocks, about a mean."""
    largest, count = stored["absmax"].flatten(), cdiv(math.prod(state.shape), state.block)
    is_nested = "nested_absmax" in stored
    if len(largest) != count or (largest.dtype == torch.uint8) != is_nested:
        raise refuse(format.name, f"has absmax {largest.dtype} of {len(largest)} blocks, not of {count}")
    if not is_nested:
        return largest.to(torch.float32)
    levels, blocks = (stored[role].to(torch.float32).flatten() for role in ("nested_quant_map", "nested_absmax"))
    size = state.nested_block
    if len(levels) != 256 or size < 1 or len(blocks) != cdiv(count, size):
        raise refuse(format.name, f"has {len(levels)} levels and {len(blocks)} blocks of {size} of nested scales")
    return levels[largest.long()] * blocks[torch.arange(count) // size] + state.nested_offset
