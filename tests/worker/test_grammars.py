"""Compiled grammars: how many a core keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.structured.grammar import MAX_COMPILED, MAX_COMPILED_CHARACTERS, Grammar
from quire.worker.grammars import Grammars
from tests.structured.conftest import VOCABULARY


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars()
    made.use(VOCABULARY)
    yield made
    made.close()


def number(index: int, length: int = 1) -> Grammar:
    return Grammar(text=f'start: "{index:06d}{"x" * length}"')


def is_kept(grammars: Grammars, grammar: Grammar) -> bool:
    return grammar in grammars._compiled


def test_the_last_ones_are_kept_and_others_compiled_again(grammars: Grammars) -> None:
    for index in range(MAX_COMPILED + 5):
        grammars.prepare(number(index)).result(30)
    assert [is_kept(grammars, number(index)) for index in (0, 4, 5, MAX_COMPILED + 4)] == [False, False, True, True]
    assert not grammars.matcher(number(0)).error


def test_their_characters_are_bounded_and_the_last_one_stays_however_large(grammars: Grammars) -> None:
    for index in range(4):
        grammars.prepare(number(index, MAX_COMPILED_CHARACTERS // 3)).result(30)
    assert [is_kept(grammars, number(index, MAX_COMPILED_CHARACTERS // 3)) for index in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    grammars.prepare(number(9, MAX_COMPILED_CHARACTERS)).result(30)
    assert list(grammars._compiled) == [number(9, MAX_COMPILED_CHARACTERS)]
    assert grammars._num_characters == len(number(9, MAX_COMPILED_CHARACTERS).text)
