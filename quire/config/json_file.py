"""The JSON files of a model directory, read without trusting them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from quire.errors import ConfigError

MAX_JSON_BYTES = 16 << 20
"""Of a file; the largest known configurations of models and tokenizers have some 5 MB."""
MAX_JSON_DEPTH = 64
"""Lists and objects within each other."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
INTEGER_LIMIT = 2**63
"""Integers are smaller than this, and not below its negative: what is larger counts nothing, cannot be sent to a core,
and may be slow to read."""


def read_json_object(
    file: Path, remedy: str, error: type[ConfigError] = ConfigError, *, most_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any] | None:
    """The object in `file`, or None when there is no such file.

    Raises: `error` naming the file, what is wrong with it and the remedy.
    """
    try:
        data = read_bounded(file, most_bytes)
        value = None if data is None else parse_json(data)
        check_depth(value)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise error(f"{file} cannot be read: {reason}. {remedy}") from None
    if data is not None and not isinstance(value, dict):
        raise error(f"{file} must hold a JSON object, not {type(value).__name__}. {remedy}")
    return value


def read_bounded(file: Path, most_bytes: int) -> bytes | None:
    """The bytes of a regular file, or None when there is no such file.

    Raises: OSError; ValueError when it is none or too long.
    """
    if file.exists() and not file.is_file():  # a pipe would be waited for, a device might never end
        raise ValueError("it is no regular file")
    try:
        with file.open("rb") as stream:
            return read_all(stream, most_bytes)
    except FileNotFoundError:
        return None


def read_all(stream: IO[bytes], most_bytes: int) -> bytes:
    """All bytes of a file or pipe.

    Raises: OSError; ValueError when they are too many.
    """
    data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return data


def parse_json(data: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that JSON text stands for.

    Raises: ValueError for what is no JSON in UTF-8, is nested too deeply, or holds an integer beyond 64 bits or half a
        surrogate pair.
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=object_pairs_hook)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a text holds half a surrogate pair, which no Unicode text has") from None
    return value


def check_depth(value: object, most: int = MAX_JSON_DEPTH) -> None:
    """Refuse lists and objects that are nested too deeply for those who walk them.

    Raises: ValueError.
    """
    level: list[object] = [value]
    for _ in range(most + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"lists or objects are nested more than {most} deep")


def _integer(text: str) -> int:
    if len(text) > 20 or not -INTEGER_LIMIT <= int(text) < INTEGER_LIMIT:
        raise ValueError(f"it holds an integer of {len(text.lstrip('-'))} digits, which is beyond 64 bits")
    return int(text)
