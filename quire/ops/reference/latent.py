"""Attention over latents: the products of each head before and behind `paged_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.functional import LatentSpec, LinearWeight
from quire.ops.latent import join_qkv, join_values, matrices, split_attended, split_inputs
from quire.ops.reference.gemm import linear
from quire.ops.reference.norm import rms_norm
from quire.ops.threads import one_thread


@one_thread()
def latent_qkv(
    query: Tensor, compressed: Tensor, norm: Tensor, to_latents: Sequence[LinearWeight], spec: LatentSpec
) -> Tensor:
    """See `functional.latent_qkv`."""
    tokens = query.shape[0]
    nope = query.new_empty(tokens, spec.num_heads * spec.nope_size)
    latent = query.new_empty(tokens, spec.latent_size)
    split_inputs(spec, nope, latent, query, compressed)
    products, normed = _by_head(nope, to_latents), rms_norm(latent, norm, spec.norm_eps)
    qkv = query.new_empty(tokens, (spec.num_heads + 2) * spec.head_size)
    join_qkv(spec, qkv, query, compressed, products, normed)
    return qkv


@one_thread()
def latent_values(attended: Tensor, to_values: Sequence[LinearWeight], spec: LatentSpec) -> Tensor:
    """See `functional.latent_values`."""
    tokens = attended.shape[0]
    latents = attended.new_empty(tokens, spec.num_heads * spec.latent_size)
    split_attended(spec, latents, attended)
    values = attended.new_empty(tokens, spec.num_heads * spec.value_size)
    join_values(spec, values, _by_head(latents, to_values))
    return values


def _by_head(x: Tensor, weights: Sequence[LinearWeight]) -> Tensor:
    """Both hold one head after the other. Shapes: x [T, H * M], weights H times [N, M] -> [T, H * N]."""
    heads = matrices(x, len(weights))
    return torch.cat([linear(head, weight) for head, weight in zip(heads, weights, strict=True)]).view(x.shape[0], -1)
