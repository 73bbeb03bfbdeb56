"""Layers whose attention runs in small tiles, so that few tokens meet several tiles and splits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.reference.cache import TOPS, quantize
from tests.ops.pages import spoil
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton.attention import SCRATCH_BYTES, AttentionWork, Tiling, View, attend  # isort: skip  (see device)
from quire.ops.triton.cache import allocate_kv_cache  # isort: skip

TILING = Tiling(rows=16, keys=16, split=32, num_warps=4, num_stages=1, merged_rows=64)
WALK, SPLITS = 0, SCRATCH_BYTES
"""Bytes of scratch with which one program walks all splits of a row, and with which each split has a program."""
Work = list[tuple[int, int, int]]
"""(sequence, first token, end) for each sequence of a step."""


@dataclass(kw_only=True)
class Layer:
    """Whole sequences of queries, keys and values, of which steps write the keys and values that they compute."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    slots: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    tiling: Tiling = TILING
    view: View = field(default_factory=lambda: View(scale=0.25))

    def __post_init__(self) -> None:
        width = -(-max(self.lengths) // self.slots)
        num_blocks = width * len(self.lengths) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order[: width * len(self.lengths)].view(len(self.lengths), width).int().to(DEVICE)
        columns = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = [
            randoms(length, columns, seed=10 + index, dtype=self.dtype) for index, length in enumerate(self.lengths)
        ]
        with DEVICE:
            self.cache = allocate_kv_cache(
                num_blocks=num_blocks,
                block_size=self.slots,
                num_kv_heads=self.kv_heads,
                head_size=self.size,
                dtype=self.cache_dtype or self.dtype,
            )
        self.spoil(slice(None))

    def spoil(self, blocks: slice | Tensor) -> None:
        """What nobody of a step wrote must not be read."""
        spoil(self.cache, blocks)

    def slots_of(self, row: int, start: int, stop: int) -> Tensor:
        """Where the tokens of a sequence are written."""
        tokens = torch.arange(start, stop, device=DEVICE)
        return self.tables[row, tokens // self.slots].long() * self.slots + tokens % self.slots

    def step(self, work: Work, *, scratch: int = WALK, tiling: Tiling | None = None) -> list[Tensor]:
        """Write and attend in one step. Gives the output of each part of the work."""
        query = self.write(work)
        out = attend(
            AttentionWork(query, self.cache, self.metadata(work), self.view),
            tiling=tiling or self.tiling,
            scratch_bytes=scratch,
        )
        return list(out.split([stop - start for _, start, stop in work]))

    def write(self, work: Work) -> Tensor:
        """Write keys and values, without the kernel that does so: it takes long in the interpreter. Gives queries."""
        qkv = torch.cat([self.qkv[row][start:stop] for row, start, stop in work]).unflatten(1, (-1, self.size))
        slots = torch.cat([self.slots_of(*part) for part in work])
        query, *keys_values = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        numbers, scales = parts_of(self.cache, self.size)
        at = (slots // self.slots, slice(None), slots % self.slots)
        for half, rows in enumerate(keys_values):
            if scales is None:
                numbers[half][at] = rows.to(numbers.dtype)
            else:
                integers, scale = quantize(rows.float(), self.cache.dtype).split([self.size, 4], dim=-1)
                numbers[half][at], scales[half][at] = integers, scale
        return query.contiguous()

    def metadata(self, work: Work) -> AttentionMetadata:
        """Where the tokens of a step lie."""
        counts = [stop - start for _, start, stop in work]
        return AttentionMetadata(
            query_start=torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
            seq_lens=torch.tensor([stop for _, _, stop in work], dtype=torch.int32, device=DEVICE),
            block_tables=self.tables[[row for row, _, _ in work]].contiguous(),
            block_size=self.slots,
        )


def parts_of(cache: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Views of a cache: the numbers of keys and values [2, B, K, S, D], and bytes of scales [.., S, 4]."""
    if cache.dtype not in TOPS:
        return cache, None
    slots = cache.shape[3]
    pages = cache.flatten(3)
    return pages[..., : slots * size].unflatten(3, (slots, size)), pages[..., slots * size :].unflatten(3, (slots, 4))
