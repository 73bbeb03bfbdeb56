"""The experts in front of and behind attention, as checkpoints of JetMoE spell them."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionExperts
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.quantization.schemes import DENSE
from quire.layers.weights import ShardSpec
from quire.ops.contracts.operands import AttentionExpertWeights, LinearWeight


def attention_expert_weights(arch: ModelArch, spec: AttentionExperts, ctx: LayerContext) -> AttentionExpertWeights:
    """The router, in float32, and a tensor for each of both products.

    Raises: ConfigError where they would be split.
    """
    if ctx.parallel.tp.size > 1:
        raise ConfigError(f"{arch.source}: experts cannot be split between processes yet. Use one process.")
    size, inner = arch.hidden_size, arch.num_kv_heads * arch.head_size
    router, exact = "router.layer.weight", replace(ctx, scheme=DENSE, dtype=torch.float32)
    with ctx.ops.weights_together():
        return AttentionExpertWeights(
            router=exact.packed([router], [exact.read(router, (spec.num_experts, size))]),
            queries=_of_experts(ctx, "input_linear.weight", spec.num_experts, (inner, size)),
            outputs=_of_experts(ctx, "output_linear.weight", spec.num_experts, (size, inner)),
            output_bias=ctx.tensor("bias", (size,), dtype=torch.float32),
        )


def _of_experts(ctx: LayerContext, name: str, count: int, shape: tuple[int, int]) -> tuple[LinearWeight, ...]:
    stored = [ctx.read_plain(name, (count, *shape), ShardSpec(part=index, parts=count)) for index in range(count)]
    return tuple(ctx.packed([name], [part.view(*shape)]) for part in stored)
