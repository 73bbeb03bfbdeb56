"""Everything one forward pass needs beyond its input, passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of this step and their contexts lie. CPU ops read the tensors on the host.

    Shapes: R sequences, T tokens. Tokens of one sequence are adjacent and in order of position.
    """

    query_start: Tensor
    """[R + 1] int32: sequence r owns tokens query_start[r] .. query_start[r + 1]."""
    seq_lens: Tensor
    """[R] int32: context length after this step; the sequence's last token stands at position seq_lens[r] - 1."""
    block_tables: Tensor
    """[R, max blocks] int32, rows padded with 0."""
    block_size: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step's view for the model."""

    positions: Tensor
    """[T] int64: each token's position in its sequence."""
    slot_mapping: Tensor
    """[T] int64: block id * block size + slot, where each token's key and value go."""
    attention: AttentionMetadata
    kv_caches: list[Tensor]
    """One per attention layer, as `ops.functional.allocate_kv_cache` made it."""
