"""`LastTokens`: the tokens drawn last, left on the device: a step goes on from them before the host has seen them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.ops import Ops


class LastTokens:
    """Two tokens for each sequence: the one at an even position and the one at an odd position.

    A step reads one of them and writes the other, so a step that is run again reads what it read before.
    """

    def __init__(self, ops: Ops, max_num_seqs: int) -> None:
        self._tokens = torch.zeros(2 * max_num_seqs, dtype=torch.int64, device=ops.device)

    @staticmethod
    def place(slot: int, position: int) -> int:
        """Where the token of a slot at a position is."""
        return 2 * slot + position % 2

    def put(self, places: Tensor, token_ids: Tensor) -> None:
        """Keep tokens. Shapes: [N] int64, [N] int64, both on the device."""
        self._tokens.index_copy_(0, places, token_ids)

    def take(self, places: Tensor) -> Tensor:
        """The tokens that are kept there. Shapes: [N] int64 -> [N] int64, both on the device."""
        return self._tokens.index_select(0, places)
