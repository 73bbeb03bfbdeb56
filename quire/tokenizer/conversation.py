"""What a caller may send as a conversation: bounded, checked, and copied into plain JSON data.

Templates are not trusted, so they see copies without methods of their own. Every refusal names the place: the path to
it is put together while the error passes the levels above, and cut short, so that checking is linear whatever the keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from quire.errors import InvalidParameter, InvalidUnicode, RequestError, UnsupportedFeature, shown
from quire.tokenizer.tokenizer import without_marks
from quire.utils.cancellation import check_cancelled
from quire.utils.json_text import NoJsonNumber, loads
from quire.utils.unicode import check_unicode

T = TypeVar("T")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Message = dict[str, Json]

MAX_DEPTH = 64
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Content parts of one message."""
MAX_OBJECTS = 1_024
"""Tools, documents, or variables for the template."""
MAX_VALUES = 100_000
"""Values in a conversation in all: each string, number, list, object and key is one."""
MAX_KEY_CHARACTERS = 1_024
MAX_PATH_CHARACTERS = 200
VALUES_PER_CHECK = 256
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> its field with the text."""


class Misfit(Exception):
    """What is wrong with a value, on its way up to where the value's name is known."""

    def __init__(
        self, problem: str, *steps: str | int, before: str = "", kind: type[InvalidParameter | UnsupportedFeature]
    ) -> None:
        super().__init__(problem)
        self.problem, self.before, self.kind = problem, before, kind
        self.steps: list[str | int] = list(reversed(steps))
        """Keys and indices, innermost first."""

    def as_error(self, name: str) -> RequestError:
        """The error, with the path to the value in the one named."""
        path = _path(name, self.steps)
        return self.kind(f"{self.before}{path}{self.problem}", parameter=path)


def unfit(problem: str, *steps: str | int) -> Misfit:
    """A value that is not allowed: `problem` follows its path."""
    return Misfit(problem, *steps, kind=InvalidParameter)


def _path(name: str, steps: list[str | int]) -> str:
    path = name
    for step in reversed(steps):
        path += f"[{step}]" if isinstance(step, int) else f".{_short(step, 64)}"
        if len(path) > MAX_PATH_CHARACTERS:
            return _short(path, MAX_PATH_CHARACTERS)
    return path


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextmanager
def named(name: str) -> Iterator[None]:
    """Make errors of misfits inside: they are in the field of a request with this name.

    Raises: InvalidParameter and UnsupportedFeature.
    """
    try:
        yield
    except Misfit as misfit:
        raise misfit.as_error(name) from misfit.__cause__


@contextmanager
def at(step: str) -> Iterator[None]:
    """Say of misfits inside that they are under this key."""
    try:
        yield
    except Misfit as misfit:
        misfit.steps.append(step)
        raise


def each_of(values: Iterable[T], convert: Callable[[T], Json]) -> list[Json]:
    """What `convert` makes of each value; misfits get the index."""
    results: list[Json] = []
    try:
        for value in values:
            results.append(convert(value))
    except Misfit as misfit:
        misfit.steps.append(len(results))
        raise
    return results


