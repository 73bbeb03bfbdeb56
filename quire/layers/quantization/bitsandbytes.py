"""Weights as bitsandbytes stores them (arXiv 2208.07339 for 8 bits, 2305.14314 for nf4 and nested scales)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
    state = _state(format, stored["quant_state"])
    rows, columns = state["shape"]
    block = state["blocksize"]
    if rows * columns != format.shape[0]:
        raise refuse(format.name, f"has a quant_state for the shape {[rows, columns]} and {format.shape[0]} codes")
    packed = stored["weight"].contiguous().view(torch.uint8)
    codes = along_rows(packed.view(-1, 1), 4).view(-1, 2).flip(1).reshape(rows, columns)  # high bits first
    levels = tuple(stored["quant_map"].to(torch.float32).tolist())
    if len(levels) != 16:
        raise refuse(format.name, f"has a quant_map of {len(levels)} levels, not of 16")
    size = math.gcd(columns, block)  # blocks go on over the ends of rows
    begins = torch.arange(0, rows * columns, size)
    scales = _scales(format, stored, state)[begins // block].view(rows, columns // size)
    return QuantizedRows(values=codes.to(torch.int8), bits=4, scales=scales, group_size=size, levels=levels)


def _scales(format: StoredFormat, stored: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Of all blocks, one after the other; they may be quantised themselves, in blocks, about a mean."""
    largest, count = stored["absmax"].flatten(), cdiv(format.shape[0], state["blocksize"])
    is_nested = "nested_absmax" in stored
    if len(largest) != count or (largest.dtype == torch.uint8) != is_nested:
        raise refuse(format.name, f"has absmax {largest.dtype} of {len(largest)} blocks, not of {count}")
    if not is_nested:
        return largest.to(torch.float32)
    levels, blocks = (stored[role].to(torch.float32).flatten() for role in ("nested_quant_map", "nested_absmax"))
    size = state["nested_blocksize"]
    if len(levels) != 256 or size < 1 or len(blocks) != cdiv(count, size):
        raise refuse(format.name, f"has {len(levels)} levels and {len(blocks)} blocks of {size} of nested scales")
    offset: float = state["nested_offset"]
    return levels[largest.long()] * blocks[torch.arange(count) // size] + offset


def _state(format: StoredFormat, stored: Tensor) -> dict[str, Any]:
    """What bitsandbytes keeps of a weight, as JSON in a tensor of bytes. Raises: CheckpointError."""
    try:
        state = json.loads(bytes(stored.tolist()))
        rows, columns = map(int, state["shape"])
        kept = {"shape": (rows, columns), "blocksize": int(state["blocksize"])}
        nested = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError):
        raise refuse(format.name, "has a quant_state that is no JSON of a shape and a blocksize") from None
    if rows < 1 or columns < 1 or kept["blocksize"] not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise refuse(format.name, f"has the quant_state {kept}")
    return {**kept, "nested_blocksize": nested[0], "nested_offset": nested[1]}
