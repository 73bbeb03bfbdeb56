"""What `thinking_token_budget` and `gate` come to for one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sampling_params import SamplingParams
from quire.structured.grammar import Gate, Thinking

FIELD = "thinking_token_budget"


def gate_in_force(
    params: SamplingParams,
    known: Thinking | None,
    prompt_token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> Gate | None:
    """The gate of a request; `known` is how the model marks its thinking, for requests that do not say it. `decode`
    gives the text of a prompt.

    Raises: UnsupportedFeature, InvalidParameter.
    """
    gate, budget = gate_with_thinking(params, known, prompt_token_ids, decode), params.thinking_token_budget
    if gate is None or gate.thinking is None or budget is None:
        return gate
    thinking = gate.thinking
    limited = replace(thinking, budget=budget, forced=thinking.forced or _end_of(thinking))
    return replace(gate, thinking=limited)


def gate_with_thinking(
    params: SamplingParams,
    known: Thinking | None,
    prompt_token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> Gate | None:
    """The gate of a request, which says how the model marks its thinking where a budget counts.

    Raises: UnsupportedFeature.
    """
    gate = params.gate
    if params.thinking_token_budget is None or (gate is not None and gate.thinking is not None):
        return gate
    return replace(gate or Gate(), thinking=_of_prompt(known, prompt_token_ids, decode))


def _of_prompt(
    known: Thinking | None, prompt_token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> Thinking:
    if known is None:
        raise UnsupportedFeature(
            f"{FIELD} is not supported here: this engine was not told how the model marks its thinking. Start it with "
            "--reasoning-parser, or limit the whole answer with max_tokens.",
            parameter=FIELD,
        )
    return replace(known, is_open=_is_open(known, prompt_token_ids, decode))


def _is_open(known: Thinking, prompt_token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether a prompt ends inside the thinking, by the marker that comes last in it; `known` says it otherwise."""
    begin, end = known.begin.token_id, known.end.token_id
    if begin is not None and end is not None:
        marks = (token_id == begin for token_id in reversed(prompt_token_ids) if token_id in (begin, end))
        return next(marks, known.is_open)
    text = decode(prompt_token_ids)
    begun, ended = text.rfind(known.begin.text), text.rfind(known.end.text)
    return known.is_open if begun == ended else begun > ended


def _end_of(thinking: Thinking) -> tuple[int, ...]:
    if thinking.end.token_id is None:
        raise InvalidParameter(
            f"{FIELD} needs gate.thinking.forced, the tokens that end the thinking: its end marker "
            f"{thinking.end.text!r} is no token of its own",
            parameter=FIELD,
        )
    return (thinking.end.token_id,)
