"""One weight of a checkpoint, plain or quantised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.config.quantized.config import StoredQuantization
from quire.config.quantized.stored import Packing, StoredFormat, refuse
from quire.errors import ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.layers.weights import Rows, ShardSpec, WeightReader


def read_rows(
    weights: WeightReader, quantization: StoredQuantization | None, name: str, shape: tuple[int, ...], shard: ShardSpec
) -> Rows:
    """This rank's part of a weight of full shape [N, M], or one expert of [X, N, M].

    Raises: CheckpointError where its tensors do not fit; ConfigError for a part of quantised columns.
    """
    found = None if quantization is None else quantization.find(name, weights.header)
    if found is None:
        return weights.read(name, shape, shard)
    _check_shape(found, shape)
    stored = {role: weights.read_raw(tensor) for role, tensor in found.tensors.items()}
    if next(iter(stored.values())).is_meta:
        return torch.empty(shard.local_shape(shape), device="meta")
    if len(shape) == 3:
        return UNPACK[found.packing](found, {role: tensor[shard.part] for role, tensor in stored.items()})
    rows = UNPACK[found.packing](found, stored)
    return rows if shard.parts == 1 else rows[_slice_of(found, shard, shape)]


def stored_names(weights: WeightReader, quantization: StoredQuantization | None, names: Sequence[str]) -> list[str]:
    """The tensors that hold the weights of these names."""
    found = [None if quantization is None else quantization.find(name, weights.header) for name in names]
    return [
        stored
        for name, format in zip(names, found, strict=True)
        for stored in ([name] if format is None else format.tensors.values())
    ]


def _check_shape(found: StoredFormat, shape: tuple[int, ...]) -> None:
    fits = math.prod(shape) == math.prod(found.shape) if found.packing is Packing.BNB_4BIT else shape == found.shape
    if not fits:
        raise refuse(found.name, f"has shape {list(found.shape)}, but config.json asks for {list(shape)}")


def _slice_of(found: StoredFormat, shard: ShardSpec, shape: tuple[int, ...]) -> slice:
    if shard.dim != 0:
        raise ConfigError(f"{found.name} is quantised and cannot be split by its input features. Use one process.")
    return shard.slice_of(shape[0])
