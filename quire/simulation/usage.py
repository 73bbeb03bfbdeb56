"""`Usage`: what the steps of a replica held and computed, summed over virtual time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Sums over steps; a share of the pool follows by dividing by the busy seconds."""

    busy_s: float = 0.0
    """Seconds in steps."""
    block_seconds: float = 0.0
    """Blocks that sequences hold, times seconds; a block that several share counts once."""
    token_seconds: float = 0.0
    """Tokens of sequences whose keys and values are held, times seconds; shared ones count for each."""
    most_blocks: int = 0

    def add(self, num_blocks: int, num_tokens: int, seconds: float) -> None:
        """Count a step."""
        self.busy_s += seconds
        self.block_seconds += num_blocks * seconds
        self.token_seconds += num_tokens * seconds
        if num_blocks > self.most_blocks:
            self.most_blocks = num_blocks
