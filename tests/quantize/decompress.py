"""The numbers that a checkpoint in compressed-tensors' formats stands for, by the formats' description alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def decompress(directory: Path) -> dict[str, Tensor]:
    """All tensors in float32, by the names of the unquantised model."""
    stored: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    scheme = config["config_groups"]["group_0"]["weights"]
    numbers = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            numbers[f"{module}.weight"] = _unpacked(module, stored, scheme["num_bits"])
        elif f"{module}.weight_scale" in stored and part == "weight":
            numbers[name] = tensor.float() * stored[f"{module}.weight_scale"].float()
        elif not part.startswith("weight_"):
            numbers[name] = tensor.float()
    return numbers


def _unpacked(module: str, stored: dict[str, Tensor], bits: int) -> Tensor:
    rows, columns = stored[f"{module}.weight_shape"].tolist()
    values = _fields(stored[f"{module}.weight_packed"], bits)[:, :columns]
    scales = stored[f"{module}.weight_scale"].float()
    group = columns // scales.shape[1]
    half = 1 << bits - 1
    zeros = torch.full_like(scales, half)
    if f"{module}.weight_zero_point" in stored:
        zeros = _fields(stored[f"{module}.weight_zero_point"].T, bits).T[:rows].float()
    return (values - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def _fields(words: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    unsigned = words.long() & 0xFFFFFFFF
    out = torch.empty(words.shape[0], words.shape[1] * per_word)
    for place in range(per_word):
        out[:, place::per_word] = ((unsigned >> (bits * place)) & ((1 << bits) - 1)).float()
    return out
