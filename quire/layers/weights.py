"""Where a parameter's values come from: names in the checkpoint, and the slice of them that a rank holds.

Knows no files: `quire.loader` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How a family's checkpoint spells what its layers ask for."""

    fuse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A layer that computes several of the checkpoint's layers at once -> those, in order."""
    transposed: frozenset[str] = frozenset()
    """Layers whose weight is stored [in, out]."""
    base_prefix: str = "model."
    """Missing in checkpoints that were saved without their head; then it is left out of every name."""
    ignored: tuple[str, ...] = ()
    """Endings of names that older versions stored and nobody reads, beside those every family has."""

    def sources(self, name: str) -> list[str]:
        """The checkpoint's names of the layer called `name`."""
        parent, dot, last = name.rpartition(".")
        return [parent + dot + part for part in self.fuse.get(last, (last,))]

    def is_transposed(self, name: str) -> bool:
        """Whether the layer called `name` is stored [in, out]."""
        return name.rpartition(".")[2] in self.transposed


class WeightReader(Protocol):
    """Gives tensors by their checkpoint name."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor. A reader without a checkpoint has none, and gives any."""

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """This rank's part of a tensor of full shape `shape`, in the checkpoint's dtype. Valid until `release`."""

    def release(self, names: Sequence[str]) -> None:
        """The tensors read under these names have been copied."""
