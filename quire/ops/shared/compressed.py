"""Compressed attention in plain torch: rotations, rows of caches, entries, and attention over the last tokens and
entries. The reference. Where the native kernels serve, only attention of heads that no page holds is computed here.

Row invariance: a token's context is gathered into splits of SPLIT rows, where each row has a place that follows from
the token's position alone. Products have one shape, with as many rows as make every matrix begin at a multiple of 64
bytes; exponentials are computed in whole vectors; sums add halves to each other, or splits in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, CompressorWeights, RowCache
from quire.ops.shared.elementwise import VECTOR
from quire.ops.threads import one_thread
from quire.utils.math import round_up

SPLIT = 128
"""Rows of the context per partial sum."""
TILE = 16
"""Query heads are rounded up to a multiple of so many."""
ROWS_AT_A_TIME = 32
"""Tokens that are rotated, or of which chosen entries are listed, at a time."""
SCORED_AT_A_TIME = 8
"""Tokens for which keys of entries are gathered once."""
WAVE_BYTES = 8 << 20
"""Of what is gathered for the tokens, or entries, that are computed at a time, unless a single one takes more."""


@one_thread()
def rotate_last(x: Tensor, positions: Tensor, cos_sin: Tensor, *, backward: bool = False) -> None:
    """See `Ops.rotate_last`."""
    last = x[..., x.shape[-1] - cos_sin.shape[1] :]
    for heads, places in zip(torch.split(last, ROWS_AT_A_TIME), torch.split(positions, ROWS_AT_A_TIME), strict=True):
        heads.copy_(rotated(heads, cos_sin.index_select(0, places).unsqueeze(1), backward=backward))


def rotated(x: Tensor, cos_sin: Tensor, *, backward: bool = False) -> Tensor:
    """Pairs of neighbours, turned. Shapes: x [..., R], cos_sin [..., R] float32, cosines first -> [..., R] float32."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    sin = -sin if backward else sin
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


