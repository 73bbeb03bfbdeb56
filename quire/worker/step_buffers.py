"""`StepBuffers`: everything a step reads, side by side in one block of memory.

A device with memory of its own has a block of the same layout, at an address that never changes: graphs that were
captured read it there. Each step sends it the part that it uses, in one copy. The host writes two blocks in turn, so
that it can prepare a step while the device still copies the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.utils.math import round_up
from quire.worker.device_link import Link, Sent

NUM_HOST_BLOCKS = 2
"""With two steps in flight, the copy out of a block is done when its turn comes again, as a rule."""
ALIGNMENT = 64
"""Bytes: each array begins at a multiple of it, and so does each group's part of one."""

A = TypeVar("A")
HostArray = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(Generic[A]):
    """The arrays of a step, as the host writes them or as the device reads them.

    Shapes: T tokens, R sequences, G KV groups, as many as there can be.
    """

    starts: A
    """[R + 1] int32: sequence r owns tokens starts[r] .. starts[r + 1]."""
    seq_lens: A
    """[R] int32"""
    sampled: A
    """[R] int64: rows whose logits are wanted."""
    reads: A
    """[G, R] int32: pages of states that are read; -1 for none."""
    writes: A
    """[G, R] int32: pages that states are written to."""
    taken: A
    """[R] int64: where in `LastTokens` the tokens are that only the device has."""
    taken_to: A
    """[R] int64: where among the step's tokens they belong."""
    kept: A
    """[R] int64: where in `LastTokens` those go that the step draws."""
    token_ids: A
    """[T] int64"""
    positions: A
    """[T] int64"""
    slots: A
    """[G, T] int64"""


class StepBuffers:
    """The arrays of one step after the other."""

    def __init__(
        self, block_tables: NDArray[np.int32], *, max_num_seqs: int, max_num_tokens: int, link: Link | None
    ) -> None:
        """`block_tables` [G, R, B]: the host's, which a device gets a copy of. `link`: to a device with memory of its
        own."""
        self._link = link
        self._block_tables = block_tables
        groups, seqs, tokens = (
            len(block_tables),
            round_up(max_num_seqs + 1, ALIGNMENT // 4),
            round_up(max_num_tokens, ALIGNMENT // 8),
        )
        self._fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **dict.fromkeys(("starts", "seq_lens"), ((seqs,), torch.int32)),
            **dict.fromkeys(("reads", "writes"), ((groups, seqs), torch.int32)),
            **dict.fromkeys(("sampled", "taken", "taken_to", "kept"), ((seqs,), torch.int64)),
            **dict.fromkeys(("token_ids", "positions"), ((tokens,), torch.int64)),
            "slots": ((groups, tokens), torch.int64),
        }
        self._tables_at = sum(prod(shape) * dtype.itemsize for shape, dtype in self._fields.values())
        if link is None:
            block = torch.zeros(self._tables_at, dtype=torch.uint8)
            self._blocks = [block]
            self.device = StepArrays(**self._views(block))
            """What ops read."""
            self.tables = torch.from_numpy(block_tables)
            """[G, R, B] int32: the block tables that they read."""
        else:
            rows, entries = block_tables.shape[1:]
            self._row_bytes = groups * entries * 4
            num_bytes = self._tables_at + rows * self._row_bytes
            self._blocks = [link.host_memory(num_bytes) for _ in range(NUM_HOST_BLOCKS)]
            self._on_device = link.device_memory(num_bytes)
            self.device = StepArrays(**self._views(self._on_device))
            self.tables = self._tables(self._on_device).transpose(0, 1)
        self._hosts: list[StepArrays[HostArray]] = [
            StepArrays(**{name: view.numpy() for name, view in self._views(block).items()}) for block in self._blocks
        ]
        self._host_tables = [self._tables(block).numpy() for block in self._blocks] if link is not None else []
        self._sent: list[Sent | None] = [None] * len(self._blocks)
        self._turn = 0

    def begin(self) -> StepArrays[HostArray]:
        """The host's arrays, to be written for the next step. Waits if the device still copies what they held."""
        if self._link is not None:
            self._turn = (self._turn + 1) % len(self._blocks)
            sent = self._sent[self._turn]
            if sent is not None:
                sent.synchronize()
        return self._hosts[self._turn]

    def send(self, num_seqs: int) -> None:
        """Bring what was written, and the first rows of the block tables, to where ops read it."""
        if self._link is not None:
            tables, block = self._host_tables[self._turn], self._blocks[self._turn]
            tables[:num_seqs] = self._block_tables[:, :num_seqs].swapaxes(0, 1)
            used = self._tables_at + num_seqs * self._row_bytes
            self._sent[self._turn] = self._link.send(block[:used], self._on_device[:used])

    def _views(self, block: Tensor) -> dict[str, Tensor]:
        """The arrays of a block, by name."""
        views, begin = dict[str, Tensor](), 0
        for name, (shape, dtype) in self._fields.items():
            end = begin + prod(shape) * dtype.itemsize
            views[name] = block[begin:end].view(dtype).view(shape)
            begin = end
        return views

    def _tables(self, block: Tensor) -> Tensor:
        """Row by row, so that those in use lie in front. Shapes: -> [R, G, B] int32."""
        groups, rows, entries = self._block_tables.shape
        return block[self._tables_at :].view(torch.int32).view(rows, groups, entries)
