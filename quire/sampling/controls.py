"""`Controls`: what a request's lists of tokens mean for logits, worked out once and shared by its branches.

Nothing here grows from step to step; where a branch stands in a bad word is in its `SamplingRow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.messages.request import EngineCoreRequest
from quire.structured.backend import Matcher
from quire.structured.grammar import Grammar
from quire.utils.phrases import Phrases


class Controls:
    """Allowed, banned and biased tokens of one request."""

    def __init__(self, request: EngineCoreRequest, make_matcher: Callable[[Grammar], Matcher] | None = None) -> None:
        """`make_matcher` is for requests with a grammar."""
        params = request.sampling_params
        self.request = request
        self._make_matcher = make_matcher
        self.ends = sorted({*request.eos_token_ids, *(params.stop_token_ids or ())}) if request.grammar else []
        """What ends an output that follows a grammar."""
        self.banned = _ids(word[0] for word in request.bad_words_token_ids if len(word) == 1)
        """Bad words of one token."""
        waits = params.min_tokens > 0 and request.grammar is None
        stops = {*request.eos_token_ids, *(params.stop_token_ids or ())} if waits else ()
        self.stops = _ids(sorted(stops))
        """What ends the output; impossible before min_tokens. A grammar says itself when (`grammar_masks`)."""
        bias = params.logit_bias or {}
        self.biased = _ids(bias)
        self.biases = np.fromiter(bias.values(), np.float32, len(bias))
        bans = _bans(request.bad_words_token_ids)
        self._bans = list(bans.values())
        self.phrases = Phrases(list(bans)) if bans else None
        """What stands before the last token of longer bad words; None when there are none."""
        self._excluded: Tensor | None = None

    def matcher(self) -> Matcher | None:
        """Where an empty output stands in the grammar; None without one."""
        if self.request.grammar is None:
            return None
        assert self._make_matcher is not None
        return self._make_matcher(self.request.grammar)

    @property
    def has_allowed(self) -> bool:
        """Whether only some tokens may be produced."""
        return self.request.allowed_tokens is not None

    def excluded(self, vocab_size: int) -> Tensor:
        """Whether each token is none of the allowed ones. Shapes: [V] bool."""
        if self._excluded is None or len(self._excluded) != vocab_size:
            bits = np.frombuffer(self.request.allowed_tokens or b"", np.uint8)
            allowed = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little").astype(np.bool_)
            self._excluded = torch.from_numpy(~np.pad(allowed, (0, vocab_size - len(allowed))))
        return self._excluded

    def bans_after(self, state: int) -> Iterator[int]:
        """Last tokens of the longer bad words that a branch in this state of `phrases` has begun."""
        assert self.phrases is not None
        for number in self.phrases.complete(state):
            yield from self._bans[number]


def _ids(token_ids: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(token_ids), np.int64)


def _bans(words: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """All but the last token of each longer word -> the last tokens that may not follow."""
    bans: dict[tuple[int, ...], list[int]] = {}
    for word in words:
        if len(word) > 1:
            bans.setdefault(word[:-1], []).append(word[-1])
    return bans
