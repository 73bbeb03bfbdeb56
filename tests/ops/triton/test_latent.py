"""Attention over latents in Triton. Tolerances are those of `implementations.TOLERANCE`: sums in another order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.contracts.operands import HeadWeights, LatentSpec
from quire.ops.reference import latent as reference
from tests.ops.implementations import assert_close, rand
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import gemm, latent  # isort: skip  (device decides whether Triton can be imported)

SPEC = LatentSpec(num_heads=3, rope_size=6, nope_size=12, latent_size=20, value_size=7, head_size=30, norm_eps=1e-5)
"""No size is a power of two."""


def head_weights(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, seed: int) -> HeadWeights:
    made = [rand(rows, columns, seed=seed + head) * 0.2 for head in range(SPEC.num_heads)]
    return HeadWeights(heads=tuple(gemm.pack_linear([weight], dtype=dtype, device=device) for weight in made))


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, compressed tokens and the norm's weight."""
    query = randoms(rows, SPEC.num_heads * (SPEC.nope_size + SPEC.rope_size), seed=2, dtype=dtype)
    return query, randoms(rows, SPEC.latent_size + SPEC.rope_size, seed=3, dtype=dtype), 1 + randoms(SPEC.latent_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [26, 30])
def test_queries_keys_and_values_are_those_of_the_reference(dtype: torch.dtype, head_size: int) -> None:
    spec, (query, compressed, norm) = replace(SPEC, head_size=head_size), inputs(5, dtype)
    own, on_cpu = (
        head_weights(spec.latent_size, spec.nope_size, dtype, device, seed=20)
        for device in (DEVICE, torch.device("cpu"))
    )
    actual = latent.latent_qkv(query, compressed, norm, own, spec)
    expected = reference.latent_qkv(query.cpu(), compressed.cpu(), norm.cpu(), on_cpu, spec)
    assert actual.dtype == dtype
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_latents_are_those_of_the_reference(dtype: torch.dtype) -> None:
    attended = randoms(5, SPEC.num_heads * SPEC.head_size, seed=4, dtype=dtype)
    unread = attended.view(5, SPEC.num_heads, -1)
    unread[..., : SPEC.rope_size] = torch.nan
    unread[..., SPEC.rope_size + SPEC.latent_size :] = torch.nan
    own, on_cpu = (
        head_weights(SPEC.value_size, SPEC.latent_size, dtype, device, seed=40)
        for device in (DEVICE, torch.device("cpu"))
    )
    actual = latent.latent_values(attended, own, SPEC)
    assert_close(actual.cpu(), reference.latent_values(attended.cpu(), on_cpu, SPEC))


def test_weights_of_another_type_are_multiplied_head_by_head() -> None:
    attended = randoms(5, SPEC.num_heads * SPEC.head_size, seed=4, dtype=torch.bfloat16)
    weights = head_weights(SPEC.value_size, SPEC.latent_size, torch.float32, DEVICE, seed=40)
    rounded = HeadWeights(
        heads=tuple(gemm.pack_linear([each.tensors["weight"]], dtype=torch.bfloat16) for each in weights.heads)
    )
    found = [latent.latent_values(attended, each, SPEC).float() for each in (weights, rounded)]
    assert (found[0] - found[1]).abs().max() < 0.05


def test_rows_do_not_see_each_other_nor_their_nan() -> None:
    query, compressed, norm = inputs(70, torch.bfloat16)
    weights = head_weights(SPEC.latent_size, SPEC.nope_size, torch.bfloat16, DEVICE, seed=20)
    whole = latent.latent_qkv(query, compressed, norm, weights, SPEC)
    for rows in (slice(0, 1), slice(3, 20)):
        assert torch.equal(latent.latent_qkv(query[rows], compressed[rows], norm, weights, SPEC), whole[rows])
    query[2], compressed[2] = torch.nan, torch.nan
    out = latent.latent_qkv(query[:5], compressed[:5], norm, weights, SPEC)
    assert torch.equal(out[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


def test_a_step_may_have_no_rows() -> None:
    query, compressed, norm = inputs(0, torch.float32)
    weights = head_weights(SPEC.latent_size, SPEC.nope_size, torch.float32, DEVICE, seed=20)
    assert latent.latent_qkv(query, compressed, norm, weights, SPEC).shape == (0, 5 * SPEC.head_size)
    attended = randoms(0, SPEC.num_heads * SPEC.head_size)
    values = head_weights(SPEC.value_size, SPEC.latent_size, torch.float32, DEVICE, seed=40)
    assert latent.latent_values(attended, values, SPEC).shape == (0, SPEC.num_heads * SPEC.value_size)
