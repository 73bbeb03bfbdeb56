"""Grammars in EBNF as llama.cpp writes it, in Lark's form.

The library converts rules. Of the characters in them it leaves to Lark and to Rust's regular expressions what these
mean: `[^a&&b]` would be any character, and `"\\u00e9"` an error.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.errors import InvalidParameter
from quire.structured.params import PLACE

FIELD = f"{PLACE}.grammar"
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|["\\\[\]nrt])'
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_TOKEN = re.compile(
    rf'#[^\r\n]*|"(?P<text>(?:{_ESCAPE}|[^"\\])*)"|\[(?P<negation>\^?)(?P<members>(?:{_ESCAPE}|[^\]\\])*)\]|.',
    re.DOTALL,
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = f"[\\x00-{chr(0x10FFFF)}]"
_GROUP = '("" '
"""Begins a group: the library leaves its parentheses out where it holds one thing, also where that is repeated."""


def is_ebnf(text: str) -> bool:
    """Whether a grammar is in this form."""
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """The grammar in Lark's form. Raises: InvalidParameter."""
    try:
        lark = gbnf_to_lark(_TOKEN.sub(_respelled, text))
    except InvalidParameter:
        raise
    except Exception as error:  # the converter raises what it comes to
        raise _refused(f"it is no EBNF: {error}") from None
    return lark.removeprefix("%llguidance {}")


def _respelled(found: re.Match[str]) -> str:
    """A token with characters that mean the same wherever the library puts them."""
    if found["text"] is not None:
        return f'"{"".join(map(_in_text, _characters(found["text"])))}"'
    if found["members"] is not None:
        return f"[{found['negation']}{_members(found['members'])}]"
    return {".": _ANY, "(": _GROUP}.get(found[0], found[0])


def _members(text: str) -> str:
    """The members of a class."""
    tokens, pieces = _CHARACTER.findall(text), []
    while tokens:
        pieces.append(_in_class(_character(tokens.pop(0))))
        if tokens[:1] == ["-"] and len(tokens) > 1:
            pieces.append(f"-{_in_class(_character(tokens[1]))}")
            del tokens[:2]
    return "".join(pieces)


def _characters(text: str) -> list[str]:
    return [_character(one) for one in _CHARACTER.findall(text)]


def _character(token: str) -> str:
    """What a character or an escape stands for. Raises: InvalidParameter for a number that no character has."""
    if token[0] != "\\":
        return token
    code = int(token[2:] or "0", 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _refused(f"{token} is no character")
    return chr(code) if token[2:] else _SHORT.get(token[1], token[1])


def _in_text(character: str) -> str:
    return f"\\{character}" if character in '"\\' else _in_class(character) if character < " " else character


def _in_class(character: str) -> str:
    """A character that means nothing else in a class."""
    return character if character.isalnum() or character > "\x7f" else f"\\x{ord(character):02x}"


def _refused(why: str) -> InvalidParameter:
    return InvalidParameter(f"{FIELD}: {why}", parameter=FIELD)
