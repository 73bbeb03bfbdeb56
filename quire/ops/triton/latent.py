"""Attention over latents: what stands before and behind `paged_attention`, in two launches and in one.

Row invariance: the products are those of `products`, and the rest of a row is computed by programs of its own.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import triton
from torch import Tensor

from quire.ops.contracts.operands import HeadWeights, LatentSpec
from quire.ops.triton.alignment import aligned
from quire.ops.triton.expert_products import table_of_addresses
from quire.ops.triton.gemm import linear
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES
from quire.ops.triton.kernels.latent import HEADS_AT_ONCE, head_products_kernel, latent_rows_kernel
from quire.ops.triton.tiles import dense_tiles, stages

_addresses: WeakKeyDictionary[HeadWeights, Tensor] = WeakKeyDictionary()


def latent_qkv(
    query: Tensor,
    compressed: Tensor,
    norm: Tensor,
    to_latents: HeadWeights,
    spec: LatentSpec,
    index_key: Tensor | None = None,
) -> Tensor:
    """See `Ops.latent_qkv`. Nothing selects tokens here, so there are no index keys."""
    assert index_key is None
    tokens, heads, size = len(query), spec.num_heads, spec.head_size
    query, compressed = aligned(query), aligned(compressed)
    qkv = query.new_empty(tokens, (heads + 2) * size)
    if not tokens:
        return qkv
    latent_rows_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
        query,
        compressed,
        norm,
        qkv,
        spec.norm_eps,
        query.stride(0),
        compressed.stride(0),
        qkv.stride(0),
        HEADS=heads,
        ROPE=spec.rope_size,
        NOPE=spec.nope_size,
        LATENT=spec.latent_size,
        SIZE=size,
        PADDED_ROPE=triton.next_power_of_2(spec.rope_size),
        PADDED_LATENT=triton.next_power_of_2(spec.latent_size),
        PADDED_REST=triton.next_power_of_2(max(1, size - spec.rope_size - spec.latent_size)),
        HEADS_AT_ONCE=HEADS_AT_ONCE,
    )
    products = qkv[:, : heads * size].view(tokens, heads, size)[..., spec.rope_size :][..., : spec.latent_size]
    _multiply(products, query.view(tokens, heads, -1)[..., : spec.nope_size], to_latents)
    return qkv


def latent_values(attended: Tensor, to_values: HeadWeights, spec: LatentSpec) -> Tensor:
    """See `Ops.latent_values`."""
    tokens, heads = len(attended), spec.num_heads
    values = attended.new_empty(tokens, heads * spec.value_size)
    if tokens:
        latents = aligned(attended).view(tokens, heads, -1)[..., spec.rope_size :][..., : spec.latent_size]
        _multiply(values.view(tokens, heads, -1), latents, to_values)
    return values


def _multiply(out: Tensor, x: Tensor, weights: HeadWeights) -> None:
    """Each head's product; in one launch where the weights are numbers of x's type.

    Shapes: x [T, H, M]. Mutates: out [T, H, N].
    """
    if any(weight.format != "dense" or weight.tensors["weight"].dtype != x.dtype for weight in weights.heads):
        for head, weight in enumerate(weights.heads):
            out[:, head] = linear(x[:, head].contiguous(), weight)
        return
    (num_rows, num_heads, num_features), num_inputs = out.shape, x.shape[2]
    tile = dense_tiles(x.dtype).of(num_rows, num_features)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_features, tile.features)
    head_products_kernel[(tiles, num_heads)](
        x,
        _addresses_of(weights),
        out,
        num_rows,
        num_features,
        num_inputs,
        x.stride(0),
        x.stride(1),
        weights.heads[0].tensors["weight"].stride(0),
        out.stride(0),
        out.stride(1),
        ACTIVATION=ACTIVATION_CODES[None],
        BLOCK_ROWS=tile.rows,
        BLOCK_FEATURES=tile.features,
        BLOCK_INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=stages(tile),
    )


def _addresses_of(weights: HeadWeights) -> Tensor:
    found = _addresses.get(weights)
    if found is None:
        found = _addresses[weights] = table_of_addresses([weight.tensors["weight"] for weight in weights.heads])
    return found
