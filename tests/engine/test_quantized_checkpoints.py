"""Checkpoints that were quantised before: they compute what their numbers stand for, and keep every promise."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire
from quire import LLM, SamplingParams
from quire.config.memory.weights.sizes import weight_bytes
from quire.errors import ConfigError
from quire.loader.model_impl import read_model_arch
from quire.ops.backends import ops_of
from tests.config.test_weight_shapes import tensors_of
from tests.engine.test_parity import available_ops, bits, prompts
from tests.engine.test_quantization import perplexity
from tests.models.harness import Harness
from tests.quantized_checkpoints import FORMATS, make_quantized_checkpoint

TINY = Path(quire.__file__).parent / "tiny"
native = pytest.mark.skipif("cpu" not in available_ops(), reason="the native kernels are not built")
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Of each format: the quantised checkpoint, and the numbers that it stands for."""
    return {format: make_quantized_checkpoint(format, tmp_path_factory.mktemp(format)) for format in FORMATS}


def logits_of(directory: Path, ops: str) -> torch.Tensor:
    raw = json.loads((directory / "config.json").read_text())
    harness = Harness(ops_of(ops), directory, arch=read_model_arch(raw, directory))
    row = harness.add([(7 * index + 3) % 250 for index in range(40)])
    return torch.cat([harness.step([(row, count)])[0] for count in (7, 33)])


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_checkpoint_is_the_numbers_that_it_stands_for(format: str, pairs: dict[str, Pair]) -> None:
    quantized, plain = pairs[format]
    torch.testing.assert_close(logits_of(quantized, "reference"), logits_of(plain, "reference"), atol=2e-4, rtol=1e-4)


@native
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_compute_it_but_for_the_rounding_of_activations(format: str, pairs: dict[str, Pair]) -> None:
    """To 8 bits in groups, of integer weights; levels of nf4 and MXFP8 are rounded, too. Not of other 8-bit floats."""
    quantized, plain = pairs[format]
    found, expected = logits_of(quantized, "cpu"), logits_of(plain, "cpu")
    error = (found - expected).norm() / (expected - expected.mean()).norm()
    assert error < (1e-5 if "fp8" in format and "mx" not in format else 0.08 if "nf4" in format else 0.05)


@native
@pytest.mark.parametrize("format", FORMATS)
def test_a_request_does_not_notice_its_neighbours(format: str, pairs: dict[str, Pair]) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=2)
    options: dict[str, Any] = {"model": str(pairs[format][0]), "dtype": "bfloat16", "max_model_len": 128}
    with LLM(**options, num_threads=2) as llm:
        alone = bits([llm.generate([prompt], params)[0] for prompt in prompts()])  # type: ignore[list-item]
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts(), params)) == alone  # type: ignore[arg-type]
    with LLM(**options, num_threads=1, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(prompts(), params)) == alone, "in chunks, on one thread"  # type: ignore[arg-type]


@native
@pytest.mark.parametrize("format", ["ct-int4", "awq", "gptq-desc-act", "ct-fp8", "fp8-blocks", "ct-nvfp4"])
@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3_moe", "deepseek_v3", "deepseek_v32", "axk2", "dots3_note_text", "hy_v4", "longcat_flash"]
)
def test_other_layers_keep_their_bits(format: str, family: str, tmp_path: Path) -> None:
    """Biases, experts, latents, indexers."""
    latent = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32}
    sizes = {
        "qwen3_moe": {"moe_intermediate_size": 64},
        "deepseek_v3": {**latent, "moe_intermediate_size": 64},
        "deepseek_v32": {**latent, "moe_intermediate_size": 64, "index_head_dim": 32},
        "axk2": {**latent, "moe_intermediate_size": 64, "index_head_dim": 32, "gated_norm_rank": 32},
        "hy_v4": {**latent, "moe_intermediate_size": 64, "index_head_dim": 32},
        "dots3_note_text": {
            **latent,
            **{f"swa_{name}": size for name, size in {**latent, "num_attention_heads": 8}.items()},
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "moe_intermediate_size": 64,
            "shared_experts_intermediate_size": 64,
            "index_head_dim": 32,
        },
        "longcat_flash": {**latent, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 64},
    }.get(family, {})
    quantized, plain = make_quantized_checkpoint(format, tmp_path, family, **sizes)
    torch.testing.assert_close(logits_of(quantized, "reference"), logits_of(plain, "reference"), atol=2e-4, rtol=1e-4)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(str(quantized), max_model_len=128) as llm:
        alone = bits([llm.generate([prompt], params)[0] for prompt in prompts()])  # type: ignore[list-item]
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts(), params)) == alone  # type: ignore[arg-type]


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("format", ["ct-int4", "gptq-desc-act", "ct-fp8", "fp8-blocks"])
def test_keys_that_are_values_are_read_twice_and_planned_so(format: str, ops: str, tmp_path: Path) -> None:
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 32, "global_head_dim": 64}
    quantized, plain = make_quantized_checkpoint(format, tmp_path, "gemma4_unified_text", **sizes)
    torch.testing.assert_close(logits_of(quantized, "reference"), logits_of(plain, "reference"), atol=2e-4, rtol=1e-4)
    arch = read_model_arch(json.loads((quantized / "config.json").read_text()), quantized)
    model = Harness(ops_of(ops), quantized, arch=arch).model
    loaded = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(model)}.values())
    assert weight_bytes(arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("format", ["ct-int4", "gptq-desc-act", "ct-fp8", "fp8-blocks"])
def test_weights_around_narrow_values_are_numbers_and_planned_so(format: str, ops: str, tmp_path: Path) -> None:
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 96, "v_head_dim": 32}
    quantized, plain = make_quantized_checkpoint(format, tmp_path, "mimo_v2_flash", **sizes, moe_intermediate_size=64)
    torch.testing.assert_close(logits_of(quantized, "reference"), logits_of(plain, "reference"), atol=2e-4, rtol=1e-4)
    arch = read_model_arch(json.loads((quantized / "config.json").read_text()), quantized)
    model = Harness(ops_of(ops), quantized, arch=arch).model
    loaded = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(model)}.values())
    assert weight_bytes(arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("format", FORMATS)
def test_the_plan_counts_what_they_take(format: str, ops: str, pairs: dict[str, Pair]) -> None:
    directory, _ = pairs[format]
    arch = read_model_arch(json.loads((directory / "config.json").read_text()), directory)
    model = Harness(ops_of(ops), directory, arch=arch).model
    loaded = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(model)}.values())
    assert weight_bytes(arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


@native
@pytest.mark.parametrize("product", ["experts.1.up_proj", "shared_experts.gate_proj"])
def test_an_expert_whose_gate_and_up_are_stored_differently_has_both_as_numbers(
    product: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the plan knows."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32, "moe_intermediate_size": 64}
    quantized, plain = make_quantized_checkpoint("awq", tmp_path, "deepseek_v3", **sizes)
    name, tensors = f"model.layers.1.mlp.{product}", load_file(quantized / "model.safetensors")
    kept = {tensor: value for tensor, value in tensors.items() if not tensor.startswith(name)}
    kept[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(kept, quantized / "model.safetensors", metadata={"format": "pt"})
    found, expected = logits_of(quantized, "cpu"), logits_of(plain, "cpu")
    errors = (found - expected).norm(dim=1) / (expected - expected.mean()).norm(dim=1)
    assert errors.median() < 0.05  # of all tokens, some of which choose other experts
    arch = read_model_arch(json.loads((quantized / "config.json").read_text()), quantized)
    model = Harness(ops_of("cpu"), quantized, arch=arch).model
    loaded = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors_of(model)}.values())
    assert weight_bytes(arch, "float32", ops="cpu") == pytest.approx(loaded, rel=0.02)
    with caplog.at_level(logging.WARNING), LLM(str(quantized), max_model_len=64) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))  # type: ignore[arg-type, list-item]
    assert "1 weight of experts become plain numbers" in caplog.text


