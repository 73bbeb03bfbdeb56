"""Hopper: what its GPUs have and others have not, and the tiles of dense products that were fast on one.

Measured on an H100 with the shapes of an 8B model (`benchmarks/gpu.md`). Up to 64 rows a product is as fast as its
weight is read, and tiles differ in how many bytes they have under way. Beyond, the multiprocessors compute tiles in
rounds, one each at a time, and the last round takes as long as a full one: so the tile is chosen by its rounds.

The copy engine's tiles are the fastest, but the host takes some 60 us longer to launch a kernel with descriptors. Steps
of up to 512 rows are mostly replayed from graphs, which take the host no time, and from 2,048 on the GPU takes longer
than the host. Between the two, threads load the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quire.ops.triton.tiles import Tile
from quire.utils.math import cdiv

CAPABILITIES = (9, 10)
"""Hopper's, and that of Blackwell in data centres. Blackwell on desks (12) has less than half of the shared memory."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
AWAITING_HOST = range(513, 2048)
"""Rows of steps whose products end before the host has launched the next ones."""


@cache
def is_hopper() -> bool:
    """Whether the current GPU has what Hopper has."""
    is_cuda = torch.cuda.is_available() and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability()[0] in CAPABILITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """A tile for many rows."""

    tile: Tile
    cost: float
    """What a round takes, in microseconds for 4096 inputs; only their ratios count."""

    def of(self, num_rows: int, num_features: int) -> float:
        """What a product of this size takes."""
        programs = cdiv(num_rows, self.tile.rows) * cdiv(num_features, self.tile.features)
        return cdiv(programs, MULTIPROCESSORS) * self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTiles:
    """The tiles of dense products of 16-bit numbers."""

    narrow: Tile
    """Up to 16 rows, and no more features than the programs of a round compute."""
    skinny: Tile
    """Up to 16 rows."""
    low: Tile
    """Up to 64 rows."""
    awaiting_host: Tile
    """See there."""
    large: tuple[Rounds, ...]

    def of(self, num_rows: int, num_features: int) -> Tile:
        """The one for a product of this size."""
        if num_rows <= self.skinny.rows:
            is_one_round = num_features <= MULTIPROCESSORS * self.narrow.features
            return self.narrow if is_one_round else self.skinny
        if num_rows <= self.low.rows:
            return self.low
        if num_rows in AWAITING_HOST:
            return self.awaiting_host
        return min(self.large, key=lambda each: each.of(num_rows, num_features)).tile

    def all(self) -> tuple[Tile, ...]:
        """For the check that all of them compile."""
        return self.narrow, self.skinny, self.low, self.awaiting_host, *(each.tile for each in self.large)


NARROW = Tile(rows=16, features=32, inputs=256, num_warps=4, num_stages=6)
SKINNY = Tile(rows=16, features=32, inputs=128, num_warps=4, num_stages=4)
LOADED = Tile(rows=128, features=128, inputs=64, num_warps=8, num_stages=3)
PLAIN = HopperTiles(
    narrow=NARROW,
    skinny=SKINNY,
    awaiting_host=LOADED,
    low=Tile(rows=64, features=64, inputs=128, num_warps=4, num_stages=6, tma=True),
    large=(
        Rounds(tile=Tile(rows=256, features=128, inputs=64, num_warps=8, num_stages=4, tma=True), cost=46),
        Rounds(tile=Tile(rows=128, features=128, inputs=64, num_warps=4, num_stages=4, tma=True), cost=27),
        Rounds(tile=Tile(rows=128, features=64, inputs=128, num_warps=4, num_stages=3, tma=True), cost=23.5),
        Rounds(tile=Tile(rows=64, features=64, inputs=128, num_warps=4, num_stages=4), cost=17.5),
    ),
)
GATED = HopperTiles(
    narrow=NARROW,
    skinny=SKINNY,
    awaiting_host=LOADED,
    low=Tile(rows=64, features=64, inputs=128, num_warps=4, num_stages=4, tma=True),
    large=(
        Rounds(tile=Tile(rows=128, features=128, inputs=64, num_warps=8, num_stages=3, tma=True), cost=46),
        Rounds(tile=Tile(rows=128, features=64, inputs=64, num_warps=4, num_stages=4, tma=True), cost=27),
        Rounds(tile=Tile(rows=64, features=64, inputs=128, num_warps=4, num_stages=4, tma=True), cost=23.5),
    ),
)
"""Of products with a gate: as many features of each half."""
