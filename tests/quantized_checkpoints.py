"""Quantised checkpoints as the formats' own libraries write them, by small writers that share no code with quire.

Every writer here was compared once with files that the library wrote from the same weights, bit for bit:
compressed-tensors 0.19 (by llm-compressor 0.14; MXFP8: 0.20), AutoAWQ 0.2.9, bitsandbytes 0.50.2 and transformers'
`Fp8Quantize` (5.23). Where gptqmodel (7.7) corrects errors, the one here rounds to the nearest; its packing was
compared, that of 3 bits by itself. BitNet's is compared in `tests/models/test_ternary.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import random_model
from tests.tiny_tokenizer import write_tokenizer

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""e2m1 (OCP Microscaling Formats 1.0)."""
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""QLoRA (arXiv 2305.14314), appendix E."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A weight as a format stores it."""

    tensors: Mapping[str, Tensor]
    """By what is added to the linear layer's name."""
    weight: Tensor
    """[N, M] float32: what it stands for."""


Writer = Callable[[Tensor], Written]


def packed(values: Tensor, bits: int) -> Tensor:
    """A stream of bits in int32 words, the first value in the lowest; values may cross words.

    Shapes: [N, M], none negative -> [N, M * bits / 32].
    """
    num_words = -(-values.shape[1] * bits // 32)
    filled = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % 32))
    stream = (filled.unsqueeze(-1) >> torch.arange(bits) & 1).reshape(values.shape[0], -1, 32)
    return (stream << torch.arange(32)).sum(-1).to(torch.int32)[:, :num_words]


def in_groups(weight: Tensor, group_size: int | None) -> Tensor:
    return weight.float().view(weight.shape[0], -1, group_size or weight.shape[1])


def spread(of_groups: Tensor, group_size: int | None, columns: int) -> Tensor:
    return of_groups.float().repeat_interleave(group_size or columns, dim=1)


