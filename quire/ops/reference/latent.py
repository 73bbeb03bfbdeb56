"""Attention over latents: the products of each head before and behind `paged_attention`.

A product reads and writes whole rows, so each head's features are a matrix of their own while its weight is applied:
shapes [H, T, ...] below, in memory of any shape. Shape letters as in `operands.LatentSpec`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import HeadWeights, LatentSpec
from quire.ops.reference.gemm import linear
from quire.ops.reference.norm import rms_norm
from quire.ops.threads import one_thread


@one_thread()
def latent_qkv(
    query: Tensor,
    compressed: Tensor,
    norm: Tensor,
    to_latents: HeadWeights,
    spec: LatentSpec,
    index_key: Tensor | None = None,
) -> Tensor:
    """See `Ops.latent_qkv`."""
    tokens = query.shape[0]
    nope = query.new_empty(tokens, spec.num_heads * spec.nope_size)
    latent = query.new_empty(tokens, spec.latent_size)
    _split_inputs(spec, nope, latent, query, compressed)
    products, normed = _by_head(nope, to_latents), rms_norm(latent, norm, spec.norm_eps)
    qkv = query.new_empty(tokens, (spec.num_heads + 2) * spec.head_size)
    _join_qkv(spec, qkv, query, compressed, products, normed)
    if index_key is not None:
        qkv.view(tokens, -1, spec.head_size)[:, spec.num_heads, -index_key.shape[1] :].copy_(index_key)
    return qkv


@one_thread()
def latent_values(attended: Tensor, to_values: HeadWeights, spec: LatentSpec) -> Tensor:
    """See `Ops.latent_values`."""
    tokens = attended.shape[0]
    latents = attended.new_empty(tokens, spec.num_heads * spec.latent_size)
    _split_attended(spec, latents, attended)
    values = attended.new_empty(tokens, spec.num_heads * spec.value_size)
    _join_values(spec, values, _by_head(latents, to_values))
    return values


def _by_head(x: Tensor, weights: HeadWeights) -> Tensor:
    """Both hold one head after the other. Shapes: x [T, H * M], weights of [N, M] -> [T, H * N]."""
    heads = _matrices(x, len(weights.heads))
    products = [linear(head, weight) for head, weight in zip(heads, weights.heads, strict=True)]
    return torch.cat(products).view(x.shape[0], -1)


def _matrices(x: Tensor, num_heads: int) -> Tensor:
    """The heads of memory that holds one after the other. Shapes: x [T, H * N] -> [H, T, N]."""
    return x.view(num_heads, x.shape[0], -1)


def _split_inputs(spec: LatentSpec, nope: Tensor, latent: Tensor, query: Tensor, compressed: Tensor) -> None:
    """What products and norm read. Shapes: nope [H, T, U], latent [T, C]. Mutates: nope, latent."""
    heads = query.view(query.shape[0], spec.num_heads, -1)
    _matrices(nope, spec.num_heads).copy_(heads[..., : spec.nope_size].transpose(0, 1))
    latent.copy_(compressed[:, : spec.latent_size])


def _join_qkv(
    spec: LatentSpec, qkv: Tensor, query: Tensor, compressed: Tensor, products: Tensor, latent: Tensor
) -> None:
    """See `Ops.latent_qkv`. Shapes: products [H, T, C], latent [T, C], normalised. Mutates: qkv, all of it."""
    tokens, heads, end = query.shape[0], spec.num_heads, spec.rope_size + spec.latent_size
    parts = qkv.view(tokens, heads + 2, spec.head_size)
    rotated, latents = parts[..., : spec.rope_size], parts[..., spec.rope_size : end]
    rotated[:, :heads].copy_(query.view(tokens, heads, -1)[..., spec.nope_size :])
    rotated[:, heads].copy_(compressed[:, spec.latent_size :])
    rotated[:, heads + 1].zero_()
    latents[:, :heads].copy_(_matrices(products, heads).transpose(0, 1))
    latents[:, heads:].copy_(latent.unsqueeze(1).expand(-1, 2, -1))
    parts[..., end:].zero_()


def _split_attended(spec: LatentSpec, latents: Tensor, attended: Tensor) -> None:
    """The latents that each head attended to. Shapes: latents [H, T, C]. Mutates: latents."""
    heads = attended.view(attended.shape[0], spec.num_heads, spec.head_size)
    first, end = spec.rope_size, spec.rope_size + spec.latent_size
    _matrices(latents, spec.num_heads).copy_(heads[..., first:end].transpose(0, 1))


def _join_values(spec: LatentSpec, values: Tensor, products: Tensor) -> None:
    """Shapes: values [T, H * W], products [H, T, W]. Mutates: values."""
    heads = values.view(values.shape[0], spec.num_heads, -1)
    heads.copy_(_matrices(products, spec.num_heads).transpose(0, 1))
