"""Blocks of tokens that an indexer chooses for the query heads of each KV head, in plain torch, the reference; and
where attention finds them.

Row invariance: products of a token with the keys of its context have one shape, a split of the context at a time; the
largest of several is the same in any order. What was chosen is attended to as the context of a sequence of one token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RowCache
from quire.ops.shared.compressed import SCORED_AT_A_TIME, SPLIT, TILE, WAVE_BYTES, gather_rows, sequences_of
from quire.ops.threads import one_thread
from quire.utils.math import cdiv, round_up


@one_thread()
def fill_blocks(selected: Tensor, query: Tensor, *, keys: RowCache, block_size: int, num_local: int) -> None:
    """`Ops.select_blocks`. Mutates: selected [T, K, N]."""
    selected.fill_(-1)
    most = selected.shape[2]
    for number, tokens, first in sequences_of(keys.metadata):
        for begin in range(0, len(tokens), SCORED_AT_A_TIME):
            rows = slice(tokens[begin], min(tokens[begin] + SCORED_AT_A_TIME, tokens.stop))
            positions = range(first + begin, first + begin + rows.stop - rows.start)
            if positions[-1] // block_size < most:
                _take_all(selected[rows], positions, block_size)
                continue
            scores = _scores(query[rows].float(), keys, number, positions, block_size)
            for chosen, of_token, position in zip(selected[rows], scores, positions, strict=True):
                _choose(chosen, of_token, position // block_size + 1, num_local)


def _take_all(selected: Tensor, positions: range, block_size: int) -> None:
    """Mutates: selected [n, K, N]."""
    for chosen, position in zip(selected, positions, strict=True):
        count = position // block_size + 1
        chosen[:, :count] = torch.arange(count)


def _choose(chosen: Tensor, scores: Tensor, count: int, num_local: int) -> None:
    """Of a token that sees so many blocks. Shapes: scores [K, blocks]. Mutates: chosen [K, N], scores."""
    most = min(chosen.shape[1], count)
    scores[:, max(0, count - num_local) : count] = math.inf
    # Stable: of equal scores the earlier block comes first.
    best = scores[:, :count].sort(dim=1, descending=True, stable=True).indices[:, :most]
    chosen[:, :most] = best.sort(dim=1).values


def _scores(query: Tensor, keys: RowCache, number: int, positions: range, block_size: int) -> Tensor:
    """Of all blocks that the last of a few tokens sees. Shapes: query [n, K, I] -> [n, K, blocks] float32."""
    tokens, heads, size = query.shape
    rows = query.new_zeros(tokens, round_up(heads, TILE), size)
    rows[:, :heads] = query
    count = positions[-1] + 1
    found = query.new_empty(tokens, heads, cdiv(count, block_size))
    step = keys_at_a_time(size, heads, block_size)
    for begin in range(0, count, step):
        places = torch.arange(begin, min(begin + step, count))
        context = query.new_zeros(round_up(len(places), math.lcm(SPLIT, block_size)), size)
        context[: len(places)] = gather_rows(keys, number, places)[:, :size]
        splits = context.view(-1, SPLIT, size)
        blocks = slice(begin // block_size, cdiv(begin + len(places), block_size))
        for token, position in enumerate(positions):
            tile = rows[token].expand(len(splits), -1, -1).contiguous()
            products = torch.bmm(tile, splits.transpose(1, 2))[:, :heads].transpose(0, 1).flatten(1)
            products[:, max(0, position + 1 - begin) :] = -math.inf
            largest = products.view(heads, -1, block_size).amax(dim=2)
            found[token, :, blocks] = largest[:, : blocks.stop - blocks.start]
    return found


def keys_at_a_time(size: int, num_heads: int, block_size: int) -> int:
    """Keys of a context that are gathered at once: whole splits, and whole blocks. The memory plan knows it, too
    (`block_selection_bytes`).
    """
    whole = math.lcm(SPLIT, block_size)
    return whole * max(1, WAVE_BYTES // (12 * whole * (size + 2 * round_up(num_heads, TILE))))


def owners(metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each token of a step."""
    counts = metadata.query_start.diff().long()
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) + (metadata.seq_lens - metadata.query_start[1:])[owner]


def by_runs(metadata: AttentionMetadata, selected: Tensor, run: int) -> AttentionMetadata:
    """Where the tokens of a step lie if each is a sequence of its own, whose context is what was chosen for it. Tokens
    of sequences no longer than that stay together, for they see all of it.

    Shapes: selected [T, N] int32, of one KV head.
    """
    owner, positions = owners(metadata)
    is_first = torch.ones(len(owner), dtype=torch.bool)
    is_first[1:] = owner[1:] != owner[:-1]
    firsts = (is_first | (metadata.seq_lens[owner] > selected.shape[1] * run)).nonzero().flatten()
    starts = torch.cat((firsts, torch.tensor([len(owner)])))
    last = starts[1:] - 1
    chosen, per_run = selected[last], run // metadata.block_size
    num_chosen = (chosen >= 0).sum(dim=1, keepdim=True)
    newest = chosen.gather(1, num_chosen - 1).flatten().long()
    columns = (chosen.clamp(min=0).unsqueeze(2) * per_run + torch.arange(per_run)).flatten(1)
    columns = columns.clamp_(max=metadata.block_tables.shape[1] - 1)  # of a run that ends behind the token
    return AttentionMetadata(
        query_start=starts.int(),
        seq_lens=((num_chosen.flatten() - 1) * run + (positions[last] + 1 - newest * run).clamp(max=run)).int(),
        block_tables=metadata.block_tables[owner[last].unsqueeze(1), columns],
        block_size=metadata.block_size,
    )
