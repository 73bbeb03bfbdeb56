"""What layers need of the KV cache, and what the pool gives."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of this layer, keys and values together."""
        slot = self.head_size + 4 if self.dtype == "int8" else self.head_size * DTYPE_BYTES[self.dtype]
        return 2 * self.block_size * self.num_kv_heads * slot


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
