"""Regular expressions of requests as the grammar library reads them. What they mean is what Python's `re` says.

The library reads the syntax of Rust's `regex`, where some mean something else: `a++`, `x{ 1}`, `[a&&b]`, `\\w`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Refuse = Callable[[str], Exception]
"""Makes the error for a pattern, of the reason."""
_ESCAPE = r"\\(?:[pPxuUN]\{[^}]{0,64}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0[0-7]{0,2}|[0-9]+|.)"
_TOKEN = re.compile(rf"{_ESCAPE}|\{{[0-9]*(?:,[0-9]*)?\}}|\(\?(?:<?[=!]|P=|[>(]|[a-zA-Z]*)|.", re.DOTALL)
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_COUNT = re.compile(r"\{(?!\})[0-9]*(?:,[0-9]*)?\}")
_UNKEPT = (
    (re.compile(r"\(\?<?[=!]"), "looks around"),
    (re.compile(r"\\[1-9][0-9]*|\(\?P="), "is a back reference"),
    (re.compile(r"\\[bB]"), "is a boundary of words"),
    (re.compile(r"\\"), "escapes nothing"),
    (re.compile(r"\(\?>"), "is an atomic group"),
    (re.compile(r"\(\?\("), "is a condition"),
    (re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*"), "sets the flag x"),
)
"""Tokens outside classes that no grammar keeps, and what each does."""
_MEMBERS = {"w": r"\p{L}\p{N}_", "s": r"\s\x1c-\x1f"}
"""Members of the classes that differ: the library's `\\w` has combining marks, too, and its `\\s` no separators."""
_CLASSES = {f"\\{name}": f"[{members}]" for name, members in _MEMBERS.items()} | {
    f"\\{name.upper()}": f"[^{members}]" for name, members in _MEMBERS.items()
}
_CLASSES |= {r"\<": "<", r"\>": ">"}  # there they are boundaries of words
_IN_CLASS = {**_CLASSES, **{f"\\{name}": members for name, members in _MEMBERS.items()}, r"\b": r"\x08"}
_TO_ESCAPE = "[]&~-^"
"""Members of a class that the library might take for something else."""


def translated(pattern: str, refuse: Refuse) -> str:
    """The pattern in the library's syntax. What is an error in both is left to the library.

    Raises: what `refuse` makes, for what cannot be said there.
    """
    pieces, at, is_counted = [], 0, False
    while found := _TOKEN.match(pattern, at):
        token, start, at = found[0], at, found.end()
        is_count = token in ("*", "+", "?") or _COUNT.fullmatch(token) is not None
        why = "follows another quantifier" if is_count and is_counted else _why_unkept(token)
        if why:
            raise refuse(f"{token} at {start} {why}, which is not supported; write the pattern in another way")
        if is_count and pattern[at : at + 1] == "?":
            token, at = f"{token}?", at + 1
        elif token == "[":
            token, at = _class(pattern, at)
        pieces.append(_outside(token, is_count=is_count))
        is_counted = is_count
    return "".join(pieces)


def json_space(pattern: str, refuse: Refuse) -> str:
    """The same for a pattern of white space only, in which `\\s` is the white space that JSON allows."""
    return translated(pattern, refuse).replace(_MEMBERS["s"], r" \t\r\n")


def _why_unkept(token: str) -> str:
    return next((what for tokens, what in _UNKEPT if tokens.fullmatch(token)), "")


def _outside(token: str, *, is_count: bool) -> str:
    """A token that stands in no class."""
    if token[0] == "{":
        return token.replace("{,", "{0,") if is_count else f"\\{token}"
    return _CLASSES.get(token, token)


def _class(pattern: str, at: int) -> tuple[str, int]:
    """A class from behind its bracket on, and where it ends. One without an end stands as it is."""
    pieces = ["[^" if pattern[at : at + 1] == "^" else "["]
    first = at = at + len(pieces[0]) - 1
    while (found := _MEMBER.match(pattern, at)) and (found[0] != "]" or at == first):
        pieces.append(_member(found[0]))
        at = found.end()
        end = _MEMBER.match(pattern, at + 1) if pattern[at : at + 1] == "-" else None
        if end is not None and end[0] != "]":
            pieces.append(f"-{_member(end[0])}")
            at = end.end()
    return ("".join(pieces) + "]", at + 1) if found else (pattern[first - len(pieces[0]) :], len(pattern))


def _member(token: str) -> str:
    return f"\\{token}" if token in _TO_ESCAPE else _IN_CLASS.get(token, token)
