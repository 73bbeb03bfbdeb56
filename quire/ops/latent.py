"""Where the parts of attention over latents lie: copies between heads side by side and heads one after the other.

A product reads and writes whole rows, so each head's features are a matrix of their own while its weight is applied:
shapes [H, T, ...] below, in memory of any shape. Nothing is computed here, so every implementation has the same bits.
Shape letters as in `functional.LatentSpec`.
"""

from __future__ import annotations

from torch import Tensor

from quire.ops.functional import LatentSpec


def matrices(x: Tensor, num_heads: int) -> Tensor:
    """The heads of memory that holds one after the other. Shapes: x [T, H * N] -> [H, T, N]."""
    return x.view(num_heads, x.shape[0], -1)


def split_inputs(spec: LatentSpec, nope: Tensor, latent: Tensor, query: Tensor, compressed: Tensor) -> None:
    """What products and norm read. Shapes: nope [H, T, U], latent [T, C]. Mutates: nope, latent."""
    heads = query.view(query.shape[0], spec.num_heads, -1)
    matrices(nope, spec.num_heads).copy_(heads[..., : spec.nope_size].transpose(0, 1))
    latent.copy_(compressed[:, : spec.latent_size])


def join_qkv(
    spec: LatentSpec, qkv: Tensor, query: Tensor, compressed: Tensor, products: Tensor, latent: Tensor
) -> None:
    """See `functional.latent_qkv`. Shapes: products [H, T, C], latent [T, C], normalised. Mutates: qkv, all of it."""
    tokens, heads, end = query.shape[0], spec.num_heads, spec.rope_size + spec.latent_size
    parts = qkv.view(tokens, heads + 2, spec.head_size)
    rotated, latents = parts[..., : spec.rope_size], parts[..., spec.rope_size : end]
    rotated[:, :heads].copy_(query.view(tokens, heads, -1)[..., spec.nope_size :])
    rotated[:, heads].copy_(compressed[:, spec.latent_size :])
    rotated[:, heads + 1].zero_()
    latents[:, :heads].copy_(matrices(products, heads).transpose(0, 1))
    latents[:, heads:].copy_(latent.unsqueeze(1).expand(-1, 2, -1))
    parts[..., end:].zero_()


def split_attended(spec: LatentSpec, latents: Tensor, attended: Tensor) -> None:
    """The latents that each head attended to. Shapes: latents [H, T, C]. Mutates: latents."""
    heads = attended.view(attended.shape[0], spec.num_heads, spec.head_size)
    first, end = spec.rope_size, spec.rope_size + spec.latent_size
    matrices(latents, spec.num_heads).copy_(heads[..., first:end].transpose(0, 1))


def join_values(spec: LatentSpec, values: Tensor, products: Tensor) -> None:
    """Shapes: values [T, H * W], products [H, T, W]. Mutates: values."""
    heads = values.view(values.shape[0], spec.num_heads, -1)
    heads.copy_(matrices(products, spec.num_heads).transpose(0, 1))
