"""`LayerContext`: all that a layer is built with, so that no constructor grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.distributed.groups import ParallelContext
from quire.layers.quantization import DENSE, WeightScheme
from quire.layers.weights import WHOLE, HeadOrder, ShardSpec, WeightMap, WeightReader, multiplied
from quire.ops.operands import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Where a layer stands in the model, and where its parameters come from. A layer is born with its values."""

    weights: WeightReader
    weight_map: WeightMap
    dtype: torch.dtype
    """Of activations and of the weights that are not kept in float32."""
    max_model_len: int
    parallel: ParallelContext = ParallelContext()
    scheme: WeightScheme = DENSE
    """How linear weights are kept."""
    name: str = ""
    """The layer's dotted name, as in the checkpoint."""

    def child(self, name: str | int) -> LayerContext:
        """The context of a part of this layer."""
        return replace(self, name=f"{self.name}.{name}" if self.name else str(name))

    def beside(self, name: str) -> LayerContext:
        """The context of another part of the same parent."""
        return replace(self, name=f"{self.name.rpartition('.')[0]}.{name}")

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name, for those that it may spell in several ways."""
        return self.weights.has(f"{self.name}.{name}")

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec = WHOLE) -> Tensor:
        """A tensor of the checkpoint, or this rank's part of it, for `packed`."""
        return self.weights.read(f"{self.name}.{name}", shape, shard)

    def packed(self, names: Sequence[str], parts: Sequence[Tensor]) -> LinearWeight:
        """The packed weight of parts that `read` gave under these names; they are released."""
        if parts[0].is_meta:
            out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
            return LinearWeight(out_features=out_features, in_features=in_features, format="none", tensors={})
        packed = self.scheme.pack(parts, self.dtype, is_head=False)
        self.weights.release([f"{self.name}.{name}" for name in names])
        return packed

    # A reader that only checks gives meta tensors. Nothing is computed with those: their arithmetic imports torch's
    # compiler, which takes more than a second.

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        """A copy of one whole parameter in `dtype` (default: the model's), plus `offset`, times `scale`."""
        source = f"{self.name}.{name}"
        stored = self.weights.read(source, shape, WHOLE)
        if stored.is_meta:
            return stored
        value = stored.to(dtype or self.dtype, copy=True)
        self.weights.release([source])
        if offset:
            value.add_(offset)
        return value if scale == 1.0 else value.mul_(scale)

    def linear_weight(
        self,
        in_features: int,
        out_features: tuple[int, ...],
        shard: ShardSpec,
        *,
        is_head: bool = False,
        order: HeadOrder | None = None,
        factors: Sequence[float] = (),
    ) -> LinearWeight:
        """The packed weight of a linear layer; `out_features` has one entry per layer that it computes.

        `order` is that of the rows of a single tensor, where it is another. `factors` multiply the rows of each entry.
        """
        transposed = self.weight_map.is_transposed(self.name)
        names, sizes = self._parts(out_features, "weight")
        parts = []
        for source, size in zip(names, sizes, strict=True):
            if transposed:
                stored = ShardSpec(dim=1 - shard.dim, part=shard.part, parts=shard.parts)
                parts.append(self.weights.read(source, (in_features, size), stored).t())
            else:
                parts.append(self.weights.read(source, (size, in_features), shard))
        if parts[0].is_meta:
            return LinearWeight(out_features=sum(out_features), in_features=in_features, format="none", tensors={})
        if order is not None:
            parts = order.parts(parts[0])
        parts = multiplied(parts, out_features, factors)
        packed = self.scheme.pack(parts, self.dtype, is_head=is_head)
        self.weights.release(names)
        return packed

    def linear_bias(
        self,
        out_features: tuple[int, ...],
        shard: ShardSpec,
        *,
        order: HeadOrder | None = None,
        factors: Sequence[float] = (),
    ) -> Tensor:
        """The bias of a linear layer in float32; see `linear_weight`."""
        names, sizes = self._parts(out_features, "bias")
        parts = [self.weights.read(source, (size,), shard) for source, size in zip(names, sizes, strict=True)]
        if parts[0].is_meta:
            return parts[0]
        if order is not None:
            parts = order.parts(parts[0])
        parts = multiplied(parts, out_features, factors)
        bias = torch.cat([part.to(torch.float32) for part in parts])
        self.weights.release(names)
        return bias

    def _parts(self, out_features: tuple[int, ...], name: str) -> tuple[list[str], tuple[int, ...]]:
        """The checkpoint's names and sizes: one for each part, or a single one where the checkpoint is fused too."""
        sources = [f"{source}.{name}" for source in self.weight_map.sources(self.name)]
        return sources, out_features if len(sources) == len(out_features) else (sum(out_features),)
