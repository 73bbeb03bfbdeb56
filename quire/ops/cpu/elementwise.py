"""Elementwise ops; `csrc/cpu/elementwise.cpp`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu.dtypes import DTYPES
from quire.ops.cpu.library import check, load
from quire.ops.cpu.memory import empty

lib = load()


def scale_add(x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """See `functional.scale_add`."""
    out = empty(x.shape, x.dtype)
    added = None if residual is None else residual.data_ptr()
    check(lib.qr_scale_add(out.data_ptr(), x.data_ptr(), added, DTYPES[x.dtype], scale, x.numel()))
    return out


def soft_cap(logits: Tensor, cap: float) -> None:
    """See `functional.soft_cap`."""
    check(lib.qr_soft_cap(logits.data_ptr(), cap, logits.numel()))
