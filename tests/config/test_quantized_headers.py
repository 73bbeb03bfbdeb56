"""Headers of quantised weights: any shapes give a format that fits them, or an error that names the weight."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.quantized.config import SIDE_FILE, StoredQuantization, read_quantization, with_side_file
from quire.config.quantized.find import weights_in
from quire.config.quantized.stored import Header
from quire.errors import CheckpointError, ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.loader.mapped_file import STORED_DTYPES
from quire.ops.dequantize import dequantize

LAYER = "model.layers.0.mlp.up_proj"
PACKED_4: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
}
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, tuple[str, tuple[int, ...]]]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False},
        {
            "qweight": ("I32", (16, 64)),
            "qzeros": ("I32", (4, 8)),
            "scales": ("F16", (4, 64)),
            "g_idx": ("I32", (128,)),
        },
    ),
    "gptq of 3 bits": (
        {"quant_method": "gptq", "bits": 3, "sym": False},
        {"qweight": ("I32", (12, 64)), "qzeros": ("I32", (4, 6)), "scales": ("F16", (4, 64))},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4},
        {"qweight": ("I32", (128, 8)), "qzeros": ("I32", (4, 8)), "scales": ("F16", (4, 64))},
    ),
    "packed": (
        PACKED_4,
        {
            "weight_packed": ("I32", (64, 16)),
            "weight_scale": ("BF16", (64, 4)),
            "weight_zero_point": ("I32", (8, 4)),
            "weight_shape": ("I64", (2,)),
        },
    ),
    "int8": (PACKED_4, {"weight": ("I8", (64, 128)), "weight_scale": ("F32", (64, 1))}),
    "fp8": ({"quant_method": "fp8"}, {"weight": ("F8_E4M3", (64, 256)), "weight_scale_inv": ("F32", (1, 2))}),
    "nvfp4": (
        PACKED_4,
        {
            "weight_packed": ("U8", (64, 64)),
            "weight_scale": ("F8_E4M3", (64, 8)),
            "weight_global_scale": ("F32", (1,)),
        },
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"weight": ("U8", (64, 64)), "weight_scale": ("F8_E4M3", (64, 8)), "weight_scale_2": ("F32", (1,))},
    ),
    "blocks of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (2, 1, 2, 1))},
    ),
    "nf4": (
        {"quant_method": "bitsandbytes"},
        {
            "weight": ("U8", (4096, 1)),
            "weight.absmax": ("F32", (128,)),
            "weight.quant_map": ("F32", (16,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", (40,)),
        },
    ),
}
Headers = dict[str, Header]


def headers_of(case: str) -> tuple[StoredQuantization, Headers]:
    config, roles = CASES[case]
    quantization = read_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    return quantization, {f"{LAYER}.{role}": Header(*header) for role, header in roles.items()}


def tensor_of(header: Header, draw: random.Random) -> Tensor:
    """Any bytes."""
    dtype = STORED_DTYPES[header.dtype]
    count = prod(header.shape) * dtype.itemsize
    return (
        torch.frombuffer(bytearray(draw.randbytes(count) or b"\0" * 8), dtype=torch.uint8)[:count]
        .view(dtype)
        .view(header.shape)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_headers_tell_the_format(case: str) -> None:
    quantization, headers = headers_of(case)
    (name,) = set(weights_in(headers.items()))
    found = quantization.find(name, headers.get)
    assert found is not None
    halves = case in ("nf4", "nvfp4 of modelopt")
    assert prod(found.shape) == prod(CASES[case][1].get("weight", ("", (64, 128)))[1]) * (2 if halves else 1)
    assert set(found.tensors.values()) <= set(headers)


@pytest.mark.parametrize("case", CASES)
def test_any_shapes_and_bytes_end_with_rows_or_an_error_that_names_the_weight(case: str) -> None:
    quantization, whole = headers_of(case)
    draw, read = random.Random(case), 0
    refused: list[str] = []
    for _ in range(400):
        headers = mutated(whole, draw)
        try:
            for name in weights_in(headers.items()):
                found = quantization.find(name, headers.get)
                if found is None:
                    continue
                stored = {role: tensor_of(headers[tensor], draw) for role, tensor in found.tensors.items()}
                rows = UNPACK[found.packing](found, stored)
                assert dequantize(rows).shape == rows.shape
                read += 1
        except CheckpointError as error:
            refused.append(str(error))
    assert refused
    assert all(LAYER in message for message in refused)
    assert read or case == "nf4"  # whose state is JSON, which bytes at random are not


def mutated(headers: Headers, draw: random.Random) -> Headers:
    """One tensor is away, or has another dtype or shape; or none."""
    changed = dict(headers)
    name = draw.choice(sorted(headers))
    header = headers[name]
    match draw.randrange(5):
        case 0:
            del changed[name]
        case 1:
            changed[name] = Header(draw.choice(sorted(STORED_DTYPES)), header.shape)
        case 2:
            shape = list(header.shape)
            shape[draw.randrange(len(shape))] = draw.choice((0, 1, 2, 3, 7, 8, 31, 64, 65, 129))
            changed[name] = Header(header.dtype, tuple(shape))
        case 3:
            changed[name] = Header(header.dtype, draw.choice(((), (1,), header.shape[::-1], (*header.shape, 1))))
        case _:
            pass
    return changed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq", "bits": 3}, "bits is 3; quire reads 4 or 8"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5; quire reads 4 or 8 or 3 or 2"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "desc_act": "no"}, "desc_act is 'no'; quire reads true or false"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllama"}, "packing_format"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 1}}, "groups that quantise weights"),
        ({**PACKED_4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "weights that are not sparse"),
        ({**PACKED_4, "transform_config": {"config_groups": {"R1": {}}}}, "weights that are not rotated"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; quire reads FP8, "),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo is ['FP8']"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "kv_cache_scheme is 'FP8'"),
        ({"quant_method": ["gptq"]}, "quantised by"),
        ({}, "quantised by None"),
        ("yes", "must be an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantization({"quantization_config": config}, "config.json")
    assert words in str(caught.value)


def test_a_file_beside_config_json_says_it_where_config_json_does_not(tmp_path: Path) -> None:
    file, given = tmp_path / SIDE_FILE, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert with_side_file({"a": 1}, tmp_path) == {"a": 1}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": given}))
    found = read_quantization(with_side_file({}, tmp_path), "config.json")
    assert found is not None
    assert (found.method, found.kv_cache and found.kv_cache.dtype) == ("modelopt", "fp8")
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}))
    found = read_quantization(with_side_file({}, tmp_path), "config.json")
    assert found is not None
    assert found.find(f"{LAYER}.weight", {f"{LAYER}.weight": Header("BF16", (64, 64))}.get) is None, "plain weights"
    assert with_side_file({"quantization_config": {}}, tmp_path) == {"quantization_config": {}}
    file.write_text(json.dumps({"quantization": ["FP8"]}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization is \['FP8'\]"):
        with_side_file({}, tmp_path)
