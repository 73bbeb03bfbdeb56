"""`LayerContext`: all that a layer is built with, so that no constructor grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.quantized.config import StoredQuantization
from quire.config.quantized.stored import Header, StoredFormat
from quire.distributed.groups import ParallelContext
from quire.errors import CheckpointError, ConfigError
from quire.layers.quantization.read import read_rows, stored_names
from quire.layers.quantization.schemes import STORED, WeightScheme, copied, copy_rows, plain
from quire.layers.weights import WHOLE, HeadOrder, Rows, ShardSpec, WeightMap, WeightReader, multiplied
from quire.ops.contracts.operands import BlockTable, LinearWeight
from quire.ops.contracts.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Where a layer stands in the model, and where its parameters come from. A layer is born with its values."""

    ops: Ops
    weights: WeightReader
    weight_map: WeightMap
    dtype: torch.dtype
    """Of activations and of the weights that are not kept in float32."""
    max_model_len: int
    parallel: ParallelContext = ParallelContext()
    quantization: StoredQuantization | None = None
    """How the checkpoint has its weights quantised."""
    scheme: WeightScheme = STORED
    """How linear weights are kept."""
    has_kv_scales: bool = False
    """Whether the KV cache takes the checkpoint's scales, where there are some."""
    name: str = ""
    """The layer's dotted name, as in the checkpoint."""

    def child(self, name: str | int) -> LayerContext:
        """The context of a part of this layer."""
        return replace(self, name=f"{self.name}.{name}" if self.name else str(name))

    def beside(self, name: str) -> LayerContext:
        """The context of another part of the same parent."""
        return replace(self, name=f"{self.name.rpartition('.')[0]}.{name}")

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a weight of this name, for those that it may spell in several ways."""
        return self.header(name) is not None or self.is_quantized(name)

    def header(self, name: str) -> Header | None:
        """Of the checkpoint's tensor of this name, if there is one."""
        return self.weights.header(self._full(name))

    def is_quantized(self, name: str) -> bool:
        """Whether the checkpoint has the weight of this name quantised."""
        return self._format_of(self._full(name)) is not None

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec = WHOLE) -> Rows:
        """A weight [N, M] of the checkpoint, or this rank's part of it, or one expert of [X, N, M], for `packed`."""
        return read_rows(self.weights, self.quantization, self._full(name), shape, shard)

    def read_plain(self, name: str, shape: tuple[int, ...], shard: ShardSpec = WHOLE) -> Tensor:
        """Likewise, as numbers."""
        return plain(self.read(name, shape, shard))

    def release(self, names: Sequence[str]) -> None:
        """What was read under these names has been copied."""
        self.weights.release(stored_names(self.weights, self.quantization, [self._full(name) for name in names]))

    def packed(self, names: Sequence[str], parts: Sequence[Rows]) -> LinearWeight:
        """The packed weight of parts that `read` gave under these names; they are released."""
        if parts[0].is_meta:
            out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
            return LinearWeight(out_features=out_features, in_features=in_features, format="none", tensors={})
        packed = self._pack([self._full(name) for name in names], parts, is_head=False)
        self.release(names)
        return packed

    def _pack(self, names: Sequence[str], parts: Sequence[Rows], *, is_head: bool) -> LinearWeight:
        """Raises: CheckpointError naming the weights where they have values or scales that no format has."""
        try:
            return self.scheme.pack(self.ops, parts, self.dtype, is_head=is_head)
        except ConfigError as error:
            raise CheckpointError(f"{', '.join(names)}: {error.message}") from None

    def _format_of(self, full: str) -> StoredFormat | None:
        return None if self.quantization is None else self.quantization.find(full, self.weights.header)

    def _full(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

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
        stored = self.read(name, shape)
        if stored.is_meta:
            return plain(stored)
        value = copied(stored, dtype or self.dtype, self.ops.device)
        self.release([name])
        if offset:
            value.add_(offset)
        return value if scale == 1.0 else value.mul_(scale)

    def integers(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype = torch.int32) -> Tensor:
        """A copy of a table of whole numbers."""
        header = self.header(name)
        if header is not None and header.shape == shape and header.dtype in ("I64", "I32"):
            stored = self.weights.read_raw(self._full(name))
        else:
            stored = self.read_plain(name, shape)
        if stored.is_meta:
            return stored
        value = stored.to(self.ops.device, dtype, copy=True)
        self.release([name])
        return value

    def table(
        self, name: str, shape: tuple[int, int], *, first_row: int, end: int, num_more: int = 0
    ) -> Tensor | BlockTable:
        """A copy of the rows of a table from `first_row` to `end`, for `Ops.embedding`, and `num_more` copies of the
        first of them behind the last."""
        stored = self.read(name, shape)
        if stored.is_meta:
            return plain(stored)
        if num_more:
            table: Tensor | BlockTable = self._longer_table(stored[first_row:end], num_more)
        else:
            table = self.scheme.table(stored[first_row:end], self.dtype, self.ops.device)
        self.release([name])
        return table

    def joined_table(self, names: Sequence[str], shape: tuple[int, int]) -> Tensor:
        """A copy of a table whose rows the checkpoint has in several tensors, each of which is let go once copied."""
        stored = [header.shape for header in map(self.header, names) if header is not None]
        sizes = [rows for rows, *_ in stored] if len(names) > 1 else [shape[0]]
        if sum(sizes) != shape[0]:
            raise CheckpointError(
                f"{self._full(names[0])} and those that follow have {sum(sizes)} rows, but config.json asks for "
                f"{shape[0]}; one of the two belongs to another model"
            )
        table: Tensor | None = None
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            rows = self.read(name, (size, shape[1]))
            if rows.is_meta:
                continue
            table = torch.empty(shape, dtype=self.dtype, device=self.ops.device) if table is None else table
            copy_rows(table[begin : begin + size], rows)
            self.release([name])
            begin += size
        return torch.empty(shape, device="meta") if table is None else table

    def _longer_table(self, rows: Rows, num_more: int) -> Tensor:
        table = torch.empty(rows.shape[0] + num_more, rows.shape[1], dtype=self.dtype, device=self.ops.device)
        copy_rows(table, rows)
        table[rows.shape[0] :] = table[0]
        return table

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
        names, sizes = self._parts(out_features, "weight")
        parts = [self._linear_rows(name, (size, in_features), shard) for name, size in zip(names, sizes, strict=True)]
        if parts[0].is_meta:
            return LinearWeight(out_features=sum(out_features), in_features=in_features, format="none", tensors={})
        if order is not None:
            parts = order.parts(parts[0])
        parts = multiplied(parts, out_features, factors)
        packed = self._pack(names, parts, is_head=is_head)
        self.weights.release(stored_names(self.weights, self.quantization, names))
        return packed

    def _linear_rows(self, source: str, shape: tuple[int, int], shard: ShardSpec) -> Rows:
        """A weight [out, in], which a checkpoint that has it plainly may have transposed."""
        if self.weight_map.is_transposed(self.name) and self._format_of(source) is None:
            stored = ShardSpec(dim=1 - shard.dim, part=shard.part, parts=shard.parts)
            return self.weights.read(source, shape[::-1], stored).t()
        return read_rows(self.weights, self.quantization, source, shape, shard)

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
        stored = [self.weights.read(source, (size,), shard) for source, size in zip(names, sizes, strict=True)]
        if stored[0].is_meta:
            return stored[0]
        parts: list[Rows] = [*stored]
        if order is not None:
            parts = order.parts(parts[0])
        bias = torch.cat([plain(part).to(torch.float32) for part in multiplied(parts, out_features, factors)])
        self.weights.release(names)
        return bias.to(self.ops.device)

    def _parts(self, out_features: tuple[int, ...], name: str) -> tuple[list[str], tuple[int, ...]]:
        """The checkpoint's names and sizes: one for each part, or a single one where the checkpoint is fused too."""
        layers = self.weight_map.sources(self.name)
        if len(layers) > 1 and self.has(name):
            layers = [self.name]
        sources = [f"{layer}.{name}" for layer in layers]
        return sources, out_features if len(sources) == len(out_features) else (sum(out_features),)


def refuse_elsewhere(arch: ModelArch, ctx: LayerContext, what: str) -> None:
    """Raises: ConfigError where the ops of a GPU would have to compute `what`, or several processes."""
    if ctx.ops.name == "triton":
        raise ConfigError(f"{arch.source}: {what} is what the triton ops do not have yet; give device='cpu'")
    if ctx.parallel.tp.size > 1:
        raise ConfigError(f"{arch.source}: {what} is not split between processes. Use one process.")
