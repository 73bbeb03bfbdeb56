"""Language models inside models for text and images: their logits are those that transformers gives for texts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.arch import ModelArch
from quire.config.text_part import LEFT_OUT, TEXT_TYPES
from quire.errors import CheckpointError, ConfigError
from tests.checkpoints import make_checkpoint, one_thread
from tests.models.cases.text_parts import CASES, DOTS, KIMI, Case
from tests.models.harness import Harness
from tests.ops.implementations import REFERENCE


def make(case: str, directory: Path) -> torch.nn.Module:
    """A random model with a language model inside, saved, and itself."""
    return make_from(CASES[case], directory)


def make_from(case: Case, directory: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    kind, text, rest = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, text_config=dict(text), **rest)
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
        model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_text_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    compare(make(case, tmp_path), tmp_path)


def compare(model: torch.nn.Module, directory: Path) -> None:
    token_ids = [(7 * index + 3) % 250 for index in range(30)]
    with one_thread(), torch.inference_mode():
        expected = model(input_ids=torch.tensor([token_ids])).logits[0]
        harness = Harness(REFERENCE, directory)
        row = harness.add(token_ids)
        found = torch.cat([harness.step([(row, count)])[0] for count in (13, 17)])
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_kimi_k25_is_read_in_the_names_that_are_published(tmp_path: Path) -> None:
    """transformers 5.24 writes other names of layers than it reads."""
    from safetensors.torch import load_file, save_file

    model = make_from(KIMI, tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {name.replace("model.blocks.", "model.layers."): value for name, value in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    compare(model, tmp_path)


def test_dots3_note_is_read_as_published(tmp_path: Path) -> None:
    """With the keys of the language model at the top of the config, and its tensors at the top of the model."""
    from safetensors.torch import load_file, save_file

    model = make_from(DOTS, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    renamed = {
        name.replace("model.language_model.", "model.")
        .replace("model.vision_tower.", "vision_encoder.")
        .replace("model.audio_tower.", "audio_encoder."): value
        for name, value in load_file(file).items()
    }
    assert {name.partition(".")[0] for name in renamed} == {"model", "lm_head", "vision_encoder", "audio_encoder"}
    save_file(renamed, file, metadata={"format": "pt"})
    whole = json.loads(config.read_text())
    text = whole.pop("text_config")
    config.write_text(json.dumps({**text, **whole}))
    compare(model, tmp_path)


def test_what_older_checkpoints_call_the_parts(tmp_path: Path) -> None:
    """language_model.model.layers instead of model.language_model.layers."""
    from safetensors.torch import load_file, save_file

    make("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    before = Harness(REFERENCE, tmp_path).model.lm_head.weight.tensors  # type: ignore[attr-defined]
    renamed = {
        f"language_model.model.{name.removeprefix('model.language_model.')}"
        if name.startswith("model.language_model.")
        else name.removeprefix("model."): value
        for name, value in stored.items()
    }
    assert any(name.startswith("vision_tower.") for name in renamed)
    save_file(renamed, file, metadata={"format": "pt"})
    after = Harness(REFERENCE, tmp_path).model.lm_head.weight.tensors  # type: ignore[attr-defined]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_tensors_of_neither_part_are_no_part_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.language_model.extra.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is not used by this model"):
        Harness(REFERENCE, tmp_path)


SOUNDS_TOO: dict[str, tuple[str, str, list[str]]] = {
    "gemma3n_text": (
        "Gemma3nForConditionalGeneration",
        "gemma3n",
        ["vision_tower.blocks.0", "audio_tower.conformer.0", "language_model.layers.3.self_attn.v_proj"],
    ),
    "gemma4_text": (
        "Gemma4ForConditionalGeneration",
        "gemma4",
        ["vision_tower.encoder.layers.0", "audio_tower.layers.0", "language_model.layers.3.self_attn.v_proj"],
    ),
    "apertus1p5_text": (
        "Apertus1p5ForConditionalGeneration",
        "apertus1p5",
        ["vision_tokenizer.encoder.conv_in", "audio_tokenizer.encoder.layers.0"],
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        ["vision_embedder.patch_dense", "embed_vision.patch_dense"],
    ),
}
"""Family -> the class around it, its model_type, and what checkpoints have beside what a text needs."""


@pytest.mark.parametrize("family", SOUNDS_TOO)
def test_the_text_among_parts_for_images_and_sounds(family: str, tmp_path: Path) -> None:
    """Keys and values that published checkpoints have for layers that read those of others are not read."""
    from safetensors.torch import load_file, save_file

    directory, (architecture, model_type, unread) = make_checkpoint(family, tmp_path), SOUNDS_TOO[family]
    config, weights = directory / "config.json", directory / "model.safetensors"
    expected = Harness(REFERENCE, directory).logits(list(range(30)))
    text = {key: value for key, value in json.loads(config.read_text()).items() if key != "architectures"}
    whole = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    config.write_text(json.dumps({**whole, "vision_config": {}, "audio_config": {}, "eos_token_id": [1, 106]}))
    stored = {name.replace("model.", "model.language_model.", 1): part for name, part in load_file(weights).items()}
    stored |= {f"model.{name}.weight": torch.ones(2) for name in [*unread, "embed_vision.norm", "embed_audio.norm"]}
    save_file(stored, weights, metadata={"format": "pt"})
    assert torch.equal(Harness(REFERENCE, directory).logits(list(range(30))), expected)


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_what_configs_leave_out_is_what_transformers_has(model_type: str) -> None:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    assert {key: getattr(default, key) for key in LEFT_OUT[model_type]} == LEFT_OUT[model_type]


def test_the_config_of_gemma_3_as_it_was_published() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    arch = ModelArch.from_config(raw, source="config.json")
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_size) == (34, 8, 4, 256)
    assert (arch.vocab_size, arch.dtype, arch.eos_token_ids) == (262_208, "bfloat16", (1, 106))
    assert arch.tie_word_embeddings
    assert {mixer.window for mixer in arch.plain_attentions} == {1024, None}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}}, "GemmaFor"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "'llava' is a model for text and images"),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "x"}}, "text-only"),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}, "text-only"),
    ],
)
def test_others_are_refused_by_name(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="text and images") as caught:
        ModelArch.from_config(raw, source="config.json")
    assert words in str(caught.value)


def test_every_language_model_is_of_a_family() -> None:
    from quire.config.families import ARCHITECTURES

    assert set(TEXT_TYPES.values()) <= set(ARCHITECTURES)
