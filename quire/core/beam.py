"""`BeamSearch`: which continuations of a request's beams live on, and which completions are the best.

The rules are those of `generate(num_beams=...)` in transformers 5 (`GenerationMixin._beam_search`), order and scores
included. The penalty on length is that of Wu et al., "Google's Neural Machine Translation System" (arXiv 1609.08144),
section 7, in its common short form. Knows tokens and logprobs: `results` makes the sequences follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from quire.messages.output import PositionLogprobs
from quire.messages.request import BeamHypothesis, BeamProgress, EngineCoreRequest, RequestProgress
from quire.sampling_params import NEVER


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for a running beam."""

    parent: int
    """Which beam, in the order of the beams."""
    token_id: int
    cum_logprob: float
    """The sum of the logprobs of all its tokens."""


def score_of(cum_logprob: float, num_tokens: int, length_penalty: float) -> float:
    """What completions are ranked by."""
    return cum_logprob / math.pow(num_tokens, length_penalty)


class BestHypotheses:
    """The best completions that a search has found, best first; those found earlier come first among equals."""

    __slots__ = ("_hypotheses", "_length_penalty", "_width")

    def __init__(self, width: int, length_penalty: float, hypotheses: Iterable[BeamHypothesis] = ()) -> None:
        """Keep `width` of them."""
        self._width = width
        self._length_penalty = length_penalty
        self._hypotheses: list[BeamHypothesis] = []
        self.add(hypotheses)

    def __len__(self) -> int:
        return len(self._hypotheses)

    @property
    def is_full(self) -> bool:
        """Whether another one would have to be better than one of them."""
        return len(self._hypotheses) == self._width

    def add(self, hypotheses: Iterable[BeamHypothesis]) -> None:
        """Keep those that are among the best."""
        both = [*self._hypotheses, *hypotheses]
        self._hypotheses = sorted(both, key=self._score_of, reverse=True)[: self._width]  # equal ones keep their order

    def first(self, count: int) -> list[BeamHypothesis]:
        """The best of them."""
        return self._hypotheses[:count]

    def would_take(self, cum_logprob: float, num_tokens: int) -> bool:
        """Whether a completion of so many tokens would be among the best."""
        return not self.is_full or self._score(cum_logprob, num_tokens) > self._score_of(self._hypotheses[-1])

    def _score_of(self, hypothesis: BeamHypothesis) -> float:
        return self._score(hypothesis.cum_logprob, len(hypothesis.token_ids))

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return score_of(cum_logprob, num_tokens, self._length_penalty)


class BeamSearch:
    """The search of one request."""

    __slots__ = (
        "_early_stopping",
        "_length_penalty",
        "_max_tokens",
        "_num_candidates",
        "_stop_reasons",
        "_width",
        "best",
        "branches",
        "cum_logprobs",
        "num_tokens",
        "reported",
    )

    def __init__(self, request: EngineCoreRequest, stop_reasons: dict[int, int | None]) -> None:
        """`stop_reasons`: tokens that end a completion, and the reasons that they give."""
        params, progress = request.sampling_params, request.progress or RequestProgress()
        so_far = progress.beams or BeamProgress(cum_logprobs=[0.0])
        self._width = params.num_sequences
        self._num_candidates = request.num_beam_candidates
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = request.max_tokens
        self._stop_reasons = stop_reasons
        self.branches = list(progress.branches) or [0]
        """Branch numbers of the running beams, best first."""
        self.cum_logprobs = list(so_far.cum_logprobs)
        """Sums of the logprobs of the running beams, in the same order."""
        self.num_tokens = len(next(iter(progress.branches.values()), ()))
        """Output tokens of each running beam."""
        self.reported: dict[int, PositionLogprobs] = {}
        """Branch -> its most likely continuations; those of running beams that have computed them."""
        self.best = BestHypotheses(self._width, self._length_penalty, so_far.ended)

    @property
    def is_complete(self) -> bool:
        """Whether all running beams have reported, so that a step can be chosen."""
        return len(self.reported) == len(self.branches)

    @property
    def is_done(self) -> bool:
        """Whether the best completions are found: no running beam is expected to be among them."""
        if not self.cum_logprobs:
            return True
        if not self.best.is_full or self._early_stopping is True:
            return self.best.is_full
        hopes_for_length = self._early_stopping == NEVER and self._length_penalty > 0
        num_tokens = self._max_tokens if hopes_for_length else self.num_tokens
        return not self.best.would_take(self.cum_logprobs[0], num_tokens)

    def candidates(self) -> list[PositionLogprobs]:
        """What all running beams have reported, in their order."""
        return [self.reported[branch] for branch in self.branches]

    def choose(self, tokens_of: Callable[[int], list[int]]) -> tuple[list[Continuation], list[BeamHypothesis]]:
        """Choose a step: (the running beams from now on, best first; the completions that ended).

        `tokens_of` gives the output tokens of a beam. Mutates: everything but `branches`, which the caller sets.
        """
        ranked = self._ranked()
        self.num_tokens += 1
        self.reported = {}
        is_last = self.num_tokens >= self._max_tokens
        ended = [one for one in ranked[: self._width] if is_last or one.token_id in self._stop_reasons]
        going_on = [] if is_last else [one for one in ranked if one.token_id not in self._stop_reasons]
        running = going_on[: self._width]
        found = [self._hypothesis(one, tokens_of(one.parent)) for one in ended]
        self.best.add(found)
        self.cum_logprobs = [one.cum_logprob for one in running]
        return running, found

    def progress(self) -> BeamProgress:
        """Where the search stands, for a core that takes the request over."""
        return BeamProgress(cum_logprobs=list(self.cum_logprobs), ended=self.best.first(self._width))

    def _ranked(self) -> list[Continuation]:
        """The continuations of all beams, the most likely first. Among equals the better beam's comes first."""
        continuations = []
        for parent, (branch, before) in enumerate(zip(self.branches, self.cum_logprobs, strict=True)):
            entry = self.reported[branch]  # may have more than the search needs: those that the request asked for
            pairs = zip(entry.token_ids, entry.logprobs, strict=True)
            for token_id, logprob in islice(pairs, self._num_candidates):
                continuations.append(Continuation(parent, token_id, before + logprob))
        return sorted(continuations, key=attrgetter("cum_logprob"), reverse=True)

    def _hypothesis(self, one: Continuation, token_ids: list[int]) -> BeamHypothesis:
        return BeamHypothesis(
            token_ids=[*token_ids, one.token_id],
            cum_logprob=one.cum_logprob,
            stop_reason=self._stop_reasons.get(one.token_id),
            is_stopped=one.token_id in self._stop_reasons,
        )
