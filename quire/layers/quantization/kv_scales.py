"""The scales of keys and values that a checkpoint brings for a KV cache of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.quantized.kv_cache import find_kv_scales
from quire.config.quantized.stored import refuse
from quire.layers.context import LayerContext


def read_kv_scales(ctx: LayerContext, num_kv_heads: int) -> Tensor | None:
    """Those of the attention that `ctx` is of; None where each token has its own. Shapes: -> [2, K] float32.

    Raises: CheckpointError where one is not finite or not above 0.
    """
    names = find_kv_scales(ctx.name, num_kv_heads, ctx.weights.header) if ctx.has_kv_scales else None
    if names is None:
        return None
    stored = [ctx.weights.read_raw(name) for name in names]
    if stored[0].is_meta:
        return None
    scales = torch.stack([scale.float().flatten().expand(num_kv_heads) for scale in stored])
    for name, scale in zip(names, scales, strict=True):
        if not (scale > 0).all() or not scale.isfinite().all():
            raise refuse(name, f"has the scale {scale.min().item():g}, which is not above 0 or not finite")
    ctx.weights.release(names)
    return scales.to(ctx.ops.device)