@one_thread()
def store_rows(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `Ops.store_rows`."""
    size, count = cache.shape[4], cache.shape[3]
    blocks, places = slots // count, slots % count
    cache[0, blocks, 0, places] = rows[:, :size].to(cache.dtype)
    cache[1, blocks, 0, places] = _padded(rows[:, size:], size).to(cache.dtype)


def _padded(rows: Tensor, size: int) -> Tensor:
    return rows if rows.shape[1] == size else torch.cat((rows, rows.new_zeros(rows.shape[0], 1)), dim=1)


class StepSequence(NamedTuple):
    """A sequence of a step."""

    number: int
    tokens: range
    first: int
    """Position of the first of the tokens."""


def sequences_of(metadata: AttentionMetadata) -> Iterator[StepSequence]:
    """Those of a step, in order."""
    starts, seq_lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for index, seq_len in enumerate(seq_lens):
        tokens = range(starts[index], starts[index + 1])
        yield StepSequence(index, tokens, seq_len - len(tokens))


def gather_rows(source: RowCache, index: int, places: Tensor, rate: int = 1) -> Tensor:
    """Rows of a sequence: of tokens, or of entries, of `rate` tokens each. Shapes: places [...] -> [..., 2 * X]."""
    size = source.metadata.block_size
    firsts = places * rate
    blocks = source.metadata.block_tables[index].index_select(0, (firsts // size).flatten()).view(places.shape)
    halves = source.rows[:, blocks.long(), 0, firsts % size // rate]
    return torch.cat((halves[0], halves[1]), dim=-1).float()


@one_thread()
def compress(tail: RowCache, entries: RowCache, weights: CompressorWeights, cos_sin: Tensor) -> None:
    """See `Ops.compress`."""
    rate, size = weights.rate, entries.metadata.block_size
    step = max(1, WAVE_BYTES // (48 * weights.reach * weights.bias.shape[1]))
    for sequence in sequences_of(tail.metadata):
        first, end = sequence.first // rate, (sequence.first + len(sequence.tokens)) // rate
        for begin in range(first, end, step):
            numbers = torch.arange(begin, min(begin + step, end))
            rows = _entries(tail, sequence.number, numbers, weights, cos_sin)
            blocks = entries.metadata.block_tables[sequence.number].index_select(0, numbers * rate // size)
            slots = blocks.long() * (size // rate) + numbers * rate % size // rate
            store_rows(rows, entries.rows, slots)


def _entries(tail: RowCache, index: int, numbers: Tensor, weights: CompressorWeights, cos_sin: Tensor) -> Tensor:
    """Shapes: numbers [C] -> [C, sum of sizes] float32."""
    rate, before = weights.rate, weights.reach - weights.rate
    positions = numbers.unsqueeze(1) * rate + torch.arange(-before, rate)
    rows = gather_rows(tail, index, positions.clamp(min=0))
    products, gates = torch.split(rows, weights.bias.shape[1], dim=2)
    gates = gates + weights.bias[positions % rate]
    is_missing = (positions < 0).unsqueeze(2)
    parts, column = [], 0
    turns = cos_sin.index_select(0, numbers * rate)
    for norm in weights.norms:
        own = slice(column, column := column + norm.shape[0] * (weights.reach // rate))
        part = _weighed(_of_entry(products[..., own], before), _of_entry(gates[..., own], before), is_missing)
        parts.append(_turned(_normed(part, norm, weights.eps), turns))
    return torch.cat(parts, dim=1)


def _of_entry(x: Tensor, before: int) -> Tensor:
    """Of tokens before an entry's own the first half of the features, of its own the other. Shapes: [C, U, F]."""
    if not before:
        return x
    size = x.shape[2] // 2
    return torch.cat((x[:, :before, :size], x[:, before:, size:]), dim=1)


def _weighed(products: Tensor, gates: Tensor, is_missing: Tensor) -> Tensor:
    """Sums over tokens, weighed by softmaxes. Shapes: products, gates [C, U, F], is_missing [C, U, 1] -> [C, F]."""
    gates = gates.masked_fill(is_missing, float("-inf"))
    weights = exponentials(gates - gates.amax(dim=1, keepdim=True))
    weights = weights / in_order(weights).unsqueeze(1)
    return in_order(products.masked_fill(is_missing, 0.0) * weights)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shapes: x [C, F] -> [C, F]."""
    return x / (row_sums(x.square()) / x.shape[1] + eps).sqrt_() * weight


def _turned(x: Tensor, cos_sin: Tensor) -> Tensor:
    first = x.shape[1] - cos_sin.shape[1]
    return torch.cat((x[:, :first], rotated(x[:, first:], cos_sin)), dim=1)


def exponentials(x: Tensor) -> Tensor:
    """e to the power of each element, in stretches of whole vectors for each row. Shapes: x [T, ...]."""
    flat = x.reshape(x.shape[0], -1)
    room = flat.new_zeros(flat.shape[0], round_up(flat.shape[1], VECTOR))
    room[:, : flat.shape[1]] = flat
    return room.exp_()[:, : flat.shape[1]].reshape(x.shape)


def in_order(x: Tensor) -> Tensor:
    """Sums over dimension 1, one after the other."""
    return x[:, 0] if x.shape[1] == 1 else x.cumsum(1)[:, -1]


def row_sums(x: Tensor) -> Tensor:
    """Sums over the last dimension: the second half is added to the first, again and again. Shapes: -> [..., 1]."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    if size != x.shape[-1]:
        x = torch.cat((x, x.new_zeros(*x.shape[:-1], size - x.shape[-1])), dim=-1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


@one_thread()
def fill_tokens(out: Tensor, selected: Tensor, positions: Tensor, *, rate: int) -> None:
    """`Ops.tokens_of_entries`. Mutates: out [T, N]."""
    for rows in (slice(begin, begin + ROWS_AT_A_TIME) for begin in range(0, out.shape[0], ROWS_AT_A_TIME)):
        _fill_tokens(out[rows], selected[rows], positions[rows], rate)


def _fill_tokens(out: Tensor, selected: Tensor, positions: Tensor, rate: int) -> None:
    tokens = (selected.unsqueeze(2) * rate + torch.arange(rate, dtype=torch.int32)).flatten(1)
    is_chosen = selected >= 0
    out[:, : tokens.shape[1]] = tokens.masked_fill_(~is_chosen.repeat_interleave(rate, dim=1), -1)
    out[:, tokens.shape[1] :] = -1
    places = torch.arange(rate - 1)
    tail = (positions + 1).unsqueeze(1) // rate * rate + places
    tail = tail.masked_fill_(tail > positions.unsqueeze(1), -1).int()
    out.scatter_(1, is_chosen.sum(dim=1, keepdim=True) * rate + places, tail)


def tokens_of_entries(selected: Tensor, positions: Tensor, *, rate: int) -> Tensor:
    """See `Ops.tokens_of_entries`."""
    out = torch.empty(selected.shape[0], selected.shape[1] * rate + rate - 1, dtype=torch.int32)
    fill_tokens(out, selected, positions, rate=rate)
    return out


@one_thread()
def fill_selected(selected: Tensor, query: Tensor, weights: Tensor, *, entries: RowCache, rate: int) -> None:
    """`Ops.select_entries`. Mutates: selected [T, N]."""
    selected.fill_(-1)
    for number, tokens, first in sequences_of(entries.metadata):
        for begin in range(0, len(tokens), SCORED_AT_A_TIME):
            rows = slice(tokens[begin], min(tokens[begin] + SCORED_AT_A_TIME, tokens.stop))
            counts = [(first + begin + at + 1) // rate for at in range(rows.stop - rows.start)]
            _select(selected[rows], query[rows], weights[rows], entries, number, counts, rate)


def _select(
    selected: Tensor, query: Tensor, weights: Tensor, entries: RowCache, number: int, counts: list[int], rate: int
) -> None:
    """Of a few tokens, which see so many entries, the last of them the most. Mutates: selected [n, N]."""
    most = selected.shape[1]
    scores = _scores(query.float(), weights, entries, number, counts[-1], rate) if counts[-1] > most else None
    for token, count in enumerate(counts):
        if count <= most:
            selected[token, :count] = torch.arange(count)
            continue
        assert scores is not None
        # Stable: of equal scores the earlier entry comes first.
        best = scores[token, :count].sort(descending=True, stable=True).indices[:most]
        selected[token] = best.sort().values


def _scores(query: Tensor, weights: Tensor, entries: RowCache, number: int, count: int, rate: int) -> Tensor:
    """Of the first `count` entries of a sequence. Shapes: query [n, H, I], weights [n, H] -> [n, count] float32."""
    tokens, heads, size = query.shape
    rows = query.new_zeros(tokens, round_up(heads, TILE), size)
    rows[:, :heads] = query
    last, found = entries.size, query.new_empty(tokens, round_up(count, SPLIT))
    step = SPLIT * max(1, WAVE_BYTES // (12 * SPLIT * (last + 2 * rows.shape[1])))
    for begin in range(0, count, step):
        numbers = torch.arange(begin, min(begin + step, count))
        keys = query.new_zeros(round_up(len(numbers), SPLIT), size)
        keys[: len(numbers)] = gather_rows(entries, number, numbers, rate)[:, last - size : last]
        splits = keys.view(-1, SPLIT, size)
        for token in range(tokens):
            tile = rows[token].expand(len(splits), -1, -1).contiguous()
            products = torch.bmm(tile, splits.transpose(1, 2))[:, :heads].relu_().mul_(weights[token].view(1, heads, 1))
            found[token, begin : begin + len(keys)] = in_order(products).flatten()
    return found


@one_thread()
def fill_attended(
    out: Tensor,
    query: Tensor,
    sinks: Tensor,
    selected: Tensor | None,
    *,
    last: RowCache,
    entries: RowCache | None,
    scale: float,
    window: int,
    rate: int,
) -> None:
    """`Ops.compressed_attention`. Mutates: out [T, H * D]."""
    most, widest = None if selected is None else selected.shape[1], last.size if entries is None else entries.size
    for sequence in sequences_of(last.metadata):
        for tokens, num_entries in _waves(sequence, query, widest, window, rate if entries is not None else None, most):
            rows = slice(tokens.start, tokens.stop)
            positions = torch.arange(len(tokens)) + sequence.first + tokens.start - sequence.tokens.start
            context, is_seen = _last_rows(last, sequence.number, positions, window, query.shape[2])
            if entries is not None and num_entries:
                chosen = None if selected is None else selected[rows]
                numbers = _numbers(positions, num_entries, rate, chosen)
                more = gather_rows(entries, sequence.number, numbers.clamp(min=0), rate)[..., : query.shape[2]]
                context = torch.cat((context, more.masked_fill_((numbers < 0).unsqueeze(2), 0.0)), dim=1)
                is_seen = torch.cat((is_seen, numbers >= 0), dim=1)
            out[rows] = _attend(query[rows].float(), context, is_seen, sinks, scale).flatten(1).to(out.dtype)


def _waves(
    sequence: StepSequence, query: Tensor, size: int, window: int, rate: int | None, most: int | None
) -> Iterator[tuple[range, int]]:
    """Tokens that see equally many splits of entries, a few at a time, and how many entries these splits have.

    `size` is that of the widest row. The memory plan knows what a wave takes (`compressed_bytes`).
    """
    begin, heads = sequence.tokens.start, round_up(query.shape[1], TILE)
    row_bytes = 4 * (4 * size + 2 * heads + 3 * heads * query.shape[2] // SPLIT)
    while begin < sequence.tokens.stop:
        position = sequence.first + begin - sequence.tokens.start
        count = _seen_entries(position, rate, most)
        of_token = (round_up(window, SPLIT) + count) * row_bytes
        end = min(begin + max(1, WAVE_BYTES // of_token), sequence.tokens.stop)
        while _seen_entries(position + end - 1 - begin, rate, most) != count:
            end -= 1
        yield range(begin, end), count
        begin = end


def _seen_entries(position: int, rate: int | None, most: int | None) -> int:
    """Of a token, rounded up to whole splits."""
    count = 0 if rate is None else (position + 1) // rate
    return round_up(count if most is None else min(count, most), SPLIT)


def _last_rows(last: RowCache, index: int, positions: Tensor, window: int, size: int) -> tuple[Tensor, Tensor]:
    """The window of each position, and which rows there are. Shapes: positions [B] -> [B, U, D], [B, U]."""
    places = torch.arange(round_up(window, SPLIT))
    seen = positions.unsqueeze(1) - window + 1 + places
    is_seen = (seen >= 0) & (places < window)
    # Places that are not seen name the token itself: what stands elsewhere may be a neighbour's NaN.
    rows = gather_rows(last, index, torch.where(is_seen, seen, positions.unsqueeze(1)))[..., :size]
    return rows.masked_fill_(~is_seen.unsqueeze(2), 0.0), is_seen


def _numbers(positions: Tensor, num_entries: int, rate: int, chosen: Tensor | None) -> Tensor:
    """The entries of each token, -1 where there is none. Shapes: positions [B], chosen [B, N] -> [B, num_entries]."""
    if chosen is None:
        numbers = torch.arange(num_entries).expand(len(positions), -1)
        return numbers.masked_fill(numbers >= ((positions + 1) // rate).unsqueeze(1), -1)
    numbers = torch.full((len(positions), num_entries), -1)
    count = min(num_entries, chosen.shape[1])
    numbers[:, :count] = chosen[:, :count]
    return numbers


def _attend(query: Tensor, context: Tensor, is_seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Shapes: query [B, H, D], context [B, U, D], is_seen [B, U], sinks [H], all float32 -> [B, H, D]."""
    count, heads, size = query.shape
    rows, splits = round_up(heads, TILE), context.shape[1] // SPLIT
    tile = query.new_zeros(count, splits, rows, size)
    tile[:, :, :heads] = query.unsqueeze(1)
    keys = context.reshape(count * splits, SPLIT, size)
    scores = torch.bmm(tile.view(count * splits, rows, size), keys.transpose(1, 2))
    scores = scores.view(count, splits, rows, SPLIT).mul_(scale)
    scores.masked_fill_(~is_seen.view(count, splits, 1, SPLIT), float("-inf"))
    own = sinks.new_zeros(rows)
    own[:heads] = sinks
    largest = scores.amax(dim=(1, 3)).maximum(own)
    weights = scores.sub_(largest.view(count, 1, rows, 1)).exp_()
    total = in_order(row_sums(weights).squeeze(3)) + exponentials(own - largest)
    values = in_order(torch.bmm(weights.view(count * splits, rows, SPLIT), keys).view(count, splits, rows, size))
    return (values / total.unsqueeze(2))[:, :heads]


def select_entries(query: Tensor, weights: Tensor | None, entries: RowCache, *, rate: int, num_selected: int) -> Tensor:
    """See `Ops.select_entries`."""
    weights = torch.ones(query.shape[:2]) if weights is None else weights
    selected = torch.empty(query.shape[0], num_selected, dtype=torch.int32)
    fill_selected(selected, query, weights, entries=entries, rate=rate)
    return selected


def compressed_attention(
    query: Tensor,
    sinks: Tensor,
    last: RowCache,
    entries: RowCache | None = None,
    selected: Tensor | None = None,
    *,
    scale: float,
    window: int,
    rate: int = 1,
) -> Tensor:
    """See `Ops.compressed_attention`."""
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    fill_attended(out, query, sinks, selected, last=last, entries=entries, scale=scale, window=window, rate=rate)
    return out
