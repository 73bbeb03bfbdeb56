"""`StructuredOutputsParams`: the form that an output must have, as users hand it in. Named as in vLLM.

Only kinds of values and sizes are checked here, which costs next to nothing. Whether a schema can be kept is found out
by `checker`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.utils.lazy import nearest
from quire.utils.unicode import check_unicode

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is given."""
MAX_CHARACTERS = {"json": 1 << 18, "regex": 1 << 13, "grammar": 1 << 17, "structural_tag": 1 << 18, "choice": 1 << 17}
"""Of the text of each kind; of a list of choices together."""
MAX_CHOICES = 4096
MAX_WHITESPACE_PATTERN = 256
MAX_DEPTH = 64
"""Of JSON inside JSON."""
PLACE = "structured_outputs"
_SPACE = r"(?:[ \t\r\n]|\\[trns ]|\\x20)"
_WHITE_SPACE = re.compile(rf"(?:{_SPACE}|\[{_SPACE}+\]|\(\?:|[()|*+?]|\{{[0-9,]*\}})*")
_WHITE_SPACE_WORDS = r"a regular expression of JSON's white space: spaces, \t, \r, \n, \s for any of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.

    Raises: InvalidParameter naming the field, the value and the limit.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON Schema, as a text or as what such a text holds; kept as a text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar: Lark's, or EBNF as llama.cpp writes it (`root ::= ...`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which certain beginnings start parts that follow a schema."""
    disable_any_whitespace: bool = False
    """JSON without any white space. Otherwise a model may write one space, or a line break and up to 16 spaces, where
    JSON allows white space."""
    disable_additional_properties: bool = False
    """Objects have no properties but those that their schema lists, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand where JSON allows white space; of nothing but such."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidParameter(
                f"{PLACE} needs exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none of them'}",
                parameter=PLACE,
            )
        (kind,) = given
        object.__setattr__(self, kind, _READERS[kind](kind, getattr(self, kind)))
        self._check_modifiers()

    def _check_modifiers(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "True or False", getattr(self, name))
        pattern = self.whitespace_pattern
        if pattern is not None:
            _read_text("whitespace_pattern", pattern, MAX_WHITESPACE_PATTERN)
            if not _WHITE_SPACE.fullmatch(pattern):
                raise _wrong("whitespace_pattern", _WHITE_SPACE_WORDS, pattern)
            if self.disable_any_whitespace:
                raise InvalidParameter(
                    f"{PLACE}: whitespace_pattern has no effect with disable_any_whitespace; leave one of them out",
                    parameter=f"{PLACE}.whitespace_pattern",
                )
        if self.disable_additional_properties and self.kind == "json_object":
            raise InvalidParameter(
                f"{PLACE}: disable_additional_properties has no effect with json_object, whose properties no schema "
                "lists; leave it out, or send a schema as json",
                parameter=f"{PLACE}.disable_additional_properties",
            )
        changed = [field.name for field in fields(self) if field.name not in KINDS]
        for name in changed:
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise InvalidParameter(
                    f"{PLACE}: {name} is for json and json_object, and here the output follows {self.kind}; leave it "
                    "out",
                    parameter=f"{PLACE}.{name}",
                )

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def num_characters(self) -> int:
        """Of all texts."""
        value = getattr(self, self.kind)
        return sum(map(len, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0

    def __hash__(self) -> int:
        return hash((self.json, self.regex, self.grammar, self.structural_tag, tuple(self.choice or ())))  # all texts

    @classmethod
    def of(cls, given: object) -> StructuredOutputsParams:
        """From such an object or a mapping of its fields.

        Raises: InvalidParameter.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InvalidParameter(
                f"{PLACE} must be StructuredOutputsParams, a mapping of its fields or None, got {shown(given)} "
                f"({type(given).__name__})",
                parameter=PLACE,
            )
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise InvalidParameter(
                    f"{PLACE} has no field {shown(name)}{nearest(str(name), names)}", parameter=f"{PLACE}.{name}"[:200]
                )
        return cls(**given)


def _wrong(name: str, expected: str, value: object) -> InvalidParameter:
    return InvalidParameter(
        f"{PLACE}.{name} must be {expected}, got {shown(value)} ({type(value).__name__})", parameter=f"{PLACE}.{name}"
    )


def _too_long(name: str, number: int, limit: int, what: str = "characters") -> InvalidParameter:
    return InvalidParameter(f"{PLACE}.{name} has {number} {what}, the limit is {limit}", parameter=f"{PLACE}.{name}")


def _read_text(name: str, value: object, limit: int = 0) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    limit = limit or MAX_CHARACTERS[name]
    if len(value) > limit:
        raise _too_long(name, len(value), limit)
    check_unicode(value, f"{PLACE}.{name}")
    if not (value if name in ("regex", "whitespace_pattern") else value.strip()):
        raise InvalidParameter(f"{PLACE}.{name} must not be blank", parameter=f"{PLACE}.{name}")
    if "\0" in value:
        raise InvalidParameter(f"{PLACE}.{name} must not hold the character U+0000", parameter=f"{PLACE}.{name}")
    return value


def _read_json(name: str, value: object) -> str:
    """Data becomes text in the order in which it stands: an output has its properties in the schema's order."""
    if isinstance(value, str):
        return _read_text(name, value)
    if not isinstance(value, (dict, bool)):
        raise _wrong(name, "a JSON Schema as a mapping or as text", value)
    pieces, total = [], 0
    try:
        for piece in _checked_depth(name, value):
            total += len(piece)
            if total > MAX_CHARACTERS[name]:
                raise _too_long(name, total, MAX_CHARACTERS[name], "characters and more")
            pieces.append(piece)
    except (TypeError, ValueError) as error:
        raise InvalidParameter(f"{PLACE}.{name} is not JSON: {error}", parameter=f"{PLACE}.{name}") from None
    text = "".join(pieces)
    check_unicode(text, f"{PLACE}.{name}")
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _checked_depth(name: str, value: object) -> Iterable[str]:
    """The pieces of the text, written as they are asked for."""
    try:
        yield from _ENCODER.iterencode(value)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from None


def _read_choice(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(name, "a list of strings", value)
    if not 0 < len(value) <= MAX_CHOICES:
        raise InvalidParameter(
            f"{PLACE}.{name} must hold 1 to {MAX_CHOICES} texts, got {len(value)}", parameter=f"{PLACE}.{name}"
        )
    for text in value:
        if not isinstance(text, str):
            raise _wrong(name, "a list of strings", text)
        if not text:
            raise InvalidParameter(f"{PLACE}.{name} must not hold an empty text", parameter=f"{PLACE}.{name}")
    total = sum(map(len, value))
    if total > MAX_CHARACTERS[name]:
        raise _too_long(name, total, MAX_CHARACTERS[name])
    for text in value:
        check_unicode(text, f"{PLACE}.{name}")
    return list(dict.fromkeys(value))


def _read_true(name: str, value: object) -> bool:
    if value is not True:
        raise _wrong(name, "True or left out", value)
    return value


_READERS: dict[str, Callable[[str, object], object]] = {
    "json": _read_json,
    "regex": _read_text,
    "choice": _read_choice,
    "grammar": _read_text,
    "json_object": _read_true,
    "structural_tag": _read_json,
}
