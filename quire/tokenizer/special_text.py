"""Text of a request that looks like special tokens: marked before a template sees it, told apart after.

Everything a request brings goes through `marked`, keys as well as values. Marks stand around special tokens, in
whatever case (a template may change it), and where a text begins or ends with a part of one (a template may put two
texts side by side). A template that cuts pieces out of a text can still join the parts of a token. Knows no
conversations and no templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from quire.tokenizer.conversation import Json
from quire.tokenizer.tokenizer import MARK_END, MARK_START, without_marks
from quire.utils.cancellation import check_cancelled

PIECE_CHARACTERS = 65_536
"""Text searched in one go, without a look at whether the client is still there."""
VALUES_PER_CHECK = 256


def marked(value: Json, tokens: Collection[str]) -> Json:
    """A copy in which special tokens, and parts of them at the ends of a text, have marks; in values and in keys."""
    if not tokens:
        return value
    specials = _specials(frozenset(tokens))
    num_values = 0

    def mark(item: Json) -> Json:
        nonlocal num_values
        num_values += 1
        if num_values % VALUES_PER_CHECK == 0:
            check_cancelled()
        if isinstance(item, str):
            return specials.mark(without_marks(item))
        if isinstance(item, list):
            return [mark(child) for child in item]
        return {str(mark(name)): mark(child) for name, child in item.items()} if isinstance(item, dict) else item

    return mark(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Specials:
    """What the special tokens of a model look like."""

    pattern: re.Pattern[str]
    longest: int
    heads: frozenset[str]
    """Beginnings of tokens, without the tokens themselves."""
    tails: frozenset[str]
    """Ends of tokens, in the same way."""
    first: frozenset[str]
    """The first characters of heads."""
    last: frozenset[str]
    """The last characters of tails."""

    def mark(self, text: str) -> str:
        """A text with its marks."""
        text = self._mark_ends(text)
        return _replaced(self.pattern, _between_marks, text, self.longest)

    def _mark_ends(self, text: str) -> str:
        body = text.rstrip()
        end = body[-self.longest :].lower()
        if not self.first.isdisjoint(end) and any(end[start:] in self.heads for start in range(len(end))):
            text = body + MARK_END + text[len(body) :]
        body = text.lstrip()
        start = body[: self.longest].lower()
        if not self.last.isdisjoint(start) and any(start[:stop] in self.tails for stop in range(1, len(start) + 1)):
            text = text[: len(text) - len(body)] + MARK_START + body
        return text


@lru_cache(maxsize=8)
def _specials(tokens: frozenset[str]) -> _Specials:
    heads = _telling(token[:end] for token in tokens for end in range(1, len(token)))
    tails = _telling(token[start:] for token in tokens for start in range(1, len(token)))
    return _Specials(
        pattern=re.compile(_pattern(tokens).pattern, re.IGNORECASE),
        longest=max(map(len, tokens)),
        heads=heads,
        tails=tails,
        first=frozenset(head[0] for head in heads),
        last=frozenset(tail[-1] for tail in tails),
    )


def _telling(parts: Iterable[str]) -> frozenset[str]:
    """Parts that are no ordinary words: those are also roles and types, which templates compare with."""
    return frozenset(part.lower() for part in parts if not part.isalnum())


def turn_marks(rendered: str, tokens: Collection[str]) -> str:
    """Marks around the template's special tokens instead of the request's; lone marks go."""
    special = _pattern(frozenset(token for token in tokens if len(token) > 1)).pattern
    pattern = re.compile(f"{MARK_START}({special}){MARK_END}|({special})|[{MARK_START}{MARK_END}]")
    return _replaced(pattern, _turned, rendered, max(map(len, tokens), default=0) + 2)


def with_marks(text: str) -> str:
    """A text in which marks were written as escapes (`repr`, JSON in ASCII), with the marks themselves."""
    return _ESCAPED_MARK.sub(_unescaped, text) if "\\ufdd" in text else text


_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd([01])")


def _unescaped(match: re.Match[str]) -> str:
    return match[1] + (MARK_START if match[2] == "0" else MARK_END)


def _between_marks(match: re.Match[str]) -> str:
    return f"{MARK_START}{match[0]}{MARK_END}"


def _turned(match: re.Match[str]) -> str:
    requests, templates = match.groups()
    return f"{MARK_START}{templates}{MARK_END}" if templates else requests or ""


def _replaced(pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], text: str, longest: int) -> str:
    """`pattern.sub`, piece by piece: matches are at most `longest` characters, and the same however text is cut."""
    if len(text) <= PIECE_CHARACTERS:
        return pattern.sub(replacement, text)
    parts: list[str] = []
    done = 0
    for match in _matches(pattern, text, longest):
        parts += text[done : match.start()], replacement(match)
        done = match.end()
    return "".join((*parts, text[done:]))


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    start = 0
    while start < len(text):
        check_cancelled()
        stop = start + PIECE_CHARACTERS
        for match in pattern.finditer(text, start, stop + longest):
            if match.start() >= stop:
                break
            yield match
            start = match.end()
        start = max(start, stop)


_Tree = dict[str, "_Tree"]


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Finds the longest of the tokens at each place; what they share at the front is compared once."""
    root: _Tree = {}
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(root) if root else "(?!)")


def _alternatives(tree: _Tree) -> str:
    """The regular expression of a tree of characters: longer tokens first, `""` where one may end."""
    branches = []
    for character, below in sorted(tree.items(), reverse=True):
        text = re.escape(character)
        while len(below) == 1 and "" not in below:
            ((character, below),) = below.items()
            text += re.escape(character)
        branches.append(text + (_alternatives(below) if below.keys() - {""} else ""))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
