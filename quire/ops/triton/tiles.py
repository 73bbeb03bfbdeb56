"""How much of a product one program computes. The choices are estimates; `hopper` has those that were measured.

Row invariance: a row's sum over the inputs runs in the same steps in every tile, `Tile.inputs` at a time and in order,
and is never split between programs. In the interpreter the bits agree whichever tile computes a row. On a device they
agree if its matrix instructions of different shapes add up alike, which `gemm.tiles_agree` finds out.
Ampere has one shape for all of these tiles. Hopper has wgmma for tiles of 64 rows and more, and mma.sync for the
others; on an H100 their bits agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.utils.math import cdiv

PROGRAMS = 128
"""So many programs fill a device: of products with fewer, the next smaller tile computes more at a time."""
MANY_FEATURES = 8192
"""From so many output features on, programs of 32 fill the device; below, programs of 16 do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes, and how the compiler shall spread it."""

    rows: int
    features: int
    """Output features; of a gated product, so many of each half."""
    inputs: int
    """Input features that one step of the sum takes."""
    num_warps: int
    num_stages: int
    """Steps whose loads are under way at a time, and one."""
    tma: bool = False
    """Whether Hopper's copy engine loads them (`dense_tma_kernel`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tiles of one kernel, for weights of one size."""

    narrow: Tile
    """Up to 16 rows, few features: streams the weight in many small programs."""
    skinny: Tile
    """Up to 16 rows."""
    medium: Tile
    large: Tile
    """Where there are enough of it."""

    def of(self, num_rows: int, num_features: int) -> Tile:
        """The one for a product of this size."""
        if num_rows <= self.skinny.rows:
            return self.narrow if num_features < MANY_FEATURES else self.skinny
        num_large = cdiv(num_rows, self.large.rows) * cdiv(num_features, self.large.features)
        return self.medium if num_large < PROGRAMS else self.large

    def all(self) -> tuple[Tile, ...]:
        """For the check that all of them compile."""
        return self.narrow, self.skinny, self.medium, self.large


HALF = Tiles(
    narrow=Tile(rows=16, features=16, inputs=64, num_warps=2, num_stages=8),
    skinny=Tile(rows=16, features=32, inputs=64, num_warps=4, num_stages=6),
    medium=Tile(rows=64, features=64, inputs=64, num_warps=4, num_stages=3),
    large=Tile(rows=128, features=128, inputs=64, num_warps=8, num_stages=3),
)
"""Of 16-bit activations."""
SINGLE = Tiles(
    narrow=Tile(rows=16, features=16, inputs=32, num_warps=2, num_stages=4),
    skinny=Tile(rows=16, features=32, inputs=32, num_warps=4, num_stages=4),
    medium=Tile(rows=32, features=32, inputs=32, num_warps=4, num_stages=2),
    large=Tile(rows=64, features=64, inputs=32, num_warps=8, num_stages=2),
)
"""Of float32 activations, whose products tensor cores do not compute."""
WIDENED = Tiles(
    narrow=Tile(rows=16, features=16, inputs=64, num_warps=2, num_stages=4),
    skinny=Tile(rows=16, features=32, inputs=64, num_warps=4, num_stages=4),
    medium=Tile(rows=64, features=32, inputs=64, num_warps=4, num_stages=2),
    large=Tile(rows=128, features=32, inputs=64, num_warps=8, num_stages=2),
)
"""Of quantised weights, which are widened in registers: larger tiles have too few left on Ampere."""
WIDENED_SINGLE = Tiles(
    narrow=WIDENED.narrow,
    skinny=WIDENED.skinny,
    medium=Tile(rows=16, features=32, inputs=64, num_warps=4, num_stages=2),
    large=Tile(rows=16, features=32, inputs=64, num_warps=4, num_stages=2),
)
"""Of quantised weights and float32 activations, which leave no registers for more rows."""

WIDENED_GATHERED = Tiles(narrow=WIDENED.narrow, skinny=WIDENED.skinny, medium=WIDENED.medium, large=WIDENED.medium)
"""Of quantised experts, whose rows lie apart: 128 of them spill 380 to 1236 bytes on MI300."""


def gathered_tiles(dtype: torch.dtype) -> Tiles:
    """Of quantised experts, for activations of this type."""
    return WIDENED_SINGLE if dtype == torch.float32 else WIDENED_GATHERED


def widened_tiles(dtype: torch.dtype) -> Tiles:
    """Of quantised weights, for activations of this type."""
    return WIDENED_SINGLE if dtype == torch.float32 else WIDENED


def dense_tiles(dtype: torch.dtype) -> Tiles:
    """For activations of this type."""
    return SINGLE if dtype == torch.float32 else HALF


def stages(tile: Tile) -> int:
    """Of a tile on this machine: AMD's local memory holds two."""
    return min(2, tile.num_stages) if torch.version.hip else tile.num_stages
