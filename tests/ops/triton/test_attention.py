"""paged_attention and chunked_attention: against the reference, and bit for bit against themselves in other steps.

Tolerances, relative to the largest magnitude of the expected values: float32 1e-5, float16 2e-3, bfloat16 1e-2.
Triton's interpreter truncates to bfloat16 where a GPU rounds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops import reference
from quire.ops.contracts.operands import AttentionMetadata
from tests.ops.implementations import assert_close
from tests.ops.triton.device import DEVICE, INTERPRETED, randoms
from tests.ops.triton.layers import SPLITS, TILING, WALK, Layer, Work, parts_of

from quire.ops.triton import attention  # isort: skip  (see device)
from quire.ops.triton.attention import AttentionWork, Tiling, View, attend  # isort: skip
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
SLOPES = torch.tensor([0.5, 0.01, 0.1, 0.0], device=DEVICE)
SINKS = torch.tensor([-3.0, 0.5, 9.0, 200.0], device=DEVICE)
PLAIN = View(scale=0.25)
VIEWS = {
    "plain": PLAIN,
    "itself": View(scale=0.25, sliding_window=1),
    "window": View(scale=0.25, sliding_window=24),
    "window beyond the context": View(scale=0.25, sliding_window=500),
    "soft cap": View(scale=0.25, soft_cap=5.0),
    "slopes": View(scale=0.25, slopes=SLOPES),
    "all": View(scale=0.25, sliding_window=40, soft_cap=5.0, slopes=SLOPES, sinks=SINKS),
    "chunks": View(scale=0.25, chunk_size=48),
}
each_dtype = pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def reference_cache(layer: Layer) -> Tensor:
    """The layer's cache as the reference lays it out: scales of 8 bits beside each token."""
    numbers, scales = parts_of(layer.cache.cpu(), layer.size)
    return numbers if scales is None else torch.cat((numbers, scales), dim=-1)


def expected(layer: Layer, work: Work) -> list[Tensor]:
    """What the reference gives for a step whose keys and values are in the pages."""
    metadata, view = layer.metadata(work), layer.view
    metadata = AttentionMetadata(
        query_start=metadata.query_start.cpu(),
        seq_lens=metadata.seq_lens.cpu(),
        block_tables=metadata.block_tables.cpu(),
        block_size=layer.slots,
    )
    queries = layer.write(work).cpu()
    args = (queries, reference_cache(layer), metadata)
    if view.chunk_size is not None:
        out = reference.OPS["chunked_attention"](*args, scale=view.scale, chunk_size=view.chunk_size)
    else:
        out = reference.OPS["paged_attention"](
            *args,
            scale=view.scale,
            sliding_window=view.sliding_window,
            soft_cap=view.soft_cap,
            slopes=None if view.slopes is None else view.slopes.cpu(),
            sinks=None if view.sinks is None else view.sinks.cpu(),
        )
    return list(out.split([stop - start for _, start, stop in work]))


def assert_as_reference(layer: Layer, work: Work, **how: int) -> list[Tensor]:
    outputs = layer.step(work, **how)
    for output, wanted in zip(outputs, expected(layer, work), strict=True):
        assert output.dtype == layer.dtype
        assert_close(output.cpu(), wanted)
    return outputs


def assert_same_bits(outputs: list[Tensor], others: list[Tensor]) -> None:
    for output, other in zip(outputs, others, strict=True):
        assert torch.equal(output, other)


@each_view
def test_every_view_is_that_of_the_reference(view: View) -> None:
    layer = Layer(lengths=[70, 1, 17], view=view)
    layer.write([(0, 0, 40)])
    mixed = [(0, 40, 70), (1, 0, 1), (2, 0, 17)]
    walked = assert_as_reference(layer, mixed, scratch=WALK)
    assert_same_bits(layer.step(mixed, scratch=SPLITS), walked)


