"""What an answer must follow beside its own form: calls follow their tools' schemas, and forms count after thinking."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import UnsupportedFeature
from quire.message_formats.format import CallSyntax
from quire.message_formats.thinking import marked_thinking
from quire.sampling_params import SamplingParams
from quire.server.api.call_grammars import call_grammar, takes_triggers
from quire.server.api.message_reader import Reading
from quire.server.api.output_form import Form
from quire.server.api.tools import Choice, ToolUse
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
        return _only_read(Constrained(params, reading), "a beam search follows no grammar")
    if params.structured_outputs is not None:
        if tools.choice is Choice.REQUIRED:
            raise invalid(
                "tool_choice",
                "tool_choice asks for calls, and structured_outputs for another form; send one.",
            )
        return _with_form(params, params.structured_outputs, reading, grammars)
    if not tools.may_call:
        return _free(params, reading)
    if params.ignore_eos:
        if tools.choice is Choice.REQUIRED:
            raise invalid(
                "tool_choice", "tool_choice needs a grammar, whose end ignore_eos would pass; send one of them."
            )
        return _only_read(_free(params, reading), "a grammar ends an output, and ignore_eos is set")
    return _with_calls(params, reading, grammars)


def form_beside(tools: ToolUse, form: Form | None) -> tuple[Form | None, list[str]]:
    """The form of an answer, and a warning where it has none: as in OpenAI's API, an answer that must be calls is no
    text that could have the form of `response_format`."""
    if form is None or form.place == "structured_outputs" or tools.choice is not Choice.REQUIRED:
        return form, []
    return None, [f"{form.place} has no effect: tool_choice asks for calls, and the answer is nothing else"]


def _with_calls(params: SamplingParams, reading: Reading, grammars: GrammarChecker) -> Constrained:
    syntax, tools = reading.message_format.calls, reading.tools
    assert syntax is not None
    is_required = tools.choice is Choice.REQUIRED
    gate = _gate(reading) if is_required else _call_gate(syntax, reading)
    free = _free(params, reading)
    why = "" if is_required else _why_only_read(syntax, reading, gate)
    if why:
        return _only_read(free, why)
    try:
        found = call_grammar(syntax, reading, grammars)
    except UnsupportedFeature as error:
        if is_required:
            raise
        return _only_read(free, error.message)
    if not is_required and not found.is_binding:
        return _only_read(replace(free, warnings=found.warnings), "strict is false for one of the tools")
    forms = StructuredOutputsParams(grammar=found.text)
    openings = () if gate is None else gate.openings
    is_whole = is_required or not syntax.bare or (bool(openings) and not syntax.has_other_openings)
    read = replace(reading, calls_as_they_come=is_whole)
    silent = _without_thoughts(reading, "the answer must be a call") if is_required else ()
    kept = Constrained(params.clone(structured_outputs=forms, gate=gate), read, (*silent, *found.warnings))
    if not is_whole:
        return _partly_kept(kept) if openings else _only_read(kept, "calls of this model may begin without a marker")
    return kept if is_required else _with_one_end(kept, grammars)


def _call_gate(syntax: CallSyntax, reading: Reading) -> Gate | None:
    """Where calls begin to count, in an answer that may have some; None where no place can be told from text."""
    thinking = _thinking(reading)
    triggers = tuple(reading.marks.marker(begin) for begin in syntax.begins)
    openings = syntax.openings(reading.tools.tools) if thinking is None else ()  # a model may think again before it
    if not triggers and not openings:
        return None
    is_repeated = reading.tools.is_parallel or _takes_headers(reading)
    return Gate(
        thinking=thinking,
        triggers=triggers,
        openings=openings,
        repeats=is_repeated,
        is_open=reading.in_header is True,
        takes_triggers=takes_triggers(syntax, reading),
    )


def _takes_headers(reading: Reading) -> bool:
    """Whether the grammar of calls takes the headers of all messages."""
    layout = reading.message_format.layout
    return layout is not None and layout.takes_headers


def _why_only_read(syntax: CallSyntax, reading: Reading, gate: Gate | None) -> str:
    """Why no grammar can keep calls that the answer may have; empty where one can."""
    if gate is None:
        return "no marker begins the calls of this model"
    thinking, marks = reading.message_format.thinking, reading.marks
    layout = reading.message_format.layout
    if layout is not None and layout.takes_headers:
        if reading.in_header is None:
            return "the prompt does not end where the header of a message begins"
        missing = [marker for marker in layout.frame if marker not in marks.ids]
        return f"this tokenizer has no token {missing[0]!r}" if missing else ""
    loose = [] if thinking is None else [one for one in thinking.ends_before if one not in marks.ids]
    return f"{loose[0]!r}, which ends the thinking, is no token" if loose else ""


def _with_one_end(kept: Constrained, grammars: GrammarChecker) -> Constrained:
    """In a layout of messages one call is all where the marker behind it ends the output, and else it may not be."""
    layout, tools = kept.reading.message_format.layout, kept.reading.tools
    if layout is None or not layout.takes_headers or tools.is_parallel:
        return kept
    if kept.reading.marks.ids.get(layout.call_end) in grammars.vocabulary().eos_token_ids:
        return kept
    why = f"{layout.call_end!r}, which ends a call, does not end outputs"
    return replace(kept, warnings=(*kept.warnings, f"parallel_tool_calls has no effect: {why}"))


def _partly_kept(found: Constrained) -> Constrained:
    """Calls that a grammar keeps only where they are spelled as the chat template has them."""
    how = "holds only for calls that begin as the chat template writes them; others are only read"
    return replace(found, warnings=(*found.warnings, *(f"{name} {how}" for name in _asked_of_grammars(found))))


def _asked_of_grammars(found: Constrained) -> list[str]:
    """What was asked for and only a grammar can keep."""
    tools = found.reading.tools
    asked = {
        "strict": any(tool.strict for tool in tools.tools.values()),
        "parallel_tool_calls": not tools.is_parallel,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _only_read(found: Constrained, why: str) -> Constrained:
    """Calls that no grammar keeps, with a warning for each thing that was asked for and only a grammar could keep."""
    warnings = [f"{name} has no effect: calls are only read here, since {why}" for name in _asked_of_grammars(found)]
    return replace(found, warnings=(*found.warnings, *warnings))


def _with_form(
    params: SamplingParams, form: StructuredOutputsParams, reading: Reading, grammars: GrammarChecker
) -> Constrained:
    """The answer has a form. Where that is JSON and the model may call tools, it is that or calls."""
    gate = _form_gate(reading)
    alone = Constrained(params.clone(gate=gate), reading, _without_thoughts(reading, "the answer has a form"))
    syntax = reading.message_format.calls
    if not reading.tools.may_call or syntax is None:
        return alone
    if form.kind not in ("json", "json_object"):
        return _only_read(alone, f"the answer follows a {form.kind}")
    if reading.message_format.layout is not None or form != StructuredOutputsParams(
        **{form.kind: getattr(form, form.kind)}
    ):
        unused = "tools: the answer has the form that was asked for, so it calls nothing"
        return replace(alone, warnings=(*alone.warnings, unused))
    found = call_grammar(syntax, reading, grammars, form)
    forms = StructuredOutputsParams(grammar=found.text)
    warnings = (*alone.warnings, *found.warnings)
    return Constrained(params.clone(structured_outputs=forms, gate=gate), reading, warnings)


def _without_thoughts(reading: Reading, why: str) -> tuple[str, ...]:
    """A warning where a model that may think cannot, since its answer follows a grammar from the first token on."""
    thinking = _thinking(reading)
    if thinking is None or thinking.is_open or thinking.begin.token_id is not None:
        return ()
    if reading.message_format.layout is not None:
        return ()
    marker = f"its marker {thinking.begin.text!r} is no token of its own, and the prompt has not begun it"
    return (f"the model does not think before it answers: {why}, {marker}",)


def _free(params: SamplingParams, reading: Reading) -> Constrained:
    """Nothing but a budget of thinking counts."""
    is_limited = params.thinking_token_budget is not None
    return Constrained(params.clone(gate=_gate(reading)) if is_limited else params, reading)


def _form_gate(reading: Reading) -> Gate | None:
    """Where the form of the answer begins to count."""
    layout = reading.message_format.layout
    if layout is not None and layout.answer:
        return Gate(triggers=(Marker(text=layout.answer),))
    return _gate(reading)


def _gate(reading: Reading) -> Gate | None:
    """What counts after the thinking; None where all counts from the start."""
    thinking = _thinking(reading)
    return None if thinking is None else Gate(thinking=thinking)


def _thinking(reading: Reading) -> Thinking | None:
    """How the thinking of this prompt's answer is marked."""
    known = marked_thinking(reading.message_format, reading.marks, reading.tokenizer)
    return None if known is None else replace(known, is_open=reading.in_thinking)
