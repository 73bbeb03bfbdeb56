"""rope_and_cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RopeAndCacheSpec
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, KV_HEADS, SIZE, EPS = 4, 2, 16, 1e-6
each_implementation = pytest.mark.parametrize("implementation", implementations_of("rope_and_cache"))


def spec_of(rotary_dim: int, *, interleaved: bool = False) -> RopeAndCacheSpec:
    return RopeAndCacheSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        norm_eps=EPS,
    )


def cache_of(implementation: str, dtype: torch.dtype) -> Tensor:
    return ops(implementation)["allocate_kv_cache"](
        num_blocks=8, block_size=8, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype
    )


def table_of(rotary_dim: int) -> Tensor:
    angles = torch.arange(64).unsqueeze(1) * torch.linspace(1, 0.01, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotated(x: Tensor, cos_sin: Tensor, *, interleaved: bool) -> Tensor:
    """In complex numbers: a pair is one, turned by its angle."""
    x = x.double().clone()
    width = cos_sin.shape[-1]
    turn = torch.complex(cos_sin[:, : width // 2].double(), cos_sin[:, width // 2 :].double()).unsqueeze(1)
    first, second = (
        (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(width // 2), slice(width // 2, width))
    )
    turned = torch.complex(x[..., first], x[..., second]) * turn
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [SIZE, SIZE // 2])
@pytest.mark.parametrize("with_norms", [False, True])
def test_query_is_normed_and_rotated(
    implementation: str, dtype: torch.dtype, interleaved: bool, rotary_dim: int, with_norms: bool
) -> None:
    qkv = rand(5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype)
    positions, slots = torch.tensor([0, 1, 30, 31, 63]), torch.tensor([3, 9, 1, 63, 20])
    norms = [rand(SIZE, seed=1) + 1, rand(SIZE, seed=2) + 1] if with_norms else [None, None]
    cos_sin = table_of(rotary_dim)
    query = ops(implementation)["rope_and_cache"](
        qkv,
        positions,
        cos_sin,
        *norms,
        cache_of(implementation, dtype),
        slots,
        spec_of(rotary_dim, interleaved=interleaved),
    )
    expected = qkv.view(5, -1, SIZE)[:, :HEADS].double()
    if with_norms:
        expected = normed(expected, norms[0])
    assert query.dtype == dtype
    assert query.is_contiguous()
    assert_close(query, rotated(expected, cos_sin[positions], interleaved=interleaved))


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_reach_the_slots_named(implementation: str, dtype: torch.dtype) -> None:
    """Read back through attention: a token that sees only itself gives its value, one that sees two weighs by keys."""
    table, cache, cos_sin = ops(implementation), cache_of(implementation, dtype), table_of(SIZE)
    norms = (rand(SIZE, seed=1) + 1, rand(SIZE, seed=2) + 1)
    qkv = rand(2, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype)
    positions, slots = torch.tensor([0, 1]), torch.tensor([5 * 8, 5 * 8 + 1])
    query = table["rope_and_cache"](qkv, positions, cos_sin, *norms, cache, slots, spec_of(SIZE))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_tables=torch.tensor([[5]], dtype=torch.int32),
        block_size=8,
    )
    actual = table["paged_attention"](query, cache, metadata, scale=0.25).view(2, HEADS, SIZE)
    parts = qkv.view(2, -1, SIZE)
    key = rotated(normed(parts[:, HEADS:-KV_HEADS], norms[1]), cos_sin[positions], interleaved=False).to(dtype).double()
    value = parts[:, -KV_HEADS:].double()
    key, value = key.repeat_interleave(HEADS // KV_HEADS, 1), value.repeat_interleave(HEADS // KV_HEADS, 1)
    assert_close(actual[0], value[0])
    weights = (torch.einsum("hd,thd->ht", query[1].double(), key) * 0.25).softmax(-1)
    assert_close(actual[1], torch.einsum("ht,thd->hd", weights, value))


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
def test_query_rows_do_not_see_each_other(implementation: str, dtype: torch.dtype, with_norms: bool) -> None:
    qkv = rand(40, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype)
    positions, slots = torch.arange(40), torch.arange(40)
    norms = (rand(SIZE, seed=1), rand(SIZE, seed=2)) if with_norms else (None, None)
    cache, cos_sin = cache_of(implementation, dtype), table_of(SIZE)
    rope = ops(implementation)["rope_and_cache"]
    assert_rows_alone(
        lambda rows: rope(qkv[rows], positions[rows], cos_sin, *norms, cache, slots[rows], spec_of(SIZE)), 40
    )


@each_implementation
def test_written_keys_do_not_depend_on_the_rows_beside_them(implementation: str) -> None:
    qkv = rand(40, (HEADS + 2 * KV_HEADS) * SIZE)
    positions, norms, cos_sin = torch.arange(40), (rand(SIZE, seed=1), rand(SIZE, seed=2)), table_of(SIZE)
    caches = []
    for size in (40, 1, 7):
        cache = cache_of(implementation, torch.float32).zero_()
        for start in range(0, 40, size):
            rows = slice(start, min(start + size, 40))
            ops(implementation)["rope_and_cache"](
                qkv[rows], positions[rows], cos_sin, *norms, cache, positions[rows], spec_of(SIZE)
            )
        caches.append(cache)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])


@each_implementation
def test_input_is_left_alone(implementation: str) -> None:
    qkv = rand(6, (HEADS + 2 * KV_HEADS) * SIZE)
    before = qkv.clone()
    rope = ops(implementation)["rope_and_cache"]
    cache = cache_of(implementation, torch.float32)
    rope(qkv, torch.arange(6), table_of(SIZE), None, None, cache, torch.arange(6), spec_of(SIZE))
    assert torch.equal(qkv, before)


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_kv_heads_queries_are_the_same_and_nothing_is_written(implementation: str, dtype: torch.dtype) -> None:
    tokens, spec = 9, spec_of(SIZE)
    qkv, norm = rand(tokens, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype), rand(SIZE, seed=1)
    positions, slots = torch.arange(tokens), torch.arange(tokens) + 3
    cache = cache_of(implementation, dtype).zero_()
    op, table = ops(implementation)["rope_and_cache"], table_of(SIZE)
    alone = op(
        qkv[:, : HEADS * SIZE].contiguous(), positions, table, norm, None, cache, slots, replace(spec, num_kv_heads=0)
    )
    assert not cache.any()
    assert torch.equal(op(qkv, positions, table, norm, None, cache, slots, spec), alone)
    assert cache.any()
