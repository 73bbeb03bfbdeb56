"""Sequences to sample from, without an engine."""

from collections.abc import Sequence

from quire.engine.front.input_processor import as_bits
from quire.messages.request import EngineCoreRequest
from quire.sampling.controls import Controls
from quire.sampling.row import SamplingRow
from quire.sampling_params import SamplingParams


def make_row(
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    branch: int = 0,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> SamplingRow:
    """A sequence that has produced `output` so far; further keywords are SamplingParams fields."""
    allowed = params.pop("allowed_token_ids", None)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**{"max_tokens": None, **params}),
        seed=seed,
        max_tokens=1000,
        eos_token_ids=eos_token_ids,
        bad_words_token_ids=bad_words_token_ids,
        allowed_tokens=as_bits(allowed, max(allowed) + 1) if isinstance(allowed, list) else None,
    )
    return SamplingRow(request, branch, len(prompt), [*prompt, *output], Controls(request))
