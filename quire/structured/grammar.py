"""`Grammar`: what an output must follow, in the words of a grammar library, and from where on (`Gate`); and the
vocabulary it is followed with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_COMPILED = 32
"""Grammars that a core keeps compiled; those used least recently are compiled again."""
MAX_COMPILED_CHARACTERS = 1 << 18
"""Of their texts together: as much as the largest schema has."""
COMPILED_BYTES = 400 << 10
"""What a small one takes, with the matcher of an output: 100 of them in a vocabulary of 150,000 tokens, measured."""
COMPILED_BYTES_PER_CHARACTER = 110
"""What large ones take, measured with schemas of 100 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What separates the parts of an output."""

    text: str
    token_id: int | None = None
    """Only this token is the marker. None: the text is looked for in the bytes of the output, in which special tokens
    count as they are spelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a model marks the thinking that comes before its answer, and how much of it there may be."""

    begin: Marker
    end: Marker
    is_open: bool = False
    """The prompt ends inside the thinking. Otherwise there is thinking where the output begins with `begin`, white
    space aside."""
    budget: int | None = None
    """Most tokens of thinking, without the begin marker. None: as many as the model likes."""
    forced: tuple[int, ...] = ()
    """Tokens that follow when the budget is used up; the thinking ends with the last one."""
    before: tuple[int, ...] = ()
    """Tokens that end the thinking, too, and are part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """From where on a grammar counts. See `gate` for what that means token by token."""

    thinking: Thinking | None = None
    """The grammar counts after it."""
    triggers: tuple[Marker, ...] = ()
    """The grammar counts after each of these, until it is complete and can take nothing more. Without any it counts to
    the end of the output."""
    repeats: bool = True
    """A trigger may come again. Otherwise the output ends when the grammar behind the first one is complete."""
    is_open: bool = False
    """The prompt ends with a trigger, so the grammar counts from the first token on."""
    takes_triggers: bool = False
    """The grammar takes a trigger, too, and what may follow can depend on which one it was."""
    openings: tuple[str, ...] = ()
    """Texts with which an answer may begin, white space before them and behind their first character aside. Then the
    grammar counts from that character on: it takes the opening, too."""

    @property
    def markers(self) -> tuple[Marker, ...]:
        """All markers."""
        return (*(() if self.thinking is None else (self.thinking.begin, self.thinking.end)), *self.triggers)

    @property
    def num_characters(self) -> int:
        """Of all texts, a number counted as one."""
        ids = () if self.thinking is None else (*self.thinking.forced, *self.thinking.before)
        return sum(len(marker.text) for marker in self.markers) + sum(map(len, self.openings)) + len(ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that are named."""
        forced = () if self.thinking is None else (*self.thinking.forced, *self.thinking.before)
        return (*(marker.token_id for marker in self.markers if marker.token_id is not None), *forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that was checked. Equal grammars are compiled once."""

    text: str
    """Empty where only the gate counts: a budget of thinking."""
    backend: str = "llguidance"
    gate: Gate | None = None
    """None: it counts from the first token to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of all tokens that a model can produce. Sent to a core once, before the first grammar."""

    tokens: list[bytes]
    """By token id; empty for an id without a token, which no grammar allows."""
    special_ids: frozenset[int] = field(default_factory=frozenset)
    """Tokens that stand for no text: no grammar takes them for their spelling."""
    eos_token_ids: tuple[int, ...]
    """What ends an output when its grammar allows the end."""
