"""`GatedMatcher`: a matcher that counts only in some parts of an output, and ends thinking that takes too long.

Where an output stands is a function of the grammar and the output's tokens, as for every matcher:

1. *Thinking*. It is there if the prompt ends inside it, or if the output begins with its begin marker, white space
   aside. Until the end marker everything is allowed, the end of the output too. When the budget is used up, the
   `forced` tokens are the only ones, one after the other; then the thinking has ended.
2. *Answer without triggers*. The grammar counts from the end of the thinking to the end of the output. If the output
   may begin with thinking, the begin marker's token is allowed as the first one beside what the grammar allows.
3. *Answer with triggers*. Everything is allowed until a trigger has come. From just after it the grammar counts, until
   it is complete and can take nothing more; then everything is allowed, and a trigger may come again, or the output
   ends if the gate does not repeat. Where the grammar is complete and could take more, it can only be continued, or
   the output ended: so end such grammars with a mark. The answer is open from its first token on where the prompt ends
   with a trigger. An *opening* is a trigger that counts only as the beginning of the answer, and that the grammar
   takes, too. White space before it and behind its first character is no part of it, nor are special tokens. A token
   that completes one and goes on as the grammar forbids is impossible.

A marker without a token of its own may end inside a token. The bytes after it belong to what follows: a trigger whose
further bytes the grammar cannot take was none, and a token with which the thinking would end and the answer begin in a
way that the grammar cannot take is impossible, white space aside, which is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.structured.backend import GrammarBackend, Masks, Matcher
from quire.structured.grammar import Gate, Grammar, Marker, Thinking, Vocabulary


class Part(Enum):
    """Where an output stands."""

    START = "start"
    """It may still begin with thinking."""
    THINKING = "thinking"
    FORCED = "forced"
    """The budget of the thinking is used up."""
    ANSWER = "answer"


class Anything:
    """The matcher of a grammar without text: all outputs fit."""

    error = ""
    is_free = True
    is_complete = False

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""

    def clone(self) -> Anything:
        """See `Matcher`."""
        return self


class Spelling:
    """The bytes of tokens, and the tokens of bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        """By token id, special tokens as they are spelled."""
        self._special_ids = vocabulary.special_ids
        self._completing: tuple[bytes, list[int]] | None = None
        """The last answer: a model has one mark for the end of its thinking."""
        self._holding: tuple[frozenset[int], list[int]] | None = None
        """The last answer: a format has one way to open calls."""

    @cached_property
    def of_bytes(self) -> dict[int, int]:
        """Byte -> a token that says just this byte."""
        single = (token_id for token_id, token in enumerate(self.tokens) if len(token) == 1)
        return {self.tokens[token_id][0]: token_id for token_id in single if token_id not in self._special_ids}

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for no text."""
        return token_id in self._special_ids

    def holding(self, last: frozenset[int]) -> list[int]:
        """Tokens that hold one of these bytes."""
        if self._holding is None or self._holding[0] != last:
            singles = [bytes([byte]) for byte in last]
            found = [i for i, token in enumerate(self.tokens) if any(one in token for one in singles)]
            self._holding = last, [token_id for token_id in found if token_id not in self._special_ids]
        return self._holding[1]

    def completing(self, text: bytes) -> list[int]:
        """Tokens that can complete a text and say more after it."""
        if self._completing is None or self._completing[0] != text:
            ends = tuple(text[start:] for start in range(1, len(text)))
            found = [i for i, token in enumerate(self.tokens) if token.startswith(ends) or text in token]
            self._completing = text, found
        return self._completing[1]


class Texts:
    """Markers without a token, in a stream of bytes."""

    def __init__(self, markers: Iterable[Marker]) -> None:
        self._texts = [marker.text.encode() for marker in markers if marker.token_id is None]
        self._kept = max(map(len, self._texts), default=1) - 1

    def end(self, window: bytes, start: int, seen: int) -> int | None:
        """Where the first one ends that begins at `start` or later and ends after `seen`."""
        found = self.find(window, start, seen)
        return None if found is None else found[1]

    def find(self, window: bytes, start: int, seen: int) -> tuple[int, int] | None:
        """Where that one begins and ends; of two that end together, the longer."""
        begins = ((window.find(text, max(start, seen - len(text) + 1)), len(text)) for text in self._texts)
        found = [(begin, begin + size) for begin, size in begins if begin >= 0]
        return min(found, key=lambda place: (place[1], place[0]), default=None)

    def tail(self, window: bytes) -> bytes:
        """The bytes at the end that a marker may have begun in."""
        return window[len(window) - self._kept :] if self._kept < len(window) else window


def take(matcher: Matcher, data: bytes, spelling: Spelling) -> int | None:
    """Have a matcher take bytes until it is complete: how many it took, or None when it cannot take one.

    Mutates: matcher.
    """
    for count, byte in enumerate(data, 1):
        token_id = spelling.of_bytes.get(byte)
        if token_id is None:
            return None
        matcher.advance(token_id)
        if matcher.error:
            return None
        if matcher.is_complete:
            return count
    return len(data)


class Exits:
    """Tokens that end the thinking and begin the answer in a way that its grammar cannot take.

    Such tokens are known by how much of the end marker's text has been said before.
    """

    def __init__(self, end: Marker, root: Matcher, spelling: Spelling) -> None:
        self._text = end.text.encode()
        self._root, self._spelling = root, spelling
        self._can_begin: dict[bytes, bool] = {}
        candidates = [] if end.token_id is not None or root.is_free else spelling.completing(self._text)
        self._wrong = [
            np.array([token_id for token_id in candidates if self._is_wrong(size, token_id)], np.int64)
            for size in range(len(self._text))
        ]

    def _is_wrong(self, size: int, token_id: int) -> bool:
        _, found, rest = (self._text[:size] + self._spelling.tokens[token_id]).partition(self._text)
        return bool(found and rest.strip()) and not self._takes(rest)

    def _takes(self, data: bytes) -> bool:
        """Most are wrong from the first byte on, which is tried once."""
        first = data[:1]
        if first not in self._can_begin:
            self._can_begin[first] = take(self._root.clone(), first, self._spelling) == 1
        return self._can_begin[first] and take(self._root.clone(), data, self._spelling) == len(data)

    def wrong(self, tail: bytes) -> NDArray[np.int64]:
        """Those that are impossible after these bytes."""
        said = (size for size in range(len(self._text) - 1, 0, -1) if tail.endswith(self._text[:size]))
        return self._wrong[next(said, 0)]


class Openings:
    """Texts with which an answer may begin."""

    def __init__(self, texts: Iterable[str], root: Matcher, spelling: Spelling) -> None:
        self._texts = tuple(text.encode() for text in texts)
        self._root, self._spelling = root, spelling
        self._candidates = spelling.holding(frozenset(text[-1] for text in self._texts)) if self._texts else []
        tails = [text[1:] for text in self._texts]
        self._whole = [i for i in self._candidates if any(tail in spelling.tokens[i] for tail in tails)]
        """Those that complete one where no more than its first character was said."""

    def __bool__(self) -> bool:
        return bool(self._texts)

    def has_come(self, said: bytes) -> bool:
        """Whether an answer begins with one."""
        return plainly(said).startswith(self._texts)

    def may_come(self, said: bytes) -> bool:
        """Whether an answer may go on to be one."""
        plain = plainly(said)
        return len(said) <= MAX_BEGUN and any(text.startswith(plain) for text in self._texts)

    def wrong(self, said: bytes) -> list[int]:
        """Tokens that complete one and go on as the grammar forbids."""
        plain, tokens = plainly(said), self._spelling.tokens
        if len(plain) < 2:
            complete = [i for i in self._whole if self.has_come(said + tokens[i])]
        else:
            rests = tuple(text[len(plain) :] for text in self._texts if text.startswith(plain))
            complete = [i for i in self._candidates if tokens[i].startswith(rests)]
        return [token_id for token_id in complete if not self._takes(said + tokens[token_id])]

    def _takes(self, data: bytes) -> bool:
        return take(self._root.clone(), data.lstrip(WHITE), self._spelling) is not None


WHITE = b" \t\r\n"
MAX_BEGUN = 1024
"""Bytes of the beginning of an answer in which an opening may come."""


def plainly(said: bytes) -> bytes:
    """What an answer has said, without white space before it and behind its first character."""
    said = said.lstrip(WHITE)
    return said[:1] + said[1:].lstrip(WHITE)


class GatedMatcher:
    """See above. `inner` is asked where the grammar counts."""

    def __init__(self, gate: Gate, root: Matcher, spelling: Spelling) -> None:
        """`root` is the grammar's matcher of an empty output; it is only cloned."""
        self._gate = gate
        self._thinking = gate.thinking
        self._root = root
        self._spelling = spelling
        self._triggers = Texts(gate.triggers)
        self._trigger_ids = {marker.token_id for marker in gate.triggers} - {None}
        self._openings = Openings(gate.openings, root, spelling)
        self._is_triggered = bool(gate.triggers or gate.openings)
        self._end = Texts([] if gate.thinking is None else [gate.thinking.end])
        has_exits = gate.thinking is not None and not self._is_triggered
        self._exits = Exits(gate.thinking.end, root, spelling) if gate.thinking is not None and has_exits else None
        self._not_before = self._impossible_before() if has_exits else ()
        self._begun: bytes | None = None
        """What the answer has said while it may still become an opening."""
        self._tail = b""
        """Bytes in which a marker may have begun."""
        self._head = b""
        """Of a begin marker, at the start of the output."""
        self._count = 0
        """Tokens of thinking; in the part `FORCED`, of `forced`."""
        self.inner: Matcher | None = None
        self._answer()
        if gate.is_open:
            self._open(root.clone())
        self._part = Part.ANSWER
        if gate.thinking is not None:
            self._part = Part.START
            if gate.thinking.is_open:
                self._think(gate.thinking)

    @property
    def _reopens(self) -> bool:
        """Whether everything is allowed again when the grammar is complete."""
        return self._is_triggered and self._gate.repeats

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return "" if self.inner is None else self.inner.error

    @property
    def is_free(self) -> bool:
        """See `Matcher`."""
        if self._part is Part.THINKING:
            return not len(self._wrong_exits())
        if self._part is Part.FORCED:
            return False
        return not self._wrong_openings() if self.inner is None else self.inner.is_free

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return not self._reopens and self.inner is not None and self.inner.is_complete

    def clone(self) -> GatedMatcher:
        """See `Matcher`."""
        other = copy(self)
        other.inner = None if self.inner is None else self.inner.clone()
        return other

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        match self._part:
            case Part.START:
                self._advance_start(token_id)
            case Part.THINKING:
                self._advance_thinking(token_id)
            case Part.FORCED:
                self._advance_forced()
            case Part.ANSWER:
                self._advance_answer(token_id)

    def amend(self, mask: Masks) -> None:
        """Change a row of masks, which `inner` has filled if there is one. Shapes: mask [W]. Mutates: mask."""
        thinking = self._thinking
        if self._part is Part.FORCED and thinking is not None:
            mask[:] = _words([thinking.forced[self._count]], len(mask))
        elif self._part is Part.THINKING:
            mask[:] = ~_words(self._wrong_exits(), len(mask))
        elif self.inner is None:
            mask[:] = ~_words(self._wrong_openings(), len(mask))
        elif self._part is Part.START and thinking is not None and thinking.begin.token_id is not None:
            mask |= _words([thinking.begin.token_id], len(mask))

    def _wrong_exits(self) -> Sequence[int] | NDArray[np.int64]:
        wrong = () if self._exits is None else self._exits.wrong(self._tail)
        return [*wrong, *self._not_before] if self._not_before else wrong

    def _impossible_before(self) -> tuple[int, ...]:
        """Tokens that would end the thinking and begin an answer that the grammar cannot take."""
        assert self._thinking is not None
        return tuple(token_id for token_id in self._thinking.before if not self._takes(token_id))

    def _takes(self, token_id: int) -> bool:
        matcher = self._root.clone()
        matcher.advance(token_id)
        return not matcher.error

    def _wrong_openings(self) -> Sequence[int]:
        return () if self._begun is None else self._openings.wrong(self._begun)

    def _advance_start(self, token_id: int) -> None:
        thinking = self._thinking
        assert thinking is not None
        data = self._spelling.tokens[token_id]
        is_first_only = self.inner is not None and not self.inner.is_free and not self._is_triggered
        if thinking.begin.token_id is not None:
            if token_id == thinking.begin.token_id:
                return self._think(thinking)
            begins = not data.strip()
        else:
            text = thinking.begin.text.encode()
            self._head = (self._head + data).lstrip()
            if self._head.startswith(text) and not is_first_only:
                return self._think(thinking, self._head[len(text) :])
            begins = text.startswith(self._head)
        if is_first_only or not begins:
            self._part = Part.ANSWER
        self._advance_answer(token_id)
        return None

    def _think(self, thinking: Thinking, said: bytes = b"") -> None:
        """Begin to think; `said` came after the begin marker in its token."""
        self._part = Part.THINKING
        self.inner, self._tail, self._count, self._begun = None, b"", 0, None
        self._look_for_end(said)
        self._check_budget(thinking)

    def _advance_thinking(self, token_id: int) -> None:
        thinking = self._thinking
        assert thinking is not None
        self._count += 1
        if token_id in thinking.before:
            self._answer()
            self._advance_answer(token_id)
        elif thinking.end.token_id is None:
            self._look_for_end(self._spelling.tokens[token_id])
        elif token_id == thinking.end.token_id:
            self._answer()
        self._check_budget(thinking)

    def _check_budget(self, thinking: Thinking) -> None:
        if self._part is Part.THINKING and thinking.budget is not None and self._count >= thinking.budget:
            self._part, self._count = Part.FORCED, 0

    def _look_for_end(self, data: bytes) -> None:
        window = self._tail + data
        end = self._end.end(window, 0, len(self._tail))
        if end is None:
            self._tail = self._end.tail(window)
        else:
            self._answer(window[end:])

    def _advance_forced(self) -> None:
        assert self._thinking is not None
        self._count += 1
        if self._count == len(self._thinking.forced):
            self._answer()

    def _answer(self, said: bytes = b"") -> None:
        """Begin the answer; `said` came after the end marker in its token."""
        self._part = Part.ANSWER
        self.inner, self._tail = None, b""
        if self._is_triggered:
            self._begun = b"" if self._openings else None
            self._look_for_triggers(said)
        else:
            begun = self._root.clone()
            self.inner = begun if take(begun, said, self._spelling) == len(said) else self._root.clone()

    def _advance_answer(self, token_id: int) -> None:
        if self.inner is not None:
            self.inner.advance(token_id)
            if self._reopens and self.inner.is_complete:
                self.inner, self._tail = None, b""
        elif token_id in self._trigger_ids:
            matcher = self._root.clone()
            if self._gate.takes_triggers:
                matcher.advance(token_id)
            self._open(matcher)
        else:
            self._look_for_triggers(self._spelling.tokens[token_id], is_special=self._spelling.is_special(token_id))

    def _open(self, matcher: Matcher) -> None:
        """Have the grammar count. Thinking comes before everything else."""
        self._part = Part.ANSWER
        self.inner, self._tail, self._begun = matcher, b"", None

    def _begin(self, data: bytes) -> bytes | None:
        """Look for an opening: what is left of the data for triggers, or None where the grammar counts now."""
        said = (self._begun or b"") + data
        self._begun = said if self._openings.may_come(said) else None
        if not self._openings.has_come(said):
            return data
        self._begun = None
        said = said.lstrip(WHITE)
        matcher = self._root.clone()
        taken = take(matcher, said, self._spelling)
        if taken is None:
            return data
        if matcher.is_complete and self._reopens:
            self._part, self._tail = Part.ANSWER, b""
            return said[taken:]
        self._open(matcher)
        return None

    def _look_for_triggers(self, data: bytes, *, is_special: bool = False) -> None:
        if self._begun is not None and not is_special:
            left = self._begin(data)
            if left is None:
                return None
            data = left
        window = self._tail + data
        start, seen = 0, len(self._tail)
        while (found := self._triggers.find(window, start, seen)) is not None:
            begin, seen = found
            end = begin if self._gate.takes_triggers else seen
            matcher = self._root.clone()
            taken = 0 if matcher.error else take(matcher, window[end:], self._spelling)
            if taken is not None and not (matcher.is_complete and self._reopens):
                return self._open(matcher)
            if taken is not None:  # opened and closed again
                self._part = Part.ANSWER
                start = seen = end + taken
        self._tail = self._triggers.tail(window[start:])
        return None


def _words(token_ids: Sequence[int] | NDArray[np.int64], num_words: int) -> Masks:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class GatedBackend:
    """A grammar library whose matchers may be gated."""

    def __init__(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._spelling = Spelling(vocabulary)

    def compile(self, grammar: Grammar) -> Matcher:
        """See `GrammarBackend`. The gate is left out: `gated` adds it."""
        return self._backend.compile(grammar) if grammar.text else Anything()

    def gated(self, gate: Gate, root: Matcher) -> GatedMatcher:
        """A compiled grammar behind a gate."""
        return GatedMatcher(gate, root, self._spelling)

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Masks) -> None:
        """See `GrammarBackend`."""
        gated = [(matcher, row) for matcher, row in matchers if isinstance(matcher, GatedMatcher)]
        inner = [(matcher.inner, row) for matcher, row in gated if matcher.inner is not None]
        asked = [(matcher, row) for matcher, row in matchers if not isinstance(matcher, GatedMatcher)]
        if inner or asked:
            self._backend.fill_masks([*asked, *inner], masks)
        for matcher, row in gated:
            matcher.amend(masks[row])