@each_dtype
def test_every_dtype_is_that_of_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    layer = Layer(lengths=[36, 3], dtype=dtype, cache_dtype=cache_dtype)
    walked = assert_as_reference(layer, [(0, 0, 36), (1, 0, 3)], scratch=WALK)
    assert_same_bits(layer.step([(0, 0, 36), (1, 0, 3)], scratch=SPLITS), walked)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (8, 2), (9, 3), (16, 2), (20, 1)])
def test_any_number_of_heads_shares_a_kv_head(heads: tuple[int, int]) -> None:
    layer = Layer(lengths=[37], heads=heads[0], kv_heads=heads[1], tiling=replace(TILING, rows=32))
    layer.write([(0, 0, 37)])
    assert_as_reference(layer, [(0, 21, 37)], scratch=SPLITS)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_heads_of_a_kv_head_may_be_cut_into_tiles(cache_dtype: torch.dtype) -> None:
    layer = Layer(lengths=[37, 1], heads=12, kv_heads=2, cache_dtype=cache_dtype)
    layer.write([(0, 0, 37)])
    work = [(0, 21, 37), (1, 0, 1)]
    whole = assert_as_reference(layer, work, scratch=SPLITS)
    layer.tiling = replace(TILING, heads=3)
    for scratch in (WALK, SPLITS):
        assert_same_bits(assert_as_reference(layer, work, scratch=scratch), whole)


def test_heads_as_large_as_those_of_latents_have_a_tiling() -> None:
    layer = Layer(lengths=[19], heads=20, kv_heads=1, size=272, slots=16)
    work = [(0, 0, 19)]
    query = layer.write(work)
    tiling = AttentionWork(query, layer.cache, layer.metadata(work), PLAIN).tiling()
    assert (tiling.rows, tiling.heads) == (16, 10)
    layer.tiling = tiling
    assert_same_bits(layer.step(work, scratch=SPLITS), assert_as_reference(layer, work, scratch=WALK))


@pytest.mark.parametrize(
    ("size", "cache_dtype"),
    [*((size, torch.float32) for size in (8, 64, 80, 128, 256)), (80, torch.int8), (80, torch.float8_e4m3fn)],
)
def test_heads_have_any_size(size: int, cache_dtype: torch.dtype) -> None:
    layer = Layer(lengths=[35], size=size, cache_dtype=cache_dtype)
    layer.write([(0, 0, 35)])
    assert_as_reference(layer, [(0, 20, 35)], scratch=SPLITS)


@pytest.mark.parametrize(
    ("slots", "cache_dtype"),
    [*((slots, torch.float32) for slots in (1, 5, 32, 128)), (5, torch.int8), (5, torch.float8_e4m3fn)],
)
def test_blocks_have_any_size(slots: int, cache_dtype: torch.dtype) -> None:
    layer = Layer(lengths=[38], slots=slots, cache_dtype=cache_dtype)
    layer.write([(0, 0, 38)])
    assert_as_reference(layer, [(0, 14, 38)])


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_contexts_end_at_the_border_of_a_page_or_a_split_or_beside_it(length: int) -> None:
    layer = Layer(lengths=[length])
    layer.write([(0, 0, length)])
    whole = layer.step([(0, length - 3, length)])[0]
    for scratch in (WALK, SPLITS):
        last = assert_as_reference(layer, [(0, length - 1, length)], scratch=scratch)[0]
        assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "view"),
    [
        *((*dtypes, PLAIN) for dtypes in DTYPES),
        (torch.bfloat16, torch.bfloat16, VIEWS["all"]),
        (torch.float32, torch.float32, VIEWS["chunks"]),
    ],
)
def test_neither_steps_nor_neighbours_change_bits(dtype: torch.dtype, cache_dtype: torch.dtype, view: View) -> None:
    length = 52
    layer = Layer(lengths=[length, 5], dtype=dtype, cache_dtype=cache_dtype, view=view)
    whole = layer.step([(0, 0, length)])[0]
    layer.spoil(slice(None))
    parts = [layer.step([(0, start, min(start + 23, length))], scratch=SPLITS)[0] for start in range(0, length, 23)]
    assert torch.equal(torch.cat(parts), whole), "chunks of 23"
    beside = layer.step([(1, 0, 5), (0, 45, length)])[1]
    assert torch.equal(beside, whole[45:]), "beside another sequence"
    for token in (0, 31, 32, 48, 51):
        alone = layer.step([(0, token, token + 1)], scratch=SPLITS)[0]
        assert torch.equal(alone, whole[token : token + 1]), f"token {token} by itself"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiling_of_a_layer_keeps_bits_too(dtype: torch.dtype) -> None:
    """Two splits of 256 tokens, in the tiles that GPUs run."""
    length = 270
    layer = Layer(lengths=[length], heads=4, kv_heads=1, size=64, slots=32, dtype=dtype)
    tiling = AttentionWork(layer.write([(0, 0, length)]), layer.cache, layer.metadata([(0, 0, length)]), PLAIN).tiling()
    layer.tiling = tiling
    chunk = assert_as_reference(layer, [(0, 252, length)], scratch=WALK)[0]
    assert_same_bits(layer.step([(0, 252, length)], scratch=SPLITS), [chunk])
    assert_same_bits(layer.step([(0, length - 1, length)], scratch=SPLITS), [chunk[-1:]])


