"""Elementwise ops."""

from __future__ import annotations

from torch import Tensor


def scale_add(x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """See `functional.scale_add`."""
    value = x.float() * scale
    return (value if residual is None else value + residual.float()).to(x.dtype)


def soft_cap(logits: Tensor, cap: float) -> None:
    """See `functional.soft_cap`."""
    for row in logits.div_(cap):  # row by row: torch's bits may depend on where a row lies among others
        row.tanh_()
    logits.mul_(cap)
