"""From the input items of a response to the messages of a conversation.

Items of one turn of the model (reasoning, text, calls) become one message, as chat templates expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import PromptTooLong, RequestError, shown
from quire.server.api.message_reader import is_whole
from quire.server.api.protocol.fields import MAX_LABEL
from quire.server.http.errors import ApiError, invalid, renamed
from quire.tokenizer.conversation import MAX_PARTS
from quire.tokenizer.unread_fields import MAX_WARNINGS, SENT_BACK, Unknown, unknown_in

OF_ITEMS = ("type", "id", "status")
"""Fields that only the API itself gives a message; chat templates do not see them."""
MAX_NAME = 256
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_FIELDS = {
    "function_call": {*OF_ITEMS, "call_id", "name", "arguments"},
    "function_call_output": {*OF_ITEMS, "call_id", "output"},
    "reasoning": {*OF_ITEMS, "summary", "content", "encrypted_content"},
}
"""Fields of items that have a meaning; of a message the chat template says which do."""
_NAMES = {"messages": "input", "prompt": "input"}
"""What the other APIs call a field -> what this one does."""
_PATH = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?(?:\.(\w+))?(.*)", re.DOTALL)


@dataclass(slots=True)
class _Place:
    """Where the parts of a message come from."""

    item: str
    fields: dict[str, str] = field(default_factory=dict)
    """Fields that have another name in the request, with that name."""
    calls: list[str] = field(default_factory=list)
    """The items of its calls."""

    def of(self, call: str | None, name: str | None, rest: str) -> str:
        """The request's name of a field."""
        if call is not None and int(call) < len(self.calls):
            return f"{self.calls[int(call)]}.{name}{rest}" if name else self.calls[int(call)]
        if name is None:
            return self.item
        return self.fields.get(name, f"{self.item}.{name}") + rest


