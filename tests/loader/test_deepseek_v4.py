"""DeepSeek V4 as it is published: names of its own, 8-bit floats with scales of blocks, experts of 4 bits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.memory.weights.sizes import weight_bytes
from quire.errors import CheckpointError, ConfigError
from quire.loader.model_impl import with_stored_formats
from quire.ops.backends import ops_of
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import implementations_of
from tests.quantized_checkpoints import FP4

WIDE = {"hidden_size": 160, "intermediate_size": 96, "moe_intermediate_size": 96, "o_lora_rank": 128, "q_lora_rank": 64}
RENAMED = {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_"}
EIGHT_BITS = re.compile(r"\.(wq_a|wq_b|attn\.wkv|wo_a|wo_b|shared_experts\.w[123])\.weight$")
QUANTISED = re.compile(r"\.(wq_a|attn\.wq_b|indexer\.wq_b|attn\.wkv|wo_a|wo_b|w[123])\.weight$")
FOUR_BITS = re.compile(r"\.experts\.\d+\.w[123]\.weight$")


@pytest.fixture(params=implementations_of("linear"))
def implementation(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def exponents(largest: Tensor, top: float) -> Tensor:
    """Of powers of two, by which numbers are divided to be no larger than `top`; in bytes, 127 for one."""
    return (largest / top).clamp(min=1e-30).log2().ceil().to(torch.int32).add(127).to(torch.uint8)


def powers(stored: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(stored.shape), stored.to(torch.int32) - 127)


def in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers, the scales of blocks of 128 x 128, and what they stand for."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.zeros(rows, columns, dtype=torch.uint8)
    numbers, plain = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            scales[row, column] = exponents(weight[at].abs().max(), 448.0)
            numbers[at] = (weight[at] / powers(scales[row, column])).to(torch.float8_e4m3fn)
            plain[at] = numbers[at].float() * powers(scales[row, column])
    return numbers, scales, plain


def in_four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two codes in a byte, the first in its lower half; the scales of 32 columns; and what they stand for."""
    groups = weight.view(weight.shape[0], -1, 32)
    scales = exponents(groups.abs().amax(-1), 6.0)
    codes = (groups / powers(scales).unsqueeze(2)).unsqueeze(-1).sub(FP4).abs().argmin(-1)
    plain = (FP4[codes] * powers(scales).unsqueeze(2)).view(weight.shape)
    pairs = codes.view(weight.shape[0], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).view(torch.int8), scales, plain


def published(directory: Path, written: Path) -> tuple[Path, Path]:
    """A published checkpoint and one of the numbers that its weights stand for, without the prefix of either."""
    stored, plain = {}, {}
    for name, value in load_file(written / "model.safetensors").items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        name = name.removeprefix("model.")
        pack = in_eight_bits if EIGHT_BITS.search(name) else in_four_bits if FOUR_BITS.search(name) else None
        if pack is None:
            stored[name] = plain[name] = value
            continue
        stored[name], scales, plain[name] = pack(value)
        stored[f"{name.removesuffix('weight')}scale"] = scales.view(torch.float8_e8m0fnu)
    stored["mtp.0.attn.wq_a.weight"] = torch.zeros(3, 3)
    config = json.loads((written / "config.json").read_text())
    quantised = {
        **config,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }
    made = []
    for kind, tensors, raw in (("published", stored, quantised), ("plain", plain, config)):
        place = directory / kind
        shutil.copytree(written, place)
        (place / "config.json").write_text(json.dumps(raw))
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        made.append(place)
    return made[0], made[1]


def test_published_weights_are_the_numbers_that_they_stand_for(
    implementation: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    ops, (stored, plain) = ops_of(implementation), published(tmp_path, checkpoint("deepseek_v4", **WIDE))
    token_ids = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    harness = Harness(ops, stored)
    actual = harness.logits(token_ids)
    expected = Harness(ops, plain).logits(token_ids)
    error, largest = (actual - expected).abs().amax(1), expected.abs().max().item()
    if implementation == "reference":
        assert error.max().item() < 1e-4 * largest
    else:  # whose kernels round inputs, too, which may choose other experts and entries
        assert error.median().item() < 0.15 * largest
        assert error[0].item() < 0.03 * largest
    assert torch.equal(harness.logits(token_ids, chunk=7), actual)


def test_names_of_either_kind_are_the_same_model(
    implementation: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    written, ops = checkpoint("deepseek_v4"), ops_of(implementation)
    place = tmp_path / "renamed"
    shutil.copytree(written, place)
    tensors = load_file(written / "model.safetensors")
    for old, new in RENAMED.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    assert {"embed.weight", "hc_head_fn", "layers.0.attn.wq_a.weight", "head.weight"} <= tensors.keys()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    assert torch.equal(Harness(ops, place).logits([5, 6, 7]), Harness(ops, written).logits([5, 6, 7]))


def test_experts_of_other_bits_are_refused(checkpoint: Callable[..., Path]) -> None:
    raw = json.loads((checkpoint("deepseek_v4") / "config.json").read_text())
    given = {**raw, "expert_dtype": "fp6", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConfigError, match="expert_dtype is 'fp6'; quire reads fp8 or fp4"):
        ModelArch.from_config(given, source="config.json")


def test_a_table_of_experts_that_there_are_not_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    place, name = tmp_path / "wrong", "model.layers.0.ffn.gate.tid2eid"
    shutil.copytree(checkpoint("deepseek_v4"), place)
    tensors = load_file(place / "model.safetensors")
    tensors[name][3, 1] = 8
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} names experts from 0 to 8, but there are 8"):
        Harness(ops_of("reference"), place)
    save_file({**tensors, name: tensors[name][:, :2].contiguous()}, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tid2eid has shape \[\d+, 2\], but config.json asks for \[\d+, 3\]"):
        Harness(ops_of("reference"), place)


def test_stored_bits_are_planned(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    stored, plain = published(tmp_path, checkpoint("deepseek_v4", **WIDE))
    kept, whole = (with_stored_formats(arch_of(place), place) for place in (stored, plain))
    assert len(kept.quantized) == sum(map(bool, map(QUANTISED.search, load_file(plain / "model.safetensors"))))
    assert weight_bytes(kept, "float32", ops="cpu") < 0.5 * weight_bytes(whole, "float32", ops="cpu")
