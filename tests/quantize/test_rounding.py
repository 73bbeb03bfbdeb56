"""Grids, packing, and what both become in the form that compressed-tensors reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.config.quantized.config import read_quantization
from quire.config.quantized.stored import Header
from quire.errors import ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.loader.mapped_file import STORED_DTYPES
from quire.ops.shared.dequantize import dequantize
from quire.quantize.compressed import compressed, decompressed, pack, unpack
from quire.quantize.formats import FORMATS, TargetFormat, target_format
from quire.quantize.grid import grid_of
from tests import quantized_checkpoints as writers

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
TARGETS = {
    "int4": target_format("int4", "32", symmetric=True),
    "int4 asymmetric": target_format("int4", "16", symmetric=False),
    "int4 of rows": target_format("int4", "channel", symmetric=True),
    "int8": target_format("int8", "64", symmetric=True),
    "int8 asymmetric": target_format("int8", "32", symmetric=False),
    "w8a8": FORMATS["w8a8"],
    "fp8": FORMATS["fp8"],
}


def random_weight(rows: int = 24, columns: int = 192, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype).float()
    weight[3] = 0
    weight[4, :16] *= 50
    return weight


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> TargetFormat:
    return TARGETS[request.param]


def test_no_other_value_of_the_grid_is_nearer(target: TargetFormat) -> None:
    weight = random_weight()
    grid = grid_of(weight, target, torch.bfloat16)
    values = grid.round(weight)
    error = (grid.dequantize(values) - weight).abs()
    least, most = target.limits
    for step in (-1, 1):
        other = (values + step).clamp(least, most)
        if target.is_float:
            other = (values * (1 + step / 8)).clamp(least, most).to(torch.float8_e4m3fn).float()
        assert (error <= (grid.dequantize(other) - weight).abs() + 1e-6).all()


def test_columns_round_as_the_whole_does(target: TargetFormat) -> None:
    weight = random_weight()
    grid = grid_of(weight, target, torch.float16)
    values, numbers = grid.column(70).round(weight[:, 70])
    assert torch.equal(values, grid.round(weight)[:, 70])
    assert torch.equal(numbers, grid.dequantize(grid.round(weight))[:, 70])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_packing_is_that_of_the_library(bits: int, columns: int) -> None:
    half = 1 << bits - 1
    values = torch.randint(-half, half, (5, columns), generator=torch.Generator().manual_seed(columns))
    words = pack(values.int(), bits)
    assert torch.equal(words, writers.packed(values + half, bits))
    assert torch.equal(unpack(words, bits, columns), values.int())


def test_what_is_written_reads_as_what_was_meant(target: TargetFormat) -> None:
    weight = random_weight()
    grid = grid_of(weight, target, torch.bfloat16)
    values = grid.round(weight)
    tensors = compressed("up", values, grid, torch.bfloat16)
    assert torch.equal(decompressed("up", tensors, target), grid.dequantize(values))

    config = {"quantization_config": target.quantization_config(["lm_head"])}
    quantization = read_quantization(config, "config.json")
    assert quantization is not None
    headers = {name: Header(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = quantization.find("up.weight", headers.get)
    assert found is not None
    rows = UNPACK[found.packing](found, {role: tensors[name] for role, name in found.tensors.items()})
    torch.testing.assert_close(dequantize(rows), grid.dequantize(values), rtol=1e-6, atol=0)


def test_compressed_tensors_reads_what_is_written(target: TargetFormat) -> None:
    """Runs where the package compressed-tensors is installed; tested with 0.20."""
    library = pytest.importorskip("compressed_tensors", exc_type=ImportError)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    assert library.__version__
    weight = random_weight()
    grid = grid_of(weight, target, torch.float32)
    values = grid.round(weight)
    tensors = compressed("up", values, grid, torch.float32)
    config = QuantizationConfig.model_validate(target.quantization_config(["lm_head"]))
    compressor = BaseCompressor.get_value_from_registry(target.layout)
    stored = {name.removeprefix("up."): tensor for name, tensor in tensors.items()}
    got = compressor.decompress(stored, config.config_groups["group_0"])["weight"]
    torch.testing.assert_close(got, grid.dequantize(values), rtol=0, atol=0)


def test_group_sizes_that_make_no_sense_are_refused() -> None:
    for wrong in ("0", "-32", "12", "x", "1.5"):
        with pytest.raises(ConfigError, match="--group-size must be channel or a multiple of 8"):
            target_format("int4", wrong, symmetric=True)
    with pytest.raises(ConfigError, match="one scale for each row"):
        target_format("w8a8", "64", symmetric=True)
    with pytest.raises(ConfigError, match="no zero points"):
        target_format("fp8", None, symmetric=False)
    assert replace(target_format("int8", None, symmetric=False), symmetric=True) == FORMATS["int8"]
