"""What calls must follow, where the grammar library is of no help: the reason is the true one, and names the tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.tools import Tool
from quire.sampling_params import SamplingParams
from quire.server.api.call_grammars import BUDGET_S
from quire.server.api.constraints import Constrained, constrained
from quire.server.api.message_reader import Reading
from quire.server.api.tools import Choice, tool_use
from quire.structured.checker_protocol import CPU_S, Verdict
from quire.structured.grammar import Grammar
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

    def verdict(self, form: Any, limit_s: float = CPU_S) -> Verdict:
        problem = self._refuses(form)
        return Verdict(message=problem) if problem else Verdict(grammar=Grammar(text="start:"))


class SlowLibrary(Library):
    """Each schema takes so many seconds, and all of a form are compiled."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__(lambda _: "")
        self._seconds = seconds
        self.spent_s = 0.0

    def verdict(self, form: Any, limit_s: float = CPU_S) -> Verdict:
        needed_s = sum(seconds for name, seconds in self._seconds.items() if f'"{name}"' in form.grammar)
        self.spent_s += min(needed_s, limit_s)
        if needed_s > limit_s:
            return Verdict(message=f"it takes longer than {limit_s:.2g} s", is_slow=True, cpu_s=limit_s)
        return Verdict(grammar=Grammar(text="start:"), cpu_s=needed_s)


def kept(
    library: Library,
    choice: Choice = Choice.AUTO,
    *,
    strict: bool | Mapping[str, bool] | None = None,
    properties: Mapping[str, str] = PROPERTIES,
) -> Constrained:
    tools = [
        Tool(
            name=name,
            parameters={"type": "object", "properties": {one: {"type": "string"}}},
            strict=strict.get(name) if isinstance(strict, Mapping) else strict,
        )
        for name, one in properties.items()
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


def test_a_few_tools_that_take_too_long_give_way_within_one_budget() -> None:
    seconds = {"slow_a": 9.0, "b": 0.01, "slow_c": 9.0, "d": 0.02}
    library = SlowLibrary(seconds)
    warnings = kept(library, properties={f"f_{name}": name for name in seconds}).warnings
    assert [warning.partition(": it takes longer than ") for warning in warnings] == [
        ("tools[0].function.parameters", ": it takes longer than ", _gives_way(warnings[0], "f_slow_a")),
        ("tools[2].function.parameters", ": it takes longer than ", _gives_way(warnings[1], "f_slow_c")),
    ]
    assert library.spent_s <= BUDGET_S


def _gives_way(warning: str, name: str) -> str:
    assert warning.endswith(f". The arguments of {name} may be any JSON object")
    return warning.partition(": it takes longer than ")[2]


def test_many_tools_that_take_too_long_all_give_way_within_one_budget_and_the_largest_are_named() -> None:
    seconds = {f"p{index}": 0.01 if index == 1 else 9.0 for index in range(100)}
    library = SlowLibrary(seconds)
    warnings = kept(library, properties={f"f_{name}": name for name in seconds}).warnings
    assert library.spent_s <= BUDGET_S
    assert len(warnings) == len(seconds)
    assert "takes longer than 0.35 s" in warnings[0]
    assert "the largest are tools[0].function.parameters (0.35 s), tools[2]" in warnings[99]


@pytest.mark.parametrize("index", [0, 99])
def test_a_strict_tool_is_refused_when_the_budget_does_not_suffice_and_what_was_too_large_is_named(index: int) -> None:
    seconds = {f"p{number}": 9.0 for number in range(100)}
    library = SlowLibrary(seconds)
    with pytest.raises(InvalidParameter, match=r"longer") as caught:
        kept(library, properties={f"f_{name}": name for name in seconds}, strict={f"f_p{index}": True})
    assert library.spent_s <= BUDGET_S
    assert caught.value.parameter == f"tools[{index}].function.parameters"
    assert "tools[0].function.parameters" in caught.value.message


@pytest.mark.parametrize("each", [0.08, 0.1])
def test_tools_of_which_each_is_small_are_too_much_only_together(each: float) -> None:
    seconds = {f"p{index}": each for index in range(10)}
    library = SlowLibrary(seconds)
    warnings = kept(library, properties={f"f_{name}": name for name in seconds}).warnings
    assert library.spent_s <= BUDGET_S
    assert len(warnings) == len(seconds)


def test_a_check_that_was_given_up_for_lack_of_processors_blames_no_tool() -> None:
    library = Library(lambda _: "")
    library.verdict = lambda *_: Verdict(message="busy machine", is_final=False)  # type: ignore[method-assign]
    with pytest.raises(InvalidParameter, match="tools: busy machine") as caught:
        kept(library)
    assert caught.value.parameter == "tools"
