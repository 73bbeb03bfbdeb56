"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages.output import Failure
from quire.messages.stats import RequestEffort, RequestStats


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    """Natural logarithm of its probability, from the raw logits."""
    rank: int | None = None
    """1 is the most likely token."""
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The candidates of one position, by token id: the chosen token first, then the most likely ones in order."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end of sequence and for other reasons."""

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token; the first is None, since nothing predicts it. Of deltas only the first has them."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    seed: int | None = None
    """The seed in force: the one given, or the one drawn."""
    metrics: RequestStats | None = None
    """When what happened to it; with the last output."""
    effort: RequestEffort | None = None
    """What its prompt took, and why it waited; with the last output."""
    warnings: list[str] = field(default_factory=list)
    """What was adjusted or left out, in words."""
    failure: Failure | None = None
    """Of completions with the finish reason error: what happened, and whether the request itself is the cause."""

    def merged(self, later: RequestOutput) -> RequestOutput:
        """Two deltas as one: texts, tokens and logprobs of each completion joined, everything else from the later.

        Mutates: later, which is returned.
        """
        earlier = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            before = earlier.get(completion.index)
            if before is not None:
                completion.text = before.text + completion.text
                completion.token_ids = before.token_ids + completion.token_ids
                if completion.logprobs is not None and before.logprobs is not None:
                    completion.logprobs = before.logprobs + completion.logprobs
            earlier[completion.index] = completion
        if later.prompt_logprobs is None:
            later.prompt_logprobs = self.prompt_logprobs
        later.outputs = [earlier[index] for index in sorted(earlier)]
        return later
