"""Attention over chosen tokens: an indexer's scores, the choice, and attention over what was chosen.

Row invariance: scores of a token are products of one shape, a split of the context at a time, and sums over heads one
after the other. What was chosen is gathered, and attended to as a context of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.operands import AttentionMetadata
from quire.ops.reference.attention import SPLIT, Scores, attend, gather, paged_attention, sum_in_order
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
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, selected: Tensor, *, scale: float
) -> Tensor:
    """See `Ops.selected_attention`."""
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for index, tokens, first in _sequences(metadata):
        rows = slice(tokens.start, tokens.stop)
        if first + len(tokens) <= selected.shape[1]:
            out[rows] = paged_attention(query[rows], kv_cache, _alone(metadata, index), scale=scale)
            continue
        context = gather(kv_cache, metadata, index, 0, 0, first + len(tokens))
        for position, token in enumerate(tokens, first):
            count = min(position + 1, selected.shape[1])
            chosen = context.new_zeros(2, 1, cdiv(count, SPLIT) * SPLIT, context.shape[3])
            chosen[:, :, :count] = context[:, :, selected[token, :count].long()]
            row = attend(query[token].unsqueeze(0), chosen[0], chosen[1], count - 1, Scores(scale=scale))
            out[token] = row.flatten()
    return out


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
