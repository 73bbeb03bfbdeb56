"""Pages of keys and values that leave the pool for a slower tier and come back: what core and worker say of them.

A slot has room for one page. Slots are numbered through all tiers: those in memory first, then those of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.utils.math import round_up

PageContent = tuple[int, bytes, bytes, tuple[int, ...]]
"""(KV group, hash, parent's hash, tokens) of a full block."""
PageMove = tuple[int, int, PageContent]
"""(source, destination, what the page holds)."""


FLUSH_S = 60.0
"""Seconds that an engine takes at most, unless told otherwise, to write its cached pages to the file when it ends."""
ALIGNMENT = 4096
"""Bytes. What the file begins with, headers and pages take whole multiples."""
MOST_HEADER_BYTES = 128
"""Of a page in a file, without its tokens."""


def header_bytes(block_size: int) -> int:
    """Room for what the file says of a page of so many tokens."""
    return round_up(MOST_HEADER_BYTES + 8 * block_size, ALIGNMENT)


def slot_bytes(page_bytes: int, block_size: int) -> int:
    """What a slot takes in the file."""
    return header_bytes(block_size) + round_up(page_bytes, ALIGNMENT)


def slots_in(file_bytes: int, page_bytes: int, block_size: int) -> int:
    """Slots of a file of so many bytes."""
    return max(0, file_bytes - ALIGNMENT) // slot_bytes(page_bytes, block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What a worker says when it has opened its tiers."""

    pages: list[tuple[int, PageContent]]
    """(slot, content) of pages that an earlier engine of the same identity has left in the file."""
    load_token_s: float
    """Seconds to load the pages of a token, verified."""
    compute_token_s: float
    """Seconds to compute a token of a prompt."""
    step_s: float
    """Seconds of a step with one token: what is loaded is computed with one step later."""

    @property
    def break_even(self) -> int | None:
        """Tokens of the shortest prefix that is loaded faster than computed; None where none is."""
        gain_s = self.compute_token_s - self.load_token_s
        return None if gain_s <= 0 else int(self.step_s / gain_s) + 1
