"""`call_grammar`: what the calls in an answer must follow, with as much of the tools' schemas as can be kept.

The checks of one request have one budget of computing. Where it does not suffice for all schemas, tools are looked at
one by one, each with half of what is left: one that takes longer gives way, and what is left for the others is enough
if they are small. When hardly anything is left, all schemas give way. A strict tool gives way to nothing: the request
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.message_formats.format import CallSyntax
from quire.message_formats.grammars.argument_schema import field_of
from quire.message_formats.grammars.call_grammar import CallGrammar, without_ebnf
from quire.message_formats.tools import Tool
from quire.server.api.message_reader import Reading
from quire.server.api.tools import Choice
from quire.structured.checker import GrammarChecker
from quire.structured.checker_protocol import CPU_S, Verdict
from quire.structured.json_expression import json_expression
from quire.structured.json_schema import JsonSchema
from quire.structured.params import StructuredOutputsParams

BUDGET_S = 2 * CPU_S
"""Seconds of computing for the checks of a request's tools."""
LEAST_S = 0.02
"""No check is begun with less."""
MAX_NAMED = 5
"""Tools in a message."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The grammar of calls, or of calls and a form that the answer may have instead."""

    text: str
    is_binding: bool
    warnings: tuple[str, ...]


def call_grammar(
    syntax: CallSyntax, reading: Reading, grammars: GrammarChecker, form: StructuredOutputsParams | None = None
) -> Calls:
    """A grammar that was checked. Schemas that are too much for the grammar library give way, but for strict ones.

    Raises: InvalidParameter, UnsupportedFeature.
    """
    try:
        grammars.vocabulary()
    except UnsupportedFeature as error:
        reason = error.message.partition(": ")[2]
        raise UnsupportedFeature(f"tools cannot be kept by a grammar here: {reason}", parameter="tools") from None
    return _Request(syntax, reading, grammars, form).calls()


def takes_triggers(syntax: CallSyntax, reading: Reading) -> bool:
    """Whether what follows depends on the marker that begins a call. A grammar cannot take those that are of text and
    tokens."""
    is_plain = all(len(reading.marks.pieces(begin)) == 1 for begin in syntax.begins)
    is_one_thing = reading.message_format.layout is not None or len(syntax.begins) + bool(syntax.bare) < 2
    return bool(syntax.begins) and is_plain and not is_one_thing


