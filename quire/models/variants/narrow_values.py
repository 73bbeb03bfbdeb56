"""Weights around value heads that are narrower than keys.

The KV cache and the ops of attention have one size for keys and values. So the product to values gives zeros behind
each value, and the output's product has zeros where it reads them.

These weights become numbers where the checkpoint has them quantised: zeros fit neither its blocks nor its groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.config.arch import ModelArch
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import AttentionSpec
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.weights import WHOLE, Rows


def narrow_projection(arch: ModelArch, ctx: LayerContext, heads: Heads) -> Linear:
    """To queries, keys, and values with zeros behind each; `ctx` is the attention's.

    Raises: ConfigError where the model would be split.
    """
    if ctx.parallel.tp.size > 1:
        raise ConfigError(
            f"{arch.source}: values narrower than keys cannot be split between processes yet. Use one process."
        )
    names, num_values = arch.family.names.qkv, heads.kv_size - heads.num_kv_heads * heads.num_unused
    counts = (heads.query_size, heads.kv_size, num_values)

    def read(kind: str, width: tuple[int, ...]) -> list[Rows]:
        parts = [ctx.read_plain(f"{name}.{kind}", (count, *width)) for name, count in zip(names, counts, strict=True)]
        return [*parts[:2], _filled(parts[2], heads.num_kv_heads, heads)]

    weight = ctx.packed([f"{name}.weight" for name in names], read("weight", (arch.hidden_size,)))
    if not arch.attention_bias:
        return Linear.of(ctx.ops, weight)
    parts = [part for part in read("bias", ()) if isinstance(part, Tensor)]
    bias = parts[0] if parts[0].is_meta else torch.cat([part.to(torch.float32) for part in parts]).to(ctx.ops.device)
    ctx.release([f"{name}.bias" for name in names])
    return Linear.of(ctx.ops, weight, bias)


def narrow_output(arch: ModelArch, ctx: LayerContext, mixer: AttentionSpec) -> Linear:
    """The output's product, which reads the zeros behind each value; `ctx` is its own."""
    heads, factor = mixer.cached, mixer.factors.output
    num_read = heads.query_size - heads.num_heads * heads.num_unused
    stored = ctx.read_plain("weight", (arch.hidden_size, num_read))
    filled = _filled(stored.t(), heads.num_heads, heads).t()
    if factor != 1.0 and not filled.is_meta:
        filled = filled.to(torch.float32) * factor
    weight = ctx.packed(["weight"], [filled])
    bias = None
    if arch.output_bias:
        bias = ctx.linear_bias((arch.hidden_size,), WHOLE, factors=(factor,))
    return Linear.of(ctx.ops, weight, bias)


def _filled(values: Tensor, count: int, heads: Heads) -> Tensor:
    """With zeros behind each of so many heads. Shapes: values [count * W] or [count * W, M] -> [count * D (, M)]."""
    size, rest = heads.head_size, values.shape[1:]
    if values.is_meta:
        return values.new_empty((count * size, *rest))
    by_head = values.reshape(count, size - heads.num_unused, -1)
    return pad(by_head, (0, 0, 0, heads.num_unused)).reshape(count * size, *rest)
