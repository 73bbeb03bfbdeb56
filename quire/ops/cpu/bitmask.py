"""Masks of tokens applied to logits: numpy is fast enough, so there is no kernel for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FEW = 8
"""Where at most one word in so many has something to do, the tokens are listed."""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))
"""[256, 8]: what a byte of a mask adds to the logits of its tokens."""


def apply_token_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `functional.apply_token_bitmask`."""
    values, words = logits.numpy(), masks.numpy()
    room = np.empty((4 * words.shape[1], 8), np.float32)
    for row, mask in zip(rows.tolist(), words, strict=True):
        _apply(values[row], mask, room)


def _apply(logits: NDArray[np.float32], mask: NDArray[np.int32], room: NDArray[np.float32]) -> None:
    """Often nearly all tokens are allowed, or nearly none: both need only a few of them. Mutates: logits, room."""
    allowed = np.flatnonzero(mask)
    if FEW * len(allowed) < len(mask):
        kept = _tokens(mask, allowed, len(logits))
        values = logits[kept]
        logits.fill(-np.inf)
        logits[kept] = values
        return
    forbidden = np.flatnonzero(mask != -1)
    if FEW * len(forbidden) < len(mask):
        logits[_tokens(~mask, forbidden, len(logits))] = -np.inf
    else:
        np.take(_ADDED, mask.view(np.uint8), axis=0, out=room, mode="clip")
        logits += room.reshape(-1)[: len(logits)]


def _tokens(mask: NDArray[np.int32], words: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """The tokens whose bits are set in these words."""
    bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
    tokens: NDArray[np.int64] = words[bits >> 5] * 32 + (bits & 31)
    return tokens[: np.searchsorted(tokens, vocab_size)]