def checked_messages(messages: object) -> Sequence[object]:
    """The messages. Raises: InvalidParameter unless they are a list that is neither empty nor too long."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidParameter(f"messages must be a list of messages, got {kind_of(messages)}", parameter="messages")
    if not messages:
        raise InvalidParameter("messages must contain at least 1 item.", parameter="messages")
    _check_count(messages, "messages", MAX_MESSAGES)
    return messages


def _check_count(values: Sized, name: str, limit: int) -> None:
    if len(values) > limit:
        raise InvalidParameter(
            f"{name} has {len(values)} items; the limit is {limit}. Send fewer of them.", parameter=name
        )


@dataclass(slots=True)
class Copier:
    """Copies what one request brings, and counts it."""

    num_values: int = field(default=0, init=False)

    def objects(self, values: object, name: str) -> Json:
        """Copies of a list of objects; None stays None. Raises: InvalidParameter for anything else."""
        if values is None:
            return None
        if not isinstance(values, (list, tuple)):
            raise InvalidParameter(f"{name} must be a list of objects, got {kind_of(values)}", parameter=name)
        _check_count(values, name, MAX_OBJECTS)
        with named(name):
            return each_of(values, self.mapping)

    def variables(self, values: Mapping[str, object], name: str) -> dict[str, Json]:
        """A copy of an object with a limited number of fields. Raises: InvalidParameter."""
        _check_count(values, name, MAX_OBJECTS)
        with named(name):
            return self.mapping(values)

    def mapping(self, value: object) -> Message:
        """A copy of an object. Raises: Misfit for anything else."""
        if not isinstance(value, Mapping):
            self.plain(value)  # what is no JSON at all is told as such
            raise unfit(f" must be an object, got {kind_of(value)}")
        return cast(Message, self.plain(value))

    def plain(self, value: object, depth: int = 0) -> Json:
        """A copy made of plain JSON types only, which have no methods a template could misuse, without marks.

        Raises: Misfit for what is not JSON, not Unicode, or beyond a limit.
        """
        self._count()
        if isinstance(value, str):
            return _text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            raise unfit(f" is {value}, which is not JSON; numbers must be finite")
        if isinstance(value, (int, float)):
            return int.__int__(value) if isinstance(value, int) else float.__float__(value)
        if not isinstance(value, (list, tuple, Mapping)):
            raise unfit(f" must be made of JSON types (objects, lists, strings, numbers), got {kind_of(value)}")
        if depth == MAX_DEPTH:
            raise unfit(f" is nested deeper than {MAX_DEPTH} levels")
        if self.num_values + len(value) > MAX_VALUES:
            raise _too_many()
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        return each_of(value, lambda item: self.plain(item, depth + 1))

    def _mapping(self, values: Mapping[object, object], depth: int) -> Json:
        copies: dict[str, Json] = {}
        for key, item in values.items():
            self._count()
            name = _key(key)
            try:
                copies[name] = self.plain(item, depth + 1)
            except Misfit as misfit:
                misfit.steps.append(name)
                raise
        return copies

    def _count(self) -> None:
        self.num_values += 1
        if self.num_values % VALUES_PER_CHECK == 0:
            check_cancelled()
            if self.num_values > MAX_VALUES:
                raise _too_many()

    def tool_calls(self, calls: Json) -> Json:
        """Tool calls with their arguments as objects: templates write them out, clients send them as JSON text."""
        if not isinstance(calls, list):
            raise unfit(f" must be a list, got {kind_of(calls)}")
        return each_of(calls, self._tool_call)

    def _tool_call(self, call: Json) -> Json:
        if not isinstance(call, dict):
            raise unfit(f" must be an object, got {kind_of(call)}")
        with at("function"):
            return {**call, "function": self._function(call.get("function"))}

    def _function(self, function: Json) -> Json:
        if not isinstance(function, dict):
            raise unfit(f" must be an object with a name and arguments, got {kind_of(function)}")
        if not isinstance(function.get("name"), str):
            raise unfit(f" must be a string, got {kind_of(function.get('name'))}", "name")
        with at("arguments"):
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                parsed = _parsed(arguments)
                arguments = {} if parsed is None else self.plain(parsed)
            if not isinstance(arguments, dict):
                raise unfit(f" must be a JSON object, as it is or in a string, got {kind_of(arguments)}")
            return {**function, "arguments": arguments}


def _too_many() -> Misfit:
    return unfit(f": the conversation has more than {MAX_VALUES} values (texts, numbers, lists, objects and keys)")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise unfit(f" has a key that is not a string: {shown(key)}")
    if len(key) > MAX_KEY_CHARACTERS:
        raise unfit(f" has a key of {len(key)} characters; the limit is {MAX_KEY_CHARACTERS}")
    return _text(key)


def _text(text: str) -> str:
    try:
        check_unicode(text, "")
    except InvalidUnicode as error:
        raise Misfit(error.message, kind=InvalidUnicode) from None
    return without_marks(str.__str__(text))


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[{,:]', re.DOTALL)


def _parsed(text: str) -> object:
    """The JSON in a text, its values counted before they are made."""
    if sum(map(text.count, "[{,:")) > MAX_VALUES:
        num_values = 0
        for token in _TOKEN.finditer(text):
            num_values += token[0][0] != '"'
            if num_values > MAX_VALUES:
                raise _too_many()
            if num_values % VALUES_PER_CHECK == 0:
                check_cancelled()
    try:
        return loads(text or "{}")
    except json.JSONDecodeError as error:
        raise unfit(f" is not valid JSON: {error}") from error
    except RecursionError:
        raise unfit(" is nested too deeply") from None
    except NoJsonNumber as error:
        raise unfit(f" is not valid JSON: {error}") from None
    except ValueError:
        raise unfit(" has a number of too many digits") from None


def text_of_parts(parts: list[Json]) -> list[str]:
    """The texts of content parts. Raises: Misfit."""
    if len(parts) > MAX_PARTS:
        raise unfit(f" has {len(parts)} parts; the limit is {MAX_PARTS}")
    return cast("list[str]", each_of(parts, text_of_part))


def text_of_part(part: Json) -> str:
    """The text of a content part. Raises: Misfit."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise unfit(" must be an object with a type, such as text")
    name = TEXT_PARTS.get(kind)
    if name is None:
        raise Misfit(
            ': this model takes text only. Use parts of the form {"type": "text", "text": "..."}.',
            before=f"Unsupported content part type {kind[:64]!r} in ",
            kind=UnsupportedFeature,
        )
    text = part.get(name)
    if not isinstance(text, str):
        raise unfit(f" must be a string, got {kind_of(text)}", name)
    return text


def kind_of(value: object) -> str:
    """What a value is, in the words of an error message."""
    return "nothing" if value is None else f"a {type(value).__name__}"
