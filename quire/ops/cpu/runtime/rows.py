"""Rows of a stored weight, as the library reads them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import zeros

ROWS_AT_A_TIME = 512
"""Rows copied at a time, whole panels: temporaries stay small."""


def readable_rows(part: Tensor) -> Iterator[Tensor]:
    """The rows of a part as the library reads them; where they lie otherwise, copies of a few at a time."""
    if part.dtype in DTYPES and part.stride(1) == 1:
        yield part
        return
    size = part.shape[1]
    room = zeros(min(ROWS_AT_A_TIME, part.shape[0]) * size * 4).view(torch.float32).view(-1, size)
    for start in range(0, part.shape[0], ROWS_AT_A_TIME):
        rows = part[start : start + ROWS_AT_A_TIME]
        yield room[: rows.shape[0]].copy_(rows)