def test_neither_wider_tables_nor_the_merging_of_rows_change_bits() -> None:
    layer = Layer(lengths=[40])
    layer.write([(0, 0, 40)])
    before = layer.step([(0, 36, 40)], scratch=SPLITS)
    layer.tables = torch.cat((layer.tables, layer.tables.new_full((1, 12), -7)), dim=1)
    for rows in (1, 64):
        tiling = replace(TILING, merged_rows=rows)
        assert_same_bits(layer.step([(0, 36, 40)], scratch=SPLITS, tiling=tiling), before)


@pytest.mark.parametrize(
    ("slots", "window", "step", "scratch", "cache_dtype"),
    [
        (5, 24, 13, WALK, torch.float32),
        (16, 24, 13, SPLITS, torch.float32),
        (16, 1, 40, SPLITS, torch.float32),
        (5, 24, 30, SPLITS, torch.int8),
    ],
)
def test_blocks_behind_the_window_are_not_read(
    slots: int, window: int, step: int, scratch: int, cache_dtype: torch.dtype
) -> None:
    """They are given back when nothing sees them, and whoever gets them may write NaN."""
    length = 60
    layer = Layer(lengths=[length], slots=slots, cache_dtype=cache_dtype, view=replace(PLAIN, sliding_window=window))
    whole = layer.step([(0, 0, length)])[0]
    parts, free = [], 0
    for start in range(0, length, step):
        for index in range(free, max(0, start - window + 1) // slots):
            layer.spoil(layer.tables[0, index].long())
            layer.tables[0, index] = layer.tables[0, 0]
            free = index + 1
        parts.extend(layer.step([(0, start, min(start + step, length))], scratch=scratch))
    assert torch.equal(torch.cat(parts), whole)


def test_blocks_before_a_chunk_are_not_read() -> None:
    layer = Layer(lengths=[70], view=VIEWS["chunks"])
    whole = layer.step([(0, 0, 70)])[0]
    layer.spoil(layer.tables[0, :3].long())
    layer.tables[0, :3] = -7
    for scratch in (WALK, SPLITS):
        assert torch.equal(layer.step([(0, 69, 70)], scratch=scratch)[0], whole[69:])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's, in the interpreter
@each_dtype
def test_a_broken_neighbour_changes_nothing(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    layer = Layer(lengths=[10, 10], dtype=dtype, cache_dtype=cache_dtype)
    alone = layer.step([(1, 0, 10)])[0]
    layer.qkv[0].fill_(float("nan"))
    broken, output = layer.step([(0, 0, 10), (1, 0, 10)])
    assert torch.equal(output, alone)
    assert broken.isnan().all(), "and is seen to be broken"


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("scratch", [WALK, SPLITS])
def test_one_broken_query_is_broken_alone(scratch: int) -> None:
    layer = Layer(lengths=[40])
    before = layer.step([(0, 0, 40)], scratch=scratch)[0]
    layer.qkv[0][39, : layer.heads * layer.size] = float("nan")
    after = layer.step([(0, 0, 40)], scratch=scratch)[0]
    assert torch.equal(after[:39], before[:39])
    assert after[39].isnan().all()


@pytest.mark.parametrize("scratch", [WALK, SPLITS])
def test_sequences_without_tokens_and_tokens_without_a_sequence_do_no_harm(scratch: int) -> None:
    """As a step has them that is padded to the shape of a graph."""
    layer = Layer(lengths=[40, 9])
    work = [(0, 38, 40), (1, 0, 9)]
    layer.step([(0, 0, 40)])
    wanted = torch.cat(layer.step(work))
    query = torch.cat((layer.write(work), randoms(5, layer.heads, layer.size)))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 0, 2, 2, 11, 11, 11], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([0, 40, 7, 9, 1, 1], dtype=torch.int32, device=DEVICE),
        block_tables=layer.tables[[1, 0, 1, 1, 0, 0]].contiguous(),
        block_size=layer.slots,
    )
    out = attend(AttentionWork(query, layer.cache, metadata, PLAIN), tiling=TILING, scratch_bytes=scratch)
    assert torch.equal(out[:11], wanted)


