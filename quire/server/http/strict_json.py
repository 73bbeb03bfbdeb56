"""JSON texts, read strictly, within bounds that are counted while reading, and never for long at a time.

Strict: UTF-8, no key twice, no NaN, no number beyond a float's range, no half of a surrogate pair. What two readers
could understand differently is refused.

A small text is read by `json.loads`. It holds the interpreter's lock to its end, and with it every stream of the
process, so a large text is walked here in Python, which gives the lock up, and only pieces of it are handed to C.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from quire.errors import shown
from quire.server.http.errors import ApiError
from quire.utils.cancellation import check_cancelled
from quire.utils.json_text import NoJsonNumber, finite, no_constant

MAX_DEPTH = 64
MAX_KEYS = 4096
"""Of one object."""
MAX_KEY = 1024
"""Characters of a key."""
MAX_STRING = 4 << 20
"""Bytes of a string as it is written: a text of four million tokens has about as many."""
CONTAINER_COST = 4
"""A container takes the memory of so many other values."""
SMALL = 16 << 10
"""Bytes of a text that is read at once."""
PIECE = 64 << 10
"""Bytes of a larger text that are handed to C at once, at most."""
_RUN = 8 << 10
"""The same of a list of numbers: each costs more than a character does."""

_SPACE = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_ESCAPED = re.compile(
    rb'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Text with escapes; a surrogate only as part of a pair."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F])|.)")
"""One escape, or a pair of surrogates; the group is half of a pair."""
_SCALAR = re.compile(rb"-?[0-9][-+.0-9eE]*|true|false|null|-?Infinity|NaN")
_SIMPLE = re.compile(rb'(?:(?:[-+.0-9a-zA-Z]+|"[^"\\\x00-\x1f]*")[ \t\n\r]*,[ \t\n\r]*)+')
"""Items of a list, each with its comma: scalars, and strings without escapes."""
_PAIRS = re.compile(
    rb'(?:"[^"\\\x00-\x1f]*"[ \t\n\r]*:[ \t\n\r]*(?:[-+.0-9a-zA-Z]+|"[^"\\\x00-\x1f]*")[ \t\n\r]*,[ \t\n\r]*)+'
)
"""The same of an object."""
_SPACES = b" \t\n\r"


def read_json(data: bytes | bytearray, max_values: int) -> tuple[Any, int]:
    """The value of a JSON text, and how many values it has at most, a container counted as several.

    Takes long for a text of more than `SMALL` bytes, asking `check_cancelled` all along.

    Raises: ApiError naming what is wrong, and the byte.
    """
    if len(data) <= SMALL:
        return _read_small(data), data.count(b",") + 1 + CONTAINER_COST * (data.count(b"[") + data.count(b"{"))
    reader = _Reader(data, max_values)
    return reader.read(), reader.count


def _read_small(data: bytes | bytearray) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(error.start) from None
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        place = len(text[: error.pos].encode())
        raise _not_json(f"Could not parse JSON: {error.msg} at byte {place}.") from None
    except RecursionError:
        raise _too_deep() from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value, MAX_DEPTH)
    if _SURROGATE.search(data):
        _check_surrogates(value, data)
    return value


def _loads(text: str) -> Any:
    """What `json` makes of it, strictly but for depth and surrogates."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=no_constant, parse_float=finite)
    except json.JSONDecodeError:
        raise
    except NoJsonNumber as error:
        raise _not_json(f"{error}.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _not_json(f"Could not parse JSON: {str(error).partition(';')[0]}.") from None


class _Reader:
    """Reads one large text, from its beginning to its end. Places are offsets in bytes."""

    def __init__(self, data: bytes | bytearray, max_values: int) -> None:
        self._data = data
        self._max_values = max_values
        self.count = 0
        """Values so far."""

    def read(self) -> Any:
        """The value of the whole text."""
        value, end = self._value(self._skip(0), MAX_DEPTH)
        end = self._skip(end)
        if end < len(self._data):
            raise _malformed("Extra data", end)
        return value

    def _value(self, place: int, room: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        check_cancelled()
        match self._data[place : place + 1]:
            case b'"':
                self._charge(1)
                return self._string(place + 1, MAX_STRING)
            case b"[":
                return self._list(place + 1, room)
            case b"{":
                return self._dict(place + 1, room)
            case _:
                self._charge(1)
                return self._scalar(place)

    def _list(self, place: int, room: int) -> tuple[list[Any], int]:
        self._enter(room)
        items: list[Any] = []
        place = self._skip(place)
        if self._data[place : place + 1] == b"]":
            return items, place + 1
        while True:
            place = self._skip(self._simple(items, place))
            item, place = self._value(place, room - 1)
            items.append(item)
            place = self._skip(place)
            mark = self._data[place : place + 1]
            if mark == b"]":
                return items, place + 1
            if mark != b",":
                raise _malformed("Expecting ',' delimiter", place)
            place = self._skip(place + 1)

    def _dict(self, place: int, room: int) -> tuple[dict[str, Any], int]:
        self._enter(room)
        items: dict[str, Any] = {}
        place = self._skip(place)
        if self._data[place : place + 1] == b"}":
            return items, place + 1
        while True:
            place = self._skip(self._pairs(items, place))
            key, place = self._key(place, items)
            items[key], place = self._value(place, room - 1)
            place = self._skip(place)
            mark = self._data[place : place + 1]
            if mark == b"}":
                return items, place + 1
            if mark != b",":
                raise _malformed("Expecting ',' delimiter", place)
            place = self._skip(place + 1)

    def _key(self, place: int, items: dict[str, Any]) -> tuple[str, int]:
        """The key that begins at a place, and where its value does."""
        if self._data[place : place + 1] != b'"':
            raise _malformed("Expecting property name enclosed in double quotes", place)
        key, place = self._string(place + 1, 6 * MAX_KEY)
        _check_key(key)
        if key in items:
            raise _twice(key)
        if len(items) >= MAX_KEYS:
            raise _too_many_keys()
        place = self._skip(place)
        if self._data[place : place + 1] != b":":
            raise _malformed("Expecting ':' delimiter", place)
        return key, self._skip(place + 1)

    def _string(self, begin: int, limit: int) -> tuple[str, int]:
        """The text that begins after a quote, and the place after the quote that ends it."""
        data, place = self._data, begin
        pieces: list[str] = []
        while True:
            check_cancelled()
            window = place + PIECE
            end = self._whole_characters(place, _PLAIN.match(data, place, window).end())  # type: ignore[union-attr]
            if data[end : end + 1] != b"\\":
                pieces.append(self._decoded(place, end))
            else:
                end = _ESCAPED.match(data, place, window).end()  # type: ignore[union-attr]
                end = self._whole_characters(place, end)
                pieces.append(self._unescaped(place, end))
            if end - begin > limit:
                raise _too_large(f"A string or key has more than {limit} bytes, the limit (at byte {begin}).")
            if data[end : end + 1] == b'"':
                return "".join(pieces), end + 1
            if end == place:
                raise self._bad_character(place)
            place = end

    def _whole_characters(self, begin: int, end: int) -> int:
        """The end of a piece, moved back to where a character begins."""
        data = self._data
        least = max(begin, end - 3)
        while end > least and end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        return end

    def _decoded(self, begin: int, end: int) -> str:
        try:
            return self._data[begin:end].decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(begin + error.start) from None

    def _unescaped(self, begin: int, end: int) -> str:
        text: str = json.loads(f'"{self._decoded(begin, end)}"')
        return text

    def _bad_character(self, place: int) -> ApiError:
        """Why a string cannot go on at a place."""
        found = self._data[place : place + 2]
        if not found:
            return _malformed("Unterminated string", place)
        if _SURROGATE.match(self._data, place):
            return _half(place)
        if found[0] < 0x20:
            return _malformed("Invalid control character", place)
        return _malformed("Invalid \\escape", place) if found[:1] == b"\\" else _not_utf8(place)

    def _scalar(self, place: int) -> tuple[Any, int]:
        """A number, or a name: whatever is no string and no container."""
        found = _SCALAR.match(self._data, place, place + PIECE)
        if found is None:
            raise _malformed("Expecting value", place)
        try:
            return _loads(found[0].decode()), found.end()
        except json.JSONDecodeError as error:
            raise _malformed(error.msg, place + error.pos) from None

    def _simple(self, items: list[Any], place: int) -> int:
        """Take several items of a list at once that hold no others, and go on behind them. Mutates items."""
        while found := _SIMPLE.match(self._data, place, place + _RUN):
            items += self._several(found, "[]")
            place = found.end()
        return place

    def _pairs(self, items: dict[str, Any], place: int) -> int:
        """The same for an object. Mutates items."""
        while found := _PAIRS.match(self._data, place, place + _RUN):
            several = self._several(found, "{}")
            for key in items.keys() & several.keys():
                raise _twice(key)
            items.update(several)
            if len(items) > MAX_KEYS:
                raise _too_many_keys()
            place = found.end()
        return place

    def _several(self, found: re.Match[bytes], brackets: str) -> Any:
        """The container of some items, each with its comma."""
        check_cancelled()
        begin = found.start()
        text = self._decoded(begin, begin + len(found[0].rstrip(_SPACES)) - 1)
        try:
            several = _loads(f"{brackets[0]}{text}{brackets[1]}")
        except json.JSONDecodeError as error:
            raise _malformed(error.msg, begin + len(text[: error.pos - 1].encode())) from None
        self._charge(len(several))
        return several

    def _skip(self, place: int) -> int:
        """Where white space ends."""
        if self._data[place : place + 1] not in _SPACES:
            return place
        while True:
            end = _SPACE.match(self._data, place, place + PIECE).end()  # type: ignore[union-attr]
            if end < place + PIECE:
                return end
            check_cancelled()
            place = end

    def _enter(self, room: int) -> None:
        if not room:
            raise _too_deep()
        self._charge(CONTAINER_COST)

    def _charge(self, count: int) -> None:
        self.count += count
        if self.count > self._max_values:
            raise _too_large(
                f"The request body has more than {self._max_values} values, the limit (an array or object counts as "
                f"{CONTAINER_COST}). Send less at once, or start with a larger --max-body-values."
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _twice(Counter(name for name, _ in pairs).most_common(1)[0][0])
    if len(pairs) > MAX_KEYS:
        raise _too_many_keys()
    for name in value:
        _check_key(name)
    return value


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY:
        raise _not_json(f"A key has {len(key)} characters; the limit is {MAX_KEY}.")


def _check_depth(value: Any, room: int) -> None:
    if not room:
        raise _too_deep()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, room - 1)


def _check_surrogates(value: Any, data: bytes | bytearray) -> None:
    """Refuse halves of surrogate pairs, in keys too."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _half(next((found.start() for found in _ESCAPE.finditer(data) if found[1]), 0)) from None


def _half(place: int) -> ApiError:
    return ApiError(
        400,
        "invalid_unicode",
        f"The request body contains an unpaired surrogate at byte {place}, which stands for nothing; remove it or "
        "replace it with U+FFFD.",
    )


def _twice(key: str) -> ApiError:
    return _not_json(f"Duplicate key {shown(key)}.")


def _too_many_keys() -> ApiError:
    return _not_json(f"An object has more than {MAX_KEYS} keys, the limit.")


def _too_large(message: str) -> ApiError:
    return ApiError(413, "content_too_large", message)


def _too_deep() -> ApiError:
    return _not_json(f"JSON is nested too deeply (limit {MAX_DEPTH}).")


def _not_utf8(place: int) -> ApiError:
    return _not_json(f"Request body is not valid UTF-8 (byte {place}).")


def _malformed(what: str, place: int) -> ApiError:
    return _not_json(f"Could not parse JSON: {what} at byte {place}.")


def _not_json(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)
