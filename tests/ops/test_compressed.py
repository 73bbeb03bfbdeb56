"""Compressed attention and hyper-connections: values, against sums in double, and bits in chunks and company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from quire.ops.contracts.operands import AttentionMetadata, CompressorWeights, HyperWeights, RowCache
from quire.ops.contracts.ops import Ops
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, rand, run

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, ROTATED = 3, 26, 17, 9, 6
LENGTHS = (70, 1, 300, 9)
BLOCK = 60
RATES = [(4, True), (5, False), (30, False), (1, True)]
each_rate = pytest.mark.parametrize(("rate", "overlaps"), RATES)
each_implementation = pytest.mark.parametrize("implementation", implementations_of("compress"))


@pytest.fixture(params=implementations_of("compress"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@dataclass
class Store:
    """Rows of sequences in shuffled blocks, which hold NaN where nothing was written."""

    size: int
    rate: int = 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        width = -(-max(LENGTHS) // BLOCK)
        shape = (2, width * len(LENGTHS) + 2, 1, BLOCK // self.rate, (self.size + 1) // 2)
        self.rows = torch.full(shape, float("nan"), dtype=self.dtype)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(self.size)).int()
        self.tables = order[: width * len(LENGTHS)].view(len(LENGTHS), width)

    def cache(self, work: list[tuple[int, int, int]]) -> RowCache:
        """As a step sees it that computes tokens [begin, end) of sequences, [(sequence, begin, end)]."""
        starts = torch.tensor([0, *(end - begin for _, begin, end in work)]).cumsum(0).int()
        metadata = AttentionMetadata(
            query_start=starts,
            seq_lens=torch.tensor([end for _, _, end in work], dtype=torch.int32),
            block_tables=self.tables[[row for row, _, _ in work]],
            block_size=BLOCK,
        )
        return RowCache(rows=self.rows, size=self.size, metadata=metadata)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return self.tables[row, positions // BLOCK].long() * BLOCK + positions % BLOCK


def whole(row: int) -> list[tuple[int, int, int]]:
    return [(row, 0, LENGTHS[row])]


def steps() -> list[list[tuple[int, int, int]]]:
    """All sequences, in chunks of changing sizes and company."""
    done, sizes = [0] * len(LENGTHS), torch.Generator().manual_seed(1)
    found = []
    while any(at < end for at, end in zip(done, LENGTHS, strict=True)):
        work = []
        for row, end in enumerate(LENGTHS):
            count = min(int(torch.randint(1, 40, (), generator=sizes)), end - done[row])
            if count:
                work.append((row, done[row], done[row] + count))
                done[row] += count
        found.append(work)
    return found


def turns() -> Tensor:
    angles = torch.arange(max(LENGTHS)).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.01])
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def turned(x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
    """The last features, by complex numbers. Shapes: x [..., D], positions as far as they go."""
    x = x.double()
    angles = positions.double().unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.01], dtype=torch.double)
    pairs = torch.view_as_complex(x[..., -ROTATED:].reshape(*x.shape[:-1], -1, 2).clone())
    last = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), sign * angles)).flatten(-2)
    return torch.cat((x[..., :-ROTATED], last), dim=-1)


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_the_last_features_of_heads_rotate(implementation: str, dtype: torch.dtype, backward: bool) -> None:
    x, positions = rand(90, HEADS, SIZE, dtype=dtype), torch.arange(90).flip(0) * 3

    def rotated(rows: slice) -> Tensor:
        out = x[rows].clone()
        run(implementation, "rotate_last", out, positions[rows], turns(), backward=backward)
        return out

    expected = turned(x, positions.unsqueeze(1), -1.0 if backward else 1.0)
    assert_close(rotated(slice(0, 90)), expected)
    assert_rows_alone(rotated, 90)


def compressor(rate: int, overlaps: bool) -> CompressorWeights:
    times = 1 + overlaps
    return CompressorWeights(
        rate=rate,
        reach=rate * times,
        bias=rand(rate, times * (SIZE + INDEX_SIZE), seed=7),
        norms=(rand(SIZE, seed=8), rand(INDEX_SIZE, seed=9)),
        eps=1e-5,
    )


def compressed(ops: Ops, weights: CompressorWeights, work: list[list[tuple[int, int, int]]]) -> Store:
    """The entries of what `work` computes."""
    features = weights.bias.shape[1]
    tail, entries = Store(2 * features), Store(SIZE + INDEX_SIZE, weights.rate)
    for step in work:
        for row, begin, end in step:
            rows = rand(LENGTHS[row], 2 * features, seed=row)[begin:end]
            ops.store_rows(rows, tail.rows, tail.slots(row, torch.arange(begin, end)))
        ops.compress(tail.cache(step), entries.cache(step), weights, turns())
    return entries


def entry(row: int, number: int, weights: CompressorWeights) -> Tensor:
    """One entry in double, as its contract says."""
    features, rate = weights.bias.shape[1], weights.rate
    products, gates = rand(LENGTHS[row], 2 * features, seed=row).double().split(features, dim=1)
    gates = gates + weights.bias.double()[torch.arange(LENGTHS[row]) % rate]
    parts, column = [], 0
    for norm in weights.norms:
        size = norm.shape[0]
        own = torch.arange(number * rate, (number + 1) * rate)
        columns = torch.arange(column, column + size)
        seen = [(own, columns)]
        if weights.reach > rate:
            seen = [(own, columns + size)] + ([(own - rate, columns)] if number else [])
        own_gates = torch.cat([gates[at][:, where] for at, where in seen])
        own_products = torch.cat([products[at][:, where] for at, where in seen])
        total = (own_products * own_gates.softmax(0)).sum(0)
        normed = total / (total.square().mean() + weights.eps).sqrt() * norm.double()
        parts.append(turned(normed.unsqueeze(0), torch.tensor([number * rate]))[0])
        column += size * (weights.reach // rate)
    return torch.cat(parts)


def rows_of(entries: Store, row: int, count: int) -> Tensor:
    firsts = torch.arange(count) * entries.rate
    blocks, slots = entries.tables[row, firsts // BLOCK].long(), firsts % BLOCK // entries.rate
    halves = entries.rows[:, blocks, 0, slots]
    return torch.cat((halves[0], halves[1]), dim=1)[:, : entries.size]


@each_rate
def test_entries_are_sums_weighed_by_gates(ops: Ops, rate: int, overlaps: bool) -> None:
    weights = compressor(rate, overlaps)
    entries = compressed(ops, weights, [[(row, 0, end) for row, end in enumerate(LENGTHS)]])
    for row, length in enumerate(LENGTHS):
        count = length // rate
        found = rows_of(entries, row, count)
        for number in {0, 1, count // 2, count - 1} & set(range(count)):
            assert_close(found[number], entry(row, number, weights))
    num_written = (~entries.rows.isnan()).flatten(4).all(-1)[0].sum().item()
    assert num_written == sum(length // rate for length in LENGTHS), "entries of tokens that are not all there"


@each_rate
def test_how_tokens_come_changes_no_bit_of_entries(ops: Ops, rate: int, overlaps: bool) -> None:
    weights = compressor(rate, overlaps)
    alone = compressed(ops, weights, [whole(row) for row in range(len(LENGTHS))])
    chunked = compressed(ops, weights, steps())
    for row, length in enumerate(LENGTHS):
        assert torch.equal(rows_of(alone, row, length // rate), rows_of(chunked, row, length // rate))


def test_a_replay_finishes_entries_of_what_the_cache_has_then(ops: Ops) -> None:
    weights, work = compressor(4, overlaps=True), whole(2)
    features = weights.bias.shape[1]
    tail, entries = Store(2 * features), Store(SIZE + INDEX_SIZE, 4)
    caches, cos_sin = (tail.cache(work), entries.cache(work)), turns()

    def run() -> tuple[Tensor, ...]:
        ops.compress(*caches, weights, cos_sin)
        return (entries.rows,)

    graph = ops.make_graphs().record(run)
    for seed in range(2):
        ops.store_rows(rand(300, 2 * features, seed=seed), tail.rows, tail.slots(2, torch.arange(300)))
        graph.replay()
        replayed = rows_of(entries, 2, 75)
        entries.rows.fill_(float("nan"))
        run()
        assert torch.equal(rows_of(entries, 2, 75), replayed)


@dataclass
class Attention:
    """Sequences whose last tokens and entries are there."""

    ops: Ops
    rate: int
    window: int

    def __post_init__(self) -> None:
        self.last, self.entries = Store(SIZE), Store(SIZE + INDEX_SIZE, self.rate)
        self.sinks = rand(HEADS, seed=3)
        for row, length in enumerate(LENGTHS):
            positions = torch.arange(length)
            self.ops.store_rows(rand(length, SIZE, seed=row), self.last.rows, self.last.slots(row, positions))
            count = length // self.rate
            firsts = torch.arange(count) * self.rate
            blocks = self.entries.tables[row, firsts // BLOCK].long() * (BLOCK // self.rate)
            rows = rand(count, SIZE + INDEX_SIZE, seed=20 + row)
            self.ops.store_rows(rows, self.entries.rows, blocks + firsts % BLOCK // self.rate)

    def queries(self, work: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([rand(LENGTHS[row], HEADS, SIZE, seed=40 + row)[begin:end] for row, begin, end in work])

    def selected(self, work: list[tuple[int, int, int]], most: int) -> Tensor:
        query, weights = (
            torch.cat([rand(LENGTHS[row], *shape, seed=60 + row)[begin:end] for row, begin, end in work])
            for shape in ((INDEX_HEADS, INDEX_SIZE), (INDEX_HEADS,))
        )
        return self.ops.select_entries(query, weights, self.entries.cache(work), rate=self.rate, num_selected=most)

    def attended(self, work: list[tuple[int, int, int]], most: int | None, *, has_entries: bool = True) -> Tensor:
        return self.ops.compressed_attention(
            self.queries(work),
            self.sinks,
            self.last.cache(work),
            self.entries.cache(work) if has_entries else None,
            None if most is None else self.selected(work, most),
            scale=0.3,
            window=self.window,
            rate=self.rate,
        )

    def expected(self, row: int, position: int, most: int | None, *, has_entries: bool = True) -> Tensor:
        first = max(0, position - self.window + 1)
        context = rand(LENGTHS[row], SIZE, seed=row).double()[first : position + 1]
        if has_entries:
            entries = rand(LENGTHS[row] // self.rate, SIZE + INDEX_SIZE, seed=20 + row).double()
            entries = entries[: (position + 1) // self.rate]
            if most is not None and len(entries) > most:
                entries = entries[self.best(row, position, entries[:, SIZE:], most)]
            context = torch.cat((context, entries[:, :SIZE]))
        query = rand(LENGTHS[row], HEADS, SIZE, seed=40 + row)[position].double()
        scores = torch.cat((query @ context.T * 0.3, self.sinks.double().unsqueeze(1)), dim=1)
        return (scores.softmax(-1)[:, :-1] @ context).flatten()

    def best(self, row: int, position: int, keys: Tensor, most: int) -> Tensor:
        query = rand(LENGTHS[row], INDEX_HEADS, INDEX_SIZE, seed=60 + row)[position].double()
        weights = rand(LENGTHS[row], INDEX_HEADS, seed=60 + row)[position].double()
        scores = ((query @ keys.T).relu() * weights.unsqueeze(1)).sum(0)
        return scores.topk(most).indices.sort().values


@pytest.mark.parametrize("window", [1, 12, 128, 200])
@pytest.mark.parametrize(("rate", "most"), [(4, 7), (4, 200), (30, None), (1, None), (1, 140)])
def test_queries_see_the_last_tokens_and_entries(ops: Ops, window: int, rate: int, most: int | None) -> None:
    attention = Attention(ops, rate, window)
    for row, length in enumerate(LENGTHS):
        attended = attention.attended(whole(row), most)
        for position in {0, 3, 11, 68, length - 1} & set(range(length)):
            assert_close(attended[position], attention.expected(row, position, most))


def test_layers_without_entries_see_the_last_tokens(ops: Ops) -> None:
    attention = Attention(ops, 4, 12)
    attended = attention.attended(whole(0), None, has_entries=False)
    assert_close(attended[50], attention.expected(0, 50, None, has_entries=False))


@pytest.mark.parametrize(("rate", "most"), [(4, 7), (5, None), (1, 140)])
def test_company_and_chunks_change_no_bit_of_a_token(ops: Ops, rate: int, most: int | None) -> None:
    attention = Attention(ops, rate, 20)
    alone = [attention.attended(whole(row), most) for row in range(len(LENGTHS))]
    for work in steps():
        together = attention.attended(work, most)
        expected = torch.cat([alone[row][begin:end] for row, begin, end in work])
        assert torch.equal(together, expected)


def test_of_equal_scores_the_earlier_entry_is_chosen(ops: Ops) -> None:
    attention = Attention(ops, 4, 12)
    work = whole(2)
    query, weights = torch.zeros(300, INDEX_HEADS, INDEX_SIZE), rand(300, INDEX_HEADS)
    selected = ops.select_entries(query, weights, attention.entries.cache(work), rate=4, num_selected=5)
    assert selected[2].tolist() == [-1] * 5, "no entry is there yet"
    assert selected[14].tolist() == [0, 1, 2, -1, -1]
    assert selected[299].tolist() == [0, 1, 2, 3, 4]


def connection(count: int, num_products: int, *, iterations: int = 3) -> HyperWeights:
    return HyperWeights(
        count=count,
        scale=rand(num_products, seed=1),
        base=rand(num_products, seed=2),
        iterations=iterations,
        eps=1e-3,
        norm_eps=1e-5,
        magnitude=1.7,
        least_added=0.25,
    )


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_streams_are_read_and_written_as_each_token_says(implementation: str, dtype: torch.dtype, count: int) -> None:
    size, num_products = 21, count * (2 + count)
    streams, out = rand(50, count * size, dtype=dtype), rand(50, size, seed=1, dtype=dtype)
    products, weights = rand(50, num_products, seed=2), connection(count, num_products)

    def halves(rows: slice) -> Tensor:
        read, writing = run(implementation, "read_streams", streams[rows], products[rows], weights)
        written = run(implementation, "write_streams", streams[rows], out[rows], writing)
        return torch.cat((read, written), dim=1)

    wide = streams.double()
    rms = (wide.square().mean(1, keepdim=True) + weights.norm_eps).sqrt()
    numbers = products.double() / rms * weights.scale.double() + weights.base.double()
    read = numbers[:, :count].sigmoid() + weights.eps
    matrix = numbers[:, 2 * count :].view(-1, count, count).softmax(-1) + weights.eps
    matrix = matrix / (matrix.sum(1, keepdim=True) + weights.eps)
    for _ in range(2):
        matrix = matrix / (matrix.sum(2, keepdim=True) + weights.eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + weights.eps)
    parts = wide.view(50, count, size)
    expected = torch.einsum("tjk,tje->tke", matrix, parts)
    added = weights.magnitude * numbers[:, count : 2 * count].sigmoid() + weights.least_added
    expected += added.unsqueeze(2) * out.double().unsqueeze(1)
    collapsed = (read.unsqueeze(2) * parts).sum(1)
    assert_close(halves(slice(0, 50)), torch.cat((collapsed, expected.flatten(1)), dim=1))
    assert_rows_alone(halves, 50)


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_streams_that_are_not_mixed_stay_as_they_are_but_for_what_is_added(
    implementation: str, dtype: torch.dtype, count: int
) -> None:
    size, num_products = 21, 2 * count
    streams, out = rand(50, count * size, dtype=dtype), rand(50, size, seed=1, dtype=dtype)
    products, weights = rand(50, num_products, seed=2), connection(count, num_products, iterations=0)

    def halves(rows: slice) -> Tensor:
        read, writing = run(implementation, "read_streams", streams[rows], products[rows], weights)
        assert writing.shape == (read.shape[0], count)
        written = run(implementation, "write_streams", streams[rows], out[rows], writing)
        return torch.cat((read, written), dim=1)

    wide = streams.double()
    rms = (wide.square().mean(1, keepdim=True) + weights.norm_eps).sqrt()
    numbers = (products.double() / rms * weights.scale.double() + weights.base.double()).sigmoid()
    parts = wide.view(50, count, size)
    read = ((numbers[:, :count] + weights.eps).unsqueeze(2) * parts).sum(1)
    added = weights.magnitude * numbers[:, count:] + weights.least_added
    expected = parts + added.unsqueeze(2) * out.double().unsqueeze(1)
    assert_close(halves(slice(0, 50)), torch.cat((read, expected.flatten(1)), dim=1))
    assert_rows_alone(halves, 50)


@each_implementation
def test_the_last_reading_writes_nothing(implementation: str) -> None:
    streams, products = rand(40, 63), rand(40, 15, seed=2)
    whole_weights = connection(3, 15)
    weights = connection(3, 3)
    read, _ = run(implementation, "read_streams", streams, products, whole_weights)
    last = replace(weights, scale=whole_weights.scale[:3], base=whole_weights.base[:3])
    assert torch.equal(run(implementation, "sum_streams", streams, products[:, :3].contiguous(), last), read)
