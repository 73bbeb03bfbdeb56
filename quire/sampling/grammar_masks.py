"""`GrammarMasks`: which tokens grammars allow in a step. Where a core is free they are computed beside the model.

Logits stay as they are: what chooses a token looks at the allowed ones only. To write -inf to the others would cost
more than the masks do.

A matcher's state is a function of the grammar and the output's tokens, and to ask it changes nothing: a step that runs
again gets the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.ops import functional as F
from quire.sampling.row import SamplingRow
from quire.structured.backend import GrammarBackend, Masks, Matcher, mask_words


class GrammarMasks:
    """structured_outputs: masks of the rows that have a grammar.

    min_tokens counts here: before it, tokens that end the output are possible only where the grammar allows no other.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        found = [(index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None]
        self._rows = [row for _, row, _ in found]
        self._matchers: list[Matcher] = [matcher for _, _, matcher in found]
        self._indices = np.array([index for index, _, _ in found], np.int64)
        self._masks: Masks = np.zeros((len(found), mask_words(vocab_size)), np.int32)
        self.masks = torch.from_numpy(self._masks)
        """[M, ceil(V / 32)] int32, valid after `restrict`."""
        numbers = {index: number for number, index in enumerate(self._indices.tolist())}
        self.mask_of = torch.tensor([numbers.get(index, -1) for index in range(len(rows))], dtype=torch.int64)
        """[R]: the mask of each row, -1 where it has none."""
        self._ends = [_as_words(row.controls.ends, self._masks.shape[1]) for row in self._rows]
        self._fill_now: Callable[[], None] | None = None
        """What `restrict` waits for, or does."""

    def begin(self, backend: GrammarBackend, thread: ThreadPoolExecutor | None) -> None:
        """Compute the masks of the next step in a thread, beside what comes before `restrict`; without one, there."""
        if thread is None:
            self._fill_now = partial(self._fill, backend)
        else:  # one after the other: one of a step that failed may still run
            self._fill_now = thread.submit(self._fill, backend).result

    def restrict(self, logits: Tensor, largest: list[float], greedy: list[int]) -> None:
        """Make `row_max` of the logits one among allowed tokens. Mutates: largest, greedy."""
        assert self._fill_now is not None, "begin comes before restrict"
        self._fill_now()
        self._fill_now = None
        best = np.array(greedy)[self._indices]
        is_allowed = self._masks[np.arange(len(best)), best >> 5] >> (best & 31) & 1
        others = np.flatnonzero(is_allowed == 0)
        if len(others):
            rows = self._indices[others]
            found = F.allowed_max(logits, torch.from_numpy(rows), torch.from_numpy(self._masks[others]))
            for row, value, token_id in zip(rows.tolist(), *found, strict=True):
                largest[row], greedy[row] = value, token_id

    def _fill(self, backend: GrammarBackend) -> None:
        backend.fill_masks(list(zip(self._matchers, range(len(self._matchers)), strict=True)), self._masks)
        for mask, row, matcher, ends in zip(self._masks, self._rows, self._matchers, self._ends, strict=True):
            if matcher.error:
                mask[:] = 0  # what the library leaves there would end the output
            elif row.num_output_tokens < row.request.sampling_params.min_tokens and np.any(longer := mask & ~ends):
                mask[:] = longer


def _as_words(token_ids: Sequence[int], num_words: int) -> Masks:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
