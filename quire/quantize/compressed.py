"""Quantised weights as compressed-tensors stores them (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.quantize.formats import TargetFormat
from quire.quantize.grid import Grid

WORD_BITS = 32


def compressed(module: str, values: Tensor, grid: Grid, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that stand for a linear layer's weight, by name. Shapes: values [N, M] float32.

    Raises: CheckpointError for a weight that is not finite, and so has no scales.
    """
    if not bool(grid.scales.isfinite().all()):
        raise CheckpointError(f"{module}.weight has numbers that are not finite. Download the model again.")
    scales = {f"{module}.weight_scale": grid.scales.to(scale_dtype)}
    if not grid.target.is_packed:
        dtype = torch.float8_e4m3fn if grid.target.is_float else torch.int8
        return {f"{module}.weight": values.to(dtype), **scales}
    bits = grid.target.bits
    tensors = {
        f"{module}.weight_packed": pack(values.to(torch.int32), bits),
        **scales,
        f"{module}.weight_shape": torch.tensor(values.shape, dtype=torch.int64),
    }
    if grid.zero_points is not None:
        packed = pack(grid.zero_points.to(torch.int32).T, bits).T
        tensors[f"{module}.weight_zero_point"] = packed.contiguous()
    return tensors


def decompressed(module: str, tensors: Mapping[str, Tensor], target: TargetFormat) -> Tensor:
    """The weight that `compressed` made tensors of. Shapes: -> [N, M] float32."""
    scales = tensors[f"{module}.weight_scale"].to(torch.float32)
    if not target.is_packed:
        return tensors[f"{module}.weight"].to(torch.float32) * scales
    num_rows, num_columns = tensors[f"{module}.weight_shape"].tolist()
    values = unpack(tensors[f"{module}.weight_packed"], target.bits, num_columns)
    zero_points = None
    if not target.symmetric:
        zero_points = unpack(tensors[f"{module}.weight_zero_point"].T, target.bits, num_rows).T.to(torch.float32)
    grid = Grid(target=target, group_size=target.group_size or num_columns, scales=scales, zero_points=zero_points)
    return grid.dequantize(values.to(torch.float32))


def pack(values: Tensor, bits: int) -> Tensor:
    """Values, made positive, in int32, the first one in the lowest bits. Shapes: [N, M] -> [N, M * bits / 32]."""
    per_word = WORD_BITS // bits
    missing = -values.shape[1] % per_word
    # A row's last word is filled up with zeros, not with the value 0.
    padded = torch.nn.functional.pad(values.to(torch.int64) + (1 << bits - 1), (0, missing))
    words = padded.view(values.shape[0], -1, per_word) << torch.arange(0, WORD_BITS, bits)
    return words.sum(dim=2).to(torch.int32)


def unpack(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """Undo `pack`. Shapes: [N, W] -> [N, M] int32."""
    values = words.unsqueeze(2) >> torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (values.reshape(words.shape[0], -1)[:, :num_columns] & (1 << bits) - 1) - (1 << bits - 1)
