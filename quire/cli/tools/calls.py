"""Calls of a model: what is run, what is said of it, and what goes back to the model. Knows no tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from quire.cli.output import say
from quire.config.json_file import check_depth, parse_json
from quire.inputs import ChatMessage
from quire.message_formats.parts import ToolCall
from quire.utils.json_text import loads

if TYPE_CHECKING:
    from quire.cli.terminal.answer import Answer

RunCall = Callable[[str, str], str]
"""The result of a tool, by its name and the arguments as the model wrote them; mistakes are results, too."""
MAX_CALLS = 8
"""Calls of one message that are run."""


def has_calls(answer: Answer) -> bool:
    """Whether an answer ended with calls that are whole: cut and interrupted ones are not run."""
    return bool(answer.tool_calls) and answer.finish_reason in ("tool_calls", "stop")


def run_calls(answer: Answer, run: RunCall) -> list[ChatMessage]:
    """Run an answer's calls and show them; the messages with which the conversation goes on."""
    said = {"role": "assistant", "content": answer.text, "tool_calls": [written_call(c) for c in answer.tool_calls]}
    messages = [said]
    for index, call in enumerate(answer.tool_calls):
        say(f"call: {call.name} {call.arguments}")
        result = run(call.name, call.arguments) if index < MAX_CALLS else f"error: at most {MAX_CALLS} calls are run"
        say(f"result: {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return cast(list[ChatMessage], messages)


def written_call(call: ToolCall) -> dict[str, Any]:
    """A call as a request has it. Servers refuse arguments that are no object: the result says what was wrong."""
    arguments = call.arguments if _is_object(call.arguments) else "{}"
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _is_object(text: str) -> bool:
    try:
        value = parse_json(text)
        loads(text)  # refuses numbers that JSON does not have
        check_depth(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
