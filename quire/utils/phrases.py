"""`Phrases`: finds several sequences of items in a stream, at a cost that does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Phrases(Generic[Item]):
    """The automaton of Aho and Corasick (1975). Built once and shared; whoever reads a stream keeps only a state.

    A state is the longest end of the stream that begins a phrase; 0 is none. One more item costs a look-up, amortised.
    """

    def __init__(self, phrases: Sequence[Sequence[Item]]) -> None:
        """Phrases are not empty, and no two are equal."""
        self.firsts = frozenset(phrase[0] for phrase in phrases)
        self.depth = [0]
        """Items that each state stands for."""
        self._ends: list[int] = [-1]
        """The phrase that is complete in each state."""
        self._next: dict[tuple[int, Item], int] = {}
        for number, phrase in enumerate(phrases):
            self._add(number, phrase)
        self._shorter = [0] * len(self.depth)
        """The next shorter end of the stream that begins a phrase."""
        self._complete = [0] * len(self.depth)
        """The next shorter one that is a whole phrase."""
        self._link()

    def step(self, state: int, item: Item) -> int:
        """The state after one more item."""
        while True:
            following = self._next.get((state, item))
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._shorter[state]

    def complete(self, state: int) -> Iterator[int]:
        """The phrases with which the stream ends, the longest first."""
        while state:
            if self._ends[state] >= 0:
                yield self._ends[state]
            state = self._complete[state]

    def num_open(self, state: int) -> int:
        """Items at the end of the stream that may be the beginning of a phrase that is not complete yet."""
        while state and not self._continues[state]:
            state = self._shorter[state]
        return self.depth[state]

    def _add(self, number: int, phrase: Sequence[Item]) -> None:
        state = 0
        for item in phrase:
            following = self._next.get((state, item))
            if following is None:
                following = self._next[state, item] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self._ends.append(-1)
            state = following
        self._ends[state] = number

    def _link(self) -> None:
        """Shorter ends first: what a state needs of others is known before its turn comes."""
        self._continues = bytearray(len(self.depth))
        for (state, item), following in sorted(self._next.items(), key=lambda edge: self.depth[edge[1]]):
            self._continues[state] = 1
            shorter = self.step(self._shorter[state], item) if state else 0
            self._shorter[following] = shorter
            self._complete[following] = shorter if self._ends[shorter] >= 0 else self._complete[shorter]
