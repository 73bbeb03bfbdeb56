"""Scales of the KV cache from a checkpoint: found by every writer's names, used where the cache's type is theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, ConfigError
from quire.loader.load import load_model
from quire.loader.model_impl import read_model_arch
from quire.models.decoder import DecoderForCausalLM
from quire.ops.backends import ops_of
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits, prompts

ATTENTION = "model.layers.{}.self_attn."
PER_HEAD = {"k_scale": torch.tensor([[[0.01]], [[0.02]]]), "v_scale": torch.tensor([[[0.03]], [[0.04]]])}
"""As compressed-tensors writes `attn_head`; the embedded families here have two kv heads."""
DIALECTS: dict[str, dict[str, Tensor]] = {
    "per head": PER_HEAD,
    "per tensor": {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.03]).bfloat16()},
    "of outputs": {"k_proj.output_scale": torch.tensor(0.02), "v_proj.output_scale": torch.tensor(0.03)},
    "of projections": {"k_proj.k_scale": torch.tensor(0.02), "v_proj.v_scale": torch.tensor(0.03)},
    "of both": {"kv_scale": torch.tensor(0.02)},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def scheme_of(kind: str, **changes: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True, **changes}
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}


def with_scales(source: Path, directory: Path, scales: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    shutil.copytree(source, directory, dirs_exist_ok=True)
    raw = json.loads((source / "config.json").read_text())
    extra = {} if config is None else {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps({**raw, **extra}))
    tensors = load_file(source / "model.safetensors")
    for layer in range(raw["num_hidden_layers"]):
        tensors |= {ATTENTION.format(layer) + name: scale.clone() for name, scale in scales.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def scales_in(directory: Path, kv_cache_dtype: str) -> list[Tensor | None]:
    """Of each layer of the model."""
    arch = read_model_arch(json.loads((directory / "config.json").read_text()), directory)
    options: dict[str, Any] = {"dtype": torch.float32, "max_model_len": 64, "kv_cache_dtype": kv_cache_dtype}
    model = load_model(directory, arch, ops=ops_of("reference"), **options)
    assert isinstance(model, DecoderForCausalLM)
    return [layer.mixers[0].attention.kv_scales for layer in model.layers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("config", "kv_cache_dtype"), [(scheme_of("float"), "fp8"), (scheme_of("int"), "int8"), (None, "fp8")]
)
def test_scales_are_those_of_the_checkpoint(
    dialect: str, config: dict[str, Any] | None, kv_cache_dtype: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    scales = DIALECTS[dialect]
    directory = with_scales(checkpoint("llama"), tmp_path, scales, config)
    wanted = torch.stack([scale.float().flatten().expand(2) for scale in (*scales.values(), *scales.values())][:2])
    found = scales_in(directory, kv_cache_dtype)
    assert found
    assert all(scale is not None and torch.equal(scale, wanted) for scale in found)
    assert scales_in(directory, "bfloat16") == [None] * len(found)
    assert scales_in(directory, {"fp8": "int8", "int8": "fp8"}[kv_cache_dtype]) == [None] * len(found)


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [("float", "fp8"), ("int", "int8")])
def test_auto_is_the_type_of_the_scheme(
    kind: str, kv_cache_dtype: str, ops: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = str(with_scales(checkpoint("llama"), tmp_path, PER_HEAD, scheme_of(kind, strategy="attn_head")))
    with LLM(directory, ops=ops, dtype="bfloat16", max_model_len=128) as llm:
        config = llm.engine.config
        assert config.cache_config.dtype == kv_cache_dtype
        assert "kv_cache_scheme" in config.choices["kv_cache_dtype"].reason
        alone = bits([llm.generate([prompt], GREEDY)[0] for prompt in prompts()])
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts(), GREEDY)) == alone
        assert bits(llm.generate(prompts(), GREEDY)) == alone, "from the prefix cache"
    with LLM(directory, ops=ops, dtype="bfloat16", max_model_len=128, kv_cache_dtype="bfloat16") as llm:
        assert "are not used" in llm.engine.config.choices["kv_cache_dtype"].reason
        assert bits(llm.generate(prompts(), GREEDY)) != alone


def test_scales_change_what_is_kept(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Ones far too large leave hardly a number of the cache."""
    coarse = {"k_scale": torch.tensor([1e4]), "v_scale": torch.tensor([1e4])}
    outputs = []
    for number, scales in enumerate(({}, PER_HEAD, coarse)):
        directory = with_scales(checkpoint("llama"), tmp_path / str(number), scales, None)
        with LLM(str(directory), kv_cache_dtype="fp8", max_model_len=128) as llm:
            outputs.append(bits(llm.generate(prompts(), GREEDY)))
    assert outputs[0] != outputs[1]
    assert outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 4}, "num_bits"),
        ({"symmetric": False}, "symmetric"),
        ({"strategy": "channel"}, "channel"),
        ({"type": ["float"]}, "type"),
    ],
)
def test_schemes_that_quire_lacks_are_refused_where_nothing_else_is_asked_for(
    changes: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = str(with_scales(checkpoint("llama"), tmp_path, PER_HEAD, scheme_of("float", **changes)))
    with pytest.raises(ConfigError, match=rf"kv_cache_scheme is .*{words}.*Pass --kv-cache-dtype float32"):
        LLM(directory)
    with LLM(directory, kv_cache_dtype="fp8", max_model_len=64) as llm:
        assert llm.generate("a", GREEDY)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"k_scale": torch.tensor([0.0]), "v_scale": torch.tensor([1.0])}, "k_scale has the scale 0"),
        ({"k_scale": torch.tensor([1.0]), "v_scale": torch.tensor([float("nan")])}, "v_scale has the scale nan"),
        ({"k_scale": torch.tensor([1.0])}, "counterpart"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, r"shape \[3\], not a scale for each kv head"),
    ],
)
def test_scales_that_are_none_are_refused(
    scales: dict[str, Tensor], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = with_scales(checkpoint("llama"), tmp_path, scales, scheme_of("float"))
    with pytest.raises(CheckpointError, match=words):
        scales_in(directory, "fp8")
