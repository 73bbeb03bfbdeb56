"""Models from GGUF files compute what transformers computes of the numbers that the files' weights stand for."""

from __future__ import annotations

import itertools
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.gguf.architectures import architecture_of
from quire.config.gguf.config_json import gguf_config, report_unknown
from quire.config.gguf.files import read_gguf
from quire.config.gguf.metadata import GgufKeys
from quire.config.gguf.tensor_types import BY_NAME, QUANTIZED
from quire.config.memory.weights.sizes import weight_bytes
from quire.errors import CheckpointError, ConfigError
from quire.loader.checkpoint import open_checkpoint
from quire.loader.gguf.names import translated
from quire.loader.model_impl import read_model_arch
from quire.ops.backends import ops_of
from tests.checkpoints import in_transformers, make_checkpoint
from tests.config.test_weight_shapes import tensors_of
from tests.engine.test_parity import available_ops
from tests.gguf.files import ALSO, ARCHITECTURES, GgufFile
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import REFERENCE

SUPER_BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Sizes that blocks of 256 divide."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},  # all layers of a file are alike
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},  # what llama.cpp takes it to be
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3_text": {"query_pre_attn_scalar": 24},
    "afmoe": {"global_attn_every_n_layers": 4},
    "dots1": {"max_window_layers": 4},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
    "falcon_h1": {  # the factors are in the weights
        **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"), 1.0),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"), 1.0),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    },
    "minicpm3": {"scale_emb": 12, "dim_model_base": 256},
    "bitnet": {"hidden_act": "silu", "tie_word_embeddings": True},
    "minicpm": {"attention_multiplier": 0.25},
    "orion": {"partial_rotary_factor": 1.0},
}
"""What no file says: llama.cpp has it in code."""
OTHERWISE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "apertus")
"""Families that files have in another way than config.json: sorted otherwise, or with divisors of frequencies."""
OF_FILES = {"source", "raw", "eos_token_ids", "dtype", "quantization", "quantized"}
IDS = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def converted(directory: Path, family: str, kind: str, **overrides: Any) -> tuple[Path, Path]:
    """(a GGUF file, a checkpoint with the numbers that it stands for)."""
    kin = ALSO.get(family, family)
    given = {**OVERRIDES.get(kin, {}), **OVERRIDES.get(family, {}), **overrides}
    file = GgufFile(
        make_checkpoint(kin, directory / "source", **given), kind=kind, arch=family if family in ALSO else None
    )
    if family == "apertus":
        file.weights["rope_freqs"] = llama3_divisors(file.config["rope_parameters"], 16)
    return file.write(directory / "model.gguf"), file.write_dequantized(directory / "dequantized")


def logits_of(file: Path) -> Tensor:
    return Harness(REFERENCE, file, arch=read_model_arch(gguf_config(file), file)).logits(IDS)


