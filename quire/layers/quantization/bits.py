"""Values of a few bits, taken out of the bytes that hold them. A byte's low bits come first."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1 (OCP Microscaling Formats 1.0, section 5.3.3)."""


def fields(words: Tensor, bits: int) -> Tensor:
    """The fields of integers. Shapes: words [..., K] -> [..., K, F] uint8, F being 8 * bytes of a word / bits."""
    words = words.contiguous()
    stored = words.view(torch.uint8).view(*words.shape, words.element_size())
    if bits == 8:
        return stored
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (stored.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """Values packed along the last dimension. Shapes: words [R, K] -> [R, K * F] uint8."""
    return fields(words, bits).flatten(-2)


def along_columns(words: Tensor, bits: int) -> Tensor:
    """Values packed along the first dimension, transposed. Shapes: words [K, C] -> [C, K * F] uint8."""
    return fields(words, bits).permute(1, 0, 2).flatten(-2)


def signed(values: Tensor, bits: int) -> Tensor:
    """Unsigned values less half of their range. Shapes: values uint8 -> alike, int8."""
    return (values ^ 0x80).view(torch.int8) if bits == 8 else values.to(torch.int8) - (1 << bits - 1)
