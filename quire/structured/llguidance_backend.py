"""llguidance behind `GrammarBackend`: an Earley parser over derivatives of regular expressions, in Rust."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire.structured.backend import Masks, Matcher
from quire.structured.grammar import Grammar, Vocabulary

MAX_LEXER_STATES = 50_000
"""Of one matcher, some 2 KB each."""
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
        return LLGuidanceMatcher(LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=self._limits))

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Masks) -> None:
        """See `GrammarBackend`."""
        inner = [(cast(LLGuidanceMatcher, matcher).matcher, row) for matcher, row in matchers]
        assert masks.dtype == np.int32
        assert masks.flags["C_CONTIGUOUS"]
        address = masks.__array_interface__["data"][0]
        self._executor.unsafe_compute_mask_ptr(inner, address, 4 * masks.shape[1], masks.shape[0])


class LLGuidanceMatcher:
    """One output in llguidance's parser."""

    is_free = False

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self.matcher.get_error()

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return self.matcher.is_stopped() and self.matcher.is_accepting()

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        self.matcher.consume_token(token_id)

    def clone(self) -> LLGuidanceMatcher:
        """See `Matcher`."""
        return LLGuidanceMatcher(self.matcher.deep_copy())


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
