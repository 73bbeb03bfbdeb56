"""Log-probabilities of chosen tokens and of the best candidates beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from quire.messages.output import PositionLogprobs
from quire.ops.contracts.ops import Ops


def prompt_logprobs(ops: Ops, logits: Tensor, chosen_ids: Sequence[int], k: int) -> list[PositionLogprobs]:
    """How likely the model found each token of a prompt. Row i holds the logits from which `chosen_ids[i]` follows.

    Shapes: logits [P, V] float32; k candidates for each position, -1 for the whole vocabulary.
    """
    return position_logprobs(ops, logits, chosen_ids, [k] * len(chosen_ids))


def position_logprobs(ops: Ops, logits: Tensor, chosen_ids: Sequence[int], ks: Sequence[int]) -> list[PositionLogprobs]:
    """The chosen token and then the k best in order, the chosen one not repeated, so 5 are a prefix of 20.

    Shapes: logits [P, V] float32, unprocessed; for each row its chosen token and its k (-1: the whole vocabulary).
    """
    vocab_size = logits.shape[-1]
    widths = [vocab_size if k == -1 else min(k, vocab_size) for k in ks]
    positions: list[PositionLogprobs] = []
    for _, same in groupby(range(len(widths)), key=lambda index: widths[index] == vocab_size):
        begin, *others = same  # rows beside each other, so that no logits are copied
        part = slice(begin, begin + 1 + len(others))
        positions += _positions(ops, logits[part], list(chosen_ids[part]), widths[part])
    return positions


def _positions(ops: Ops, logits: Tensor, chosen_ids: list[int], widths: list[int]) -> list[PositionLogprobs]:
    columns = ops.top_logprobs(logits, torch.tensor(chosen_ids, device=ops.device), max(widths))
    return logprobs_of(chosen_ids, widths, columns)


def logprobs_of(chosen_ids: Sequence[int], widths: Sequence[int], columns: Sequence[Tensor]) -> list[PositionLogprobs]:
    """What is reported of each row, from what `Ops.top_logprobs` gave, of which its first `widths` candidates."""
    rows = zip(chosen_ids, widths, *(column.tolist() for column in columns), strict=True)
    return [_position(*row) for row in rows]


def _position(
    chosen: int, width: int, chosen_logprob: float, rank: int, top_ids: list[int], top: list[float]
) -> PositionLogprobs:
    ids, logprobs = top_ids[:width], top[:width]
    if rank <= width:
        del ids[rank - 1], logprobs[rank - 1]
    return PositionLogprobs(token_ids=[chosen, *ids], logprobs=[chosen_logprob, *logprobs], rank=rank)
