"""Where the activations of a step lie: as `ops.cpu.memory.Arena` lays them out, in the first gap that fits."""

from __future__ import annotations

from quire.messages.kv import DTYPE_BYTES
from quire.utils.math import round_up

FLOAT = DTYPE_BYTES["float32"]
"""Bytes of a number of what is computed in float32 whatever the model's dtype."""
INT32 = 4
"""Bytes of a position."""
INT64 = 8
"""Bytes of the number of a row of a table."""
Places = tuple[tuple[str, tuple[int, int]], ...]
"""Pieces, with where each begins and ends."""


class StepLayout:
    """Pieces of one region; a piece that ends gives its place to later ones."""

    def __init__(self, num_tokens: int, item: int) -> None:
        self._num_tokens = num_tokens
        self.item = item
        self._pieces: dict[str, tuple[int, int]] = {}
        self.peak = 0

    def take(self, name: str, columns: int, item: int | None = None, *, rows: int = 1) -> None:
        """Place a piece of so many columns, and rows for each token, in the model's dtype or items of another size."""
        count = self._num_tokens * rows
        count = round_up(count, 32) if count > 32 else count
        self.place(name, count * columns * (self.item if item is None else item))

    def place(self, name: str, num_bytes: int) -> None:
        """Place a piece in the first gap."""
        size, begin = round_up(num_bytes, 64), 0
        for start, end in sorted(self._pieces.values()):
            if start - begin >= size:
                break
            begin = end
        self._pieces[name] = begin, begin + size
        self.peak = max(self.peak, begin + size)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a piece."""
        return name in self._pieces

    def places(self) -> Places:
        """Where the pieces lie."""
        return tuple(sorted(self._pieces.items()))

    def restore(self, places: Places) -> None:
        """Let pieces lie as they did."""
        self._pieces = dict(places)

    def free(self, *names: str) -> None:
        """End pieces."""
        for name in names:
            del self._pieces[name]

    def renew(self, name: str, columns: int) -> None:
        """Let a piece take the place of the one that it is made of."""
        self.take("renewed", columns)
        self.free(name)
        self.rename("renewed", name)

    def rename(self, old: str, new: str) -> None:
        """Call a piece by another name."""
        self._pieces[new] = self._pieces.pop(old)
