"""Linear layers. Output features are split between tensor-parallel ranks, or input features where `shard_dim` is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from quire.layers.context import LayerContext
from quire.layers.weights import HeadOrder, ShardSpec
from quire.ops.contracts.operands import LinearWeight
from quire.ops.contracts.ops import Ops


class Linear:
    """activation(x @ weight.T + bias) + residual; several of the checkpoint's layers may be fused into one."""

    def __init__(
        self,
        ctx: LayerContext,
        in_features: int,
        *out_features: int,
        bias: bool = False,
        shard_dim: int = 0,
        order: HeadOrder | None = None,
        input_factor: float = 1.0,
        factors: Sequence[float] = (),
    ) -> None:
        """`factors` multiply each of `out_features`, with its bias, and `input_factor` what the layer reads."""
        self.ops = ctx.ops
        tp = ctx.parallel.tp
        self.weight = ctx.linear_weight(
            in_features,
            out_features,
            ShardSpec(dim=shard_dim, part=tp.rank, parts=tp.size),
            order=order,
            factors=[input_factor * factor for factor in factors or (1.0,) * len(out_features)],
        )
        # A bias follows the output features: split with them, or whole and added by the first rank only.
        bias_shard = ShardSpec(part=tp.rank, parts=tp.size) if shard_dim == 0 else ShardSpec()
        has_bias = bias and (shard_dim == 0 or tp.rank == 0)
        self.bias = None
        if has_bias:
            self.bias = ctx.linear_bias(out_features, bias_shard, order=order, factors=factors)

    @classmethod
    def of(cls, ops: Ops, weight: LinearWeight, bias: Tensor | None = None) -> Self:
        """One whose parameters were read before."""
        made = cls.__new__(cls)
        made.ops, made.weight, made.bias = ops, weight, bias
        return made

    def __call__(self, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        """Shapes: x [T, M], residual [T, N] -> [T, N]."""
        return self.ops.linear(x, self.weight, self.bias, activation=activation, residual=residual)


class GatedLinear(Linear):
    """activation(gate(x)) * up(x), gate and up being the two halves of one product."""

    def __init__(
        self,
        ctx: LayerContext,
        in_features: int,
        out_features: int,
        *,
        activation: str,
        bias: bool = False,
        input_factor: float = 1.0,
        factors: Sequence[float] = (),
    ) -> None:
        both = out_features, out_features
        super().__init__(ctx, in_features, *both, bias=bias, input_factor=input_factor, factors=factors)
        self.activation = activation

    def gate(self, x: Tensor) -> Tensor:
        """Shapes: x [T, M] -> [T, F]."""
        return self.ops.gated_linear(x, self.weight, self.bias, activation=self.activation)
