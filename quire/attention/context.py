"""Everything one forward pass needs beyond its input, passed as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.ops.contracts.operands import AttentionMetadata, StateMetadata

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionMetadata", "ForwardContext", "GroupContext", "StateMetadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """One step's view for the layers of one KV group, which share block tables."""

    slot_mapping: Tensor
    """[T] int64: block id * block size + slot, where each token's key and value go."""
    attention: AttentionMetadata
    state: StateMetadata | None = None
    """In a group of recurrent layers, which look at nothing else here."""


@dataclass(slots=True)
class Choice:
    """What the last indexer chose, for layers behind it that have none."""

    tokens: Tensor | None = None
    """As `Ops.select_tokens` gives it; None where no layer needs it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step's view for the model."""

    positions: Tensor
    """[T] int64: each token's position in its sequence."""
    groups: Sequence[GroupContext]
    group_of_layer: Mapping[int, int]
    """Which of the groups each layer belongs to."""
    kv_caches: Sequence[Tensor]
    """One per layer, as `Ops.allocate_kv_cache` or `allocate_states` made it; layers of several groups share
    one."""
    wanted: Tensor | None = None
    """[R] int64: rows whose hidden states are wanted. A model may give these alone; without it, all are wanted."""

    choice: Choice = field(default_factory=Choice)

    def state_of(self, layer: int) -> StateMetadata:
        """Where a recurrent layer finds its states."""
        state = self.groups[self.group_of_layer[layer]].state
        assert state is not None, layer
        return state
