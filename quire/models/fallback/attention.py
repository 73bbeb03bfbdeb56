"""What transformers' attention modules call: keys and values go to the paged cache, queries read from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.attention.context import ForwardContext
from quire.errors import ConfigError
from quire.ops.contracts.operands import RopeAndCacheSpec
from quire.ops.contracts.ops import Ops

NAME = "quire"
"""Of this attention among transformers' implementations."""
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings", "past_key_values"})
"""Keywords that modules hand on and that say nothing about what is computed."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens see which, as a function of two positions. Nothing is computed before somebody asks."""

    function: Callable[[int, int, Tensor, Tensor], Tensor]

    def __getattr__(self, name: str) -> None:
        raise AttributeError(f"masks are no tensors here, and the model asks one for its {name}")

    def window(self, length: int) -> int | None:
        """How many tokens a query sees, itself included; None for all before it, in contexts of up to `length`.

        Raises: ConfigError for a mask of another form.
        """
        keys = torch.arange(length + 1)
        seen = [self.function(0, 0, torch.tensor(query), keys).expand(keys.shape) for query in (length - 1, length)]
        size = int(seen[1].sum())
        for query, found in zip((length - 1, length), seen, strict=True):
            if size == 0 or not torch.equal(found, (keys <= query) & (keys > query - size)):
                raise ConfigError("its mask is neither causal nor a sliding window")
        return None if size > length else size


@dataclass(slots=True)
class Seen:
    """What the modules of a model asked for in one pass, by layer: for `trial`, which checks it."""

    num_calls: dict[int, int] = field(default_factory=dict)
    masks: dict[int, Mask | None] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Heads of keys, and the larger size of a head of keys and values."""


class PagedAttention:
    """The attention of one model: the step in progress, and the window of each layer."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.context: ForwardContext | None = None
        self.windows: dict[int, int | None] = {}
        """As the masks have them; a layer that is not there sees everything before it."""
        self.seen: Seen | None = None
        """Filled while it is there."""

    def attach(self, model: nn.Module) -> None:
        """Be what the modules of a model find."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_attention = self  # type: ignore[assignment]

    def look(self, layer: int, key: Tensor, value: Tensor, mask: Mask | None) -> None:
        """Note what is asked for."""
        if self.seen is not None:
            self.seen.num_calls[layer] = self.seen.num_calls.get(layer, 0) + 1
            self.seen.masks[layer] = mask
            self.seen.shapes[layer] = key.shape[1], max(key.shape[3], value.shape[3])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, soft_cap: float | None
    ) -> Tensor:
        """Shapes: query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V]. Mutates: the cache."""
        assert self.context is not None
        kv_cache, group = self.context.kv_caches[layer], self.context.groups[self.context.group_of_layer[layer]]
        heads, kv_heads, value_size = query.shape[1], key.shape[1], value.shape[3]
        width = max(key.shape[3], value_size)
        spec = RopeAndCacheSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=width, rotary_dim=0)
        rows = self.ops.rope_and_cache(
            side_by_side(query, key, value, width),
            self.context.positions,
            None,
            None,
            None,
            kv_cache,
            group.slot_mapping,
            spec,
        )
        out = self.ops.paged_attention(
            rows, kv_cache, group.attention, scale=scale, sliding_window=self.windows.get(layer), soft_cap=soft_cap
        )
        return out.view(1, -1, heads, width)[..., :value_size]


def side_by_side(query: Tensor, key: Tensor, value: Tensor, width: int) -> Tensor:
    """The heads of each token in a row, those that are smaller filled with zeros. Shapes: -> [T, (H + 2K) * width]."""
    parts = [
        nn.functional.pad(part[0].transpose(0, 1), (0, width - part.shape[3])).to(value.dtype)
        for part in (query, key, value)
    ]
    return torch.cat(parts, dim=1).flatten(1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers' attention functions; the window is the mask's, as in its eager attention.

    Raises: ConfigError for what is not computed here.
    """
    asked = [
        name for name, value in others.items() if name not in HARMLESS and value is not None and value is not False
    ]
    if asked:
        raise ConfigError(f"its attention takes {', '.join(asked)}")
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        raise ConfigError("it makes an attention mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ConfigError("its attention is not causal")
    if dropout:
        raise ConfigError("its attention drops out")
    paged, layer = module.paged_attention, module.layer_idx
    assert isinstance(paged, PagedAttention)
    assert isinstance(layer, int)
    paged.look(layer, key, value, attention_mask)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return paged.attend(layer, query, key, value, scale=scale, soft_cap=softcap), None


def _mask(*, mask_function: Callable[..., Tensor], **_: object) -> Mask:
    """The interface of transformers' masks."""
    return Mask(mask_function)


def register() -> None:
    """Make the name known to transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
