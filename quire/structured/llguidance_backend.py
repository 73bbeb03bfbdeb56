"""llguidance behind `GrammarBackend`: an Earley parser over derivatives of regular expressions, in Rust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire.structured.backend import Masks, Matcher
from quire.structured.grammar import Grammar, Vocabulary

MAX_LEXER_STATES = 50_000
"""Of a compiled grammar and its clones together, some 500 bytes each."""
SPECIAL = b"\xff"
"""Leads the names of tokens that stand for no text: no text holds this byte."""


class LLGuidance:
    """llguidance with a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_token_ids))
        self._num_threads = num_threads
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    @cached_property
    def _executor(self) -> LLExecutor:
        """Its threads are started when they are needed: a process that forks must have none."""
        return LLExecutor(self._num_threads)

    def compile(self, grammar: Grammar) -> LLGuidanceMatcher:
        """See `GrammarBackend`."""
        new = partial(LLMatcher, self._tokenizer, grammar.text, log_level=0, limits=self._limits)
        return LLGuidanceMatcher(new, new(), _Lexer())

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Masks) -> None:
        """See `GrammarBackend`."""
        own = cast("Sequence[tuple[LLGuidanceMatcher, int]]", matchers)
        self._compute(own, masks)
        failed = [(matcher, row) for matcher, row in own if matcher.matcher.is_error()]
        if failed:
            for matcher, _ in failed:
                matcher.start_over()
            self._compute(failed, masks)

    def _compute(self, matchers: Sequence[tuple[LLGuidanceMatcher, int]], masks: Masks) -> None:
        inner = [(matcher.matcher, row) for matcher, row in matchers]
        assert masks.dtype == np.int32
        assert masks.flags["C_CONTIGUOUS"]
        address = masks.__array_interface__["data"][0]
        self._executor.unsafe_compute_mask_ptr(inner, address, 4 * masks.shape[1], masks.shape[0])


class _Lexer:
    """States that a compiled matcher and its copies share, as the library has it."""

    is_full = False


class LLGuidanceMatcher:
    """One output in llguidance's parser.

    Copies share lexer states, whose number is limited, so one would fail because of what others have drawn. Therefore
    a matcher that fails starts over with states of its own. It has failed when those do not suffice: that depends on
    the grammar and its own tokens alone.
    One thing is left: a mask may take some 14 ms of making states (the library's step_lexer_fuel), so that nobody else
    waits longer. A pattern that needs more fails, and may last longer beside others for which states were made.
    """

    def __init__(self, new: Callable[[], LLMatcher], matcher: LLMatcher, lexer: _Lexer) -> None:
        """`new` makes the matcher of an empty output, with a lexer of its own."""
        self._new = new
        self.matcher = matcher
        self._lexer = lexer
        self._token_ids: list[int] = []

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self.matcher.get_error()

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        self._token_ids.append(token_id)
        self.matcher.consume_token(token_id)

    def clone(self) -> LLGuidanceMatcher:
        """See `Matcher`."""
        if self._lexer.is_full and not self._token_ids:
            self.matcher, self._lexer = self._new(), _Lexer()
        copy = LLGuidanceMatcher(self._new, self.matcher.deep_copy(), self._lexer)
        copy._token_ids = self._token_ids.copy()
        return copy

    def start_over(self) -> None:
        """Take the tokens again, with lexer states of its own."""
        self._lexer.is_full = True
        self.matcher, self._lexer = self._new(), _Lexer()
        self.matcher.consume_tokens(self._token_ids)


class _Tokens:
    """A vocabulary as llguidance reads one."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        special = vocabulary.special_ids
        self.tokens = [
            SPECIAL + token if token_id in special else token for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids: list[int] = []  # they have the prefix already

    def __call__(self, text: str | bytes) -> list[int]:
        """No text is tokenised; `llguidance_source` says why."""
        raise NotImplementedError
