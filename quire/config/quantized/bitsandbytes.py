"""Weights as bitsandbytes stores them, from their headers and what it keeps of each as JSON in a tensor of bytes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from quire.config.quantized.stored import Header, refuse

STATE = ".quant_state.bitsandbytes__"
MAX_STATE_BYTES = 1 << 16
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers that may share a scale."""
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""What its codes may be stored as (bnb_4bit_quant_storage), and how many bytes that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What bitsandbytes keeps of a weight of 4 bits."""

    shape: tuple[int, int]
    block: int
    """Numbers that share a scale, one row after the other."""
    nested_block: int
    """Scales that share one of their own, and what their mean is, where they are nested."""
    nested_offset: float

    @property
    def group_size(self) -> int:
        """Columns that share a scale in every row."""
        return math.gcd(self.shape[1], self.block)


def is_state(name: str, header: Header) -> bool:
    """Whether a tensor is such a state."""
    return STATE in name and header.dtype == "U8" and math.prod(header.shape) <= MAX_STATE_BYTES


def read_state(name: str, data: bytes) -> State:
    """That of the weight `name`. Raises: CheckpointError."""
    try:
        given = json.loads(data)
        rows, columns = map(int, given["shape"])
        block, nested = int(given["blocksize"]), int(given.get("nested_blocksize", 0))
        offset = float(given.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise refuse(name, "has a quant_state that is no JSON of a shape and a blocksize") from None
    if rows < 1 or columns < 1 or block not in BLOCKS or nested < 0 or not math.isfinite(offset):
        raise refuse(name, f"has a quant_state of shape {[rows, columns]} and blocksize {block}")
    return State(shape=(rows, columns), block=block, nested_block=nested, nested_offset=offset)
