"""`BlockTable`: the blocks of one sequence in one KV group."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages.step import BlockChange

NULL_BLOCK = -1
"""Stands where a block was, or would be, that no query reads."""


@dataclass(slots=True)
class BlockTable:
    """Entry i is the block of positions [i * block_size, (i + 1) * block_size); of recurrent layers see `groups`."""

    block_ids: list[int]
    num_trimmed: int = 0
    """Leading entries that are `NULL_BLOCK`."""
    num_shared: int = 0
    """Leading entries that another sequence had before."""
    num_sent: int = 0
    """Leading entries that the worker knows."""
    read_before: list[int] = field(default_factory=list)
    """Of recurrent layers: first entries that steps in flight read, before those that stand there now."""
    num_tokens: int = 0
    """Of recurrent layers: how many tokens the last entry is, or will be, the state of."""

    @property
    def held(self) -> list[int]:
        """The blocks it has a reference to."""
        held = self.block_ids[self.num_trimmed :]
        if self.read_before:
            held += [block_id for block_id in self.read_before if block_id != NULL_BLOCK]
        return held

    @property
    def num_own(self) -> int:
        """Blocks that nobody else had before."""
        return len(self.block_ids) - max(self.num_shared, self.num_trimmed)

    def fork(self) -> BlockTable:
        """The table of a sequence that begins with the same blocks; the caller counts the references."""
        return BlockTable(list(self.block_ids), num_trimmed=self.num_trimmed, num_shared=len(self.block_ids))

    def replace(self, index: int, block_id: int) -> None:
        """Put another block into an entry that the sequence is about to write."""
        self.block_ids[index] = block_id
        self.num_sent = min(self.num_sent, index)
        self.num_shared = min(self.num_shared, index)

    def trim(self, num_blocks: int) -> list[int]:
        """Let so many leading entries be null. Gives the blocks that stood there."""
        trimmed = self.block_ids[self.num_trimmed : num_blocks]
        self.block_ids[self.num_trimmed : num_blocks] = [NULL_BLOCK] * len(trimmed)
        self.num_trimmed += len(trimmed)
        return trimmed

    def shift(self) -> list[int]:
        """Drop the first entry; the others move up, and the worker is told of them again. Gives the block it held."""
        dropped = self.block_ids[self.num_trimmed : 1]
        del self.block_ids[0]
        self.num_trimmed = max(0, self.num_trimmed - 1)
        self.num_shared = max(0, self.num_shared - 1)
        self.num_sent = 0
        return dropped

    def unsent(self) -> BlockChange:
        """What the worker does not know yet; from now on it does."""
        first, self.num_sent = max(self.num_sent, self.num_trimmed), len(self.block_ids)
        return first, self.block_ids[first:]
