"""Attention over chosen tokens: which are chosen, what is attended to, and the bits of tokens in company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from quire.ops.contracts.operands import AttentionMetadata, RopeAndCacheSpec
from quire.ops.contracts.ops import Ops
from tests.ops.implementations import assert_close, implementations_of, rand
from tests.ops.pages import apart, spoil

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE = 3, 32, 19, 12
LENGTHS = (70, 1, 300, 9)
CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


@pytest.fixture(params=implementations_of("select_tokens"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@dataclass
class Contexts:
    """Sequences in the pages of one cache, whose blocks are shuffled and hold NaN where nothing was written."""

    ops: Ops
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    block_size: int = 16
    is_apart: bool = False
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        width = -(-max(LENGTHS) // self.block_size)
        cache = self.ops.allocate_kv_cache(
            num_blocks=width * len(LENGTHS) + 2,
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=SIZE,
            dtype=self.cache_dtype,
        )
        self.cache = apart(cache) if self.is_apart else cache
        spoil(self.cache)
        order = torch.randperm(cache.shape[1], generator=torch.Generator().manual_seed(3)).int()
        self.tables = order[: width * len(LENGTHS)].view(len(LENGTHS), width)
        self.qkv = [rand(n, (HEADS + 2) * SIZE, seed=n, dtype=self.dtype) for n in LENGTHS]
        self.index = [rand(n, INDEX_HEADS, INDEX_SIZE, seed=n + 1, dtype=self.dtype) for n in LENGTHS]
        self.weights = [rand(n, INDEX_HEADS, seed=n + 2) for n in LENGTHS]

    def write(self, work: list[tuple[int, int, int]]) -> tuple[Tensor, AttentionMetadata]:
        """Tokens [begin, end) of sequences, [(sequence, begin, end)], in one step. Gives their queries."""
        positions = [torch.arange(begin, end) for _, begin, end in work]
        slots = [
            self.tables[row, at // self.block_size].long() * self.block_size + at % self.block_size
            for (row, _, _), at in zip(work, positions, strict=True)
        ]
        spec = RopeAndCacheSpec(num_heads=HEADS, num_kv_heads=1, head_size=SIZE, rotary_dim=0)
        qkv = _rows(self.qkv, work)
        query = self.ops.rope_and_cache(qkv, torch.cat(positions), None, None, None, self.cache, torch.cat(slots), spec)
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *(end - begin for _, begin, end in work)]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, _, end in work], dtype=torch.int32),
            block_tables=self.tables[[row for row, _, _ in work]].contiguous(),
            block_size=self.block_size,
        )
        return query, metadata

    def step(self, work: list[tuple[int, int, int]], num_selected: int) -> tuple[Tensor, Tensor]:
        """What these tokens choose, and what they attend to."""
        query, metadata = self.write(work)
        selected = self.select(work, metadata, num_selected)
        attended = self.ops.selected_attention(query, self.cache, metadata, selected, scale=0.3, sinks=self.sinks)
        return selected, attended

    def select(self, work: list[tuple[int, int, int]], metadata: AttentionMetadata, num_selected: int) -> Tensor:
        index, weights = _rows(self.index, work), _rows(self.weights, work)
        return self.ops.select_tokens(index, weights, self.cache, metadata, num_selected=num_selected, head_size=SIZE)


def _rows(parts: list[Tensor], work: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat([parts[row][begin:end] for row, begin, end in work]).contiguous()


WHOLE = [(row, 0, length) for row, length in enumerate(LENGTHS)]


def scores_of(contexts: Contexts, row: int) -> Tensor:
    """Of every position for every token of a sequence, in float64, those that it does not see at minus infinity."""
    keys = contexts.qkv[row].view(-1, HEADS + 2, SIZE)[:, HEADS, -INDEX_SIZE:].double()
    products = torch.einsum("thi,ui->htu", contexts.index[row].double(), keys).relu()
    scores = torch.einsum("th,htu->tu", contexts.weights[row].double(), products)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("num_selected", [1, 8, 129])
def test_the_highest_scores_are_chosen(ops: Ops, num_selected: int, block_size: int) -> None:
    contexts = Contexts(ops, block_size=block_size, is_apart=block_size == 16)
    selected = contexts.step(WHOLE, num_selected)[0].split(list(LENGTHS))
    for row, chosen in enumerate(selected):
        for position, (scores, of_token) in enumerate(zip(scores_of(contexts, row), chosen.tolist(), strict=True)):
            count = min(position + 1, num_selected)
            assert of_token[count:] == [-1] * (num_selected - count)
            assert of_token[:count] == sorted(set(of_token[:count]))
            assert set(of_token[:count]) == set(scores.topk(count).indices.tolist()), (row, position)


def test_the_earlier_of_equal_scores_is_chosen(ops: Ops) -> None:
    """Zeros are frequent: a position whose products are all negative has this score, whatever the weights."""
    contexts = Contexts(ops)
    for row, keys in enumerate(contexts.qkv):
        contexts.index[row].fill_(1.0)
        contexts.weights[row].fill_(0.5)
        keys.view(-1, HEADS + 2, SIZE)[:, HEADS, -INDEX_SIZE:] = -1.0
    above = [250, 3, 77]
    contexts.qkv[2].view(-1, HEADS + 2, SIZE)[above, HEADS, -INDEX_SIZE:] = 1.0
    selected = contexts.step(WHOLE, 8)[0].split(list(LENGTHS))[2].tolist()
    assert selected[299] == [0, 1, 2, 3, 4, 5, 77, 250]
    assert selected[200] == [0, 1, 2, 3, 4, 5, 6, 77]
    assert selected[9] == list(range(8))


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("num_selected", [8, 129])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_that_over_the_chosen_tokens_alone(
    ops: Ops, num_selected: int, cache_dtype: torch.dtype, has_sinks: bool
) -> None:
    dtype = cache_dtype if cache_dtype.itemsize > 1 else torch.float32
    sinks = rand(HEADS, seed=9) if has_sinks else None
    contexts = Contexts(ops, dtype=dtype, cache_dtype=cache_dtype, sinks=sinks)
    selected, attended = (part.split(list(LENGTHS)) for part in contexts.step(WHOLE, num_selected))
    for row, length in enumerate(LENGTHS):
        query, key, value = contexts.qkv[row].double().view(length, -1, SIZE).split([HEADS, 1, 1], dim=1)
        scores = torch.einsum("thd,ud->thu", query, key[:, 0]) * 0.3
        chosen = torch.zeros(length, length + 1, dtype=torch.bool)
        chosen.scatter_(1, selected[row].long() % (length + 1), True)  # -1 is the column behind the last
        drained = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
        scores = scores.masked_fill(~chosen[:, None, :length], -torch.inf)
        with_sinks = torch.cat((scores, drained.double().view(1, HEADS, 1).expand(length, -1, -1)), dim=2)
        weights = with_sinks.softmax(-1)[:, :, :-1]
        expected = torch.einsum("thu,ud->thd", weights, value[:, 0]).flatten(1)
        if cache_dtype.itemsize > 1:
            assert_close(attended[row], expected)
        else:
            error = (attended[row].double() - expected).abs().mean() / expected.abs().mean()
            assert error < (0.02 if cache_dtype == torch.int8 else 0.06)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_where_all_are_chosen_the_bits_are_those_of_dense_attention(
    ops: Ops, block_size: int, cache_dtype: torch.dtype
) -> None:
    dtype = cache_dtype if cache_dtype.itemsize > 1 else torch.bfloat16
    contexts = Contexts(ops, dtype=dtype, cache_dtype=cache_dtype, block_size=block_size)
    query, metadata = contexts.write(WHOLE)
    dense = ops.paged_attention(query, contexts.cache, metadata, scale=0.3)
    selected = contexts.select(WHOLE, metadata, 300)
    assert torch.equal(ops.selected_attention(query, contexts.cache, metadata, selected, scale=0.3), dense)
    sinks = rand(HEADS, seed=9)
    drained = ops.paged_attention(query, contexts.cache, metadata, scale=0.3, sinks=sinks)
    sparse = ops.selected_attention(query, contexts.cache, metadata, selected, scale=0.3, sinks=sinks)
    assert torch.equal(sparse, drained)
    assert not torch.equal(drained, dense)
    # The last token of the third sequence alone chooses: all but one, of which its neighbours see nothing.
    selected = contexts.select(WHOLE, metadata, 299)
    others = torch.arange(len(dense)) != sum(LENGTHS[:3]) - 1
    sparse = ops.selected_attention(query, contexts.cache, metadata, selected, scale=0.3)
    assert torch.equal(sparse[others], dense[others])
    assert not torch.equal(sparse, dense)


def test_gathered_tokens_give_the_bits_of_the_same_context(ops: Ops) -> None:
    """A token that sees one position more than it chooses, of which the lowest score is the last."""
    for dtype in (torch.float32, torch.bfloat16):
        contexts = Contexts(ops, dtype=dtype, cache_dtype=dtype)
        for keys, weights in zip(contexts.qkv, contexts.weights, strict=True):
            weights.fill_(1.0)
            keys.view(-1, HEADS + 2, SIZE)[:, HEADS, -INDEX_SIZE:] = 1.0
        contexts.index[2].fill_(1.0)
        contexts.qkv[2].view(-1, HEADS + 2, SIZE)[280, HEADS, -INDEX_SIZE:] = -1.0
        query, metadata = contexts.write([(2, 0, 281)])
        selected = contexts.select([(2, 0, 281)], metadata, 280)
        assert selected[280].tolist() == list(range(280))
        sparse = ops.selected_attention(query, contexts.cache, metadata, selected, scale=0.3)
        shorter = AttentionMetadata(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([280], dtype=torch.int32),
            block_tables=metadata.block_tables,
            block_size=16,
        )
        dense = ops.paged_attention(query[280:].contiguous(), contexts.cache, shorter, scale=0.3)
        assert torch.equal(sparse[280:], dense)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("num_selected", [8, 40])
def test_a_token_does_not_depend_on_company_chunks_or_threads(
    ops: Ops, num_selected: int, cache_dtype: torch.dtype
) -> None:
    from quire.ops.cpu import library

    dtype = cache_dtype if cache_dtype.itemsize > 1 else torch.bfloat16
    options: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype}
    expected = [part.split(list(LENGTHS)) for part in Contexts(ops, **options).step(WHOLE, num_selected)]
    for threads in (1, 3):
        if ops.name == "cpu":
            library.set_num_threads(threads)
        contexts, done = Contexts(ops, **options), [0] * len(LENGTHS)
        sizes = torch.Generator().manual_seed(threads)
        while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
            work = []
            for row, length in enumerate(LENGTHS):
                end = min(length, done[row] + int(torch.randint(1, 60, (), generator=sizes)))
                if end > done[row]:
                    work.append((row, done[row], end))
            counts = [end - begin for _, begin, end in work]
            actual = [part.split(counts) for part in contexts.step(work, num_selected)]
            for number, (row, begin, end) in enumerate(work):
                for found, whole in zip(actual, expected, strict=True):
                    assert torch.equal(found[number], whole[row][begin:end]), (row, begin, end)
                done[row] = end
    if ops.name == "cpu":
        library.set_num_threads(2)


def test_a_replay_computes_anew(ops: Ops) -> None:
    contexts, buffer = Contexts(ops), torch.zeros(300, INDEX_HEADS, INDEX_SIZE)
    query, metadata = contexts.write([(2, 0, 300)])

    def run() -> tuple[Tensor, ...]:
        selected = ops.select_tokens(
            buffer, contexts.weights[2], contexts.cache, metadata, num_selected=9, head_size=SIZE
        )
        return selected, ops.selected_attention(query, contexts.cache, metadata, selected, scale=0.3)

    graph = ops.make_graphs().record(run)
    for seed in range(3):
        buffer.copy_(rand(*buffer.shape, seed=seed))
        assert all(map(torch.equal, graph.replay(), run()))
