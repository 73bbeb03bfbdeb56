"""What the worker needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext
from quire.ops.contracts.operands import Largest


class Model(Protocol):
    """A model that generates."""

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm, at least those of `ctx.wanted`.

        Shapes: token_ids [T] int64 -> [T, E], or [R, E] where only these are given. Mutates: ctx.kv_caches.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E], any rows of what `forward` gave -> [S, V] float32."""

    def largest_logits(self, hidden: Tensor) -> Largest:
        """The largest of the logits of each row, which are not kept. Shapes: hidden [S, E] -> [S]."""


class ModelClass(Protocol):
    """What the registry holds: built with its weights from `ctx`, it is a `Model`."""

    def __call__(self, arch: ModelArch, ctx: LayerContext) -> Model:
        """Build the model. Raises: ConfigError for options of the config that the model does not implement."""
