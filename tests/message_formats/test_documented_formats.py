"""docs/tool_calls.md: its table lists every format, with calls that are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.message_formats.formats import CALLS
from quire.message_formats.grammars.argument_schema import argument_schema
from quire.message_formats.grammars.call_grammar import MAX_SCHEMA_CHARACTERS, MAX_TOOLS
from quire.message_formats.parts import Message
from quire.message_formats.tools import Tool
from tests.message_formats.families import marks_of, read

PAGE = (Path(__file__).parents[2] / "docs" / "tool_calls.md").read_text()
TABLE = PAGE.partition("| a call |\n|---|---|---|\n")[2].partition("\n\n")[0]
ROWS = {name.strip("` "): example.strip("` ") for name, _, example in (
    line.replace(r"\|", "\0").strip("| ").split("|") for line in TABLE.splitlines()
)}  # fmt: skip


def test_every_format_has_a_row_and_the_page_is_in_the_menu() -> None:
    assert list(ROWS) == sorted(CALLS)
    assert "tool_calls.md" in (Path(__file__).parents[2] / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", ROWS)
def test_the_example_is_a_call(name: str) -> None:
    written = ROWS[name].replace("\0", "|").replace("⏎", "\n")
    message = read(name, marks_of(name, as_tokens=False), [written])
    ((call,), text) = message.tool_calls, message.text
    assert (call.name, call.arguments, text) == ("get_weather", '{"city": "Paris"}', "")
    assert message == Message(tool_calls=[call])


def test_numbers_and_words_of_the_page() -> None:
    assert f"at most {MAX_TOOLS} tools" in PAGE
    assert f"at most {MAX_SCHEMA_CHARACTERS:,} characters" in PAGE
    tool = Tool(name="f", parameters={"properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(Exception, match="is not supported") as caught:
        argument_schema(tool, 0)
    assert str(caught.value).split(";")[0] in PAGE
