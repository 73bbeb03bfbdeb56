"""Attention over chosen blocks: which are chosen, what is attended to, and the bits of tokens in company."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from quire.ops.contracts.operands import AttentionMetadata, RowCache
from quire.ops.contracts.ops import Ops
from tests.ops.implementations import assert_close, implementations_of, rand
from tests.ops.pages import Pages

LENGTHS = [70, 1, 300, 9]
HEADS, KV_HEADS, SIZE, INDEX_SIZE = 6, 2, 16, 10
PAGE = 8
WHOLE = [(row, 0, length) for row, length in enumerate(LENGTHS)]
Work = list[tuple[int, int, int]]


@pytest.fixture(params=implementations_of("select_blocks"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@dataclass
class Contexts:
    """Sequences with keys and values, and with keys of an indexer in rows of their own."""

    ops: Ops
    block_size: int = 16
    num_selected: int = 3
    num_local: int = 1
    dtype: torch.dtype = torch.float32
    sinks: Tensor | None = None
    index: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "block_size": PAGE}
        self.pages = Pages.of(self.ops.name, LENGTHS, **sizes, dtype=self.dtype, is_apart=True)  # type: ignore[arg-type]
        self.index = [rand(n, KV_HEADS + 1, INDEX_SIZE, seed=n + 1, dtype=self.dtype) for n in LENGTHS]
        shape = (2, self.pages.cache.shape[1], 1, PAGE, INDEX_SIZE // 2)
        self.rows = torch.full(shape, float("nan"), dtype=self.dtype)

    def step(self, work: Work) -> tuple[Tensor, Tensor]:
        """What these tokens choose, and what they attend to; [(sequence, begin, end)]."""
        self.pages.attend(work)
        index = torch.cat([self.index[row][begin:end] for row, begin, end in work])
        metadata = self.metadata(work)
        slots = [
            self.pages.tables[row, torch.arange(begin, end) // PAGE].long() * PAGE + torch.arange(begin, end) % PAGE
            for row, begin, end in work
        ]
        keys = RowCache(rows=self.rows, size=INDEX_SIZE, metadata=metadata)
        self.ops.store_rows(index[:, KV_HEADS].contiguous(), self.rows, torch.cat(slots))
        options = {"block_size": self.block_size, "num_selected": self.num_selected, "num_local": self.num_local}
        selected = self.ops.select_blocks(index[:, :KV_HEADS].contiguous(), keys, **options)
        query = torch.cat([self.pages.qkv[row][begin:end, : HEADS * SIZE] for row, begin, end in work])
        query = query.view(-1, HEADS, SIZE).contiguous()
        attended = self.ops.selected_attention(
            query, self.pages.cache, metadata, selected, scale=0.3, run=self.block_size, sinks=self.sinks
        )
        return selected, attended

    def metadata(self, work: Work) -> AttentionMetadata:
        return AttentionMetadata(
            query_start=torch.tensor([0, *(end - begin for _, begin, end in work)]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, _, end in work], dtype=torch.int32),
            block_tables=self.pages.tables[[row for row, _, _ in work]].contiguous(),
            block_size=PAGE,
        )


def chosen_blocks(contexts: Contexts, row: int, position: int, head: int) -> list[int]:
    """By scores in float64."""
    index, size = contexts.index[row].double(), contexts.block_size
    scores = index[: position + 1, KV_HEADS] @ index[position, head]
    best = {block: part.max().item() for block, part in enumerate(scores.split(size))}
    best |= dict.fromkeys(range(max(0, len(best) - contexts.num_local), len(best)), float("inf"))
    return sorted(sorted(best, key=best.__getitem__, reverse=True)[: contexts.num_selected])


@pytest.mark.parametrize("block_size", [8, 24, 128])
@pytest.mark.parametrize(("num_selected", "num_local"), [(1, 0), (3, 1), (3, 3), (40, 2)])
def test_the_blocks_of_the_highest_scores_are_attended_to(
    ops: Ops, block_size: int, num_selected: int, num_local: int
) -> None:
    contexts = Contexts(ops, block_size, num_selected, num_local, sinks=rand(HEADS, seed=9))
    selected, attended = (part.split(LENGTHS) for part in contexts.step(WHOLE))
    for row, length in enumerate(LENGTHS):
        visible = torch.zeros(HEADS, length, length, dtype=torch.bool)
        for position in range(length):
            for head in range(KV_HEADS):
                expected = chosen_blocks(contexts, row, position, head)
                assert selected[row][position, head].tolist() == expected + [-1] * (num_selected - len(expected))
                for block in expected:
                    end = min((block + 1) * block_size, position + 1)
                    visible[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS, position][
                        :, block * block_size : end
                    ] = True
        assert_close(attended[row], naive(contexts, row, visible))


def naive(contexts: Contexts, row: int, visible: Tensor) -> Tensor:
    """Attention in float64. Shapes: visible [H, T, T] -> [T, H * D]."""
    heads = contexts.pages.qkv[row].double().view(LENGTHS[row], -1, SIZE).transpose(0, 1)
    query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS])
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (key, value))
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~visible, -torch.inf)
    sinks = torch.full((HEADS,), -torch.inf) if contexts.sinks is None else contexts.sinks
    with_sinks = torch.cat((scores, sinks.double().view(HEADS, 1, 1).expand(-1, LENGTHS[row], -1)), dim=2)
    return (with_sinks.softmax(-1)[:, :, :-1] @ value).transpose(0, 1).flatten(1)


def test_the_earlier_of_equal_scores_is_chosen(ops: Ops) -> None:
    contexts = Contexts(ops, block_size=16, num_selected=4)
    for index in contexts.index:
        index.fill_(1.0)
    contexts.index[2][100, KV_HEADS] = 2.0
    selected = contexts.step(WHOLE)[0].split(LENGTHS)[2]
    assert selected[299].tolist() == [[0, 1, 6, 18]] * KV_HEADS
    assert selected[99].tolist() == [[0, 1, 2, 6]] * KV_HEADS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_all_are_chosen_the_bits_are_those_of_dense_attention(ops: Ops, dtype: torch.dtype) -> None:
    contexts = Contexts(ops, block_size=16, num_selected=18, dtype=dtype)
    attended = contexts.step(WHOLE)[1].split(LENGTHS)
    dense = contexts.pages.attend(WHOLE, scale=0.3)
    seen = 18 * 16
    for row, length in enumerate(LENGTHS):
        assert torch.equal(attended[row][:seen], dense[row][:seen]), row
        assert length <= seen or not torch.equal(attended[row][seen:], dense[row][seen:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 24])
def test_a_token_does_not_depend_on_company_or_chunks(ops: Ops, block_size: int, dtype: torch.dtype) -> None:
    expected = [part.split(LENGTHS) for part in Contexts(ops, block_size, dtype=dtype).step(WHOLE)]
    contexts, done, sizes = Contexts(ops, block_size, dtype=dtype), [0] * len(LENGTHS), torch.Generator().manual_seed(1)
    while done != LENGTHS:
        ends = [
            min(n, at + int(torch.randint(1, 60, (), generator=sizes))) for n, at in zip(LENGTHS, done, strict=True)
        ]
        work = [(row, done[row], end) for row, end in enumerate(ends) if end > done[row]]
        actual = [part.split([end - begin for _, begin, end in work]) for part in contexts.step(work)]
        for number, (row, begin, end) in enumerate(work):
            for found, whole in zip(actual, expected, strict=True):
                assert torch.equal(found[number], whole[row][begin:end]), (row, begin, end)
        done = ends


def test_a_replay_computes_anew(ops: Ops) -> None:
    contexts = Contexts(ops)
    contexts.step(WHOLE)
    work: Work = [(2, 0, 300)]
    keys = RowCache(rows=contexts.rows, size=INDEX_SIZE, metadata=contexts.metadata(work))
    index, query = torch.zeros(300, KV_HEADS, INDEX_SIZE), rand(300, HEADS, SIZE)

    def run() -> tuple[Tensor, ...]:
        selected = ops.select_blocks(index, keys, block_size=16, num_selected=3, num_local=1)
        cache, metadata = contexts.pages.cache, keys.metadata
        return selected, ops.selected_attention(query, cache, metadata, selected, scale=0.3, run=16)

    graph = ops.make_graphs().record(run)
    for seed in range(3):
        index.copy_(rand(*index.shape, seed=seed))
        assert all(map(torch.equal, graph.replay(), run()))
