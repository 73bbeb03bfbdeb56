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

from quire.ops.contracts.ops import Ops
from quire.sampling.row import SamplingRow
from quire.structured.backend import GrammarBackend, Masks, Matcher, mask_words


class GrammarMasks:
    """structured_outputs: masks of the rows that have a grammar.

    min_tokens counts here: before it, tokens that end the output are possible only where the grammar allows no other.
    A row that is free in a step, and past its min_tokens, costs nothing in it.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        self._ops = ops
        found = [(index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None]
        self._rows = [row for _, row, _ in found]
        self._matchers: list[Matcher] = [matcher for _, _, matcher in found]
        self._indices = np.array([index for index, _, _ in found], np.int64)
        self._masks: Masks = np.zeros((len(found), mask_words(vocab_size)), np.int32)
        self.masks = torch.from_numpy(self._masks)
        """[M, ceil(V / 32)] int32, valid after `restrict`."""
        self._mask_of = np.full(len(rows), -1, np.int64)
        self.mask_of = torch.from_numpy(self._mask_of)
        """[R]: the mask of each row in this step, -1 where it has none."""
        self._ends = [_as_words(row.controls.ends, self._masks.shape[1]) for row in self._rows]
        self._counting: list[int] = []
        """The masks that count in this step."""
        self._fill_now: Callable[[], None] | None = None
        """What `restrict` waits for, or does."""

    def begin(self, backend: GrammarBackend, thread: ThreadPoolExecutor | None) -> None:
        """Compute the masks of the next step in a thread, beside what comes before `restrict`; without one, there."""
        pairs = zip(self._rows, self._matchers, strict=True)
        self._counting = [i for i, (row, matcher) in enumerate(pairs) if not matcher.is_free or _waits(row)]
        self._mask_of[self._indices] = -1
        self._mask_of[self._indices[self._counting]] = self._counting
        if thread is None or not self._counting:
            self._fill_now = partial(self._fill, backend)
        else:  # one after the other: one of a step that failed may still run
            self._fill_now = thread.submit(self._fill, backend).result

    def restrict(self, logits: Tensor, largest: list[float], greedy: list[int]) -> None:
        """Make `row_max` of the logits one among allowed tokens. Mutates: largest, greedy."""
        assert self._fill_now is not None, "begin comes before restrict"
        self._fill_now()
        self._fill_now = None
        counting = np.array(self._counting, np.int64)
        best = np.array(greedy)[self._indices[counting]]
        is_allowed = self._masks[counting, best >> 5] >> (best & 31) & 1
        others = counting[is_allowed == 0]
        if len(others):
            rows, put = self._indices[others], self._ops.on_device
            found = self._ops.allowed_max(
                logits, put(torch.from_numpy(rows)), put(torch.from_numpy(self._masks[others]))
            )
            for row, value, token_id in zip(rows.tolist(), *found, strict=True):
                largest[row], greedy[row] = value, token_id

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The mask of each of these rows, -1 where it has none, and all masks; nothing where no grammar counts."""
        put = self._ops.on_device
        return (put(self.mask_of[rows]), put(self.masks)) if self._counting else (None, None)

    def _fill(self, backend: GrammarBackend) -> None:
        asked = [(self._matchers[index], index) for index in self._counting if not self._matchers[index].is_free]
        if asked:
            backend.fill_masks(asked, self._masks)
        for index in self._counting:
            mask, row, matcher = self._masks[index], self._rows[index], self._matchers[index]
            if matcher.is_free:
                mask[:] = -1
            if matcher.error:
                mask[:] = 0  # what the library leaves there would end the output
            elif _waits(row) and np.any(longer := mask & ~self._ends[index]):
                mask[:] = longer


def _waits(row: SamplingRow) -> bool:
    return row.num_output_tokens < row.request.sampling_params.min_tokens


def _as_words(token_ids: Sequence[int], num_words: int) -> Masks:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
