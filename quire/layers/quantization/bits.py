"""Values of a few bits, taken out of the bytes that hold them. A byte's low bits come first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fields(words: Tensor, bits: int) -> Tensor:
    """The fields of integers; those that cross words of 32 fill as many words as they have bits.

    Shapes: words [..., K] -> [..., K, F] uint8, F being 8 * bytes of a word / bits; where fields cross words
    [..., K / bits, 32], the last of which may be filled up.
    """
    stored = words.flatten().view(torch.uint8).view(*words.shape, words.element_size())
    if bits == 8:
        return stored
    if 8 % bits:
        return _crossing(stored, bits)
    per_byte = 8 // bits
    out = torch.empty(*stored.shape, per_byte, dtype=torch.uint8)
    for place in range(per_byte):
        out[..., place] = stored >> place * bits & (1 << bits) - 1
    return out.flatten(-2)


def _crossing(stored: Tensor, bits: int) -> Tensor:
    """Values that cross bytes and words: eight of as many bytes as a value has bits.

    Shapes: stored [..., K, 4] -> [..., K / bits, 32].
    """
    front = stored.shape[:-2]
    filled = torch.nn.functional.pad(stored, (0, 0, 0, -stored.shape[-2] % bits))
    parts = filled.reshape(*front, -1, bits).long()
    together = sum((parts[..., place] << 8 * place for place in range(bits)), start=torch.zeros_like(parts[..., 0]))
    eights = torch.stack([together >> bits * place & (1 << bits) - 1 for place in range(8)], dim=-1)
    return eights.to(torch.uint8).view(*front, -1, 32)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """Values packed along the last dimension. Shapes: words [R, K] -> [R, K * F] uint8."""
    return fields(words, bits).flatten(-2)


def along_columns(words: Tensor, bits: int) -> Tensor:
    """Values packed along the first dimension, transposed. Shapes: words [K, C] -> [C, K * F] uint8."""
    return along_rows(words.t(), bits)


def shuffled_along_rows(words: Tensor, bits: int, places: Sequence[int]) -> Tensor:
    """Values packed along the last dimension, transposed; places[i] is the field of a word that has its i-th value.

    Shapes: words [R, K] int32 -> [K * F, R] uint8.
    """
    columns = words.t().contiguous()
    out = torch.empty(columns.shape[0], len(places), columns.shape[1], dtype=torch.uint8)
    for index, place in enumerate(places):
        out[:, index] = columns >> place * bits & (1 << bits) - 1
    return out.flatten(0, 1)


def signed(values: Tensor, bits: int) -> Tensor:
    """Unsigned values less half of their range. Shapes: values uint8 -> alike, int8."""
    return (values ^ 0x80).view(torch.int8) if bits == 8 else values.to(torch.int8) - (1 << bits - 1)
