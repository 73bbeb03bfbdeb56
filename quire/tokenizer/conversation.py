"""What a caller may send as a conversation: checked, and copied into plain JSON data.

Templates are not trusted, so they see copies without methods of their own. Every refusal names the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.utils.unicode import check_unicode

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Message = dict[str, Json]

MAX_DEPTH = 64
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> its field with the text."""


def checked_messages(messages: object) -> Sequence[object]:
    """The messages. Raises: InvalidParameter unless they are a list that is not empty."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidParameter(f"messages must be a list of messages, got {kind_of(messages)}", parameter="messages")
    if not messages:
        raise InvalidParameter("messages must contain at least 1 item.", parameter="messages")
    return messages


def plain_objects(values: object, name: str) -> Json:
    """Copies of a list of objects; None stays None. Raises: InvalidParameter for anything else."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)):
        raise InvalidParameter(f"{name} must be a list of objects, got {kind_of(values)}", parameter=name)
    return [plain_object(value, f"{name}[{i}]") for i, value in enumerate(values)]


def plain_object(value: object, where: str) -> dict[str, Json]:
    """A copy of an object, as `plain` makes it. Raises: InvalidParameter for anything else."""
    copied = plain(value, where)
    if not isinstance(copied, dict):
        raise InvalidParameter(f"{where} must be an object, got {kind_of(value)}", parameter=where)
    return copied


def plain(value: object, where: str, depth: int = 0) -> Json:
    """A copy made of plain JSON types only, which have no methods a template could misuse.

    Raises: InvalidParameter naming the place of what is not JSON or not Unicode.
    """
    if depth > MAX_DEPTH:
        raise InvalidParameter(f"{where.split('.')[0]} is nested deeper than {MAX_DEPTH} levels", parameter=where[:200])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, str):
        return _unicode(value, where)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_unicode(_key(k, where), where): plain(item, f"{where}.{k}", depth + 1) for k, item in value.items()}
    raise InvalidParameter(
        f"{where} must be made of JSON types (objects, lists, strings, numbers), got {kind_of(value)}", parameter=where
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidParameter(f"{where} has a key that is not a string: {key!r}", parameter=where)
    return key


def _unicode(text: str, where: str) -> str:
    check_unicode(text, where)
    return str.__str__(text)


def text_of_part(part: Json, where: str) -> str:
    """The text of a content part."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidParameter(f"{where} must be an object with a type, such as text", parameter=where)
    field = TEXT_PARTS.get(kind)
    if field is None:
        raise UnsupportedFeature(
            f"Unsupported content part type {kind[:64]!r} in {where}: this model takes text only. Use parts of the form"
            ' {"type": "text", "text": "..."}.',
            parameter=where,
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidParameter(f"{where}.{field} must be a string, got {kind_of(text)}", parameter=f"{where}.{field}")
    return text


def checked_tool_calls(calls: Json, where: str) -> Json:
    """Tool calls with their arguments as objects: templates write them out, clients send them as JSON text."""
    if not isinstance(calls, list):
        raise InvalidParameter(f"{where} must be a list, got {kind_of(calls)}", parameter=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Json, where: str) -> Json:
    if not isinstance(call, dict):
        raise InvalidParameter(f"{where} must be an object, got {kind_of(call)}", parameter=where)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    name = f"{where}.function.arguments"
    try:
        arguments = json.loads(cast(str, function["arguments"]) or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name} is not valid JSON: {error}", parameter=name) from error
    return {**call, "function": {**function, "arguments": plain(arguments, name)}}


def kind_of(value: object) -> str:
    """What a value is, in the words of an error message."""
    return "nothing" if value is None else f"a {type(value).__name__}"
