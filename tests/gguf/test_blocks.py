"""Blocks of every quantised type stand for the numbers that the package gguf makes of them."""

import warnings

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as dequantize_blocks
from gguf.quants import quantize

from quire.config.gguf.tensor_types import BY_NAME, PLAIN, QUANTIZED, TENSOR_TYPES
from quire.config.memory.weights.formats import native_format
from quire.ops.contracts.operands import BlockRows, QuantizedRows
from quire.ops.shared import blocks
from quire.ops.shared.blocks import unpack_blocks
from quire.ops.shared.dequantize import dequantize

ROUNDING = 2.0**-22
"""Of float32: an offset may be rounded once more than in a product with a code from zero on."""
ROUNDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")
"""Types that the package quantises to."""


def quantized_rows(name: str, raw: torch.Tensor) -> QuantizedRows:
    return unpack_blocks(BlockRows(type_name=name, blocks=raw))


def test_types_have_the_sizes_that_the_package_gguf_says() -> None:
    for type_id, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(type_id)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (kind.name, (kind.block_size, kind.block_bytes))
    assert {*PLAIN, *QUANTIZED} <= {*BY_NAME}


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_blocks_stand_for_the_same_numbers(name: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (24, 3 * BY_NAME[name].block_bytes), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scales that are no numbers
        theirs = dequantize_blocks(raw, gguf.GGMLQuantizationType[name])
    ours = dequantize(quantized_rows(name, torch.from_numpy(raw))).numpy()
    is_finite = np.isfinite(theirs)
    assert is_finite.mean() > 0.5
    error = np.abs(ours[is_finite] - theirs[is_finite])
    if not QUANTIZED[name].has_offsets:
        assert not error.any()
    block = BY_NAME[name].block_size
    with np.errstate(invalid="ignore"):
        largest = np.abs(theirs.reshape(-1, block)).max(axis=1, keepdims=True).repeat(block, 1).reshape(theirs.shape)
    assert (error <= 64 * ROUNDING * largest[is_finite]).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_say_what_the_table_of_types_says(name: str) -> None:
    raw = torch.zeros(2, BY_NAME[name].block_bytes, dtype=torch.uint8)
    rows, kind = quantized_rows(name, raw), QUANTIZED[name]
    assert rows.shape == (2, BY_NAME[name].block_size)
    assert (rows.bits, rows.group_size) == (kind.bits, kind.group_size)
    assert ((rows.offsets is not None), (rows.levels is not None)) == (kind.has_offsets, kind.has_levels)


KEPT = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_0": 5.5, "Q5_1": 6.0, "Q5_K": 5.625, "Q6_K": 6.5625, "Q8_0": 8.5}
"""Bits of a weight in the kernels' packing, with scales and offsets."""


@pytest.mark.parametrize("name", KEPT)
def test_kernels_keep_types_in_little_more_than_the_file_has(name: str) -> None:
    kind, block = QUANTIZED[name], BY_NAME[name]
    format = native_format(
        bits=kind.bits,
        group_size=kind.group_size,
        in_features=4096,
        has_offsets=kind.has_offsets,
        is_nested=kind.has_nested_scales,
    )
    assert format is not None
    assert format.num_bytes(4096, 4096) * 8 / 4096**2 == KEPT[name]
    assert KEPT[name] <= 1.03 * block.block_bytes * 8 / block.block_size


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_fit_the_bits_that_they_are_said_to_need(name: str) -> None:
    raw = np.random.default_rng(2).integers(0, 256, (64, BY_NAME[name].block_bytes), dtype=np.uint8)
    rows = quantized_rows(name, torch.from_numpy(raw))
    low, high = (0, 15) if rows.levels is not None else (-(1 << rows.bits - 1), (1 << rows.bits - 1) - 1)
    if rows.bits == 2:
        low, high = -1, 2
    assert low <= int(rows.values.min()) <= int(rows.values.max()) <= high


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_numbers_come_back_within_half_a_step(name: str) -> None:
    weight = np.random.default_rng(3).standard_normal((8, 256), np.float32)
    rows = quantized_rows(name, torch.from_numpy(quantize(weight, gguf.GGMLQuantizationType[name])))
    step = rows.scales.abs().repeat_interleave(rows.group_size, dim=1)
    # A whole step where the type has one code less above zero than below; float16 rounds scales.
    assert ((dequantize(rows) - torch.from_numpy(weight)).abs() <= step * 1.02).all()


def test_rows_are_read_alike_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (50, 288), dtype=np.uint8))
    whole = quantized_rows("Q4_K", raw)
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 3 * 288)
    chunked = quantized_rows("Q4_K", raw)
    assert torch.equal(whole.values, chunked.values)
    assert torch.equal(whole.scales.nan_to_num(), chunked.scales.nan_to_num())  # numbers that are none differ in bits
