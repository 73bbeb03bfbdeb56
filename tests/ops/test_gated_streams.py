"""Streams behind gates, and embeddings of n-grams: values, and rows and sequences that do not depend on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.contracts.operands import AttentionMetadata, ConvWeights, NGramHashes, StateMetadata
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand, run

each_implementation = pytest.mark.parametrize("implementation", implementations_of("open_streams"))
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
LENGTHS = (40, 1, 67)


@each_implementation
@each_dtype
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_mean_of_streams_is_weighed_by_gates(implementation: str, dtype: torch.dtype, count: int) -> None:
    x, gates = rand(45, count * 21, dtype=dtype), rand(45, count * 21, seed=1, dtype=dtype) * 3

    def opened(rows: slice) -> Tensor:
        return run(implementation, "open_streams", x[rows], gates[rows], count=count)

    expected = (x.double() * gates.double().sigmoid()).view(45, count, 21).mean(1)
    assert_close(opened(slice(0, 45)), expected)
    assert_rows_alone(opened, 45)


@each_implementation
@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_of_streams_are_twice_a_sigmoid(implementation: str, count: int) -> None:
    products = rand(45, count) * 9

    def shares(rows: slice) -> Tensor:
        return run(implementation, "stream_shares", products[rows].contiguous())

    assert_close(shares(slice(0, 45)), 2 * (products.double() / count).sigmoid())
    assert_rows_alone(shares, 45)


@each_implementation
@each_dtype
def test_values_are_gated_by_roots_of_products(implementation: str, dtype: torch.dtype) -> None:
    keys, queries, values = (
        rand(45, 3 * 21, seed=n, dtype=dtype)[:, : 63 if n else 21].contiguous() for n in (1, 2, 0)
    )
    queries[7] = 0.0

    def gated(rows: slice) -> Tensor:
        return run(implementation, "gate_values", keys[rows], queries[rows], values[rows])

    product = (keys.double() * queries.double()).view(45, 3, 21).sum(2, keepdim=True) / 21**0.5
    gates = (product.abs().clamp_min(1e-6).sqrt() * product.sign()).sigmoid()
    assert_close(gated(slice(0, 45)), (gates * values.double().unsqueeze(1)).flatten(1))
    assert_rows_alone(gated, 45)


class Sequences:
    """Whose states are in pages of an implementation's, NaN where nothing was written."""

    def __init__(self, implementation: str, num_elements: int) -> None:
        self.states = ops(implementation)["allocate_states"](num_blocks=9, num_bytes=8 * (-(-num_elements // 2) + 1))
        self.states.fill_(float("nan"))
        self.pages = dict.fromkeys(range(len(LENGTHS)), -1)
        self.free = list(range(9))

    def step(self, rows: list[tuple[int, int]]) -> StateMetadata:
        """Of [(sequence, tokens)]."""
        reads = [self.pages[row] for row, _ in rows]
        for row, _ in rows:
            if self.pages[row] >= 0:
                self.free.append(self.pages[row])
            self.pages[row] = self.free.pop(0)
        return StateMetadata(
            query_start=torch.tensor([0, *(count for _, count in rows)]).cumsum(0).int(),
            reads=torch.tensor(reads, dtype=torch.int32),
            writes=torch.tensor([self.pages[row] for row, _ in rows], dtype=torch.int32),
        )


def in_turns(
    implementation: str, num_elements: int, call: Callable[[list[tuple[int, int, int]], Tensor, StateMetadata], Tensor]
) -> list[Tensor]:
    """What each sequence's tokens give when all of them take turns, in uneven pieces."""
    sequences, done = Sequences(implementation, num_elements), [0] * len(LENGTHS)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    sizes = torch.Generator().manual_seed(0)
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        work = []
        for row, length in enumerate(LENGTHS):
            count = min(int(torch.randint(1, 20, (), generator=sizes)), length - done[row])
            if count:
                work.append((row, done[row], done[row] + count))
                done[row] += count
        metadata = sequences.step([(row, end - begin) for row, begin, end in work])
        out = call(work, sequences.states, metadata).split([end - begin for _, begin, end in work])
        for (row, _, _), part in zip(work, out, strict=True):
            parts[row].append(part)
    return [torch.cat(own) for own in parts]


@each_implementation
@pytest.mark.parametrize("longest", [2, 3, 5])
def test_ngrams_do_not_reach_across_an_end(implementation: str, longest: int) -> None:
    end, heads = 4, 2 * (longest - 1)
    tokens = [torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    multipliers = torch.randint(1, 1 << 58, (longest,), generator=torch.Generator().manual_seed(1)) | 1
    rows = torch.tensor([101, 103, 107, 109, 113, 127, 131, 137][:heads])
    hashes = NGramHashes(end_id=end, multipliers=multipliers, rows=rows, firsts=rows.cumsum(0) - rows)

    def call(work: list[tuple[int, int, int]], states: Tensor, metadata: StateMetadata) -> Tensor:
        ids = torch.cat([tokens[row][begin:stop] for row, begin, stop in work])
        return run(implementation, "ngram_rows", ids, hashes, states, metadata, first=3)

    for own, found in zip(tokens, in_turns(implementation, 3 + longest - 1, call), strict=True):
        for place, row in enumerate(found.tolist()):
            before = [int(own[place - lag]) if place >= lag else end for lag in range(longest)]
            cut = next((lag for lag in range(1, longest) if before[lag] == end), longest)
            read = before[:cut] + [end] * (longest - cut)
            expected = []
            for head in range(heads):
                hashed = 0
                for lag in range(head // 2 + 2):
                    hashed ^= read[lag] * int(multipliers[lag])
                expected.append(hashed % int(rows[head]) + int(hashes.firsts[head]))
            assert row == expected, (place, read)


@each_implementation
@pytest.mark.parametrize(("width", "step"), [(1, 3), (2, 1), (4, 3)])
def test_a_convolution_skips_tokens(implementation: str, width: int, step: int) -> None:
    weights = ConvWeights(weight=rand(37, width), bias=None)
    inputs, added = ([rand(n, 37, seed=n + more) for n in LENGTHS] for more in (0, 1))

    def call(work: list[tuple[int, int, int]], states: Tensor, metadata: StateMetadata) -> Tensor:
        x, residual = (torch.cat([part[row][begin:end] for row, begin, end in work]) for part in (inputs, added))
        return run(implementation, "dilated_conv", x, residual, weights, states, metadata, step=step)

    past = (width - 1) * step
    found = in_turns(implementation, past * 37, call)
    for row, length in enumerate(LENGTHS):
        padded = F.pad(inputs[row].double().t(), (past, 0)).unsqueeze(0)
        kernel = weights.weight.double().unsqueeze(1)
        expected = F.silu(F.conv1d(padded, kernel, dilation=step, groups=37))[0].t() + added[row].double()
        assert_close(found[row], expected)
        states = Sequences(implementation, past * 37)
        alone = call([(row, 0, length)], states.states, states.step([(row, length)]))
        assert torch.equal(alone, found[row])


@each_implementation
@pytest.mark.parametrize("rate", [1, 3, 8])
def test_tokens_of_entries_are_those_of_whole_ones_and_the_rest(implementation: str, rate: int) -> None:
    positions = torch.tensor([0, 1, 2, 7, 8, 30, 31, 32])
    selected = torch.full((8, 3), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        seen = (position + 1) // rate
        chosen = sorted({0, seen // 2, seen - 1} & {*range(seen)})
        selected[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    found = run(implementation, "tokens_of_entries", selected, positions, rate=rate).tolist()
    for row, position in enumerate(positions.tolist()):
        tokens = [entry * rate + i for entry in selected[row].tolist() if entry >= 0 for i in range(rate)]
        tokens += range((position + 1) // rate * rate, position + 1)
        assert found[row] == tokens + [-1] * (4 * rate - 1 - len(tokens))


@each_implementation
def test_all_heads_attend_to_the_same_tokens(implementation: str) -> None:
    """Of a cache with several KV heads; lists may end early."""
    table, length, size = ops(implementation), 70, 16
    cache = table["allocate_kv_cache"](num_blocks=6, block_size=16, num_kv_heads=2, head_size=size, dtype=torch.float32)
    from quire.ops.contracts.operands import RopeAndCacheSpec

    spec = RopeAndCacheSpec(num_heads=6, num_kv_heads=2, head_size=size, rotary_dim=0)
    qkv, order = rand(length, 10 * size), torch.tensor([4, 0, 3, 5, 1])
    slots = order[torch.arange(length) // 16] * 16 + torch.arange(length) % 16
    query = table["rope_and_cache"](qkv, torch.arange(length), None, None, None, cache, slots, spec)
    chosen = [sorted({*range(0, position + 1, 9), position}) for position in range(length)]
    selected = torch.full((length, 12), -1, dtype=torch.int32)
    for row, tokens in enumerate(chosen):
        seen = tokens if row >= 12 else list(range(row + 1))
        selected[row, : len(seen)] = torch.tensor(seen, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=order.int().unsqueeze(0),
        block_size=16,
    )
    attended = table["selected_attention"](query, cache, metadata, selected, scale=0.3, ends_early=True)
    queries, keys, values = qkv.double().view(length, 10, size).split([6, 2, 2], dim=1)
    for row in range(length):
        seen = selected[row][selected[row] >= 0].long()
        for head in range(6):
            weights = (keys[seen, head // 3] @ queries[row, head] * 0.3).softmax(0)
            assert_close(attended[row].view(6, size)[head], weights @ values[seen, head // 3])