def test_the_plan_leaves_out_what_no_layer_reads(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A layer that drafts tokens behind the model's own, and an encoder of images."""
    shutil.copytree(pairs["awq"][0], tmp_path, dirs_exist_ok=True)
    raw = {**json.loads((tmp_path / "config.json").read_text()), "num_nextn_predict_layers": 1}
    formats = read_model_arch(raw, tmp_path).quantized
    stored = load_file(tmp_path / "model.safetensors")
    layer = {name: tensor for name, tensor in stored.items() if ".layers.1." in name}
    extra = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in layer.items()}
    extra |= {
        name.replace("model.layers.1.", "vision_tower.blocks.1."): tensor.clone() for name, tensor in layer.items()
    }
    save_file({**stored, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_model_arch(raw, tmp_path).quantized == formats


@pytest.fixture(scope="module")
def tiny_perplexity(tiny_llm: LLM) -> float:
    return perplexity(tiny_llm)


@native
@pytest.mark.parametrize(
    ("format", "limit"),
    [
        ("ct-int8", 1.01),
        ("ct-w8a8", 1.02),
        ("gptq-8", 1.01),
        ("ct-fp8", 1.02),
        ("fp8-blocks", 1.02),
        ("ct-int4", 1.06),
        ("awq", 1.06),
        ("gptq", 1.06),
        ("bnb-nf4", 1.06),
        ("bnb-int8", 1.02),
        ("ct-nvfp4", 1.06),
        ("ct-mxfp4", 1.12),
    ],
)
def test_perplexity_of_the_embedded_model(format: str, limit: float, tiny_perplexity: float, tmp_path: Path) -> None:
    """Rounded to the nearest value that the format has."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        written = FORMATS[format].write(tensor).tensors
        stored |= {f"{name.removesuffix('.weight')}.{part}": value.clone() for part, value in written.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": dict(FORMATS[format].config)}))
    with LLM(str(tmp_path)) as llm:
        assert perplexity(llm) / tiny_perplexity < limit


def test_dequantized_weights_give_the_bits_of_plain_ones(pairs: dict[str, Pair]) -> None:
    quantized, plain = pairs["awq"]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    with LLM(str(quantized), dtype="float32", dequantize=True) as llm:
        found = bits(llm.generate(prompts(), params))  # type: ignore[arg-type]
        assert llm.engine.identity.quantization == "awq, dequantized"
    with LLM(str(plain), dtype="float32") as llm:
        assert bits(llm.generate(prompts(), params)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int8"}, "the checkpoint's are quantised already (awq)"),
        ({"quantization": "gptq"}, "quantised by awq"),
        ({"load_format": "dummy"}, "makes plain weights up"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(
    options: dict[str, Any], words: str, pairs: dict[str, Pair]
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(pairs["awq"][0]), **options)
    assert words in str(caught.value)


def test_the_method_may_be_given(pairs: dict[str, Pair]) -> None:
    with LLM(str(pairs["awq"][0]), quantization="awq_marlin", max_model_len=64) as llm:
        assert llm.engine.config.quant_config.name == "awq"
        assert math.isfinite(llm.generate([[1, 2, 3]], SamplingParams(logprobs=0))[0].outputs[0].cumulative_logprob)  # type: ignore[arg-type, list-item]
