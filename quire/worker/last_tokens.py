"""`LastTokens`: the tokens drawn last, left on the device: a step goes on from them before the host has seen them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.contract import Ops


class LastTokens:
    """Two tokens for each sequence: the one at an even position and the one at an odd position.

    A step reads one of them and writes the other, so a step that is run again reads what it read before.
    """

    def __init__(self, ops: Ops, max_num_seqs: int) -> None:
        self._ops = ops
        self._tokens = torch.zeros(2 * max_num_seqs, dtype=torch.int64, device=ops.device)

    def put(self, slots: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> None:
        """Keep the token of each slot at its position. Shapes: [N], [N], [N] int64 on the device."""
        self._tokens.index_copy_(0, self._index(slots, positions), token_ids)

    def take(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The token of each slot at its position. Shapes: [N], [N] -> [N] int64 on the device."""
        return self._tokens.index_select(0, self._index(slots, positions))

    def _index(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        index = [2 * slot + position % 2 for slot, position in zip(slots, positions, strict=True)]
        return self._ops.on_device(torch.tensor(index))
