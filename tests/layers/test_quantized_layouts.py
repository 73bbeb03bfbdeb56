"""Weights in every layout that a config can ask for stand for the numbers that their writers meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.config.quantized.config import read_quantization
from quire.config.quantized.find import weights_in
from quire.config.quantized.stored import StoredFormat
from quire.errors import CheckpointError
from quire.layers.quantization.read import read_rows
from quire.layers.weights import WHOLE, WeightMap
from quire.loader.checkpoint import Checkpoint
from quire.loader.readers import CheckpointReader
from quire.ops.contracts.operands import BlockRows, QuantizedRows
from quire.ops.cpu import library
from quire.ops.shared.dequantize import dequantize
from tests.quantized_checkpoints import Written, modelopt_nvfp4, nvfp4
from tests.quantized_layouts import awq, bnb_nf4, ct_config, ct_int8, ct_packed, fp8, gptq

LAYER = "model.layers.0.mlp.up_proj"
SIZES = (None, 16, 24, 32, 48, 80, 96, 128, 1024)
"""Of groups. They fit 192 columns in twos and threes alike, and some divide them."""
PACKED = ct_config({"num_bits": 4, "group_size": 32, "symmetric": False})
BLOCKS = ((128, 128), (64, 64), (96, 96), (32, 96), (256, 128), (16, 16), (1, 128))


def weight_of(rows: int = 192, columns: int = 192) -> Tensor:
    """Every fifth row is positive, so that its zero points are 0."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[::5] = weight[::5].abs() + 0.02
    return weight


def read_back(config: Mapping[str, Any], written: Written, directory: Path) -> Tensor:
    """The numbers of the weight as quire reads it from a file."""
    _, rows = read_stored(config, written, directory)
    return dequantize(rows)


def read_stored(
    config: Mapping[str, Any], written: Written, directory: Path
) -> tuple[StoredFormat, QuantizedRows | BlockRows]:
    """The weight as quire reads it from a file, and what its headers say of it."""
    tensors = {f"{LAYER}.{role}": tensor.contiguous() for role, tensor in written.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    quantization = read_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    checkpoint = Checkpoint(directory)
    assert set(weights_in((name, checkpoint.header(name)) for name in checkpoint.tensors)) == {f"{LAYER}.weight"}  # type: ignore[misc]
    reader = CheckpointReader(checkpoint, WeightMap(), num_bytes=0)
    rows = read_rows(reader, quantization, f"{LAYER}.weight", tuple(written.weight.shape), WHOLE)
    assert not isinstance(rows, Tensor)
    found = quantization.find(f"{LAYER}.weight", checkpoint.header)
    assert found is not None
    return found, rows


def check(config: Mapping[str, Any], written: Written, directory: Path) -> None:
    torch.testing.assert_close(read_back(config, written, directory), written.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_groups_of_gptq_have_the_size_that_config_json_says(size: int | None, shuffled: bool, tmp_path: Path) -> None:
    written = gptq(weight_of(), bits=4, size=size, symmetric=True, shuffled=shuffled, v1=True)
    check({"quant_method": "gptq", "bits": 4, "group_size": size or -1, "desc_act": shuffled}, written, tmp_path)


@pytest.mark.parametrize("rules", ["dynamic", "extra_config"])
def test_rules_for_single_layers_say_sizes_too(rules: str, tmp_path: Path) -> None:
    written = gptq(weight_of(), bits=8, size=48, symmetric=True, shuffled=False, v1=True)
    config = {"quant_method": "gptq" if rules == "dynamic" else "auto-round", "bits": 4, "group_size": 128}
    check({**config, rules: {f"+:{LAYER}": {"bits": 8, "group_size": 48}}}, written, tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_groups_of_awq_have_the_size_that_config_json_says(size: int | None, tmp_path: Path) -> None:
    check({"quant_method": "awq", "group_size": size or -1}, awq(weight_of(), size=size), tmp_path)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["int", "float"])
def test_groups_of_8_bits_have_the_size_that_config_json_says(kind: str, size: int | None, tmp_path: Path) -> None:
    config = ct_config({"num_bits": 8, "type": kind, "group_size": size}, layout=f"{kind}-quantized")
    write = {
        "int": lambda: ct_int8(weight_of(), size=size, block_rows=1, symmetric=False),
        "float": lambda: fp8(weight_of(), size=size, block_rows=1, name="weight_scale"),
    }
    check(config, write[kind](), tmp_path)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(192, 192), (200, 320), (32, 96), (16, 512)])
