"""Attention over chosen tokens or blocks: an indexer's scores, the choice, and attention over what was chosen.

Row invariance: scores of a token are products of one shape, a split of the context at a time, and sums over heads one
after the other. What was chosen is gathered, and attended to as a context of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RowCache
from quire.ops.reference.attention import SPLIT, Scores, attend, gather, paged_attention, sum_in_order
from quire.ops.shared.block_selection import fill_blocks
from quire.ops.threads import one_thread
from quire.utils.math import cdiv


@one_thread()
def select_tokens(
    query: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    num_selected: int,
    head_size: int,
) -> Tensor:
    """See `Ops.select_tokens`."""
    selected = torch.full((query.shape[0], num_selected), -1, dtype=torch.int32)
    for index, tokens, first in _sequences(metadata):
        context = gather(kv_cache, metadata, index, 0, 0, first + len(tokens))
        context = context[0, 0, :, head_size - query.shape[2] : head_size]
        for position, token in enumerate(tokens, first):
            if position < num_selected:
                selected[token, : position + 1] = torch.arange(position + 1)
                continue
            keys = context[: cdiv(position + 1, SPLIT) * SPLIT]
            scores = _scores(query[token].float(), weights[token], keys)[: position + 1]
            # Stable: of equal scores the earlier position comes first.
            best = scores.sort(descending=True, stable=True).indices[:num_selected]
            selected[token] = best.sort().values
    return selected


@one_thread()
def selected_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    selected: Tensor,
    *,
    scale: float,
    run: int = 1,
    sinks: Tensor | None = None,
    ends_early: bool = False,
) -> Tensor:
    """See `Ops.selected_attention`."""
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    of_heads = selected if selected.dim() == 3 else selected.unsqueeze(1).expand(-1, kv_cache.shape[2], -1)
    of_sinks = (None,) * of_heads.shape[1] if sinks is None else sinks.chunk(of_heads.shape[1])
    scores = [Scores(scale=scale, sinks=own) for own in of_sinks]
    for index, tokens, first in _sequences(metadata):
        rows = slice(tokens.start, tokens.stop)
        if first + len(tokens) <= of_heads.shape[2] * run:
            out[rows] = paged_attention(query[rows], kv_cache, _alone(metadata, index), scale=scale, sinks=sinks)
            continue
        context = gather(kv_cache, metadata, index, 0, 0, first + len(tokens))
        for position, token in enumerate(tokens, first):
            queries = query[token].chunk(of_heads.shape[1])
            heads = zip(queries, of_heads[token], context.unbind(1), scores, strict=True)
            parts = [_attend_chosen(*head, position, run) for head in heads]
            out[token] = torch.cat(parts).flatten()
    return out


def _attend_chosen(
    query_GD: Tensor, selected_N: Tensor, context: Tensor, scores: Scores, position: int, run: int
) -> Tensor:
    """The queries of one KV head, over what of its context [2, U, D or more] was chosen. Gives [G, D]."""
    places = (selected_N[selected_N >= 0].long().unsqueeze(1) * run + torch.arange(run)).flatten()
    places = places[places <= position]
    chosen = context.new_zeros(2, 1, cdiv(len(places), SPLIT) * SPLIT, context.shape[2])
    chosen[:, 0, : len(places)] = context[:, places]
    return attend(query_GD.unsqueeze(0), chosen[0], chosen[1], len(places) - 1, scores).squeeze(0)


def select_blocks(query: Tensor, keys: RowCache, *, block_size: int, num_selected: int, num_local: int) -> Tensor:
    """See `Ops.select_blocks`."""
    selected = torch.empty(*query.shape[:2], num_selected, dtype=torch.int32)
    fill_blocks(selected, query, keys=keys, block_size=block_size, num_local=num_local)
    return selected


def _sequences(metadata: AttentionMetadata) -> Iterator[tuple[int, range, int]]:
    """Each sequence's number, its tokens, and the position of the first."""
    starts, seq_lens = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for index, seq_len in enumerate(seq_lens):
        tokens = range(starts[index], starts[index + 1])
        yield index, tokens, seq_len - len(tokens)


def _alone(metadata: AttentionMetadata, index: int) -> AttentionMetadata:
    """Of one sequence, whose tokens are the only ones."""
    one = slice(index, index + 1)
    starts = metadata.query_start[index : index + 2] - metadata.query_start[index]
    return replace(
        metadata, query_start=starts, seq_lens=metadata.seq_lens[one], block_tables=metadata.block_tables[one]
    )


def _scores(query_HI: Tensor, weights_H: Tensor, keys_UI: Tensor) -> Tensor:
    """Of every key, which are whole splits. Gives [U] float32."""
    num_heads, size = query_HI.shape
    keys = keys_UI.view(-1, SPLIT, size)
    products = torch.bmm(query_HI.expand(len(keys), -1, -1), keys.transpose(1, 2))  # [splits, H, SPLIT]
    return sum_in_order(products.relu_().mul_(weights_H.view(1, num_heads, 1))).flatten()
