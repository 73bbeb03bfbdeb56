"""Uniform random numbers as a pure function of (seed, branch, position): no generator, no state.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds
turn a 128-bit counter and a 64-bit key into 128 random bits. Batching, preemption and replay cannot change a draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
NUM_ROUNDS = 10
NUM_AHEAD = 8
"""Positions drawn at a time: little more work than one, for the calls into numpy are what costs."""
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Random words for each column. Shapes: counters [4, N], keys [2, N] -> [4, N]."""
    c0, c1, c2, c3 = counters.astype(np.uint64)
    k0, k1 = keys.astype(np.uint64)
    for _ in range(NUM_ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & LOW, (first >> HALF) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)


def uniforms(seeds: ArrayLike, branches: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one for each (seed, branch, position).

    The key is the seed; the counter is (position, branch, 0, 0), its upper words left for other streams of numbers.
    Shapes: seeds int64, branches and positions in [0, 2**32), broadcast together; the result has their shape.
    """
    seed, branch, position = np.broadcast_arrays(
        np.asarray(seeds, np.int64), np.asarray(branches, np.uint32), np.asarray(positions, np.uint32)
    )
    key = seed.ravel().view(np.uint64)
    zero = np.zeros(key.shape, np.uint32)
    words = philox4x32(np.stack((position.ravel(), branch.ravel(), zero, zero)), np.stack((key & LOW, key >> HALF)))
    high, low = words[0] >> np.uint32(5), words[1] >> np.uint32(6)
    numbers: NDArray[np.float64] = (high * 2.0**26 + low) * 2.0**-53
    return numbers.reshape(seed.shape)


class UniformStreams:
    """`uniforms` of some (seed, branch) pairs whose positions advance step by step, drawn a few positions ahead."""

    def __init__(self, seeds: list[int], branches: list[int]) -> None:
        self._seeds = np.array(seeds, np.int64)
        self._branches = np.array(branches, np.int64)
        self._positions: list[int] = []
        self._ahead: list[NDArray[np.float64]] = []
        """Of `_positions` and the positions after them, the next ones at the end."""

    def draw(self, positions: list[int], num_branches: int) -> NDArray[np.float64]:
        """A number for each pair and the branches that follow its own. Shapes: -> [N, num_branches]."""
        if num_branches > 1:
            branches = self._branches[:, None] + np.arange(num_branches)
            return uniforms(self._seeds[:, None], branches, np.array(positions)[:, None])
        if not self._ahead or positions != self._positions:
            ahead = np.array(positions) + np.arange(NUM_AHEAD)[:, None]
            self._ahead = list(uniforms(self._seeds, self._branches, ahead)[::-1])
        self._positions = [position + 1 for position in positions]
        return self._ahead.pop()[:, None]
