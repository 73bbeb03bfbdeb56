"""`SamplingRow`: what sampling knows about one sequence from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.messages.request import EngineCoreRequest
from quire.sampling.controls import Controls
from quire.structured.backend import Matcher

ON_DEVICE = -1
"""In place of a token that only the device has."""


class Occurrences:
    """The distinct tokens of a sequence and how often each stands in its output, kept up to date token by token."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int64))
        self._index = {token_id: index for index, token_id in enumerate(ids.tolist())}
        self._num_in_prompt = len(ids)
        self._ids = np.concatenate((ids, np.empty(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.int64)
        for token_id in output:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens [P], those of the prompt first."""
        return self._ids[: len(self._index)]

    @property
    def in_prompt(self) -> NDArray[np.bool_]:
        """Whether each stands in the prompt [P]."""
        return np.arange(len(self._index)) < self._num_in_prompt

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each stands in the output [P]."""
        return self._counts[: len(self._index)]


@dataclass(slots=True)
class SamplingRow:
    """One sequence: its request, its branch, and its tokens so far (copied, so that it alone changes them)."""

    request: EngineCoreRequest
    branch: int
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and output."""
    controls: Controls
    """Of the request; its branches share them."""
    drawn: int = field(init=False, default=0)
    """What was drawn for it last, or `ON_DEVICE`. It belongs to its tokens when an instruction says so."""
    bad_word_state: int = field(init=False, default=0)
    """Where the output stands in `controls.phrases`."""
    occurrences: Occurrences | None = field(init=False, repr=False)
    """For penalties; None when the request sets none."""
    matcher: Matcher | None = field(init=False, repr=False)
    """Where the output stands in its grammar; None when the request has none."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.occurrences = self._count() if self.needs_penalties else None
        self.matcher = self.controls.matcher()
        for token_id in self.token_ids[self.num_prompt_tokens :]:
            self._advance(token_id)

    def _count(self) -> Occurrences:
        prompt = self.token_ids[: self.num_prompt_tokens]
        # Only the repetition penalty looks at the prompt; the others are spared its tokens.
        return Occurrences(
            prompt if self.request.sampling_params.repetition_penalty != 1 else (),
            self.token_ids[self.num_prompt_tokens :],
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_tokens(self) -> bool:
        """Whether what may follow depends on which tokens it has; else it is enough to know how many."""
        return self.occurrences is not None or self.controls.phrases is not None or self.matcher is not None

    @property
    def needs_penalties(self) -> bool:
        """Whether a repetition, presence or frequency penalty is set."""
        params = self.request.sampling_params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def assign(self, position: int, token_ids: Sequence[int]) -> None:
        """Take the tokens from a position on. What is known already is not taken again."""
        assert position <= len(self.token_ids), (position, len(self.token_ids))
        for token_id in token_ids[len(self.token_ids) - position :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self.token_ids.append(token_id)
        if self.occurrences is not None:
            self.occurrences.append(token_id)
        self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        if self.controls.phrases is not None:
            self.bad_word_state = self.controls.phrases.step(self.bad_word_state, token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)
