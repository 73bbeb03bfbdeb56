"""How a layer's tokens learn of those before them: the mixer of each layer, as data."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.rope import RopeConfig
from quire.messages.kv import FullAttentionSpec, KVCacheSpec, PageSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionScale:
    """1 + beta * log(1 + floor(position / period)): what keeps the softmax over long contexts sharp."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention over the keys and values of all tokens, or of the last ones."""

    window: int | None
    """Tokens a query sees at most, itself included; None for all."""
    rope: RopeConfig | None
    """None where queries and keys are not rotated."""
    query_scale: float
    """Multiplies query . key."""
    position_scale: PositionScale | None = None
    """Multiplies each query by its position; None for nothing."""
    slopes: tuple[float, ...] | None = None
    """What the scores of each query head lose with each token of distance; None for nothing."""
    has_sinks: bool = False
    """Whether each query head has a learned score of no token."""

    @property
    def is_native(self) -> bool:
        """Whether the native kernels compute its scores."""
        return self.slopes is None and not self.has_sinks

    def kv_cache_spec(self, page: PageSpec) -> KVCacheSpec:
        """What the layer keeps in the KV cache, a block of which is a page."""
        return FullAttentionSpec(page=page) if self.window is None else SlidingWindowSpec(page=page, window=self.window)


MixerSpec = AttentionSpec
"""The kinds of mixers that there are."""