def test_blocks_have_the_rows_and_columns_that_config_json_says(
    shape: tuple[int, int], block: tuple[int, int], tmp_path: Path
) -> None:
    rows, columns = block
    written = fp8(weight_of(*shape), size=columns, block_rows=rows)
    check({"quant_method": "fp8", "weight_block_size": list(block)}, written, tmp_path)
    config = ct_config({"num_bits": 8, "type": "int", "block_structure": list(block)}, layout="int-quantized")
    check(config, ct_int8(weight_of(*shape), size=columns, block_rows=rows, symmetric=False), tmp_path)
    config = ct_config({"num_bits": 4, "type": "int", "strategy": "block", "block_structure": list(block)})
    check(config, ct_packed(weight_of(*shape), bits=4, size=columns, block_rows=rows, symmetric=False), tmp_path)


def test_sizes_that_fit_alike_are_refused(tmp_path: Path) -> None:
    """Which layer a rule is for is not asked: two odd sizes that give as many groups are hardly ever met."""
    written = gptq(weight_of(), bits=4, size=96, symmetric=True, shuffled=False, v1=True)
    config = {"quant_method": "gptq", "group_size": 128, "dynamic": {"+:x": {"group_size": 96}}}
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has 2 groups .* which 96, 128 fit alike"):
        read_back(config, written, tmp_path)


KEPT_AS = {
    2: {16: "int4_g16", 32: "int2_g32", 64: "int2_g64", 96: "int2_g32", 128: "int2_g128", None: "int4_g64"},
    3: {16: "int4_g16", 32: "int3_g32", 64: "int3_g64", 96: "int3_g32", 128: "int3_g128", None: "int3_g64"},
}
"""By the bits of values and the size of groups: what the native kernels keep."""


