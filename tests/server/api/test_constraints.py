"""What calls must follow, where the grammar library is of no help: the reason is the true one, and names the tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.tools import Tool
from quire.sampling_params import SamplingParams
from quire.server.api.constraints import Constrained, constrained
from quire.server.api.message_reader import Reading
from quire.server.api.tools import Choice, tool_use
from tests.message_formats.families import marks_of

PROPERTIES = {"f": "a", "g": "b"}
"""Of the tools."""
MESSAGE = "structured_outputs.grammar: rule_3 at 1(2): lexer error"


class Library:
    """Stands in for the checker: says of each form whether it can be kept."""

    def __init__(self, refuses: Callable[[Any], str], *, vocabulary: str = "") -> None:
        self._refuses = refuses
        self._vocabulary = vocabulary

    def vocabulary(self) -> None:
        if self._vocabulary:
            raise UnsupportedFeature(self._vocabulary, parameter="structured_outputs")

    def check(self, form: Any) -> None:
        if problem := self._refuses(form):
            raise InvalidParameter(problem, parameter="structured_outputs")


def kept(library: Library, choice: Choice = Choice.AUTO, *, strict: bool | None = None) -> Constrained:
    tools = [
        Tool(name=name, parameters={"type": "object", "properties": {one: {"type": "string"}}}, strict=strict)
        for name, one in PROPERTIES.items()
    ]
    params = SamplingParams()
    reading = Reading(
        request_id="x",
        tokenizer=None,  # type: ignore[arg-type]
        message_format=MessageFormat(calls=CALLS["hermes"]),
        marks=marks_of("hermes", as_tokens=True),
        tools=tool_use(tools, choice, None, parallel=None),
        prompt_token_ids=[],
        params=params,
        in_thinking=False,
        calls_as_they_come=False,
    )
    return constrained(params, reading, library)  # type: ignore[arg-type]


def test_a_tokenizer_that_no_grammar_knows_is_the_reason() -> None:
    library = Library(lambda _: "", vocabulary="structured_outputs is not supported here: the tokenizer is odd")
    with pytest.raises(UnsupportedFeature, match="tools cannot be kept by a grammar here: the tokenizer is odd"):
        kept(library, Choice.REQUIRED)
    assert kept(library).warnings == ()
    (warning,) = kept(library, strict=True).warnings
    assert warning.startswith("strict has no effect: ")
    assert warning.endswith("the tokenizer is odd")


def test_a_tool_that_is_too_much_by_itself_is_named_with_the_reason_of_its_schema() -> None:
    def refuses(form: Any) -> str:
        if form.grammar is None:
            return "structured_outputs.json: '#/properties/a': it is odd"
        return MESSAGE if '"a"' in form.grammar else ""

    (warning,) = kept(Library(refuses)).warnings
    assert warning == (
        "tools[0].function.parameters: '#/properties/a': it is odd. The arguments of f may be any JSON object"
    )
    with pytest.raises(InvalidParameter, match="'#/properties/a': it is odd") as caught:
        kept(Library(refuses), strict=True)
    assert caught.value.parameter == "tools[0].function.parameters"


def test_tools_that_are_too_much_together_are_all_named() -> None:
    def refuses(form: Any) -> str:
        return MESSAGE if form.grammar is not None and '"a"' in form.grammar and '"b"' in form.grammar else ""

    warnings = kept(Library(refuses)).warnings
    assert [warning.rpartition(". ")[2] for warning in warnings] == [
        f"The arguments of {name} may be any JSON object" for name in "fg"
    ]
    assert all("together" in warning and "rule_" not in warning for warning in warnings)


def test_tools_that_cannot_be_kept_at_all_are_refused_without_the_words_of_the_library() -> None:
    with pytest.raises(InvalidParameter, match="Send fewer tools") as caught:
        kept(Library(lambda form: MESSAGE if form.grammar is not None else ""))
    assert "rule_" not in caught.value.message
