"""The automaton against looking for every phrase at every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.utils.phrases import Phrases

texts = st.text("ab", min_size=1, max_size=6)


@given(st.lists(texts, unique=True, max_size=8), st.text("abc", max_size=40))
def test_phrases_are_found_where_they_end_longest_first(phrases: list[str], text: str) -> None:
    automaton, state = Phrases(phrases), 0
    for position, character in enumerate(text):
        state = automaton.step(state, character)
        so_far = text[: position + 1]
        found = [phrases[number] for number in automaton.complete(state)]
        assert found == sorted((phrase for phrase in phrases if so_far.endswith(phrase)), key=len, reverse=True)
        beginnings = [phrase[:length] for phrase in phrases for length in range(len(phrase))]
        assert automaton.num_open(state) == max((len(b) for b in beginnings if so_far.endswith(b)), default=0)


def test_a_stream_costs_the_same_however_many_phrases_there_are() -> None:
    phrases = ["a" * length + "b" for length in range(1, 200)]
    automaton, state, num_steps = Phrases(phrases), 0, 0

    class Counted(dict[tuple[int, str], int]):
        def get(self, key: tuple[int, str], default: object = None) -> int | None:  # type: ignore[override]
            nonlocal num_steps
            num_steps += 1
            return super().get(key)

    automaton._next = Counted(automaton._next)
    for character in "a" * 5000:
        state = automaton.step(state, character)
    assert num_steps <= 2 * 5000
