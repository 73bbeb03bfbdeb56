"""Core -> client: what is new after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from quire.messages.request import BeamHypothesis
from quire.messages.stats import RequestEffort, RequestStats, StepStats


class FinishReason(StrEnum):
    """Why a branch ended."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""
    ABORT = "abort"
    """The client asked."""
    ERROR = "error"
    """The request failed while running."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed while it ran."""

    message: str
    """What happened, in one sentence for the user."""
    is_request_fault: bool = False
    """The request's own parameters caused it; otherwise the model or the engine did."""


@dataclass(slots=True)
class PositionLogprobs:
    """Candidates at one position, best first after the chosen one.

    `token_ids[0]` is the token that stands there; the others are the most likely ones in order. `rank` is the chosen
    token's rank, 1 being the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int

    def of(self, token_id: int, count: int) -> PositionLogprobs:
        """The position with one of its candidates as the chosen token, and the `count` most likely (-1: all of them).

        Raises: ValueError when the token is none of the candidates.
        """
        assert self.rank == 1, "candidates are in order"
        index = self.token_ids.index(token_id)
        last = len(self.token_ids) if count == -1 else count
        return PositionLogprobs(
            [token_id, *self.token_ids[: min(index, last)], *self.token_ids[index + 1 : last]],
            [self.logprobs[index], *self.logprobs[: min(index, last)], *self.logprobs[index + 1 : last]],
            index + 1,
        )


@dataclass(slots=True)
class BeamStep:
    """How the running beams of a search follow from those before the step, best first.

    Their new tokens are the output's `new_token_ids`. Before the first step there is one beam, without tokens.
    """

    parents: list[int]
    """Per beam: which of the beams before it continues."""
    cum_logprobs: list[float]
    """Per beam: the sum of the logprobs of its tokens."""
    ended: list[BeamHypothesis] = field(default_factory=list)
    """Completions that the step has found."""
    candidates: list[PositionLogprobs] = field(default_factory=list)
    """Per beam before the step, when logprobs are asked for: its most likely continuations, the best one first."""


@dataclass(slots=True)
class EngineCoreOutput:
    """What is new for one branch of one request.

    A beam search tells of all its running beams together, as branch 0 and with `beam_step`. Its best completions follow
    when it ends, as the branches 0, 1, ...; their logprobs are those of the steps.
    """

    request_id: str
    branch: int
    new_token_ids: list[int]
    new_logprobs: list[PositionLogprobs] | None = None
    """One per new token, when asked for."""
    new_prompt_logprobs: list[PositionLogprobs] | None = None
    """For prompt positions that were computed in this step, in order; only on branch 0."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: Failure | None = None
    """For FinishReason.ERROR."""
    stats: RequestStats | None = None
    """The request's numbers up to here, at its first and last token and with `effort`: what else changes, tokens and
    the time of the last one, comes with the tokens. Owned by the core, which goes on counting."""
    effort: RequestEffort | None = None
    """When it has changed."""
    beam_step: BeamStep | None = None
    cum_logprob: float | None = None
    """Of a completion that a beam search has found: the sum of the logprobs of its tokens."""


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything one step has to say."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    stepped_at: float = 0.0
    """When these tokens were there, by the core's clock."""
    stats: StepStats | None = None