def compressed_tensors(weight: Tensor, *, bits: int, group_size: int | None, symmetric: bool) -> Written:
    """pack-quantized. The library computes in the weight's dtype, and so does this."""
    groups, half = weight.view(weight.shape[0], -1, group_size or weight.shape[1]), 1 << bits - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        scales = torch.maximum(-low, high) / ((2 * half - 1) / 2)
        zeros = torch.zeros_like(scales)
    else:
        scales = (high - low) / (2 * half - 1)
        zeros = (-half - low / scales).clamp(-half, half - 1).round()
    wide, wide_zeros = (of.repeat_interleave(group_size or weight.shape[1], dim=1) for of in (scales, zeros))
    values = (weight / wide + wide_zeros).clamp(-half, half - 1).round().float()
    tensors = {
        "weight_packed": packed(values + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed((zeros + half).T, bits).T.contiguous()
    return Written(tensors=tensors, weight=(values - wide_zeros.float()) * wide.float())


def int_quantized(weight: Tensor) -> Written:
    """W8A8 of compressed-tensors: a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 127.5
    values = (weight / scales).clamp(-128, 127).round()
    tensors = {"weight": values.to(torch.int8), "weight_scale": scales}
    return Written(tensors=tensors, weight=values.float() * scales.float())


def float_quantized(weight: Tensor) -> Written:
    """FP8 of compressed-tensors: a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Written(tensors={"weight": values, "weight_scale": scales}, weight=values.float() * scales.float())


def torchao(written: Written) -> Written:
    """The same as torchao calls it, whose integers have zero points beside them also where those are zero."""
    parts = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "weight_zero_point": "_weight_zero_point"}
    tensors = dict(written.tensors)
    if tensors["weight"].dtype == torch.int8:
        tensors.setdefault("weight_zero_point", torch.zeros(tensors["weight_scale"].shape, dtype=torch.int8))
    return Written(tensors={parts[name]: tensor for name, tensor in tensors.items()}, weight=written.weight)


def torchao_groups(weight: Tensor) -> Written:
    """IntxUnpackedToInt8Tensor: four bits in a byte each, with zero points."""
    groups = in_groups(weight, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    zeros = (-8 - low / scales).round().clamp(-8, 7)
    wide, shift = (spread(of, 32, weight.shape[1]) for of in (scales, zeros))
    values = (weight.float() / wide + shift).round().clamp(-8, 7)
    tensors = {"weight": values.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return torchao(Written(tensors=tensors, weight=(values - shift) * wide))


def mxfp8(weight: Tensor) -> Written:
    """compressed-tensors' mxfp8-quantized: groups of 32 with a power of two, as of MXFP4, but for 448."""
    groups = weight.float().unflatten(-1, (-1, 32))
    mantissas, exponents = torch.frexp(groups.abs().amax(-1).clamp(min=2.0**-110))
    exponents = exponents - 9 + (mantissas >= 0.875)
    wide = spread(torch.exp2(exponents.float()), 32, weight.shape[1])
    values = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": (exponents + 127).to(torch.uint8)}
    return Written(tensors=tensors, weight=values.float() * wide)


def fp8_blocks(weight: Tensor, block: int = 128) -> Written:
    """DeepSeek-V3's: a scale for each block of 128 x 128, the last ones smaller."""
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    whole[:rows, :columns] = weight.float()
    tiles = whole.view(-1, block, whole.shape[1] // block, block)
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, 448 / largest, 1.0)
    wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    values = (weight.float() * wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    inverse = 1 / scales
    wide = inverse.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return Written(tensors={"weight": values, "weight_scale_inv": inverse}, weight=values.float() * wide)


def gptq(
    weight: Tensor, *, bits: int, group_size: int, symmetric: bool, in_order: bool = True, v1: bool = True
) -> Written:
    """The format of AutoGPTQ and gptqmodel. Out of order: columns belong to groups by g_idx (desc_act)."""
    columns, most = weight.shape[1], (1 << bits) - 1
    order = torch.arange(columns) if in_order else torch.randperm(columns, generator=torch.Generator().manual_seed(5))
    groups_of = torch.empty(columns, dtype=torch.int32)
    groups_of[order] = torch.arange(columns, dtype=torch.int32) // group_size
    groups = in_groups(weight.float()[:, order], group_size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        scales = torch.maximum(-low, high) * 2 / most
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.half()
    wide, wide_zeros = scales.float()[:, groups_of.long()], zeros[:, groups_of.long()]
    values = (weight.float() / wide + wide_zeros).round().clamp(0, most)
    tensors = {
        "qweight": packed(values, bits).T.contiguous(),
        "qzeros": packed((zeros - int(v1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups_of,
    }
    return Written(tensors=tensors, weight=(values - wide_zeros) * wide)


def awq(weight: Tensor, *, group_size: int) -> Written:
    """AutoAWQ's GEMM format: eight neighbouring rows in a word, in an order of their own. It computes in float16."""
    weight = weight.half()
    groups = weight.view(weight.shape[0], -1, group_size)
    high, low = groups.amax(2), groups.amin(2)
    scales = (high - low).clamp(min=1e-5) / 15
    zeros = (-torch.round(low / scales)).clamp(0, 15)
    wide, wide_zeros = (of.repeat_interleave(group_size, dim=1) for of in (scales, zeros))
    rounded = ((weight / wide).round() + wide_zeros).clamp(0, 15)
    rounded = (rounded - wide_zeros) * wide
    values = ((rounded + wide_zeros * wide) / wide).round().float()

    def interleaved(of_rows: Tensor) -> Tensor:
        """Shapes: [N, K] -> [K, N / 8]."""
        eights = of_rows.T.reshape(of_rows.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return packed(eights.flatten(1), 4)

    tensors = {"qweight": interleaved(values), "qzeros": interleaved(zeros), "scales": scales.T.contiguous()}
    return Written(tensors=tensors, weight=(values - wide_zeros.float()) * wide.float())


def nearest_fp4(weight: Tensor) -> Tensor:
    """Codes of e2m1; ties go to the even code."""
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    magnitudes = weight.abs().unsqueeze(-1)
    up_on_tie = torch.tensor([False, True, False, True, False, True, False])
    codes = ((magnitudes > ends) | ((magnitudes == ends) & up_on_tie)).sum(-1)
    return torch.where(weight < 0, codes + 8, codes).to(torch.uint8)


def pairs(codes: Tensor) -> Tensor:
    """Two codes of four bits in a byte, the first one in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def nvfp4(weight: Tensor) -> Written:
    """compressed-tensors' nvfp4-pack-quantized: groups of 16 with e4m3 scales, and one scale for all."""
    largest = weight.view(weight.shape[0], -1, 16).abs().amax(2)
    overall = (448 * 6 / weight.abs().max()).float().view(1)
    scales = (overall * (largest / 6)).clamp(-448, 448).to(torch.float8_e4m3fn)
    wide = spread(scales.float() / overall, 16, weight.shape[1])
    codes = nearest_fp4(weight.float() / wide)
    tensors = {"weight_packed": pairs(codes), "weight_scale": scales, "weight_global_scale": overall}
    return Written(tensors=tensors, weight=FP4[codes.long()] * wide)


def modelopt_nvfp4(weight: Tensor) -> Written:
    """ModelOpt's NVFP4: the same codes under other names, and the reciprocal of the scale for all."""
    written = nvfp4(weight)
    tensors = {
        "weight": written.tensors["weight_packed"],
        "weight_scale": written.tensors["weight_scale"],
        "weight_scale_2": 1 / written.tensors["weight_global_scale"].view(()),
        "input_scale": torch.tensor(0.25),
    }
    return Written(tensors=tensors, weight=written.weight)


def modelopt_fp8(weight: Tensor) -> Written:
    """ModelOpt's FP8: a scale for the whole tensor."""
    scale = weight.float().abs().max() / 448
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.25)}
    return Written(tensors=tensors, weight=values.float() * scale)


def modelopt_fp8_blocks(weight: Tensor) -> Written:
    """ModelOpt's FP8_PB_WO: DeepSeek's blocks, their scales in four dimensions."""
    written = fp8_blocks(weight)
    scales = written.tensors["weight_scale_inv"][:, None, :, None]
    return Written(tensors={"weight": written.tensors["weight"], "weight_scale": scales}, weight=written.weight)


def mxfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents and numbers of groups of 32 along the last dimension (OCP Microscaling Formats 1.0)."""
    groups = weight.float().unflatten(-1, (-1, 32))
    mantissas, exponents = torch.frexp(groups.abs().amax(-1).clamp(min=2.0**-120))
    exponents = exponents - 3 + (mantissas >= 0.875)  # so that no more than a half of a last step is cut off
    codes = nearest_fp4(groups / torch.exp2(exponents.float()).unsqueeze(-1))
    numbers = FP4[codes.long()] * torch.exp2(exponents.float()).unsqueeze(-1)
    return codes, (exponents + 127).to(torch.uint8), numbers.flatten(-2)


def mxfp4(weight: Tensor) -> Written:
    """compressed-tensors' mxfp4-pack-quantized."""
    codes, exponents, numbers = mxfp4_blocks(weight)
    return Written(tensors={"weight_packed": pairs(codes.flatten(-2)), "weight_scale": exponents}, weight=numbers)


def bnb_nf4(weight: Tensor) -> Written:
    """bitsandbytes' nf4 in blocks of 64, whose scales stay float32."""
    blocks = weight.float().reshape(-1, 64)
    largest = blocks.abs().amax(1)
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = torch.bucketize((blocks / largest[:, None]).flatten(), middles).to(torch.uint8)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    tensors = {
        "weight": ((codes[0::2] << 4) | codes[1::2]).unsqueeze(1),
        "weight.absmax": largest,
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    numbers = NF4[codes.long()].view(-1, 64) * largest[:, None]
    return Written(tensors=tensors, weight=numbers.view(weight.shape))


def bnb_int8(weight: Tensor) -> Written:
    """bitsandbytes' LLM.int8(): a scale for each row."""
    largest = weight.half().abs().amax(1).float()
    values = (weight.half().float() * (127 / largest)[:, None]).round()
    tensors = {
        "weight": values.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(tensors=tensors, weight=values * (largest / 127)[:, None])


def bitnet(weight: Tensor, *, divides: bool) -> Written:
    """Packed weights of BitLinear, whose scale divides, or of AutoBitLinear."""
    rounded = bitnet_online(weight).weight
    scale = rounded.abs().max().view(1)
    stored = 1 / scale if divides else scale
    quarters = ((rounded / scale).round() + 1).to(torch.uint8).chunk(4)
    packed_rows = sum(quarter << 2 * place for place, quarter in enumerate(quarters))
    assert isinstance(packed_rows, Tensor)
    return Written(tensors={"weight": packed_rows, "weight_scale": stored}, weight=rounded)


def bitnet_online(weight: Tensor) -> Written:
    """Weights as they were trained, which AutoBitLinear rounds."""
    scale = 1 / weight.float().abs().mean()
    return Written(tensors={"weight": weight}, weight=(weight.float() * scale).round().clamp(-1, 1) / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format and what config.json says of it."""

    write: Writer
    config: Mapping[str, Any]


def _ct(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _packed_format(bits: int, group_size: int | None, *, symmetric: bool) -> Format:
    strategy = "channel" if group_size is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    return Format(
        write=lambda weight: compressed_tensors(weight, bits=bits, group_size=group_size, symmetric=symmetric),
        config=_ct("pack-quantized", weights),
    )


def _gptq_format(bits: int, group_size: int, *, symmetric: bool, in_order: bool = True, v1: bool = True) -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": not in_order,
        "checkpoint_format": "gptq" if v1 else "gptq_v2",
    }
    return Format(
        write=lambda weight: gptq(
            weight, bits=bits, group_size=group_size, symmetric=symmetric, in_order=in_order, v1=v1
        ),
        config=config,
    )


_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def _torchao_format(write: Writer, scheme: str, **fields: Any) -> Format:
    quant_type = {"default": {"_type": scheme, "_version": 2, "_data": fields}}
    return Format(write=write, config={"quant_method": "torchao", "quant_type": quant_type})


FORMATS: Mapping[str, Format] = {
    "ct-int4": _packed_format(4, 32, symmetric=True),
    "ct-int4-asymmetric": _packed_format(4, 64, symmetric=False),
    "ct-int4-channel": _packed_format(4, None, symmetric=True),
    "ct-int3": _packed_format(3, 32, symmetric=False),
    "ct-int8": _packed_format(8, 64, symmetric=True),
    "ct-int8-asymmetric": _packed_format(8, 32, symmetric=False),
    "ct-w8a8": Format(
        write=int_quantized,
        config=_ct("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**_TOKENS, "type": "int"}),
    ),
    "ct-fp8": Format(
        write=float_quantized,
        config=_ct(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, {**_TOKENS, "type": "float"}
        ),
    ),
    "ct-nvfp4": Format(
        write=nvfp4,
        config=_ct(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        ),
    ),
    "ct-mxfp4": Format(
        write=mxfp4,
        config=_ct("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "ct-mxfp8": Format(
        write=mxfp8,
        config=_ct("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    ),
    "gptq": _gptq_format(4, 32, symmetric=True),
    "gptq-asymmetric": _gptq_format(4, 64, symmetric=False),
    "gptq-desc-act": _gptq_format(4, 32, symmetric=True, in_order=False),
    "gptq-desc-act-asymmetric": _gptq_format(4, 64, symmetric=False, in_order=False),
    "gptq-v2": _gptq_format(4, 32, symmetric=False, v1=False),
    "gptq-3": _gptq_format(3, 32, symmetric=False, in_order=False),
    "gptq-8": _gptq_format(8, 32, symmetric=True),
    "awq": Format(
        write=lambda weight: awq(weight, group_size=32),
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "fp8-blocks": Format(
        write=fp8_blocks,
        config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "modelopt-fp8": Format(write=modelopt_fp8, config={"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-fp8-blocks": Format(
        write=modelopt_fp8_blocks, config={"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    ),
    "modelopt-nvfp4": Format(write=modelopt_nvfp4, config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "torchao-int8": _torchao_format(lambda weight: torchao(int_quantized(weight)), "Int8WeightOnlyConfig"),
    "torchao-fp8": _torchao_format(lambda weight: torchao(float_quantized(weight)), "Float8WeightOnlyConfig"),
    "torchao-groups": _torchao_format(
        torchao_groups,
        "Int8DynamicActivationIntxWeightConfig",
        weight_granularity={"_type": "PerGroup", "_data": {"group_size": 32}},
        weight_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"},
    ),
    "bnb-nf4": Format(
        write=bnb_nf4,
        config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bnb-int8": Format(write=bnb_int8, config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitnet-bitlinear": Format(write=lambda weight: bitnet(weight, divides=True), config={"quant_method": "bitnet"}),
    "bitnet-autobitlinear": Format(
        write=lambda weight: bitnet(weight, divides=False),
        config={"quant_method": "bitnet", "linear_class": "autobitlinear", "modules_to_not_convert": ["lm_head"]},
    ),
    "bitnet-online": Format(
        write=bitnet_online,
        config={"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
    ),
}
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2}


def make_quantized_checkpoint(
    format: str, directory: Path, family: str = "llama", **overrides: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of float32 numbers that its weights stand for, in new directories.

    Linear layers of the decoder are quantised, experts one by one; embeddings and head are not.
    """
    model = random_model(family, **{**SIZES, **overrides}).bfloat16()
    model.save_pretrained(directory / "saved")  # has the names of checkpoints, where transformers has its own
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "saved" / "model.safetensors").items():
        numbers[name] = tensor.float()
        stored[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            written = FORMATS[format].write(tensor)
            numbers[name] = written.weight
            del stored[name]
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": value.contiguous() for part, value in written.tensors.items()}
    if model.config.tie_word_embeddings:
        stored.pop("lm_head.weight", None), numbers.pop("lm_head.weight", None)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    quantized, plain = directory / "quantized", directory / "plain"
    for path, tensors, extra in (
        (quantized, stored, {"quantization_config": dict(FORMATS[format].config)}),
        (plain, numbers, {}),
    ):
        path.mkdir(parents=True)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(copies, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, **extra}))
        write_tokenizer(path)
    return quantized, plain