@pytest.mark.skipif(not library.available(), reason=str(library.unavailable_reason()))
@pytest.mark.parametrize(("bits", "size"), [(bits, size) for bits, kept in KEPT_AS.items() for size in kept])
@pytest.mark.parametrize("symmetric", [True, False])
def test_few_bits_take_no_more_in_groups_that_kernels_have(
    bits: int, size: int | None, symmetric: bool, tmp_path: Path
) -> None:
    """And products have the bits of the same integers in four."""
    from quire.ops.cpu.products.gemm import linear
    from quire.ops.cpu.products.quantized import pack_quantized

    written = gptq(weight_of(), bits=bits, size=size, symmetric=symmetric, shuffled=False, v1=False)
    config = {"quant_method": "gptq", "bits": bits, "group_size": size or -1, "sym": symmetric}
    stored, rows = read_stored({**config, "checkpoint_format": "gptq_v2"}, written, tmp_path)
    assert isinstance(rows, QuantizedRows)
    weight = pack_quantized([rows])
    assert weight.format == stored.kept_as == KEPT_AS[bits][size] + ("" if symmetric else "_zeros")
    units = torch.eye(weight.in_features)  # which lose nothing to being rounded to eight bits
    torch.testing.assert_close(linear(units, weight).T, written.weight, rtol=1e-3, atol=1e-4)
    in_four = pack_quantized([replace(rows, bits=4)])
    x = torch.randn(9, weight.in_features, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    assert torch.equal(linear(x, weight), linear(x, in_four))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v1", [False, True])
def test_zero_points_of_0_are_0_in_both_versions_of_gptq(bits: int, v1: bool, tmp_path: Path) -> None:
    written = gptq(weight_of(), bits=bits, size=32, symmetric=False, shuffled=False, v1=v1)
    version = "gptq" if v1 else "gptq_v2"
    check({"quant_method": "gptq", "bits": bits, "sym": False, "checkpoint_format": version}, written, tmp_path)


@pytest.mark.parametrize(("stored", "said"), [("gptq_v2", "gptq"), ("gptq", "gptq_v2"), ("gptq_v2", None)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_other_version_of_gptq_is_noticed_where_there_are_no_zero_points(
    bits: int, stored: str, said: str | None, tmp_path: Path
) -> None:
    """Each number would be off by one step."""
    written = gptq(weight_of(), bits=bits, size=32, symmetric=True, shuffled=False, v1=stored == "gptq")
    with pytest.raises(CheckpointError, match=f"as {stored} stores it, but .* says {said or 'gptq'}: .* to '{stored}'"):
        read_back({"quant_method": "gptq", "bits": bits, "checkpoint_format": said}, written, tmp_path)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [None, 32, 48])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("rows", [6, 40])
def test_packed_weights_of_any_bits_and_rows(
    rows: int, bits: int, size: int | None, symmetric: bool, tmp_path: Path
) -> None:
    config = ct_config({"num_bits": bits, "group_size": size})
    written = ct_packed(weight_of(rows), bits=bits, size=size, symmetric=symmetric)
    check(config, written, tmp_path)
    if size is None:
        check(config, ct_packed(weight_of(rows, 101), bits=bits, size=size, symmetric=symmetric), tmp_path)
        check(config, ct_packed(weight_of(), bits=bits, size=None, symmetric=symmetric, whole=True), tmp_path)


@pytest.mark.parametrize("columns", [20, 192])
def test_words_that_values_do_not_fill_are_refused(columns: int, tmp_path: Path) -> None:
    """As compressed-tensors wrote them before 0.20: ten values of three bits in a word."""
    written = ct_packed(weight_of(32, columns), bits=3, size=None, symmetric=True)
    words = torch.zeros(32, -(-columns // 10), dtype=torch.int32)
    old = Written(tensors={**written.tensors, "weight_packed": words}, weight=written.weight)
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight is packed as compressed-tensors did before 0.20"):
        read_back(ct_config({"num_bits": 3}), old, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", [(None, None), (128, 64)])
def test_the_stored_shape_tells_schemes_apart(sizes: tuple[int | None, ...], bits: int, tmp_path: Path) -> None:
    """As many words and groups in either scheme."""
    size = dict(zip((4, 8), sizes, strict=True))[bits]
    written = ct_packed(weight_of(64, 256), bits=bits, size=size, symmetric=True)
    weights = [{"num_bits": count, "group_size": size} for count, size in zip((4, 8), sizes, strict=True)]
    check(ct_config(*weights), written, tmp_path)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "int8"])
def test_the_config_decides_whether_there_are_zero_points(kind: str, symmetric: bool, tmp_path: Path) -> None:
    """Not the weight, for what kernels compute together has one format. Zero points that are there always count."""
    ct = {"num_bits": 8 if kind == "int8" else 4, "group_size": 32, "symmetric": symmetric}
    config, written = {
        "gptq": ({"quant_method": "gptq", "sym": symmetric}, gptq_of(symmetric=True)),
        "awq": ({"quant_method": "awq", "zero_point": not symmetric}, awq(weight_of(), size=32)),
        "packed": (ct_config(ct), ct_packed(weight_of(), bits=4, size=32, symmetric=False)),
        "int8": (ct_config(ct), ct_int8(weight_of(), size=32, block_rows=1, symmetric=False)),
    }[kind]
    check(config, written, tmp_path)
    quantization = read_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    found = quantization.find(f"{LAYER}.weight", Checkpoint(tmp_path).header)
    assert found is not None
    assert found.has_zero_points == (not symmetric)


@pytest.mark.parametrize("kind", ["awq", "packed", "int8"])
def test_zero_points_that_are_missing_are_missed(kind: str, tmp_path: Path) -> None:
    config, written, role = {
        "awq": ({"quant_method": "awq"}, awq(weight_of(), size=32), "qzeros"),
        "packed": (PACKED, ct_packed(weight_of(), bits=4, size=32, symmetric=False), "weight_zero_point"),
        "int8": (PACKED, ct_int8(weight_of(), size=32, block_rows=1, symmetric=False), "weight_zero_point"),
    }[kind]
    tensors = {name: tensor for name, tensor in written.tensors.items() if name != role}
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has no zero points"):
        read_back(config, Written(tensors=tensors, weight=written.weight), tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "awq", "int8", "fp8"])
def test_one_scale_for_a_row_where_config_json_has_groups_is_refused(kind: str, tmp_path: Path) -> None:
    """As of a tensor of scales that was cut off. Groups as long as a row have one scale, too."""
    write = {
        "gptq": lambda: gptq(weight_of(), bits=4, size=None, symmetric=True, shuffled=False, v1=True),
        "awq": lambda: awq(weight_of(), size=None),
        "int8": lambda: ct_int8(weight_of(), size=None, block_rows=1, symmetric=True),
        "fp8": lambda: fp8(weight_of(), size=None, block_rows=1, name="weight_scale"),
    }[kind]

    def config_of(size: int) -> dict[str, Any]:
        if kind in ("gptq", "awq"):
            return {"quant_method": kind, "group_size": size}
        return ct_config({"num_bits": 8, "type": "float" if kind == "fp8" else "int", "group_size": size})

    check(config_of(192), write(), tmp_path)
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has one scale for 192 .* groups of 64"):
        read_back(config_of(64), write(), tmp_path)


@pytest.mark.parametrize("write", [nvfp4, modelopt_nvfp4])
def test_nvfp4_needs_its_scale_for_all(write: Callable[[Tensor], Written], tmp_path: Path) -> None:
    written = write(weight_of().bfloat16())
    names = ("weight_global_scale", "weight_scale_2", "input_scale")
    tensors = {name: tensor for name, tensor in written.tensors.items() if name not in names}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has no scale for all of it"):
        read_back(config, Written(tensors=tensors, weight=written.weight), tmp_path)


def gptq_of(*, symmetric: bool) -> Written:
    return gptq(weight_of(), bits=4, size=32, symmetric=symmetric, shuffled=False, v1=True)


def test_an_order_of_minus_one_is_none(tmp_path: Path) -> None:
    written = ct_packed(weight_of(), bits=4, size=32, symmetric=True)
    tensors = {**written.tensors, "weight_g_idx": torch.full((192,), -1, dtype=torch.int32)}
    check(ct_config({"num_bits": 4, "group_size": 32}), Written(tensors=tensors, weight=written.weight), tmp_path)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("shape", [(64, 256), (64, 96), (7, 40)])
def test_blocks_of_bitsandbytes_go_on_over_the_ends_of_rows(
    shape: tuple[int, int], block: int, nested: bool, storage: torch.dtype, tmp_path: Path
) -> None:
    written = bnb_nf4(weight_of(*shape), block=block, nested=nested, storage=storage)
    check({"quant_method": "bitsandbytes", "load_in_4bit": True}, written, tmp_path)


@pytest.mark.skipif(not library.available(), reason=str(library.unavailable_reason()))
@pytest.mark.parametrize("columns", [256, 96, 1040])
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
def test_headers_say_what_blocks_of_bitsandbytes_become(block: int, columns: int, tmp_path: Path) -> None:
    from quire.ops.cpu.products.quantized import pack_quantized

    written = bnb_nf4(weight_of(64, columns), block=block, nested=False, storage=torch.bfloat16)
    stored, rows = read_stored({"quant_method": "bitsandbytes"}, written, tmp_path)
    weight = pack_quantized([rows])
    assert stored.shape == (64, columns)
    assert weight.format == stored.kept_as


@pytest.mark.parametrize(
    "state",
    [
        b"{}",
        b"[1]",
        b"no JSON",
        b'{"shape": [192, 192], "blocksize": 65}',
        b'{"shape": [192, 193], "blocksize": 64}',
        b'{"shape": [192], "blocksize": 64}',
        b'{"shape": [192, 192], "blocksize": 1e400}',
        b'{"shape": [192, 192], "blocksize": 64, "nested_offset": NaN}',
        b"[" * 70_000,
    ],
)
def test_a_damaged_state_of_bitsandbytes_is_refused(state: bytes, tmp_path: Path) -> None:
    written = bnb_nf4(weight_of(), block=64, nested=True, storage=torch.uint8)
    tensors = {**written.tensors, "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has a quant_state"):
        read_back({"quant_method": "bitsandbytes"}, Written(tensors=tensors, weight=written.weight), tmp_path)


@pytest.mark.parametrize(
    ("role", "damage"),
    [
        ("weight.absmax", lambda tensor: tensor[:-1]),
        ("weight.absmax", lambda tensor: tensor.float()),
        ("weight.quant_map", lambda tensor: tensor[:15]),
        ("weight.nested_quant_map", lambda tensor: tensor[:255]),
        ("weight.nested_absmax", lambda tensor: torch.cat([tensor, tensor])),
        ("weight.nested_absmax", lambda tensor: tensor * float("nan")),
        ("weight.nested_absmax", lambda tensor: None),
    ],
)
def test_damaged_scales_of_bitsandbytes_are_refused(role: str, damage: Any, tmp_path: Path) -> None:
    written = bnb_nf4(weight_of(), block=64, nested=True, storage=torch.uint8)
    tensors = {name: damage(tensor) if name == role else tensor for name, tensor in written.tensors.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has"):
        read_back({"quant_method": "bitsandbytes"}, Written(tensors=kept, weight=written.weight), tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused_by_name(number: float, tmp_path: Path) -> None:
    written = gptq(weight_of(), bits=4, size=32, symmetric=True, shuffled=False, v1=True)
    written.tensors["scales"][1, 7] = number
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight has a scale that is not finite"):
        read_back({"quant_method": "gptq", "group_size": 32}, written, tmp_path)
