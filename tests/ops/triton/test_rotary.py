"""rope_and_cache of the Triton implementation, against the reference and against itself in other company.

Tolerances, relative to the largest magnitude of the expected values: float32 1e-5, float16 2e-3, bfloat16 1e-2:
Triton's interpreter truncates to it where a GPU rounds. Integers of an int8 cache may differ by one where a number lies
between two of them, for norm and rotation add up in another order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops import reference
from quire.ops.contracts.operands import AttentionMetadata, RopeAndCacheSpec
from quire.ops.reference.cache import TOPS, dequantize
from tests.ops.implementations import assert_close
from tests.ops.triton.device import DEVICE, randoms
from tests.ops.triton.layers import parts_of

from quire.ops.triton import attention, rotary  # isort: skip  (see device)
from quire.ops.triton.cache import allocate_kv_cache  # isort: skip

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float32),
]
"""Of the model, of the cache."""
HEADS, KV_HEADS, SLOTS, TOKENS = 3, 1, 8, 5
POSITIONS = torch.tensor([0, 1, 30, 31, 63], device=DEVICE)
PLACES = torch.tensor([3, 9, 1, 63, 20], device=DEVICE)
each_dtype = pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)


def spec_of(size: int, rotary_dim: int, *, interleaved: bool = False) -> RopeAndCacheSpec:
    return RopeAndCacheSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=size,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        norm_eps=1e-5,
    )


def table_of(rotary_dim: int) -> Tensor:
    angles = torch.arange(64).unsqueeze(1) * torch.linspace(1, 0.01, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


def norms_of(size: int) -> tuple[Tensor, Tensor]:
    return randoms(size, seed=1) + 1, randoms(size, seed=2) + 1


def qkv_of(size: int, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> Tensor:
    return randoms(tokens, (HEADS + 2 * KV_HEADS) * size, dtype=dtype)


def fill(cache: Tensor) -> Tensor:
    """With bytes that stay where nothing is written."""
    (cache.view(torch.int8) if cache.dtype in TOPS else cache).fill_(-1 if cache.dtype in TOPS else 7.0)
    return cache


def cache_of(size: int, dtype: torch.dtype) -> Tensor:
    with DEVICE:
        cache = allocate_kv_cache(num_blocks=8, block_size=SLOTS, num_kv_heads=KV_HEADS, head_size=size, dtype=dtype)
    return fill(cache)


def assert_as_reference(
    qkv: Tensor,
    cos_sin: Tensor | None,
    norms: tuple[Tensor | None, Tensor | None],
    spec: RopeAndCacheSpec,
    cache_dtype: torch.dtype,
) -> None:
    cache = cache_of(spec.head_size, cache_dtype)
    query = rotary.rope_and_cache(qkv, POSITIONS, cos_sin, *norms, cache, PLACES, spec)
    wanted_cache = reference.OPS["allocate_kv_cache"](
        num_blocks=8, block_size=SLOTS, num_kv_heads=KV_HEADS, head_size=spec.head_size, dtype=cache_dtype
    )
    fill(wanted_cache)
    host = [None if x is None else x.cpu() for x in (qkv, POSITIONS, cos_sin, *norms)]
    wanted = reference.OPS["rope_and_cache"](*host, wanted_cache, PLACES.cpu(), spec)
    assert query.dtype == qkv.dtype
    assert query.is_contiguous()
    assert_close(query.cpu(), wanted)
    assert_same_cache(cache.cpu(), wanted_cache, spec.head_size)


def assert_same_cache(cache: Tensor, wanted: Tensor, size: int) -> None:
    """Written slots hold what the reference's hold, and the others are untouched."""
    places = PLACES.cpu()
    is_written = torch.zeros(8, SLOTS, dtype=torch.bool)
    is_written[places // SLOTS, places % SLOTS] = True
    numbers, scales = parts_of(cache, size)
    numbers, wanted = numbers.transpose(2, 3), wanted.transpose(2, 3)  # [2, B, S, K, X]
    if scales is None:
        assert torch.equal(numbers[:, ~is_written], wanted[:, ~is_written])
        assert_close(numbers[:, is_written], wanted[:, is_written])
        return
    both = torch.cat((numbers, scales.transpose(2, 3)), dim=-1)
    assert torch.equal(both.view(torch.int8)[:, ~is_written], wanted.view(torch.int8)[:, ~is_written])
    codes, expected = (x.view(torch.int8)[:, is_written][..., :size].int() for x in (both, wanted))
    assert ((codes - expected).abs().masked_fill((codes ^ expected) < 0, 0) <= 1).all()
    ours, theirs = dequantize(both[:, is_written]), dequantize(wanted[:, is_written])
    step = 1 / 127 if cache.dtype == torch.int8 else 32 / 448
    assert (ours - theirs).abs().max() <= theirs.abs().max() * step * 1.01


@each_dtype
def test_every_dtype_is_that_of_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    assert_as_reference(qkv_of(16, dtype), table_of(16), norms_of(16), spec_of(16, 16), cache_dtype)


@pytest.mark.parametrize(
    ("size", "rotary_dim"), [(16, 16), (16, 8), (24, 24), (80, 32), (64, 0), (128, 128), (256, 64)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_part_of_a_head_is_rotated(size: int, rotary_dim: int, interleaved: bool) -> None:
    spec = spec_of(size, rotary_dim, interleaved=interleaved)
    assert_as_reference(qkv_of(size), table_of(rotary_dim) if rotary_dim else None, norms_of(size), spec, torch.float32)


@pytest.mark.parametrize("normed", [(False, False), (True, False), (False, True)])
def test_each_norm_may_be_missing(normed: tuple[bool, bool]) -> None:
    q_norm, k_norm = norms_of(24)
    norms = (q_norm if normed[0] else None, k_norm if normed[1] else None)
    assert_as_reference(qkv_of(24), table_of(16), norms, spec_of(24, 16), torch.float32)


def test_without_a_table_nothing_is_rotated() -> None:
    assert_as_reference(qkv_of(16), None, (None, None), spec_of(16, 16), torch.float32)


@pytest.mark.parametrize("scales", [None, torch.tensor([[0.01, 0.003], [0.02, 0.001]])])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_bytes_are_those_of_the_reference_where_nothing_is_computed(dtype: torch.dtype, scales: Tensor | None) -> None:
    qkv, spec = qkv_of(16), spec_of(16, 0)
    qkv[1] = 0
    cache, given = cache_of(16, dtype), None if scales is None else scales[:, :KV_HEADS].to(DEVICE).contiguous()
    rotary.rope_and_cache(qkv, POSITIONS, None, None, None, cache, PLACES, spec, given)
    wanted = cache_of(16, dtype).cpu()
    given = None if given is None else given.cpu()
    reference.OPS["rope_and_cache"](qkv.cpu(), POSITIONS.cpu(), None, None, None, wanted, PLACES.cpu(), spec, given)
    both = torch.cat([part.view(torch.int8) for part in parts_of(cache.cpu(), 16) if part is not None], dim=-1)
    assert torch.equal(both, wanted.view(torch.int8))


@each_dtype
def test_a_token_without_a_slot_writes_nothing(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    cache, qkv, spec = cache_of(16, cache_dtype), qkv_of(16, dtype), spec_of(16, 16)
    args = (POSITIONS, table_of(16), *norms_of(16), cache)
    before = cache.clone()
    places = torch.full_like(PLACES, -1)
    query = rotary.rope_and_cache(qkv, *args, places, spec)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(query, rotary.rope_and_cache(qkv, *args, PLACES, spec))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_a_broken_token_is_seen_to_be_broken(cache_dtype: torch.dtype) -> None:
    cache, qkv = cache_of(16, cache_dtype), qkv_of(16)
    qkv[2, 5::16] = float("nan")
    rotary.rope_and_cache(qkv, POSITIONS, table_of(16), *norms_of(16), cache, PLACES, spec_of(16, 16))
    numbers, scales = parts_of(cache.cpu(), 16)
    values = numbers if scales is None else dequantize(torch.cat((numbers, scales), dim=-1))
    for token, place in enumerate(PLACES.tolist()):
        written = values[:, place // SLOTS, :, place % SLOTS]
        assert written.isnan().flatten(1).any(1).tolist() == [token == 2, token == 2]


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.int8)])
def test_rows_beside_a_token_change_none_of_its_bits(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    qkv, spec, tokens = qkv_of(24, dtype, 11), spec_of(24, 16), torch.arange(11, device=DEVICE)
    caches, queries = [], []
    for size in (11, 1, 4, 7):
        cache, parts = cache_of(24, cache_dtype), []
        for start in range(0, 11, size):
            at = tokens[start : start + size]
            args = (at, table_of(16), *norms_of(24), cache, at, spec)
            parts.append(rotary.rope_and_cache(qkv[start : start + size], *args))
        caches.append(cache)
        queries.append(torch.cat(parts))
    for cache, query in zip(caches, queries, strict=True):
        assert torch.equal(query, queries[0])
        assert torch.equal(cache.view(torch.uint8), caches[0].view(torch.uint8))


def test_input_is_left_alone() -> None:
    qkv = qkv_of(16)
    before = qkv.clone()
    cache = cache_of(16, torch.float32)
    rotary.rope_and_cache(qkv, POSITIONS, table_of(16), *norms_of(16), cache, PLACES, spec_of(16, 16))
    assert torch.equal(qkv, before)


def test_a_step_without_tokens_has_no_query() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    cache = cache_of(16, torch.float32)
    query = rotary.rope_and_cache(qkv_of(16, tokens=0), none, None, None, None, cache, none, spec_of(16, 0))
    assert query.shape == (0, HEADS, 16)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_attention_reads_what_was_written(cache_dtype: torch.dtype) -> None:
    """A token that sees only itself gives its value; the second one weighs both."""
    cache, spec, cos_sin = cache_of(16, cache_dtype), spec_of(16, 16), table_of(16)
    qkv, at = qkv_of(16, tokens=2), torch.tensor([0, 1], device=DEVICE)
    query = rotary.rope_and_cache(qkv, at, cos_sin, *norms_of(16), cache, at + 5 * SLOTS, spec)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 2], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([2], dtype=torch.int32, device=DEVICE),
        block_tables=torch.tensor([[5]], dtype=torch.int32, device=DEVICE),
        block_size=SLOTS,
    )
    actual = attention.paged_attention(query, cache, metadata, scale=0.25).view(2, HEADS, 16)
    wide = cache_of(16, torch.float32)
    rotary.rope_and_cache(qkv, at, cos_sin, *norms_of(16), wide, at + 5 * SLOTS, spec)
    keys, values = wide[:, 5, 0, :2]
    tolerance = 1e-5 if cache_dtype == torch.float32 else 0.05
    assert (actual[0] - values[0]).abs().max() <= tolerance
    weights = (query[1] @ keys.T * 0.25).softmax(-1)
    assert (actual[1] - weights @ values).abs().max() <= tolerance
