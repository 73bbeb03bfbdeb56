"""A router of several products, whose first features layers hand on (Zaya)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.layers.experts import RouterMlpSpec
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quantization.schemes import DENSE


class RouterMlp:
    """What the last product of a router reads: gelu(gelu(norm(thin))), thin being a product of the hidden states, plus
    that of the layer before, times a factor of each feature.

    All of it in float32: a rounding error that chooses another expert is no small one.
    """

    def __init__(self, arch: ModelArch, spec: RouterMlpSpec, ctx: LayerContext) -> None:
        """`ctx` is the router's."""
        exact, rank = replace(ctx, scheme=DENSE, dtype=torch.float32), spec.rank
        mlp = exact.child("router_mlp")
        self.ops = ctx.ops
        self.down = Linear(exact.child("down_proj"), arch.hidden_size, rank, bias=True)
        self.factors = ctx.tensor("router_states_scale", (rank,), dtype=torch.float32) if spec.reads_last else None
        self.norm = RMSNorm(mlp.child("norm"), rank, arch.norm_eps)
        self.first, self.second = (Linear(mlp.child(name), rank, rank, bias=True) for name in ("fc1", "fc2"))

    def __call__(self, hidden: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """The thin features, which the next layer gets as `last`, and what the last product reads.

        Shapes: hidden [T, E], last [T, P] float32 -> [T, P], [T, P] float32. Mutates: last.
        """
        thin = self._thin(hidden, last)
        return thin, self.second(self.first(self.norm(thin), activation="gelu"), activation="gelu")

    def _thin(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        own = self.ops.linear(hidden, self.down.weight, self.down.bias, out_dtype=torch.float32)
        if self.factors is None:
            return own
        assert last is not None
        self.ops.scale_heads(last.view(last.shape[0], 1, -1), self.factors)
        return self.ops.scale_add(last, 1.0, own)
