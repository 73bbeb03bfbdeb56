"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a stream, and says how much of the stream may still become one.

    The match that is complete first wins; of those complete at the same character, the longest. So the answer does not
    depend on how the text is cut into pieces, and generation never runs on for a longer match. (vLLM looks after each
    token and takes the first stop string in the request's order; the two differ only where one stop string lies inside
    another and both are completed by the same token.)

    Cost: each character is looked at a bounded number of times per stop string (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Longest first: the first to be complete at a character is then the longest.
        self.stop = sorted(stop, key=len, reverse=True)
        self._failures = [_failures(string) for string in self.stop]
        self._matched = [0] * len(self.stop)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, int] | None:
        """Read more text: the stop string found, and where in `text` it ends; None when there is none.

        With may_stop False, stop strings that end in `text` are passed over. After a match the matcher is used up.
        """
        best: tuple[str, int] | None = None
        for index, string in enumerate(self.stop):
            end = self._advance(index, text if best is None else text[: best[1] - 1], may_stop)
            if end is not None:
                best = (string, end)
        return best

    def _advance(self, index: int, text: str, may_stop: bool) -> int | None:
        """Where in `text` stop string `index` is complete first. Mutates its state."""
        string, failures, matched = self.stop[index], self._failures[index], self._matched[index]
        if matched == 0 and string[0] not in text:
            return None
        for position, character in enumerate(text):
            while matched and string[matched] != character:
                matched = failures[matched - 1]
            if string[matched] == character:
                matched += 1
            if matched == len(string):
                if may_stop:
                    return position + 1
                matched = failures[matched - 1]
        self._matched[index] = matched
        return None


def _failures(string: str) -> list[int]:
    """Per length of a matched prefix: the length of the next shorter prefix that ends there too."""
    table = [0] * len(string)
    matched = 0
    for position in range(1, len(string)):
        while matched and string[matched] != string[position]:
            matched = table[matched - 1]
        matched += string[matched] == string[position]
        table[position] = matched
    return table
