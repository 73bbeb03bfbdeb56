"""Where a parameter's values come from: names in the checkpoint, and the slice of them that a rank holds.

Knows no files: `quire.loader` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from quire.config.family_spec import WeightNames
from quire.config.quantized.stored import Header
from quire.ops.contracts.operands import BlockRows, StoredRows
from quire.ops.shared.blocks import unpack_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """An equal part of a tensor along one dimension."""

    dim: int = 0
    part: int = 0
    parts: int = 1

    def slice_of(self, size: int) -> slice:
        """The rows (or columns) held of a dimension of the given full size, which `parts` divides."""
        step = size // self.parts
        return slice(self.part * step, (self.part + 1) * step)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape held of a tensor of the given full shape."""
        return tuple(size // self.parts if dim == self.dim else size for dim, size in enumerate(shape))


WHOLE = ShardSpec()
Rows = Tensor | StoredRows
"""Rows of a weight [N, M]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How a family's checkpoint spells what its layers ask for."""

    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A layer that computes several of the checkpoint's layers at once -> those, in order."""
    transposed: frozenset[str] = frozenset()
    """Layers whose weight is stored [in, out]."""
    resaved: tuple[tuple[str, str], ...] = ()
    """See `WeightNames.resaved`."""
    base_prefix: str = "model."
    """Missing in checkpoints that were saved without their head; then it is left out of every name."""

    @classmethod
    def of(cls, names: WeightNames) -> WeightMap:
        """That of a decoder whose parts have these names."""
        return cls(
            fuse={"qkv_proj": names.qkv, "gate_up_proj": names.gate_up},
            transposed=names.transposed,
            resaved=names.resaved,
            base_prefix=f"{names.base}.",
        )

    def sources(self, name: str) -> list[str]:
        """The checkpoint's names of the layer called `name`."""
        parent, dot, last = name.rpartition(".")
        return [parent + dot + part for part in self.fuse.get(last, (last,))]

    def is_transposed(self, name: str) -> bool:
        """Whether the layer called `name` is stored [in, out]."""
        return any(source.rpartition(".")[2] in self.transposed for source in self.sources(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrder:
    """A tensor that has, for each group of heads in turn, its query heads, its keys, and its values."""

    num_groups: int
    num_queries: int
    """Query heads of a group."""
    num_keys: int = 1
    """Key heads of a group, and value heads."""
    head_size: int
    values_first: bool = False
    """Values stand before keys."""

    def parts(self, stored: Rows) -> list[Rows]:
        """The rows in the order that ops want: all query heads, all keys, all values. Shapes: stored [N, ...]."""
        if not isinstance(stored, Tensor):
            return [stored[rows] for rows in self._views(torch.arange(stored.shape[0]))]
        return list(self._views(stored))

    def _views(self, stored: Tensor) -> list[Tensor]:
        sizes = [self.num_queries, self.num_keys, self.num_keys]
        groups = stored.view(self.num_groups, sum(sizes), self.head_size, *stored.shape[1:])
        queries, keys, values = torch.split(groups, sizes, dim=1)
        if self.values_first:
            keys, values = values, keys
        return [part.flatten(0, 1) for kind in (queries, keys, values) for part in kind]


def split_rows(stored: Rows, sizes: Sequence[int]) -> list[Rows]:
    """So many rows each."""
    ends = list(accumulate(sizes, initial=0))
    return [stored[begin:end] for begin, end in pairwise(ends)]


def multiplied(parts: list[Rows], sizes: Sequence[int], factors: Sequence[float]) -> list[Rows]:
    """The parts times their factors, plain ones in float32; the parts themselves where all are one.

    A single part may have the rows of several factors: as many of each as `sizes` says. Shapes: parts [N] or [N, M].
    """
    if all(factor == 1.0 for factor in factors):
        return parts
    if len(parts) != len(factors):
        (whole,) = parts
        parts = split_rows(whole, sizes)
    return [_times(part, factor) for part, factor in zip(parts, factors, strict=True)]


def _times(part: Rows, factor: float) -> Rows:
    if isinstance(part, Tensor):
        return part.to(torch.float32, copy=True).mul_(factor)
    return (unpack_blocks(part) if isinstance(part, BlockRows) else part).times(factor)


class WeightReader(Protocol):
    """Gives tensors by their checkpoint name."""

    def header(self, name: str) -> Header | None:
        """Of the checkpoint's tensor of this name, if there is one. A reader without a checkpoint has none."""

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """This rank's part of a tensor of full shape `shape`, in the checkpoint's dtype. Valid until `release`."""

    def read_raw(self, name: str) -> Tensor:
        """A whole tensor that is there, of any dtype. Valid until `release`."""

    def release(self, names: Sequence[str]) -> None:
        """The tensors read under these names have been copied."""
