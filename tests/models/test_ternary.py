"""Ternary weights compute what transformers' linear layers for them compute, activations of int8 included."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitNetQuantConfig

from quire import LLM
from quire.config.memory.weights.sizes import weight_bytes
from quire.config.quantized.config import read_quantization
from quire.config.quantized.stored import Header
from quire.errors import CheckpointError, ConfigError
from quire.layers.quantization.unpack import UNPACK
from quire.loader.model_impl import read_model_arch
from quire.ops.backends import ops_of
from tests.bitnet_modules import AutoBitLinear, BitLinear, WeightQuant, pack_weights, replace_with_bitnet_linear
from tests.checkpoints import random_model
from tests.config.test_weight_shapes import tensors_of
from tests.engine.test_parity import available_ops
from tests.models.harness import Harness
from tests.quantized_checkpoints import bitnet
from tests.tiny_tokenizer import write_tokenizer

native = pytest.mark.skipif("cpu" not in available_ops(), reason="the native kernels are not built")
STORED = {torch.uint8: "U8", torch.float32: "F32"}
IDS = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()
SIZES: Mapping[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}
WITH_BIAS = "llama, of biases and one head of keys"
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    WITH_BIAS: (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "bitnet, of three heads": ("bitnet", {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1}),
}
BITLINEAR: Mapping[str, Any] = {"linear_class": "bitlinear"}
PACKED: Mapping[str, Any] = {"linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE: Mapping[str, Any] = {"linear_class": "autobitlinear", "quantization_mode": "online"}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bitlinear": BITLINEAR,
    "autobitlinear": PACKED,
    "autobitlinear, not packed": PACKED,
    "online": ONLINE,
    "online, but for some": {**ONLINE, "modules_to_not_convert": ["lm_head", "o_proj", "model.layers.1.mlp"]},
}


CASES = [
    (model, config)
    for model, config in itertools.product(MODELS, CONFIGS)
    if model != WITH_BIAS or CONFIGS[config] != PACKED
]


def make_ternary(directory: Path, model: str, config: str, **sizes: int) -> tuple[Path, nn.Module]:
    """A checkpoint, and transformers' model with its linear layers. Each product has a scale of its own."""
    family, overrides = MODELS[model]
    theirs = random_model(family, **{**SIZES, **overrides, **sizes})
    given = CONFIGS[config]
    kept = given.get("modules_to_not_convert") or ["lm_head"]
    plain = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replace_with_bitnet_linear(theirs, kept, BitNetQuantConfig(**given))
    layers = {name: layer for name, layer in theirs.named_modules() if isinstance(layer, BitLinear | AutoBitLinear)}
    assert len(layers) == (14 if kept == ["lm_head"] else 14 - 2 - 3)
    stored = dict(plain)
    loaded = dict(plain)
    for name, layer in layers.items():
        if config.startswith("online"):
            continue
        weight = plain[f"{name}.weight"].float()
        scale = weight.abs().mean()
        values = (weight / scale).round().clamp(-1, 1)
        packed = isinstance(layer, BitLinear) or config == "autobitlinear"
        of_scale = {f"{name}.weight_scale": (1 / scale if isinstance(layer, BitLinear) else scale).view(1)}
        stored |= {f"{name}.weight": pack_weights(values.clone()) if packed else values, **of_scale}
        loaded |= {f"{name}.weight": stored[f"{name}.weight"] if isinstance(layer, BitLinear) else values}
        loaded |= of_scale
    theirs.load_state_dict(loaded, assign=True)
    if theirs.config.tie_word_embeddings:
        theirs.lm_head.weight = theirs.model.embed_tokens.weight
        stored.pop("lm_head.weight", None)
    raw = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__], "dtype": "float32"}
    raw["quantization_config"] = {"quant_method": "bitnet", **given}
    directory.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in stored.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(raw))
    write_tokenizer(directory)
    return directory, theirs