class InputReader:
    """Makes messages of items, one after the other."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.unknown: list[Unknown] = []
        """Fields of items and of their parts that are not known; of messages the chat template says which are."""
        self._places: list[_Place] = []
        self._names: dict[str, str] = {}
        """Of the functions called, by call id."""
        self._thought: tuple[str, str] | None = None
        """Reasoning that belongs to the next message of the model, and its item."""
        self._can_join = False
        """The last message is the model's, and its turn may go on."""
        if instructions:
            self._add({"role": "system", "content": instructions}, _Place("instructions", {"content": "instructions"}))

    def read(self, item: Mapping[str, Any], place: str) -> None:
        """The next item; `place` names it in errors.

        Raises: ApiError.
        """
        kind = kind_of(item)
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            where = f"{place}.type"
            raise invalid(
                where, f"{where} {shown(kind)} is not supported; send {', '.join(KINDS)}.", "unsupported_content"
            )
        if kind in _FIELDS:
            given = {name: value for name, value in item.items() if value is not None}
            self._name_unknown(unknown_in(given, place, _FIELDS[kind] | SENT_BACK))
        reader(self, item, place)

    def finish(self) -> list[dict[str, Any]]:
        """The messages, when all items were read."""
        self._flush()
        return self.messages

    def renamed(self, error: RequestError) -> RequestError | ApiError:
        """An error about the messages as one about the items, or about the input as a whole."""
        path = "prompt" if isinstance(error, PromptTooLong) else str(error.fields.get("parameter"))
        place = _NAMES.get(path) or self.place_of(path)
        return error if place == path else renamed(error, path, place)

    def place_of(self, path: str) -> str:
        """A path in the messages as one in the items."""
        found = _PATH.fullmatch(path)
        if found is None or int(found[1]) >= len(self._places):
            return path
        return self._places[int(found[1])].of(found[2], found[3], found[4])

    def _warn(self, warning: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)

    def _name_unknown(self, found: Sequence[Unknown]) -> None:
        self.unknown += found[: MAX_WARNINGS - len(self.unknown)]

    def _add(self, message: dict[str, Any], place: _Place, *, can_join: bool = False) -> None:
        self.messages.append(message)
        self._places.append(place)
        self._can_join = can_join

    def _flush(self) -> None:
        """Reasoning that nothing of the model's follows is a message of its own."""
        if self._thought is not None:
            self._add_assistant({"content": ""}, self._thought[1])

    def _add_assistant(self, fields: dict[str, Any], place: str, *, can_join: bool = True) -> None:
        where = _Place(place)
        if self._thought is not None:
            text, thought_place = self._thought
            fields = {**fields, "reasoning_content": text}
            where.fields = dict.fromkeys(("reasoning_content", "thinking"), f"{thought_place}.content")
            self._thought = None
        self._add({"role": "assistant", **fields}, where, can_join=can_join)

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        message = {"content": None, **{name: value for name, value in item.items() if name not in OF_ITEMS}}
        if message.get("role") != "assistant":
            self._flush()
            self._add(message, _Place(place))
            return
        is_plain = message.keys() == {"role", "content"}
        last = self.messages[-1] if self._can_join and self._thought is None else {}
        if is_plain and "tool_calls" in last:  # between calls and their outputs there is no place for a message
            last["content"] = _joined(last["content"], message["content"], place)
            return
        self._add_assistant(message, place, can_join="tool_calls" not in message)

    def _call(self, item: Mapping[str, Any], place: str) -> None:
        call_id = _text(item, "call_id", place, MAX_LABEL)
        name = _text(item, "name", place, MAX_NAME)
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            where = f"{place}.arguments"
            raise invalid(where, f"{where} must be a JSON object in a string; got {shown(arguments)}.", "invalid_type")
        if item.get("status") == "incomplete" and not is_whole(arguments):
            self._warn(f"{place}: the call of {name} was cut and is left out")
            return
        if not self._can_join or self._thought is not None:
            self._add_assistant({"content": None}, place)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._places[-1].calls.append(place)
        self._names[call_id] = name

    def _call_output(self, item: Mapping[str, Any], place: str) -> None:
        call_id = _text(item, "call_id", place, MAX_LABEL)
        if call_id not in self._names:
            where = f"{place}.call_id"
            raise invalid(where, f"{where} is {shown(call_id)}, and no function_call before it has that call_id.")
        output = item.get("output")
        if not isinstance(output, (str, list)):
            where = f"{place}.output"
            raise invalid(where, f"{where} must be a string or an array of parts; got {shown(output)}.", "invalid_type")
        self._flush()
        message = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": output}
        self._add(message, _Place(place, {"content": f"{place}.output", "tool_call_id": f"{place}.call_id"}))

    def _reasoning(self, item: Mapping[str, Any], place: str) -> None:
        if item.get("encrypted_content") is not None:
            self._warn(f"{place}.encrypted_content has no effect")
        content = self._texts(item.get("content"), "reasoning_text", f"{place}.content")
        summary = self._texts(item.get("summary"), "summary_text", f"{place}.summary")
        text = "\n".join(content or summary)
        if not text:
            return
        if self._thought is None:
            self._thought = text, place
        else:
            self._thought = f"{self._thought[0]}\n{text}", self._thought[1]

    def _texts(self, parts: Any, kind: str, place: str) -> list[str]:
        """The texts of parts that are all of one type."""
        if parts is None:
            return []
        if not isinstance(parts, Sequence) or isinstance(parts, str) or len(parts) > MAX_PARTS:
            raise invalid(place, f"{place} must be an array of at most {MAX_PARTS} parts; got {shown(parts)}.")
        for index, part in enumerate(parts):
            where = f"{place}[{index}]"
            if not isinstance(part, Mapping) or part.get("type") != kind or not isinstance(part.get("text"), str):
                raise invalid(where, f"{where} must be an object of type {kind} with a text; got {shown(part)}.")
            self._name_unknown(unknown_in(part, where, ("type", "text")))
        return [part["text"] for part in parts]


_READERS: Mapping[str, Callable[[InputReader, Mapping[str, Any], str], None]] = {
    "message": InputReader._message,
    "function_call": InputReader._call,
    "function_call_output": InputReader._call_output,
    "reasoning": InputReader._reasoning,
}


def kind_of(item: Mapping[str, Any]) -> Any:
    """An item's type; messages and references may leave it out."""
    kind = item.get("type")
    if kind is not None:
        return kind
    return "item_reference" if "role" not in item and "id" in item else "message"


def listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An input item as a list of them shows it."""
    kind = kind_of(item)
    item = {"status": "completed", **item, "type": kind, "id": item.get("id") or item_id}
    if kind != "message" or not isinstance(item.get("content"), str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
    if item.get("role") == "assistant":
        part = {"type": "output_text", "text": item["content"], "annotations": []}
    return {**item, "content": [part]}


def _joined(first: Any, second: Any, place: str) -> Any:
    """The content of two messages as that of one."""
    if not isinstance(second, (str, list)):
        where = f"{place}.content"
        raise invalid(where, f"{where} must be a string or an array of parts; got {shown(second)}.", "invalid_type")
    if not first:
        return second
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(item: Mapping[str, Any], name: str, place: str, limit: int) -> str:
    """A field of an item that must hold a short text."""
    value = item.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= limit:
        where = f"{place}.{name}"
        raise invalid(where, f"{where} must be a string of 1 to {limit} characters; got {shown(value)}.")
    return value
