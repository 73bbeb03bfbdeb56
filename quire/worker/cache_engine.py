"""`CacheEngine`: owns the bytes of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.messages.kv import KVCacheSpec
from quire.ops import functional as ops
from quire.sampling.torch_mode import torch_mode


class CacheEngine:
    """One cache per attention layer, `num_blocks` each."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_blocks: int) -> None:
        self.caches = [
            ops.allocate_kv_cache(
                num_blocks=num_blocks,
                block_size=spec.block_size,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                dtype=getattr(torch, spec.dtype),
            )
            for spec in specs
        ]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer, in order."""
        if pairs:
            with torch_mode():
                ops.copy_blocks(self.caches, pairs)
