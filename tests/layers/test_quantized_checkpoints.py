"""Checkpoints in the formats of others, read against the numbers that their writers say they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.config.quantized.config import read_quantization
from quire.layers.quantization.unpack import UNPACK
from quire.loader.checkpoint import Checkpoint
from quire.ops.shared.dequantize import dequantize
from tests.quantized_checkpoints import FORMATS, make_quantized_checkpoint

PROMPT = [11, 92, 45, 200, 7, 31, 150, 64]


@pytest.mark.parametrize("format", FORMATS)
def test_every_weight_is_what_its_writer_meant(format: str, tmp_path: Path) -> None:
    quantized, plain = make_quantized_checkpoint(format, tmp_path)
    expected, stored = Checkpoint(plain), Checkpoint(quantized)
    quantization = read_quantization({"quantization_config": dict(FORMATS[format].config)}, "config.json")
    assert quantization is not None
    num_read = 0
    for name in expected.tensors:
        found = quantization.find(name, stored.header)
        assert (found is not None) == name.endswith("_proj.weight")
        if found is None:
            continue
        rows = UNPACK[found.packing](found, {role: stored.view(tensor) for role, tensor in found.tensors.items()})
        numbers = expected.view(name)
        torch.testing.assert_close(dequantize(rows).view(numbers.shape), numbers, rtol=1e-6, atol=1e-8)
        num_read += 1
    assert num_read == 14