def test_a_step_without_tokens_launches_nothing() -> None:
    layer = Layer(lengths=[1])
    metadata = layer.metadata([(0, 1, 1)])
    query = torch.empty(0, layer.heads, layer.size, device=DEVICE)
    out = attention.paged_attention(query, layer.cache, metadata, scale=1.0)
    assert out.shape == (0, layer.heads * layer.size)


def test_the_ops_have_the_tiling_of_the_layer() -> None:
    layer = Layer(lengths=[6, 2])
    work = [(0, 0, 6), (1, 0, 2)]
    query, metadata = layer.write(work), layer.metadata(work)
    view = VIEWS["all"]
    out = attention.paged_attention(
        query,
        layer.cache,
        metadata,
        scale=view.scale,
        sliding_window=view.sliding_window,
        soft_cap=view.soft_cap,
        slopes=view.slopes,
        sinks=view.sinks,
    )
    layer.view = view
    assert_close(out.cpu(), torch.cat(expected(layer, work)))
    chunked = attention.chunked_attention(query, layer.cache, metadata, scale=0.25, chunk_size=48)
    layer.view = VIEWS["chunks"]
    assert_close(chunked.cpu(), torch.cat(expected(layer, work)))


def test_tokens_have_the_same_bits_in_a_prompt_and_one_by_one() -> None:
    """In tiles of many rows and of few, with splits in programs of their own or without."""
    count = 40 if INTERPRETED else 1500
    tiling = Tiling(rows=64, few_rows=16, keys=64, num_warps=4, num_stages=2)
    num_blocks = count // 16 + 1
    cache = allocate_kv_cache(num_blocks=num_blocks, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    cache.copy_(randoms(*cache.shape, seed=1).cpu())
    query, tables = randoms(count, 8, 64, dtype=torch.bfloat16), torch.arange(num_blocks, dtype=torch.int32)

    def attended(starts: list[int], lengths: list[int]) -> Tensor:
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32).to(DEVICE),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
            block_tables=tables.repeat(len(lengths), 1).to(DEVICE),
            block_size=16,
        )
        work = AttentionWork(query, cache.to(DEVICE), metadata, View(scale=0.2))
        outs = [attend(work, tiling=tiling, scratch_bytes=size) for size in (0, 1 << 30)]
        assert torch.equal(*outs)
        return outs[0]

    one_by_one = attended(list(range(count + 1)), list(range(1, count + 1)))
    assert torch.equal(attended([0, count], [count]), one_by_one)
