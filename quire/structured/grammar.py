"""`Grammar`: what an output must follow, in the words of a grammar library; and the vocabulary it is followed with."""

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
class Grammar:
    """A grammar that was checked. Equal grammars are compiled once."""

    text: str
    backend: str = "llguidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of all tokens that a model can produce. Sent to a core once, before the first grammar."""

    tokens: list[bytes]
    """By token id; empty for an id without a token, which no grammar allows."""
    special_ids: frozenset[int] = field(default_factory=frozenset)
    """Tokens that stand for no text: no grammar takes them for their spelling."""
    eos_token_ids: tuple[int, ...]
    """What ends an output when its grammar allows the end."""
