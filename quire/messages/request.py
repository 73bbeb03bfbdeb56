"""Client -> core: what to run and what to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages.stats import RequestEffort, RequestStats
from quire.sampling_params import SamplingParams
from quire.structured.grammar import Grammar

MAX_PRIORITY = 2**31 - 1
"""Priorities are signed integers of 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamHypothesis:
    """A completion that a beam search has found."""

    token_ids: list[int]
    cum_logprob: float
    stop_reason: int | None = None
    is_stopped: bool = True
    """A token ended it; otherwise its length did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamProgress:
    """Where a beam search stands, beside the tokens of its running beams."""

    cum_logprobs: list[float]
    """Of the running beams, which are the branches 0, 1, ...; best first."""
    ended: list[BeamHypothesis] = field(default_factory=list)
    """In the order in which they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """What a request has given so far, for a core that takes it over: it goes on at exactly the next token."""

    branches: dict[int, list[int]] = field(default_factory=dict)
    """Output tokens of each branch that has not ended, also of those without any; empty before the request forks."""
    beams: BeamProgress | None = None
    """Of a beam search that has forked."""
    num_prompt_logprobs: int = 0
    """Prompt positions that were reported."""
    num_cached_tokens: int = -1
    """What was reported as found in the prefix cache; -1 before it was looked up."""
    stats: RequestStats | None = None
    effort: RequestEffort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A validated request: everything the core needs to run it, and to run it again.

    Filled by `InputProcessor`. No None is left that means "default": `max_tokens` and `seed` are set.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the output unless `ignore_eos`; the first is reported without a stop reason."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words` as token sequences, with and without a leading space."""
    allowed_tokens: bytes | None = None
    """`allowed_token_ids` as a bit for each token of the vocabulary, the lowest bit first; None allows all.
    `sampling_params` then has no list of them: 2**18 ids are 9 MB as a list and 32 KiB as bits."""
    grammar: Grammar | None = None
    """What `structured_outputs` came to, checked; None constrains nothing. `sampling_params` then has no
    `structured_outputs`."""
    cache_salt: str | None = None
    tenant: str = ""
    """Who asks, as the server tells clients apart: tenants share the engine evenly."""
    priority: int = 0
    """Lower ones are served first, where the engine serves by priority."""
    received_at: float = 0.0
    """When it came in, before it was read and tokenised."""
    arrived_at: float = 0.0
    progress: RequestProgress | None = None
    """None for a new request."""
    runs_alone: bool = False
    """Run it with nothing beside it until it has a new token: it may be what ended another core."""

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end a branch."""
        params = self.sampling_params
        return frozenset([*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)])

    @property
    def num_beam_candidates(self) -> int:
        """Continuations that a beam search must know of each beam: the `beam_width` best that do not end it are among
        them."""
        return self.sampling_params.num_sequences + len(self.ending_token_ids)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report per output position, -1 for all; None reports no logprobs."""
        params = self.sampling_params
        if params.use_beam_search:
            return -1 if params.logprobs == -1 else max(self.num_beam_candidates, params.logprobs or 0)
        return 0 if params.is_ranked and params.logprobs is None else params.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Stop a request, or only one of its branches (a stop string was found in its text)."""

    request_id: str
    branch: int | None = None
