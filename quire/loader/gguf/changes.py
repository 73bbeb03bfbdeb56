"""What is done to a tensor of a GGUF file to give the one that a checkpoint of transformers has: see `Change`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.gguf.architectures import Change
from quire.loader.gguf.shapes import TensorChange


def changed(rows: Tensor, change: TensorChange) -> Tensor:
    """Rows of numbers, or of bytes where they are quantised, as transformers has them. Shapes: rows [N, ...]."""
    return _COMPUTED[change.kind](rows, change)


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads whose halves take turns, the first half before the second. Shapes: rows [N, ...] -> [N, ...]."""
    heads = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def by_head(rows: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Rows of all queries, keys and values, as those of each KV head in turn: its queries, its key, its value.

    Shapes: rows [N, ...] -> [N, ...].
    """
    each = num_heads // num_kv_heads
    heads = rows.view(num_heads + 2 * num_kv_heads, -1, *rows.shape[1:])
    order: list[int] = []
    for head in range(num_kv_heads):
        order += [*range(each * head, each * (head + 1)), num_heads + head, num_heads + num_kv_heads + head]
    return heads[order].reshape(rows.shape)


def repeated(rows: Tensor, size: int, times: int) -> Tensor:
    """The first `size` rows so many times, the next ones likewise, then the others. Shapes: rows [N, ...]."""
    both = [rows[:size], rows[size : 2 * size]]
    return torch.cat([*(part for part in both for _ in range(times)), rows[2 * size :]])


def keys_and_values(keys: Tensor, values: Tensor) -> Tensor:
    """The product of latents that gives the keys and values of each head, of those for keys (transposed) and values.

    Shapes: keys [H, C, U], values [H, W, C] -> [H * (U + W), C].
    """
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def of_pairs(rows: Tensor, num_heads: int, which: int) -> Tensor:
    """One of the two parts that each head has. Shapes: rows [N, ...] -> [N / 2, ...]."""
    return rows.view(num_heads, 2, -1, *rows.shape[1:])[:, which].flatten(0, 1)


def _in_its_shape(rows: Tensor, change: TensorChange) -> Tensor:
    return rows.reshape(change.shape)


_COMPUTED: Mapping[Change, Callable[[Tensor, TensorChange], Tensor]] = MappingProxyType(
    {
        Change.TURNS: lambda rows, change: in_halves(rows, *change.sizes),
        Change.BY_HEAD: lambda rows, change: by_head(rows, *change.sizes),
        Change.TRANSPOSED: lambda rows, change: rows.t(),
        Change.OFFSET: lambda rows, change: rows.float() - change.sizes[0],
        Change.DECAY: lambda rows, change: rows.float().neg().log(),
        Change.TILED: lambda rows, change: repeated(rows, *change.sizes),
        Change.FIRST_OF_PAIRS: lambda rows, change: of_pairs(rows, change.sizes[0], 0),
        Change.SECOND_OF_PAIRS: lambda rows, change: of_pairs(rows, change.sizes[0], 1),
        **dict.fromkeys((Change.FLAT, Change.ROW, Change.CHANNELS), _in_its_shape),
    }
)
