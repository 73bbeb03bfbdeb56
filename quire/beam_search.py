"""`BeamSearchParams`, and what `LLM.beam_search` gives back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.outputs import TokenLogprobs
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.utils.lazy import nearest


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How the most likely completions of a prompt are searched for.

    Raises: InvalidParameter naming the field, the value and the allowed range.
    """

    beam_width: int
    """Beams, and completions that are returned; at least 2."""
    max_tokens: int
    """Upper limit of each completion; what the context has no room for is left out with a warning."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    temperature: float = 0.0
    """Only 0: a beam search draws nothing."""
    length_penalty: float = 1.0
    """A completion's score is the sum of its logprobs divided by the number of its tokens to this power."""
    early_stopping: bool | str = False
    """When the search ends: True as soon as beam_width beams have ended, False when no running beam is better than they
    are, "never" when no running beam can become better."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int = 0
    """Most likely tokens to report for each position beside the completion's own; -1 for the whole vocabulary."""

    def __new__(cls, *values: Any, **given: Any) -> BeamSearchParams:
        """Refuse an unknown name before the generated `__init__` raises its TypeError."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidParameter(
                    f"BeamSearchParams has no parameter {shown(name)}{nearest(name, known)}", parameter=name
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "logprobs"):
            if getattr(self, name) is None:
                raise InvalidParameter(f"{name} must be an integer, got None", parameter=name)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same request, as `LLM.generate` takes it."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        params = SamplingParams(**given, use_beam_search=True, output_kind=RequestOutputKind.FINAL_ONLY)
        return params.clone(n=self.beam_width)


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """One completion that a beam search has found."""

    tokens: list[int]
    """Prompt and completion, the end-of-sequence token included."""
    logprobs: list[TokenLogprobs]
    """For each token of the completion: {token id: Logprob} of the token and of the most likely ones."""
    cum_logprob: float
    """The sum of the logprobs of the completion's tokens."""
    score: float
    """What it is ranked by: `cum_logprob` divided by the number of the completion's tokens to the length penalty."""
    text: str | None
    """Of `tokens`; None without a tokenizer."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The completions of one prompt, best first."""

    sequences: list[BeamSearchSequence]
