"""Weights as bitsandbytes stores them (arXiv 2208.07339 for 8 bits, 2305.14314 for nf4 and nested scales)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.config.quantized.stored import StoredFormat, refuse
from quire.layers.quantization.bits import along_rows
from quire.ops.operands import QuantizedRows

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
    if rows * columns != format.shape[0] or columns % block:
        raise refuse(format.name, f"has the shape {[rows, columns]} in blocks of {block}, which cross its rows")
    codes = along_rows(stored["weight"].view(-1, 1), 4).view(-1, 2).flip(1).reshape(rows, columns)  # high bits first
    levels = tuple(stored["quant_map"].to(torch.float32).tolist())
    scales = _scales(stored, state).view(rows, columns // block)
    return QuantizedRows(values=codes.to(torch.int8), bits=4, scales=scales, group_size=block, levels=levels)


def _scales(stored: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Of all blocks, one after the other; they may be quantised themselves, in blocks, about a mean."""
    largest = stored["absmax"]
    if "nested_absmax" not in stored:
        return largest.to(torch.float32)
    levels = stored["nested_quant_map"].to(torch.float32)[largest.long()]
    blocks = stored["nested_absmax"].to(torch.float32).repeat_interleave(state["nested_blocksize"])
    offset: float = state["nested_offset"]
    return levels * blocks[: len(levels)] + offset


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
