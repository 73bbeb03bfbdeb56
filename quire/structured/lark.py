"""Grammars of requests, in Lark's form: what they hold means what it means in other fields.

The library's dialect of Lark reads regular expressions as Rust does, and has options that undo what is promised here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.structured.json_expression import OPTIONS, json_expression
from quire.structured.json_schema import JsonSchema, parse_json
from quire.structured.params import PLACE
from quire.structured.regex import translated

FIELD = f"{PLACE}.grammar"
_STRING = r'"(?:\\.|[^"\\\n])*"'
_PATTERN = r"/(?!/)(?:\\.|[^/\\\n])+/"
_TOKEN = re.compile(
    rf"(?://|#)[^\n]*|{_STRING}|<[^<>\s]+>|(?P<pattern>{_PATTERN})(?P<flags>[a-z]*)|%(?P<directive>[a-zA-Z]+)\s*"
    rf"|(?m:^)[ \t]*[?!]?\w+[ \t]*\[(?P<options>(?:{_STRING}|{_PATTERN}|[^\]\"/\n])*)\](?=[ \t]*:)"
    r"|[^/#\"<%\n]+|.",
    re.DOTALL,
)
_OPTION = re.compile(rf"(?P<name>\w+)[ \t]*(?:=[ \t]*(?P<value>{_STRING}|{_PATTERN}|[^,]*))?[ \t]*(?:,|$)")
_KEPT_OPTIONS = ("lazy", "max_tokens", "stop", "suffix")
"""Of a rule, in brackets. Others are about samplers and clients that the library's own users have."""
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_DECODER = json.JSONDecoder()


def checked_lark(text: str) -> str:
    """The grammar as the library reads it.

    Raises: InvalidParameter for what would mean something else there, or nothing.
    """
    return "".join(_pieces(text))


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while found := _TOKEN.match(text, at):
        at = found.end()
        if found["pattern"]:
            yield _pattern(found["pattern"][1:-1], found["flags"])
        elif found["directive"] == "llguidance":
            raise _refused("%llguidance", "is not supported: the engine sets the options of the grammar library")
        elif found["directive"] == "json":
            value, at = _json(text, at)
            yield found[0] + value
        else:
            _check_options(found["options"] or "")
            yield found[0]


def _pattern(pattern: str, flags: str) -> str:
    place = f"/{pattern}/"
    if "x" in flags:
        raise _refused(place, "sets the flag x, which is not supported; write the pattern in another way")
    meant = translated(pattern, partial(_refused, place))
    # The library may take the slash behind a backslash that is escaped for part of the pattern.
    spelled = _ESCAPE.sub(lambda found: r"\x5c" if found[0] == r"\\" else found[0], meant)
    return f"/{spelled}/{flags}"


def _json(text: str, at: int) -> tuple[str, int]:
    """The schema that stands at a place, as the library reads it, and where it ends."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        end = len(text)  # the error is found below
    root = parse_json(FIELD, text[at:end])
    if _is_ready(root):
        return text[at:end], end
    schema = JsonSchema(root, FIELD)
    schema.check()
    return json_expression(schema).removeprefix("%json "), end


def _is_ready(root: Any) -> bool:
    """Whether a schema was written by `json_expression`."""
    options = root.get("x-guidance") if isinstance(root, Mapping) else None
    return isinstance(options, Mapping) and {**options, **OPTIONS} == options


def _check_options(options: str) -> None:
    for found in _OPTION.finditer(options):
        if found["name"] not in _KEPT_OPTIONS:
            raise _refused(found["name"], "has no effect here; leave it out")
        if found["name"] == "stop" and found["value"] == '""':
            raise _refused("stop", "must not be empty: the output would end before its form is complete")


def _refused(place: str, why: str) -> InvalidParameter:
    return InvalidParameter(f"{FIELD}: {shown(place)}: {why}", parameter=FIELD)
