"""`GrammarMasks`: which tokens grammars allow in a step, applied to its logits. Where a core is free they are computed
beside the model.

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
    """structured_outputs: a `Processor` for the rows that have a grammar.

    min_tokens counts here: before it, tokens that end the output are possible only where the grammar allows no other.
    A row that is free in a step, and past its min_tokens, costs nothing in it.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        found = [(index, row, row.matcher) for index, row in enumerate(rows) if row.matcher is not None]
        self._rows = [row for _, row, _ in found]
        self._matchers: list[Matcher] = [matcher for _, _, matcher in found]
        self._indices = torch.tensor([index for index, _, _ in found], dtype=torch.int64)
        self._masks: Masks = np.zeros((len(found), mask_words(vocab_size)), np.int32)
        self._ends = [_as_words(row.controls.ends, self._masks.shape[1]) for row in self._rows]
        self._counting: list[int] = []
        """Which of them have a mask in this step: the first rows of `_masks`, in this order."""
        self._fill_now: Callable[[], None] | None = None
        """What `apply` waits for, or does."""
        self.is_needed = bool(found)

    def begin(self, backend: GrammarBackend, thread: ThreadPoolExecutor | None) -> None:
        """Compute the masks of the next step in a thread, beside what comes before `apply`; without one, in `apply`."""
        pairs = zip(self._rows, self._matchers, strict=True)
        self._counting = [i for i, (row, matcher) in enumerate(pairs) if not matcher.is_free or _waits(row)]
        if thread is None or not self._counting:
            self._fill_now = partial(self._fill, backend)
        else:  # one after the other: one of a step that failed may still run
            self._fill_now = thread.submit(self._fill, backend).result

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        assert self._fill_now is not None, "begin comes before apply"
        self._fill_now()
        self._fill_now = None
        if self._counting:
            masks = torch.from_numpy(self._masks[: len(self._counting)])
            F.apply_token_bitmask(logits, self._indices[self._counting], masks)

    def _fill(self, backend: GrammarBackend) -> None:
        matchers = [self._matchers[index] for index in self._counting]
        self._masks[[place for place, matcher in enumerate(matchers) if matcher.is_free]] = -1
        asked = [(matcher, place) for place, matcher in enumerate(matchers) if not matcher.is_free]
        if asked:
            backend.fill_masks(asked, self._masks)
        for place, (index, matcher) in enumerate(zip(self._counting, matchers, strict=True)):
            mask = self._masks[place]
            if matcher.error:
                mask[:] = 0  # what the library leaves there would end the output
            elif _waits(self._rows[index]) and np.any(longer := mask & ~self._ends[index]):
                mask[:] = longer


def _waits(row: SamplingRow) -> bool:
    return row.num_output_tokens < row.request.sampling_params.min_tokens


def _as_words(token_ids: Sequence[int], num_words: int) -> Masks:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
