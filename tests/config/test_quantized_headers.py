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

from quire.config.flags.args import EngineArgs
from quire.config.quantized.config import METHODS, StoredQuantization, read_quantization
from quire.config.quantized.find import weights_in
from quire.config.quantized.side_file import with_side_file
from quire.config.quantized.stored import Header, Packing
from quire.errors import CheckpointError, ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.loader.mapped_file import STORED_DTYPES
from quire.ops.shared.dequantize import dequantize
from tests.quantized_layouts import ct_config

LAYER = "model.layers.0.mlp.up_proj"
PACKED_4: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
}
TERNARY: Mapping[str, Any] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def torchao_config(scheme: str, **fields: Any) -> Mapping[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": scheme, "_data": fields}}}


NF4_STATE = b'{"shape": [64, 128], "blocksize": 64}'
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
    "torchao": (
        torchao_config("IntxWeightOnlyConfig"),
        {
            "_weight_qdata": ("I8", (64, 128)),
            "_weight_scale": ("F32", (64, 4)),
            "_weight_zero_point": ("I8", (64, 4)),
        },
    ),
    "fp8 of torchao": (
        torchao_config("Float8WeightOnlyConfig"),
        {"_weight_qdata": ("F8_E4M3", (64, 128)), "_weight_scale": ("F32", (64, 1))},
    ),
    "int8": (ct_config({"num_bits": 8}), {"weight": ("I8", (64, 128)), "weight_scale": ("F32", (64, 1))}),
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
            "weight.quant_state.bitsandbytes__nf4": ("U8", (len(NF4_STATE),), lambda: tuple(NF4_STATE)),
        },
    ),
    "bitlinear": ({"quant_method": "bitnet"}, {"weight": ("U8", (16, 128)), "weight_scale": ("BF16", (1,))}),
    "autobitlinear": (TERNARY, {"weight": ("U8", (16, 128)), "weight_scale": ("F32", (1,))}),
    "numbers of autobitlinear": (TERNARY, {"weight": ("BF16", (64, 128)), "weight_scale": ("BF16", (1,))}),
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
    of_byte = {"nf4": 2, "nvfp4 of modelopt": 2, "bitlinear": 4, "autobitlinear": 4}.get(case, 1)
    assert prod(found.shape) == prod(CASES[case][1].get("weight", ("", (64, 128)))[1]) * of_byte
    assert set(found.tensors.values()) <= set(headers)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_may_be_given(method: str) -> None:
    assert EngineArgs(quantization=method).quantization == method


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
    # a state of nf4 is JSON, and ternary weights have no code of 3, which bytes at random are not and have
    assert read or case in ("nf4", "bitlinear", "autobitlinear", "numbers of autobitlinear")


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
        (torchao_config("Int4WeightOnlyConfig"), "torchao's Int4WeightOnlyConfig, as quantization_config.quant_type"),
        (torchao_config("FqnToConfig", a={"_type": "NVFP4InferenceConfig"}), "torchao's NVFP4InferenceConfig"),
        (
            torchao_config("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"}),
            "quire reads an intx_packing_format of UNPACKED_TO_INT8",
        ),
        ({"quant_method": "torchao"}, "torchao's unnamed scheme"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type is 'int4_weight_only'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [64]}, "weight_block_size is [64]; quire reads the rows and col"),
        ({"quant_method": "fp8", "weight_block_size": [0, 64]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; quire reads FP8, "),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo is ['FP8']"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": ["FP8"]}, "kv_cache_scheme is ['FP8']"),
        ({"quant_method": "gptq", "format": "marlin"}, "format is 'marlin'"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_p"}, "format is 'gptq_p'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format is True"),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "weights that are not rotated"),
        ({"quant_method": "gptq", "group_size": "128"}, "group_size is '128'"),
        ({"quant_method": "gptq", "dynamic": [1]}, "dynamic is [1]; quire reads an object"),
        ({"quant_method": "gptq", "dynamic": {"x": {"group_size": [1]}}}, "group_size"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "checkpoint_format is 'gemv'"),
        ({"quant_method": "auto-round", "spinquant_config": {"r1": True}}, "weights that are not rotated"),
        ({"quant_method": "auto-round", "rotation_config": {"type": "hadamard"}}, "weights that are not rotated"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:mlx"}, "packing_format"),
        ({"quant_method": "auto-round", "data_type": "mx_int", "group_size": 32}, "data_type is 'mx_int'"),
        ({"quant_method": "auto-round", "bits": 8, "data_type": "fp", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**PACKED_4, "format": "marlin-24"}, "format is 'marlin-24'"),
        ({**PACKED_4, "format": "nvfp4-e5m3-pack-quantized"}, "format is 'nvfp4-e5m3-pack-quantized'"),
        (ct_config({"num_bits": 6, "type": "float"}), "integers of 1 to 8 bits, and floats of 4 and 8"),
        (ct_config({"num_bits": 8, "block_structure": 128}), "the rows and columns of a block"),
        (ct_config({"num_bits": 4}, layout="mxfp6-pack-quantized"), "format is 'mxfp6-pack-quantized'"),
        ({**TERNARY, "linear_class": "bitblas"}, "linear_class is 'bitblas'; quire reads bitlinear or autobitlinear"),
        ({**TERNARY, "quantization_mode": "late"}, "quantization_mode is 'late'; quire reads offline or online"),
        ({**TERNARY, "use_rms_norm": True}, "use_rms_norm is True; quire reads models without norms in each linear"),
        ({**TERNARY, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({**TERNARY, "modules_to_not_convert": ["(a+)+"]}, "a list of names of modules, without patterns"),
        (
            {**TERNARY, "quantization_mode": "online", "modules_to_not_convert": ["layers.0"]},
            "heads that are not rounded",
        ),
        ({"quant_method": ["gptq"]}, "quantised by"),
        ({}, "quantised by None"),
        ("yes", "must be an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantization({"quantization_config": config}, "config.json")
    assert words in str(caught.value)


GPTQMODEL = {"method": "gptq", "pack_dtype": "int32", "lm_head": False, "meta": {"quantizer": ["gptqmodel:7.0.0"]}}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "dynamic": None, "checkpoint_format": None},
        {"quant_method": "gptq", **GPTQMODEL, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
        {"quant_method": "gptq", "is_marlin_format": False, "dynamic": {"-:lm_head": {}, "+:x": {"bits": 8}}},
        {"quant_method": "awq", "version": None, "format": "gemm", "checkpoint_format": "gemm", "method": "awq"},
        {"quant_method": "intel/auto-round", "backend": "auto_round:gptq", "extra_config": {"x": {"bits": 16}}},
        {"quant_method": "auto-round", "bits": 3, "backend": "auto", "packing_format": "auto"},
        {"quant_method": "auto-round", "bits": 8, "group_size": [128, 128], "packing_format": "auto_round:fp8_static"},
        {**PACKED_4, "sparsity_config": {}, "transform_config": {}, "format": "mixed-precision"},
        {"quant_method": "fp8", "fmt": None, "weight_block_size": None, "ignored_layers": None},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "kv_cache_scheme": "NVFP4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        {"quant_method": "AWQ", "version": "GEMM"},
        {"quant_method": "bitnet", "linear_class": None, "modules_to_not_convert": None, "rms_norm_eps": 1e-6},
        {**TERNARY, "quantization_mode": "online", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
    ],
)
def test_what_writers_say_in_other_words_is_read(config: dict[str, object]) -> None:
    found = read_quantization({"quantization_config": config}, "config.json")
    assert found is not None
    assert found.method in str(config["quant_method"]).lower()


def test_methods_that_have_no_name_or_another_one_are_known() -> None:
    old = read_quantization({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}, "config.json")
    modelopt = read_quantization({"quantization_config": {"quant_algo": "NVFP4", "config_groups": {}}}, "config.json")
    assert modelopt is not None
    assert modelopt.method == "modelopt"
    spelt = read_quantization({"compression_config": {**PACKED_4, "quant_method": "compressed_tensors"}}, "config.json")
    assert old is not None
    assert spelt is not None
    assert (old.method, spelt.method) == ("bitsandbytes", "compressed-tensors")


@pytest.mark.parametrize(
    "keys",
    [
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"},
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8"},
        {"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    ],
)
def test_modelopt_says_in_many_ways_that_the_kv_cache_is_fp8(keys: dict[str, object]) -> None:
    found = read_quantization({"quantization_config": {"quant_method": "modelopt", **keys}}, "config.json")
    assert found is not None
    assert found.quantizes_weights
    assert found.kv_cache is not None
    assert found.kv_cache.dtype == "fp8"


@pytest.mark.parametrize(
    ("keys", "packing", "is_v1"),
    [
        ({}, Packing.GPTQ, True),
        ({"packing_format": "auto_round:auto_gptq"}, Packing.GPTQ, True),
        ({"packing_format": "auto_round:gptqmodel"}, Packing.GPTQ, False),
        ({"packing_format": "auto_round"}, Packing.GPTQ, False),
        ({"packing_format": "auto_round:auto_awq"}, Packing.AWQ, None),
        ({"packing_format": "auto_round:fp8", "data_type": "fp"}, Packing.FLOAT8, None),
        ({"bits": 8, "data_type": "fp", "fmt": "e4m3", "group_size": 0}, Packing.FLOAT8, None),
        ({"backend": "auto_round:gptq:exllamav2"}, Packing.GPTQ, True),
        ({"backend": "auto_round:exllamav2"}, Packing.GPTQ, False),
        ({"backend": "auto_round:awq:gemm"}, Packing.AWQ, None),
        ({"backend": "tritonv2"}, Packing.GPTQ, True),
    ],
)
def test_dialects_of_auto_round(keys: dict[str, object], packing: Packing, is_v1: bool | None) -> None:
    found = read_quantization({"quantization_config": {"quant_method": "auto-round", **keys}}, "config.json")
    assert found is not None
    assert found.packings == (packing,)
    assert is_v1 is None or found.hints.is_v1 == is_v1


def test_a_file_beside_config_json_says_it_where_config_json_does_not(tmp_path: Path) -> None:
    file, given = tmp_path / "hf_quant_config.json", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
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


@pytest.mark.parametrize(
    ("name", "given", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 96, "desc_act": False, "model_name_or_path": None}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 96, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_files_of_older_writers_say_it_too(name: str, given: dict[str, object], method: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(given))
    found = read_quantization(with_side_file({}, tmp_path), "config.json")
    assert found is not None
    assert (found.method, found.hints.group_sizes) == (method, frozenset({96}))
    given = {"compression_config": PACKED_4}
    assert with_side_file(given, tmp_path) == given
