"""Doge."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext
from quire.models.blocks import Mlp
from quire.models.decoder import DecoderForCausalLM, DecoderLayer


class DogeLayer(DecoderLayer):
    """Attention and MLP are added to the residual, each feature of which is multiplied first."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        names = arch.scales.of_features
        assert names is not None
        self.mixed_weight, self.fed_weight = (
            ctx.tensor(name, (arch.hidden_size,), dtype=torch.float32) for name in names
        )

    def _mix(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        assert self.input_norm is not None
        normed = self.input_norm(hidden)
        return self._mixed(normed, ctx, self._weighed(hidden, self.mixed_weight))

    def _feed(self, hidden: Tensor, mlp: Mlp) -> Tensor:
        assert self.pre_mlp_norm is not None
        normed = self.pre_mlp_norm(hidden)
        return mlp(normed, residual=self._weighed(hidden, self.fed_weight))

    def _weighed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Mutates: hidden."""
        self.ops.scale_heads(hidden.view(hidden.shape[0], 1, -1), weight)
        return hidden


class DogeForCausalLM(DecoderForCausalLM):
    """The common decoder, with factors of the residual's features."""

    layer_class: ClassVar[type[DecoderLayer]] = DogeLayer
