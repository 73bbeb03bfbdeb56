"""What layers need of the KV cache, and what the pool gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The KV cache of one attention layer."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """bfloat16, float16 or float32."""
    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens a query sees at most, itself included; None sees all."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of this layer, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
