"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from quire.utils.phrases import Phrases


class StopMatcher:
    """Finds the first stop string in a stream, and says how much of the stream may still become one.

    The match that is complete first wins; of those complete at the same character, the longest. So the answer does not
    depend on how the text is cut into pieces, and generation never runs on for a longer match. (vLLM looks after each
    token and takes the first stop string in the request's order; the two differ only where one stop string lies inside
    another and both are completed by the same token.)

    Cost: each character is looked at a bounded number of times, however many stop strings there are.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(stop))
        self._phrases = _phrases(self._stop)
        self._state = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return self._phrases.num_open(self._state)

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, int] | None:
        """Read more text: the stop string found, and where in `text` it ends; None when there is none.

        With may_stop False, stop strings that end in `text` are passed over. After a match the matcher is used up.
        """
        phrases, state = self._phrases, self._state
        if state == 0 and phrases.firsts.isdisjoint(text):
            return None
        for position, character in enumerate(text):
            state = phrases.step(state, character)
            if may_stop and state:
                found = next(phrases.complete(state), None)
                if found is not None:
                    return self._stop[found], position + 1
        self._state = state
        return None


@lru_cache(maxsize=16)
def _phrases(stop: tuple[str, ...]) -> Phrases[str]:
    """Kept for the branches of a request, which are made one after the other."""
    return Phrases(stop)