class _Request:
    """The tools of a request, what is known of their schemas, and what is left of the budget."""

    def __init__(
        self, syntax: CallSyntax, reading: Reading, grammars: GrammarChecker, form: StructuredOutputsParams | None
    ) -> None:
        self._syntax, self._reading, self._form = syntax, reading, form
        self._grammars = grammars
        self._tools = reading.tools.tools
        self._left_s = BUDGET_S
        self._unkept: dict[str, str] = {}
        """Why, by the name of the tool."""
        self._cost_s: dict[str, float] = {}
        """Of the tools that were looked at."""
        if form is not None:
            self._left_s -= grammars.verdict(form).cpu_s  # it was checked before

    def calls(self) -> Calls:
        """See `call_grammar`."""
        while True:
            found = _calls(self._syntax, self._reading, self._unkept, self._form)
            params = StructuredOutputsParams(grammar=found.text)
            is_last = len(self._unkept) == len(self._tools)
            try:
                verdict = self._verdict(params, CPU_S if is_last else self._left_s)
                if verdict.grammar is not None:
                    return found
                if is_last:
                    why = f"{_TOO_MUCH}, though their arguments may be any JSON object. Send fewer tools"
                    error = UnsupportedFeature if verdict.is_unsupported else InvalidParameter
                    raise error(f"tools: {why}", parameter="tools")
                self._blame()
            except _UsedUpError:
                self._unkept = {**dict.fromkeys(self._tools, self._too_large()), **self._unkept}

    def _too_large(self) -> str:
        """The tools whose schemas took most of the budget."""
        places = {name: field_of(tool, index) for index, (name, tool) in enumerate(self._tools.items())}
        largest = sorted(self._cost_s.items(), key=lambda item: -item[1])[:MAX_NAMED]
        named = ", ".join(f"{places[name]} ({cost_s:.2g} s)" for name, cost_s in largest)
        return (
            f"the schemas of all tools may take {BUDGET_S:g} s to compile, and take longer; the largest are "
            f"{named or 'those of all together'}. Make them smaller or simpler"
        )

    def _verdict(self, params: StructuredOutputsParams, limit_s: float) -> Verdict:
        """A verdict that was remembered costs as much as when it was found, so equal requests fare alike.

        Raises: _UsedUpError.
        """
        if limit_s < LEAST_S:
            raise _UsedUpError
        verdict = self._grammars.verdict(params, min(limit_s, CPU_S))
        self._left_s -= verdict.cpu_s
        if not verdict.is_final:
            raise InvalidParameter(f"tools: {verdict.message}", parameter="tools")
        return verdict

    def _blame(self) -> None:
        """Find the tools that cannot be kept even alone, and why; all of them where only the sum is too much.

        Messages about grammars that are written here say nothing to a client, so a tool's schema is checked by itself.
        """
        num_unkept = len(self._unkept)
        for name, tool in self._tools.items():
            if name in self._cost_s:
                continue
            alone = replace(self._reading, tools=replace(self._reading.tools, tools={name: tool}))
            text = _calls(self._syntax, alone, {}).text
            verdict = self._verdict(StructuredOutputsParams(grammar=text), self._left_s / 2)
            self._cost_s[name] = verdict.cpu_s
            if verdict.grammar is None:
                self._unkept[name] = verdict.message if verdict.is_slow else self._why_unkept(tool)
                if tool.strict:
                    return  # it is refused
        if len(self._unkept) == num_unkept:
            self._unkept = dict.fromkeys(self._tools, _TOO_MUCH)

    def _why_unkept(self, tool: Tool) -> str:
        """Why the schema of a tool cannot be kept, with the JSON pointer where it is known."""
        params = StructuredOutputsParams(json={"type": "object", **tool.parameters})
        verdict = self._verdict(params, self._left_s / 2)
        if verdict.grammar is None:
            return verdict.message.removeprefix("structured_outputs.json: ")
        return "the schema is more than the grammar library can keep in the form in which this model writes calls"


class _UsedUpError(Exception):
    """Hardly anything is left of the budget."""


_TOO_MUCH = "the schemas of all tools together are more than the grammar library can keep"


def _calls(
    syntax: CallSyntax,
    reading: Reading,
    unkept: Mapping[str, str],
    form: StructuredOutputsParams | None = None,
) -> Calls:
    tools = reading.tools
    is_single = tools.is_named or not tools.is_parallel
    grammar = CallGrammar(
        reading.marks,
        list(tools.tools.values()),
        parallel=not is_single,
        unkept=unkept,
        has_thought=reading.in_thinking,
        max_thinking=reading.params.thinking_token_budget,
    )
    if form is not None:
        start = f"{grammar.rule(syntax.several(grammar))} | {grammar.rule(_json_of(form))}"
    elif tools.choice is Choice.REQUIRED:
        start = syntax.several(grammar)
    else:
        takes = takes_triggers(syntax, reading)
        begins = [(grammar.marker(begin) if takes else "", begin) for begin in syntax.begins]
        begins += [("", "")] if syntax.openings(tools.tools) else []
        starts = [grammar.rule(grammar.sequence(marker, syntax.rest(grammar, begin))) for marker, begin in begins]
        start = " | ".join(dict.fromkeys(starts))
    return Calls(grammar.text(start), grammar.is_binding, tuple(grammar.warnings))


def _json_of(form: StructuredOutputsParams) -> str:
    """JSON that has the form, which was checked."""
    root = {"type": "object"} if form.kind == "json_object" else json.loads(str(form.json))
    return without_ebnf(json_expression(JsonSchema(root, "json")))