@torch.no_grad()
def transformers_logits(directory: Path) -> Tensor:
    logits: Tensor = in_transformers(directory)(torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("family", [*ARCHITECTURES, *ALSO])
def test_every_family_is_what_transformers_has(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, dequantized = converted(tmp_path, family, "Q8_0")
    ours, theirs = logits_of(file), transformers_logits(dequantized)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max() + 1e-5
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    with caplog.at_level(logging.WARNING):
        report_unknown(file)
    assert "without effect" not in caplog.text
    if family not in OTHERWISE:
        same_arch(read_model_arch(gguf_config(file), file), arch_of(dequantized))


def same_arch(ours: ModelArch, theirs: ModelArch) -> None:
    """The metadata stand for the config, but for what is of the files."""
    names = {field.name for field in fields(ModelArch)} - OF_FILES
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert ours.eos_token_ids == (256, 258)  # and the token that is known to end a turn


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTIZED])
def test_every_type_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    file, dequantized = converted(tmp_path, "llama", kind, **SUPER_BLOCKS)
    arch = read_model_arch(gguf_config(file), file)
    assert {format.bits for format in arch.quantized} == ({QUANTIZED[kind].bits} if kind in QUANTIZED else set())
    assert arch.dtype == ("float16" if kind == "F16" else "bfloat16")
    ours, theirs = logits_of(file), transformers_logits(dequantized)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_a_split_model_computes_the_same(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    whole = GgufFile(source, kind="Q8_0").write(tmp_path / "model.gguf")
    (tmp_path / "split").mkdir()
    parts = GgufFile(source, kind="Q8_0").write(tmp_path / "split" / "model.gguf", split_tensors=7)
    assert len(list((tmp_path / "split").iterdir())) > 3
    assert torch.equal(logits_of(parts), logits_of(whole))


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_file_may_have_any_types_side_by_side(family: str, ops: str, tmp_path: Path) -> None:
    """In one product, too. An expert's gate and up projections become numbers then, as the plan knows."""
    sizes = {**OVERRIDES.get(family, {}), "moe_intermediate_size": 64}
    file = GgufFile(make_checkpoint(family, tmp_path / "source", **sizes), kind="Q4_0")
    file.kinds = {"q_proj": "Q5_1", "k_proj": "F16", "v_proj": "Q8_0", "gate_proj": "IQ4_NL", "up_proj": "MXFP4"}
    written, dequantized = file.write(tmp_path / "m.gguf"), file.write_dequantized(tmp_path / "dequantized")
    ours, theirs = logits_of(written), transformers_logits(dequantized)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max() + 1e-5
    arch = read_model_arch(gguf_config(written), written)
    harness = Harness(ops_of(ops), written, arch=arch)
    errors = (harness.logits(IDS) - theirs).norm(dim=1) / (theirs - theirs.mean()).norm(dim=1)
    assert errors.median() < 0.08  # of all tokens, some of which choose other experts
    loaded = sum(
        tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(harness.model)}.values()
    )
    assert weight_bytes(arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize("alignment", [8, 64, 1024])
def test_tensors_may_lie_at_other_multiples(alignment: int, tmp_path: Path) -> None:
    """gguf leaves the key out of all files of a split model but the first, and then nobody can read the others."""
    source = make_checkpoint("llama", tmp_path / "source")
    file = GgufFile(source, kind="Q5_0")
    expected = logits_of(file.write(tmp_path / "usual.gguf"))
    other = GgufFile(source, kind="Q5_0")
    other.alignment = alignment
    assert torch.equal(logits_of(other.write(tmp_path / "other.gguf")), expected)
    with pytest.raises(CheckpointError, match=r"multiples of 32|no multiple of 32|overlaps|truncated"):
        open_checkpoint(other.write(tmp_path / "split.gguf", split_tensors=7))


def test_one_tensor_of_queries_keys_and_values_is_taken_apart(tmp_path: Path) -> None:
    """As files of the first ChatGLM and Phi 2 have it."""
    source = make_checkpoint("glm", tmp_path / "source")
    file, joined = GgufFile(source, kind="Q8_0"), GgufFile(source, kind="Q8_0")
    for layer, kind in itertools.product(range(3), ("weight", "bias")):
        names = [f"model.layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        whole = np.concatenate([joined.weights.pop(name) for name in names])
        joined.weights[f"model.layers.{layer}.self_attn.qkv_proj.{kind}"] = whole
    assert torch.equal(logits_of(joined.write(tmp_path / "joined.gguf")), logits_of(file.write(tmp_path / "m.gguf")))


def test_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    """They are counted among the others (GLM 4.5)."""
    source = make_checkpoint("glm4_moe", tmp_path / "source")
    file, drafting = GgufFile(source, kind="Q8_0"), GgufFile(source, kind="Q8_0")
    drafting.extra = {"nextn_predict_layers": 1, "block_count": 4}
    drafting.weights["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)
    drafting.weights["model.layers.3.input_layernorm.weight"] = np.ones(64, np.float32)
    assert torch.equal(logits_of(drafting.write(tmp_path / "d.gguf")), logits_of(file.write(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("family", "part", "kind"), [("granitemoeshared", "ffn_up_shexp", "Q4_0"), ("deepseek_v3", "attn_k_b", "I8")]
)
def test_parts_of_one_tensor_that_do_not_fit_are_named(family: str, part: str, kind: str, tmp_path: Path) -> None:
    file, _ = converted(tmp_path, family, "Q8_0")
    model, arch = read_gguf(file), read_model_arch(gguf_config(file), file)
    name = f"blk.1.{part}.weight"
    odd = {**model.tensors, name: replace(model.tensors[name], type=BY_NAME[kind])}
    with pytest.raises(CheckpointError, match=rf"{part}\.weight {kind} .* are one tensor of the model, and differ"):
        translated(odd, arch, architecture_of(GgufKeys(model)))


@pytest.mark.parametrize("divisor", [1.0, 8.0])
def test_divided_frequencies_are_those_of_llama_3(divisor: float, tmp_path: Path) -> None:
    """What the file has as numbers is what config.json has as four parameters."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    overrides: dict[str, Any] = {"rope_parameters": rope} if divisor > 1 else {}
    source = make_checkpoint("llama", tmp_path / "source", **overrides)
    file = GgufFile(source)
    file.weights["rope_freqs"] = llama3_divisors(rope, 16) if divisor > 1 else np.ones(8, np.float32)
    logits, theirs = logits_of(file.write(tmp_path / "model.gguf")), transformers_logits(source)
    assert (logits - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
    ids=["type", "no type", "old name"],
)
def test_a_rotation_is_stretched_by_one_factor_whatever_that_is_called(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    """As llama.cpp has it, for which a factor without a type is a linear one."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    source = make_checkpoint("llama", tmp_path / "source", rope_parameters=rope)
    file = GgufFile(source)
    file.extra = metadata
    logits, theirs = logits_of(file.write(tmp_path / "model.gguf")), transformers_logits(source)
    assert (logits - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.freq_base_swa", 1e6), ("rope.dimension_count_swa", 8), ("attention.key_length_swa", 32)],
)
def test_layers_with_a_window_that_differ_are_refused(key: str, value: float, tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("cohere2", tmp_path / "source"))
    file.extra = {key: value}
    with pytest.raises(ConfigError, match=rf"cohere2\.{key} is .* must be that of the other layers"):
        gguf_config(file.write(tmp_path / "m.gguf"))


def llama3_divisors(rope: dict[str, Any], head_size: int) -> np.ndarray:
    """As llama.cpp's converter computes them. Shapes: -> [head_size / 2] float32."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for pair in range(head_size // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_size)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_divisors_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Without them the model would compute something else."""
    file = GgufFile(make_checkpoint("llama", tmp_path / "source"), kind="F32")
    file.weights["rope_freqs"] = np.full((2, 8), 4.0, np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is F32 of shape \[2, 8\], not a list of"):
        gguf_config(file.write(tmp_path / "m.gguf"))


def test_an_architecture_that_is_not_read_is_named_with_those_that_are(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "t5")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ConfigError, match=r"architecture 't5' are not read.*llama.*qwen3moe.*Use the model with"):
        gguf_config(tmp_path / "m.gguf")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("llama", tmp_path / "source", **SUPER_BLOCKS), kind="F32").write(
        tmp_path / "m.gguf"
    )
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    data[place : place + 4] = (26).to_bytes(4, "little")  # I32 takes as many bytes as F32
    file.write_bytes(data)
    arch = read_model_arch(gguf_config(file), file)
    with pytest.raises(CheckpointError, match="has dtype I32"):
        Harness(REFERENCE, file, arch=arch)


def test_scales_of_products_beside_them_are_refused(tmp_path: Path) -> None:
    """As older converters of BitNet wrote them."""
    file, _ = converted(tmp_path, "bitnet", "F32")
    model = read_gguf(file)
    older = {**model.tensors, "blk.0.attn_q.scale": model.tensors["blk.0.attn_norm.weight"]}
    keys = GgufKeys(replace(model, tensors=older))
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.scale.*newer convert_hf_to_gguf"):
        architecture_of(keys).derived(keys)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("llama", tmp_path / "source"))
    del file.weights["model.layers.1.self_attn.k_proj.weight"]
    written = file.write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight \[32, 64\] is missing"):
        Harness(REFERENCE, written, arch=read_model_arch(gguf_config(written), written))


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("llama", tmp_path / "source"))
    file.extra = {"attention.head_count_kv": [2, 1, 2]}
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count_kv is \[2, 1, 2\].*the same for all layers"):
        gguf_config(file.write(tmp_path / "m.gguf"))


def test_a_part_of_a_head_is_refused_in_families_that_rotate_whole_ones(tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("llama", tmp_path / "source"))
    file.extra = {"rope.dimension_count": 8}
    with pytest.raises(ConfigError, match=r"llama\.rope\.dimension_count is 8.*must be that of a head, 16"):
        gguf_config(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("key", ["attention.secret", "logit_scale", "expert_weights_norm", "attention.sliding_window"])
def test_keys_without_effect_are_reported(key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that nobody knows, and those that only other architectures have."""
    file = GgufFile(make_checkpoint("llama", tmp_path / "source"))
    file.extra = {key: 3}
    with caplog.at_level(logging.WARNING):
        report_unknown(file.write(tmp_path / "m.gguf"))
    assert f"metadata keys without effect: '{key}'" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.causal", False), ("rope.scaling.yarn_attn_factor", 0.5), ("expert_gating_func", 2)],
)
def test_what_no_other_file_says_is_refused(key: str, value: float, tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("qwen3_moe", tmp_path / "source", **OVERRIDES["qwen3_moe"]))
    file.extra = {key: value}
    with pytest.raises(ConfigError, match=rf"qwen3moe\.{key} is {value}.*nothing else is computed"):
        gguf_config(file.write(tmp_path / "m.gguf"))


def test_layers_with_a_window_may_say_what_is_the_default_of_all(tmp_path: Path) -> None:
    file = GgufFile(make_checkpoint("cohere2", tmp_path / "source"))
    file.extra = {"rope.freq_base": None, "rope.freq_base_swa": 10_000.0, "attention.key_length_swa": 16}
    assert gguf_config(file.write(tmp_path / "m.gguf"))["rope_theta"] == 10_000.0


def test_bytes_of_an_expert_are_its_own(tmp_path: Path) -> None:
    file, dequantized = converted(tmp_path, "mixtral", "F32")
    source, plain = open_checkpoint(file), open_checkpoint(dequantized)
    layer = "model.layers.1.block_sparse_moe.experts"
    for expert in range(5):
        ours = source.view(f"{layer}.{expert}.down_proj.weight")
        assert torch.equal(ours, plain.view(f"{layer}.{expert}.w2.weight"))
        source.drop([f"{layer}.{expert}.down_proj.weight"])
    assert torch.equal(source.view(f"{layer}.0.up_proj.weight"), plain.view(f"{layer}.0.w3.weight"))


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_plan_counts_what_a_file_takes(family: str, ops: str, tmp_path: Path) -> None:
    """A quantised table is held as rows of numbers; where it is the head, too (qwen3), also as it is stored."""
    file, _ = converted(tmp_path, family, "Q8_0")
    arch = read_model_arch(gguf_config(file), file)
    model = Harness(ops_of(ops), file, arch=arch).model
    loaded = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(model)}.values())
    assert weight_bytes(arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize("ops", available_ops())
def test_a_table_that_is_the_head_is_held_once_where_it_becomes_numbers(ops: str, tmp_path: Path) -> None:
    file, dequantized = converted(tmp_path, "qwen3", "Q8_0")
    arch = read_model_arch(gguf_config(file), file)
    harness = Harness(ops_of(ops), file, arch=arch, dequantize=True)
    theirs = transformers_logits(dequantized)
    assert (harness.logits(IDS) - theirs).abs().max() < 1e-4 * theirs.abs().max()
    tensors = {tensor.data_ptr(): tensor for tensor in tensors_of(harness.model)}.values()
    planned = weight_bytes(replace(arch, quantized=()), "float32", ops=ops)
    assert planned == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.02)
