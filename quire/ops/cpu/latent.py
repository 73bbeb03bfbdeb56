"""Attention over latents: each head's products, over the packed weights of `gemm`.

A graph holds the products as native ops, between two calls that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.ops.cpu.gemm import linear_into
from quire.ops.cpu.library import is_recording, note_call
from quire.ops.cpu.memory import empty, untracked
from quire.ops.cpu.norm import rms_norm
from quire.ops.functional import LatentSpec, LinearWeight
from quire.ops.latent import join_qkv, join_values, matrices, split_attended, split_inputs
from quire.ops.threads import one_thread


def latent_qkv(
    query: Tensor, compressed: Tensor, norm: Tensor, to_latents: Sequence[LinearWeight], spec: LatentSpec
) -> Tensor:
    """See `functional.latent_qkv`."""
    tokens = query.shape[0]
    nope = empty((tokens, spec.num_heads * spec.nope_size), query.dtype)
    latent = empty((tokens, spec.latent_size), query.dtype)
    _copy(split_inputs, spec, nope, latent, query, compressed)
    products = _by_head(nope, to_latents)
    latent = rms_norm(latent, norm, spec.norm_eps)
    qkv = empty((tokens, (spec.num_heads + 2) * spec.head_size), query.dtype)
    _copy(join_qkv, spec, qkv, query, compressed, products, latent)
    return qkv


def latent_values(attended: Tensor, to_values: Sequence[LinearWeight], spec: LatentSpec) -> Tensor:
    """See `functional.latent_values`."""
    tokens = attended.shape[0]
    latents = empty((tokens, spec.num_heads * spec.latent_size), attended.dtype)
    _copy(split_attended, spec, latents, attended)
    products = _by_head(latents, to_values)
    values = empty((tokens, spec.num_heads * spec.value_size), attended.dtype)
    _copy(join_values, spec, values, products)
    return values


def _by_head(x: Tensor, weights: Sequence[LinearWeight]) -> Tensor:
    """Both hold one head after the other. Shapes: x [T, H * M], weights H times [N, M] -> [T, H * N]."""
    out = empty((x.shape[0], sum(weight.out_features for weight in weights)), x.dtype)
    for head_out, head, weight in zip(matrices(out, len(weights)), matrices(x, len(weights)), weights, strict=True):
        linear_into(head_out, head, weight)
    return out


def _copy(copy: Callable[..., None], spec: LatentSpec, *tensors: Tensor) -> None:
    """Copy now, or whenever the graph that is being recorded is replayed."""
    if not is_recording():
        copy(spec, *tensors)
        return
    given = [untracked(tensor) for tensor in tensors]

    def run() -> None:
        with one_thread(), torch.inference_mode():
            copy(spec, *given)

    note_call(run, [tensor.data_ptr() for tensor in given])
