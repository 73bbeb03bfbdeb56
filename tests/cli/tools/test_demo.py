"""The demonstration's tools give results, and tell the model what it got wrong."""

from __future__ import annotations

import datetime
import json
import re

import pytest

from quire.cli.tools.calls import written_call
from quire.cli.tools.demo import TOOLS, get_time, run_tool
from quire.message_formats.parts import ToolCall

NOON = datetime.datetime(2026, 11, 23, 12, 0, tzinfo=datetime.UTC)


def test_tools_are_offered_in_the_form_of_requests() -> None:
    for tool in TOOLS.values():
        function = tool.definition()["function"]
        assert function["name"] == tool.name
        assert function["parameters"]["required"] == [tool.parameter]


def test_the_time_depends_on_the_zone() -> None:
    assert get_time("UTC", NOON) == "12:00 on Monday 2026-11-23"
    assert get_time("Asia/Tokyo", NOON) == "21:00 on Monday 2026-11-23"
    assert get_time("Pacific/Auckland", NOON) == "01:00 on Tuesday 2026-11-24"


@pytest.mark.parametrize("zone", ["Mars/Base", "", "../../etc/passwd", "/etc/localtime", "Europe", "a\0b"])
def test_zones_that_do_not_exist_are_told(zone: str) -> None:
    with pytest.raises(ValueError, match="there is no time zone"):
        get_time(zone, NOON)


def test_calls_give_results() -> None:
    assert run_tool("calculate", '{"expression": "12 * 7"}') == "84"
    assert run_tool("calculate", '{"expression": 12}') == "12"
    assert re.fullmatch(r"\d\d:\d\d on \w+ \d{4}-\d\d-\d\d", run_tool("get_time", '{"timezone": "UTC"}'))


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("weather", "{}", "there is no tool 'weather'; there are calculate, get_time"),
        ("calculate", '{"expression": ', "the arguments are no JSON"),
        ("calculate", "", "the arguments are no JSON"),
        ("calculate", "[1]", 'the arguments must look like {"expression": "..."}'),
        ("calculate", "{}", 'the arguments must look like {"expression": "..."}'),
        ("calculate", '{"expression": "1", "more": 2}', "the arguments must look like"),
        ("calculate", json.dumps({"expression": ["1"] * 100}), "characters, 200 are allowed"),
        ("calculate", '{"expression": "1 / 0"}', "division by zero"),
        ("calculate", '{"expression": null}', "only numbers"),
        ("calculate", "[" * 100_000, "error: "),
        ("get_time", '{"timezone": "Nowhere"}', "there is no time zone 'Nowhere'"),
        ("get_time", '{"timezone": "\\ud800"}', "error: "),
    ],
)
def test_mistakes_are_told_to_the_model(name: str, arguments: str, told: str) -> None:
    result = run_tool(name, arguments)
    assert result.startswith("error: ")
    assert told in result


@pytest.mark.parametrize("arguments", ["", "{", "[]", "1", '"a"', "[" * 1000, '{"a": NaN}', '{"a": 1e999}'])
def test_broken_arguments_go_back_as_an_empty_object(arguments: str) -> None:
    assert written_call(ToolCall("1", "f", arguments))["function"]["arguments"] == "{}"
    assert written_call(ToolCall("1", "f", '{"a": 1}'))["function"]["arguments"] == '{"a": 1}'
