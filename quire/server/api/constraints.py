"""What an answer must follow beside its own form: calls follow their tools' schemas, and forms count after thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.message_formats.call_grammar import CallGrammar
from quire.message_formats.format import CallSyntax
from quire.sampling_params import SamplingParams
from quire.server.api.message_reader import Reading
from quire.server.api.tools import Choice
from quire.server.http.errors import invalid
from quire.structured.checker import GrammarChecker
from quire.structured.grammar import Gate, Marker, Thinking
from quire.structured.params import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Constrained:
    """A request whose answer follows something."""

    params: SamplingParams
    reading: Reading
    warnings: tuple[str, ...] = ()


def constrained(params: SamplingParams, reading: Reading, grammars: GrammarChecker) -> Constrained:
    """Parameters with what calls must follow, and from where on it counts. May take seconds, off the event loop.

    Raises: RequestErrors naming the tool, the JSON pointer and the reason.
    """
    tools = reading.tools
    if params.use_beam_search:
        if tools.choice is Choice.REQUIRED:
            raise invalid("tool_choice", "tool_choice needs a grammar, and a beam search follows none; use auto.")
        return Constrained(params, reading)
    if params.structured_outputs is not None:
        if tools.choice is Choice.REQUIRED:
            raise invalid(
                "tool_choice",
                "tool_choice asks for calls, and response_format or structured_outputs for another form; send one.",
            )
        return Constrained(params.clone(gate=_form_gate(reading)), reading)
    if not tools.may_call:
        return _free(params, reading)
    return _with_calls(params, reading, grammars)


def _with_calls(params: SamplingParams, reading: Reading, grammars: GrammarChecker) -> Constrained:
    syntax, tools = reading.message_format.calls, reading.tools
    assert syntax is not None
    is_required = tools.choice is Choice.REQUIRED
    triggers = () if is_required else tuple(_marker(reading, begin) for begin in syntax.begins)
    free = _free(params, reading)
    if not is_required and not triggers:
        return free
    try:
        found = _checked(syntax, reading, grammars)
    except UnsupportedFeature as error:
        if is_required:
            raise
        return replace(free, warnings=(f"tools: calls are only read, not kept to their schemas: {error.message}",))
    if not is_required and not found.is_binding:
        return replace(free, warnings=found.warnings)
    gate = _gate(reading, triggers)
    forms = StructuredOutputsParams(grammar=found.text)
    read = replace(reading, calls_as_they_come=is_required or not syntax.bare)
    return Constrained(params.clone(structured_outputs=forms, gate=gate), read, found.warnings)


def _free(params: SamplingParams, reading: Reading) -> Constrained:
    """Nothing but a budget of thinking counts."""
    is_limited = params.thinking_token_budget is not None
    return Constrained(params.clone(gate=_gate(reading)) if is_limited else params, reading)


@dataclass(frozen=True, slots=True)
class _Found:
    text: str
    is_binding: bool
    warnings: tuple[str, ...]


def _checked(syntax: CallSyntax, reading: Reading, grammars: GrammarChecker) -> _Found:
    """The grammar of calls. Schemas that are too much for the grammar library give way, but for strict ones.

    Raises: InvalidParameter, UnsupportedFeature.
    """
    unkept: dict[str, str] = {}
    while True:
        found = _grammar(syntax, reading, unkept)
        try:
            grammars.check(StructuredOutputsParams(grammar=found.text))
        except (InvalidParameter, UnsupportedFeature) as error:
            if len(unkept) == len(reading.tools.tools) or not reading.tools.tools:
                raise type(error)(f"tools: {error.message}", parameter="tools") from None
            unkept = _blamed(syntax, reading, grammars, unkept, error)
        else:
            return found


def _grammar(syntax: CallSyntax, reading: Reading, unkept: Mapping[str, str]) -> _Found:
    tools = reading.tools
    is_single = tools.is_named or not tools.is_parallel
    grammar = CallGrammar(reading.marks, list(tools.tools.values()), parallel=not is_single, unkept=unkept)
    if tools.choice is Choice.REQUIRED:
        start = syntax.several(grammar)
    else:
        start = " | ".join(dict.fromkeys(syntax.rest(grammar, begin) for begin in syntax.begins))
    return _Found(grammar.text(start), grammar.is_binding, tuple(grammar.warnings))


def _blamed(
    syntax: CallSyntax,
    reading: Reading,
    grammars: GrammarChecker,
    unkept: Mapping[str, str],
    error: RequestError,
) -> dict[str, str]:
    """`unkept` and the tools that cannot be kept even alone; all of them where only the sum is too much."""
    found = dict(unkept)
    for name, tool in reading.tools.tools.items():
        if name in found:
            continue
        alone = replace(reading, tools=replace(reading.tools, tools={name: tool}))
        try:
            grammars.check(StructuredOutputsParams(grammar=_grammar(syntax, alone, {}).text))
        except (InvalidParameter, UnsupportedFeature) as why:
            found[name] = why.message
    return found if len(found) > len(unkept) else dict.fromkeys(reading.tools.tools, error.message)


def _form_gate(reading: Reading) -> Gate | None:
    """Where the form of the answer begins to count."""
    layout = reading.message_format.layout
    if layout is not None and layout.answer:
        return Gate(triggers=(Marker(text=layout.answer),))
    return _gate(reading)


def _gate(reading: Reading, triggers: tuple[Marker, ...] = ()) -> Gate | None:
    """What counts after the thinking, and after triggers where there are any; None where all counts from the start."""
    thinking = _thinking(reading)
    return None if thinking is None and not triggers else Gate(thinking=thinking, triggers=triggers)


def _thinking(reading: Reading) -> Thinking | None:
    """How the thinking of this prompt's answer is marked."""
    known = reading.message_format.thinking
    if known is None:
        return None
    end = reading.marks.ids.get(known.end)
    forced = reading.tokenizer.encode(known.end, add_special_tokens=False) if end is None else [end]
    return Thinking(
        begin=_marker(reading, known.begin),
        end=_marker(reading, known.end),
        is_open=reading.in_thinking,
        forced=tuple(forced),
    )


def _marker(reading: Reading, text: str) -> Marker:
    return Marker(text=text, token_id=reading.marks.ids.get(text))
