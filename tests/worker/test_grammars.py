"""Compiled grammars: how many a core keeps."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from quire.structured.backend import Matcher
from quire.structured.gate import GatedBackend
from quire.structured.grammar import MAX_COMPILED, MAX_COMPILED_CHARACTERS, Grammar
from quire.utils.threads import BACKGROUND_NICENESS
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


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
def test_only_compiling_gives_way_to_the_model(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    compile_ = GatedBackend.compile

    def watched(backend: GatedBackend, grammar: Grammar) -> Matcher:
        seen["compiling"] = niceness()
        return compile_(backend, grammar)

    monkeypatch.setattr(GatedBackend, "compile", watched)
    before = niceness()
    done = grammars.prepare(number(1))
    done.add_done_callback(lambda _: seen.update(telling=niceness()))
    done.result(30)
    grammars.close()  # what is told is told by then
    assert seen == {"compiling": max(before, BACKGROUND_NICENESS), "telling": before}


def test_a_grammar_that_fails_says_why_and_the_next_one_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(backend: GatedBackend, grammar: Grammar) -> Matcher:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(GatedBackend, "compile", fails)
        grammars.prepare(number(1)).result(30)
        with pytest.raises(MemoryError, match="no room"):
            grammars.matcher(number(1))
    assert not grammars.matcher(number(2)).error
