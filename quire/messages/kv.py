"""What layers need of the KV cache, and what the pool gives."""

from __future__ import annotations

from dataclasses import dataclass

from quire.utils.math import cdiv, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The KV cache of one attention layer."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """bfloat16, float16, float32, or int8 with a float32 scale for each token, head, and of keys and values."""
    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens a query sees at most, itself included; None sees all."""
    slot_multiple: int = 1
    """Pages have room for a multiple of so many tokens; see `SLOT_MULTIPLES`."""

    @property
    def page(self) -> int:
        """Elements of one head's keys (or values) in a block, padding included; a multiple of `block_size`."""
        slot = self.head_size + (4 if self.dtype == "int8" else 0)
        num_slots = round_up(self.block_size, self.slot_multiple)
        if num_slots == self.block_size:
            return num_slots * slot
        return round_up(cdiv(num_slots * slot, self.block_size), 32) * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of this layer, keys and values together: what the plan counts and what is allocated."""
        return 2 * self.num_kv_heads * self.page * DTYPE_BYTES.get(self.dtype, 1)


SLOT_MULTIPLES = {"reference": 1, "cpu": 16}
"""By implementation of the ops: the native kernels read keys in tiles of 16 tokens (`csrc/cpu/kernels/cache.h`)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