def harness_of(directory: Path, ops: str) -> Harness:
    raw = json.loads((directory / "config.json").read_text())
    return Harness(ops_of(ops), directory, arch=read_model_arch(raw, directory))


@torch.no_grad()
def logits_of(theirs: Any) -> Tensor:
    logits: Tensor = theirs(torch.tensor([IDS])).logits[0]
    return logits


@native
@pytest.mark.parametrize(("model", "config"), CASES)
def test_logits_are_those_of_transformers(model: str, config: str, tmp_path: Path) -> None:
    """Sums of integers are exact in both; what rounds is the same but for float32 numbers that lie between integers."""
    directory, theirs = make_ternary(tmp_path / "m", model, config)
    expected, found = logits_of(theirs), harness_of(directory, "cpu").logits(IDS)
    errors = (found - expected).abs().amax(dim=1) / expected.abs().max()
    assert errors[0] < 1e-5
    assert errors.max() < 0.03  # behind a token one of whose activations became the next integer


@native
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    ("config", "bias"),
    [("bitlinear", False), ("bitlinear", True), ("autobitlinear", False), ("online", False), ("online", True)],
)
def test_a_product_is_that_of_transformers(config: str, bias: bool, rows: int) -> None:
    """Whose inputs have the same numbers: then all sums are of the same integers."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(72, 300, generator=generator), torch.randn(rows, 300, generator=generator)
    x[0], x[rows // 2, 7] = 3e-8, 40.0  # less than transformers' least magnitude, where there are other rows
    added = torch.randn(72, generator=generator) if bias else None
    scale, values = weight.abs().mean(), (weight / weight.abs().mean()).round().clamp(-1, 1)
    theirs: nn.Module
    if config == "bitlinear":
        theirs = BitLinear(300, 72, bias=bias, dtype=torch.float32)
        stored = {"weight": pack_weights(values.clone()), "weight_scale": (1 / scale).view(1)}
    else:
        theirs = AutoBitLinear(300, 72, bias=bias, dtype=torch.float32, online_quant=config == "online")
        stored = {"weight": weight} if config == "online" else {"weight": values, "weight_scale": scale.view(1)}
    theirs.load_state_dict(stored if added is None else {**stored, "bias": added}, assign=True)
    with torch.no_grad():
        expected = theirs(x)
    if config == "autobitlinear":
        stored["weight"] = pack_weights(values.clone())
    headers = {
        f"layers.0.mlp.{role}": Header(STORED[tensor.dtype], tuple(tensor.shape)) for role, tensor in stored.items()
    }
    quantization = read_quantization(
        {"quantization_config": {"quant_method": "bitnet", **CONFIGS[config]}}, "config.json"
    )
    assert quantization is not None
    found = quantization.find("layers.0.mlp.weight", headers.get)
    assert found is not None
    ops = ops_of("cpu")
    packed = ops.pack_quantized([UNPACK[found.packing](found, stored)])
    assert packed.format == "int2"
    torch.testing.assert_close(ops.linear(x, packed, added), expected, rtol=1e-5, atol=1e-5)


def test_the_writer_of_other_tests_packs_as_transformers_does() -> None:
    weight = torch.randn(64, 40, generator=torch.Generator().manual_seed(3))
    written = bitnet(weight, divides=False)
    values = (weight / weight.abs().mean()).round().clamp(-1, 1)
    assert torch.equal(written.tensors["weight"], pack_weights(values.clone()))
    torch.testing.assert_close(written.weight, WeightQuant.apply(weight))


@native
@pytest.mark.parametrize("model", ["llama", "bitnet"])
def test_weights_are_kept_in_two_bits(model: str, tmp_path: Path) -> None:
    harness = harness_of(make_ternary(tmp_path / "m", model, "bitlinear")[0], "cpu")
    assert {format.kept_as for format in harness.arch.quantized} == {"int2"}
    attention = harness.model.layers[0].mixers[0]  # type: ignore[attr-defined]
    assert attention.qkv_proj.weight.format == "int2"  # of three scales


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize(("model", "config"), [*itertools.product(["llama", "bitnet"], CONFIGS)])
def test_the_plan_counts_what_they_take(model: str, config: str, ops: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    harness = harness_of(make_ternary(tmp_path / "m", model, config, **sizes)[0], ops)
    tensors = {tensor.data_ptr(): tensor for tensor in tensors_of(harness.model)}
    loaded = sum(tensor.nbytes for tensor in tensors.values())
    assert weight_bytes(harness.arch, "float32", ops=ops) == pytest.approx(loaded, rel=0.02)


def changed(directory: Path, **tensors: Tensor | None) -> Path:
    """The checkpoint with other tensors of one layer, or without them."""
    stored = load_file(directory / "model.safetensors")
    for role, tensor in tensors.items():
        name = f"model.layers.1.mlp.up_proj.{role}"
        stored.pop(name)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ("bitlinear", {"weight": torch.full((50, 160), 3, dtype=torch.uint8)}, "has a code of 3, which is no ternary"),
        ("bitlinear", {"weight": torch.ones(49, 160, dtype=torch.uint8)}, "has shape [196, 160]"),
        ("bitlinear", {"weight": torch.ones(50, 159, dtype=torch.uint8)}, "has shape [200, 159]"),
        ("bitlinear", {"weight": torch.ones(50, 160, 1, dtype=torch.uint8)}, "has weight U8 of shape [50, 160, 1]"),
        ("bitlinear", {"weight_scale": None}, "is quantised, but weight_scale is missing"),
        ("autobitlinear", {"weight_scale": None}, "is quantised, but weight_scale is missing"),
        ("bitlinear", {"weight_scale": torch.ones(200)}, "has tensors that do not fit each other"),
        ("bitlinear", {"weight_scale": torch.zeros(1)}, "has a weight_scale of 0.0"),
        ("bitlinear", {"weight_scale": torch.full((1,), torch.inf)}, "has a weight_scale of inf"),
        ("autobitlinear", {"weight_scale": torch.zeros(1)}, "has a weight_scale of 0.0"),
        ("autobitlinear", {"weight_scale": torch.full((1,), torch.nan)}, "has a weight_scale of nan"),
        ("autobitlinear", {"weight_scale": torch.ones(1, dtype=torch.uint8)}, "has weight_scale U8"),
        ("autobitlinear, not packed", {"weight": torch.full((200, 160), 0.5)}, "that is not -1, 0, or 1"),
        ("autobitlinear, not packed", {"weight": torch.full((200, 160), torch.nan)}, "that is not -1, 0, or 1"),
        ("online", {"weight": torch.full((200, 160), torch.nan)}, "has a number that is not finite"),
        ("online", {"weight": torch.ones(50, 160, dtype=torch.uint8)}, "has weight U8 of shape [50, 160]"),
    ],
)
def test_what_is_no_ternary_weight_is_refused(
    config: str, tensors: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    directory = changed(make_ternary(tmp_path / "m", "llama", config)[0], **tensors)
    with pytest.raises(CheckpointError) as caught:
        harness_of(directory, "reference")
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert words in str(caught.value)


def test_biases_that_transformers_multiplies_by_scales_of_weights_are_refused(tmp_path: Path) -> None:
    directory, _ = make_ternary(tmp_path / "m", WITH_BIAS, "autobitlinear")
    with pytest.raises(CheckpointError, match="has a bias, which AutoBitLinear multiplies"):
        harness_of(directory, "reference")


@pytest.mark.parametrize(
    ("family", "words"), [("mixtral", "in models with experts"), ("gpt2", "weights that are stored [in, out]")]
)
def test_models_with_other_products_are_not_rounded(family: str, words: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "quantization_config": {"quant_method": "bitnet", **ONLINE}})
    )
    with pytest.raises(ConfigError) as caught:
        LLM(str(tmp_path))
    assert words in str(caught.value)
