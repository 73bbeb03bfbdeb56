"""What Anthropic's API calls messages, tools and blocks, from and to the forms that all APIs share here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError, shown
from quire.message_formats.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.server.api.message_reader import input_of
from quire.server.api.protocol.anthropic import CountTokensRequest
from quire.server.api.tools import NO_TOOLS, Choice, ToolUse, check_count, read_tool, tool_use
from quire.server.http.errors import ApiError, invalid, renamed
from quire.tokenizer.unread_fields import OF_MESSAGE, SENT_BACK, Unknown, unknown_in

_PATH = re.compile(r"messages\[([0-9]{1,6})\](.*)", re.DOTALL)
_BLOCK = re.compile(r"\.content\[([0-9]{1,6})\](.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a message comes from."""

    message: str
    content: str
    blocks: Sequence[str] | None = None
    """Of its content; None: all that stand there."""

    def of(self, path: str) -> str:
        """A path in the message as one in the request."""
        block = _BLOCK.fullmatch(path)
        if block is not None and self.blocks is not None and int(block[1]) < len(self.blocks):
            return self.blocks[int(block[1])] + block[2]
        if path.startswith(".content"):
            return self.content + path.removeprefix(".content")
        return self.message + path


class Messages:
    """The messages of a request in OpenAI's form, the system prompt first.

    Raises: ApiError naming the block.
    """

    def __init__(self, body: CountTokensRequest) -> None:
        self.messages: list[dict[str, Any]] = []
        self.unknown: list[Unknown] = []
        """Fields of blocks that are not known, or have no effect."""
        self._places: list[_Place] = []
        if body.system:
            self._add({"role": "system", "content": body.system}, _Place("system", "system"))
        for index, message in enumerate(body.messages):
            self._add_message(message, f"messages[{index}]")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors about `messages` name those of the request."""
        try:
            yield
        except RequestError as error:
            path = str(error.fields.get("parameter"))
            place = self.place_of(path)
            if place == path:
                raise
            raise renamed(error, path, place) from None

    def place_of(self, path: str) -> str:
        """A path in `messages` as one in the request."""
        found = _PATH.fullmatch(path)
        if found is None or int(found[1]) >= len(self._places):
            return path
        return self._places[int(found[1])].of(found[2])

    def _add(self, message: dict[str, Any], place: _Place) -> None:
        self.messages.append(message)
        self._places.append(place)

    def _add_message(self, message: dict[str, Any], place: str) -> None:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        if all(not isinstance(block, Mapping) or block.get("type") == "text" for block in blocks):
            self._add(message, _Place(place, f"{place}.content"))
        elif message.get("role") == "assistant":
            self._add_assistant(message, blocks, place)
        else:
            self._add_user(message, blocks, place)

    def _add_assistant(self, message: dict[str, Any], blocks: Sequence[Any], place: str) -> None:
        texts, thoughts, calls = {}, [], []
        for index, block in enumerate(blocks):
            where = f"{place}.content[{index}]"
            match _kind(block, where):
                case "thinking":
                    self.unknown += unknown_in(block, where, ("type", "thinking", "signature", "cache_control"))
                    thoughts.append(_text(block, "thinking", where))
                case "tool_use":
                    self.unknown += unknown_in(block, where, ("type", "id", "name", "input", "cache_control", "caller"))
                    calls.append(_call(block, where))
                case _:
                    texts[where] = block
        found: dict[str, Any] = {**message, "content": [*texts.values()] or None}
        if thoughts:
            found["reasoning_content"] = "\n".join(thoughts)
        if calls:
            found["tool_calls"] = calls
        self._add(found, _Place(place, f"{place}.content", [*texts]))

    def _add_user(self, message: dict[str, Any], blocks: Sequence[Any], place: str) -> None:
        """Results of tools are messages of their own, before what the user says."""
        role = message.get("role")
        if role != "user":
            where = f"{place}.role"
            raise invalid(where, f"{where} must be user, or assistant, beside such blocks; got {shown(role)}.")
        texts = {}
        for index, block in enumerate(blocks):
            where = f"{place}.content[{index}]"
            if _kind(block, where) != "tool_result":
                texts[where] = block
                continue
            known = (
                "type",
                "tool_use_id",
                "content",
                "cache_control",
                *(() if block.get("is_error") else ("is_error",)),
            )
            self.unknown += unknown_in(block, where, known)
            content = block.get("content")
            result = {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where)}
            self._add({**result, "content": "" if content is None else content}, _Place(where, f"{where}.content"))
        if texts:
            self._add({**message, "content": [*texts.values()]}, _Place(place, f"{place}.content", [*texts]))
        else:
            self.unknown += unknown_in(message, place, (*OF_MESSAGE, *SENT_BACK))


def _kind(block: Any, place: str) -> Any:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "redacted_thinking":
        raise ApiError(
            400, "unsupported_content", f"{place} holds thinking that only another server can read.", param=place
        )
    return kind


def _text(block: Mapping[str, Any], name: str, place: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise invalid(f"{place}.{name}", f"{place}.{name} must be a string; got {shown(text)}.")
    return text


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise invalid(f"{place}.input", f"{place}.input must be an object; got {shown(given)}.")
    function = {"name": _text(block, "name", place), "arguments": given}
    return {"id": _text(block, "id", place), "type": "function", "function": function}


def tools_of(body: CountTokensRequest) -> ToolUse:
    """The tools, and which of them may be called.

    Raises: ApiError naming the field.
    """
    choice = {"type": "auto"} if body.tool_choice is None else body.tool_choice
    kind = choice.get("type")
    parallel = choice.get("disable_parallel_tool_use")
    if parallel is not None and not isinstance(parallel, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise invalid(where, f"{where} must be true or false; got {shown(parallel)}.")
    if not body.tools:
        if kind not in ("auto", "none"):
            raise invalid("tool_choice", "tool_choice requires tools; send some, or leave it out.")
        return NO_TOOLS
    check_count(body.tools)
    tools = []
    for index, tool in enumerate(body.tools):
        if tool.get("type") not in (None, "custom"):
            raise ApiError(
                400,
                "unsupported_parameter",
                f"tools[{index}].type {shown(tool.get('type'))} is not supported: only tools that the client runs can "
                "be called here; they have an input_schema.",
                param=f"tools[{index}].type",
            )
        if tool.get("input_schema") is None:
            where = f"tools[{index}].input_schema"
            raise invalid(where, f"{where} is missing: the JSON Schema of the tool's arguments.")
        tools.append(read_tool(tool, f"tools[{index}]", parameters="input_schema"))
    names = [_text(choice, "name", "tool_choice")] if kind == "tool" else None
    return tool_use(tools, _choice(kind), names, parallel=not parallel, unknown=_unknown(body.tools, choice))


def _unknown(tools: Sequence[Any], choice: Mapping[str, Any]) -> list[Unknown]:
    """Fields that are not known. A name is one of a choice of type tool; prefixes are cached whoever asks for it."""
    known = ("type", "name", "description", "input_schema", "strict", "cache_control")
    found = [name for index, tool in enumerate(tools) for name in unknown_in(tool, f"tools[{index}]", known)]
    of_choice = {"type", "disable_parallel_tool_use", *(("name",) if choice.get("type") == "tool" else ())}
    return found + unknown_in(choice, "tool_choice", of_choice)


_CHOICES = {"auto": Choice.AUTO, "any": Choice.REQUIRED, "tool": Choice.REQUIRED, "none": Choice.NONE}


def _choice(kind: Any) -> Choice:
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice.type", f"tool_choice.type must be {', '.join(_CHOICES)}; got {shown(kind)}.")
    return _CHOICES[kind]


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """A whole message as blocks, one of text at least."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        kind, block = opened(part)
        if block is not None and (not blocks or kind == "tool_use" or blocks[-1]["type"] != kind):
            blocks.append(block)
        match part:
            case Text():
                blocks[-1]["text"] += part.text
            case Reasoning():
                blocks[-1]["thinking"] += part.text
            case CallArguments():
                blocks[-1]["input"] = input_of(part.text)
    return blocks or [{"type": "text", "text": ""}]


def opened(part: Part) -> tuple[str, dict[str, Any] | None]:
    """The kind of block that a part belongs to, and the empty block with which one begins."""
    match part:
        case Text():
            return "text", {"type": "text", "text": ""}
        case Reasoning():
            return "thinking", {"type": "thinking", "thinking": "", "signature": ""}
        case CallStart():
            return "tool_use", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        case CallArguments():
            return "tool_use", None


def delta_of(part: Part) -> dict[str, Any] | None:
    """What a part adds to its block."""
    match part:
        case Text():
            return {"type": "text_delta", "text": part.text}
        case Reasoning():
            return {"type": "thinking_delta", "thinking": part.text}
        case CallArguments():
            return {"type": "input_json_delta", "partial_json": part.text}
        case CallStart():
            return None
