"""What a grammar library must do for the worker and for the checker. Libraries are imported when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from quire.errors import UnsupportedFeature
from quire.structured.grammar import Grammar, Vocabulary
from quire.structured.params import StructuredOutputsParams
from quire.utils.lazy import LazyTable

Masks = NDArray[np.int32]
"""[R, ceil(V / 32)]: bit j of word i says whether token 32 * i + j may follow."""


def mask_words(vocab_size: int) -> int:
    """Words of a row of `Masks`."""
    return (vocab_size + 31) // 32


class Matcher(Protocol):
    """Where one output stands in its grammar: a function of the grammar and the output's tokens."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""

    @property
    def is_free(self) -> bool:
        """Whether every token may follow, so that no mask is needed."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing but its end may follow."""

    def advance(self, token_id: int) -> None:
        """Take the next token."""

    def clone(self) -> Matcher:
        """Another matcher in the same state."""


class GrammarBackend(Protocol):
    """A grammar library with a vocabulary."""

    def compile(self, grammar: Grammar) -> Matcher:
        """The matcher of an empty output. An error is in its `error`. May take long; other threads run meanwhile."""

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Masks) -> None:
        """Which tokens may follow: the row of each matcher. Other threads run meanwhile. Mutates: masks."""


BACKENDS = LazyTable("grammar backend", {"llguidance": "quire.structured.llguidance_backend:LLGuidance"})
_SOURCES = LazyTable("grammar backend", {"llguidance": "quire.structured.llguidance_source:grammar_of"})


def open_backend(name: str, vocabulary: Vocabulary, num_threads: int = 1) -> GrammarBackend:
    """A grammar library, ready to compile; `num_threads` compute masks."""
    return cast(Callable[[Vocabulary, int], GrammarBackend], BACKENDS.load(name))(vocabulary, num_threads)


def load(backend: str) -> None:
    """Import a library."""
    for table in (BACKENDS, _SOURCES):
        table.load(backend)


def grammar_of(params: StructuredOutputsParams, backend: str = "llguidance") -> Grammar:
    """The grammar of what a request asks for. Compiles nothing.

    Raises: InvalidParameter; UnsupportedFeature.
    """
    if backend not in BACKENDS:
        raise UnsupportedFeature(f"grammar backend {backend!r} is not built", parameter="structured_outputs")
    return cast(Callable[[StructuredOutputsParams], Grammar], _SOURCES.load(backend))(params)
