"""One weight of a checkpoint, plain or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.config.quantized.config import StoredQuantization
from quire.config.quantized.find import WORD_BITS
from quire.config.quantized.stored import Packing, StoredFormat, refuse
from quire.errors import ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.layers.weights import Rows, ShardSpec, WeightReader
from quire.ops.contracts.operands import QuantizedRows, StoredRows
from quire.utils.math import cdiv


def read_rows(
    weights: WeightReader, quantization: StoredQuantization | None, name: str, shape: tuple[int, ...], shard: ShardSpec
) -> Rows:
    """This rank's part of a weight of full shape [N, M], or one expert of [X, N, M].

    Raises: CheckpointError where its tensors do not fit; ConfigError for a part of quantised columns.
    """
    found = None if quantization is None else quantization.find(name, weights.header)
    if found is None:
        return weights.read(name, shape, shard)
    found = _of_shape(found, shape)
    stored = {role: weights.read_raw(tensor) for role, tensor in found.tensors.items()}
    if next(iter(stored.values())).is_meta:
        return torch.empty(shard.local_shape(shape), device="meta")
    if len(shape) == 3:
        stored = {role: tensor[shard.part] for role, tensor in stored.items()}
    rows = UNPACK[found.packing](found, stored)
    _check_numbers(found, rows)
    if len(shape) == 3:
        return rows
    return rows if shard.parts == 1 else rows[_slice_of(found, shard, shape)]


def stored_names(weights: WeightReader, quantization: StoredQuantization | None, names: Sequence[str]) -> list[str]:
    """The tensors that hold the weights of these names."""
    found = [None if quantization is None else quantization.find(name, weights.header) for name in names]
    return [
        stored
        for name, format in zip(names, found, strict=True)
        for stored in ([name] if format is None else format.tensors.values())
    ]


def _of_shape(found: StoredFormat, shape: tuple[int, ...]) -> StoredFormat:
    """The format, without what fills up the last word of packed rows. Raises: CheckpointError for another shape."""
    if shape == found.shape:
        return found
    columns = shape[-1]
    filled = cdiv(columns * found.bits, WORD_BITS) * WORD_BITS // found.bits
    if found.packing is Packing.PACKED and (*shape[:-1], filled) == found.shape:
        return replace(found, shape=shape, group_size=min(found.group_size, columns))
    raise refuse(found.name, f"has shape {list(found.shape)}, but config.json asks for {list(shape)}")


def _check_numbers(found: StoredFormat, rows: StoredRows) -> None:
    """Raises: CheckpointError for scales that are not finite. Blocks of GGUF files are checked as they are packed."""
    if isinstance(rows, QuantizedRows) and not bool(rows.scales.isfinite().all()):
        raise refuse(found.name, "has a scale that is not finite")


def _slice_of(found: StoredFormat, shard: ShardSpec, shape: tuple[int, ...]) -> slice:
    if shard.dim != 0:
        raise ConfigError(f"{found.name} is quantised and cannot be split by its input features. Use one process.")
    return shard.slice_of(shape[0])
