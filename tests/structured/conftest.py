"""A checker with a vocabulary of bytes and some words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.front.input_processor import CHECKER
from quire.structured.checker import GrammarChecker
from quire.structured.grammar import Vocabulary

TOKENS = [b"<end>", *(bytes([byte]) for byte in range(256)), b"true", b'{"', b'":', b"<tool>", b""]
VOCABULARY = Vocabulary(tokens=TOKENS, special_ids=frozenset({0, len(TOKENS) - 2}), eos_token_ids=(0,))


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(lambda: VOCABULARY, module=CHECKER)
    yield made
    made.close()
