"""A model that quire does not run: that is said first, with what it is, whom it resembles, and what would work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli.main import main
from quire.config.arch import ModelArch
from quire.config.families import supported
from quire.config.unknown import nearest_name
from quire.errors import ConfigError

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"]}, "'xLSTMForCausalLM'"),
    "its hidden size has another name": (
        {"model_type": "mvp", "architectures": ["MvpForCausalLM"], "d_model": 64, "n_layers": 2},
        "'MvpForCausalLM'",
    ),
    "code of its own": (
        {
            "model_type": "chatglm",
            "architectures": ["ChatGLMModel"],
            "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        },
        "'ChatGLMModel' is not supported. Its code is in its repository (auto_map), and quire never runs that.",
    ),
    "an older name": ({"architectures": ["StableLMEpochForCausalLM"]}, "'StableLMEpochForCausalLM' is not supported."),
    "two families": ({"architectures": ["AForCausalLM", "BForCausalLM"]}, "'AForCausalLM' is not supported."),
    "no list": ({"model_type": "t5", "architectures": "T5ForConditionalGeneration"}, "reads its input with an encoder"),
    "model_type alone": ({"model_type": "xlstm"}, "the model_type 'xlstm' is not supported."),
    "an empty list": ({"model_type": "xlstm", "architectures": []}, "the model_type 'xlstm' is not supported."),
    "a list of numbers": ({"model_type": "xlstm", "architectures": [7]}, "the model_type 'xlstm' is not supported."),
    "an encoder": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "it fills gaps in texts, and quire runs models that continue texts.",
    ),
    "a base model": ({"model_type": "bert", "architectures": ["BertModel"]}, "has no head that predicts tokens"),
    "an encoder and a decoder": (
        {"model_type": "bart", "architectures": ["BartForCausalLM"], "is_encoder_decoder": True},
        "reads its input with an encoder",
    ),
    "images": ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "it classifies images"),
    "images and texts": (
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": {}},
        "a model for text and images",
    ),
    "another head": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "it classifies texts",
    ),
    "another name of a known one": (
        {"model_type": "llama", "architectures": ["YiForCausalLM"]},
        """whose model_type 'llama' it has, run its directory with --hf-overrides '{"architectures": ["LlamaFor""",
    ),
    "a slip": ({"model_type": "llama", "architectures": ["LLaMAForCausalLM"]}, "did you mean 'LlamaForCausalLM'?"),
    "a slip in the type": ({"model_type": "lama"}, "did you mean 'llama'?"),
    "endless": ({"architectures": ["A" * 100_000]}, "is not supported"),
}


@pytest.mark.parametrize("name", CASES)
def test_that_it_is_not_supported_comes_first(name: str) -> None:
    config, part = CASES[name]
    with pytest.raises(ConfigError) as caught:
        ModelArch.from_config(config, source="config.json")
    message = caught.value.message
    assert part in message
    assert "missing" not in message
    assert "Correct the file" not in message
    assert len(message) < 900
    assert "\n" not in message
    if "images and texts" not in name:
        assert re.match(r"config\.json: the (architecture|model_type) '", message)
        assert "`quire models`" in message


@pytest.mark.parametrize("name", CASES)
def test_what_it_resembles_is_said_only_of_a_slip(name: str) -> None:
    config, part = CASES[name]
    with pytest.raises(ConfigError) as caught:
        ModelArch.from_config(config, source="config.json")
    assert ("did you mean" in caught.value.message) == ("did you mean" in part)


@pytest.mark.parametrize(
    "name",
    [
        *("MptForCausalLM", "GPTNeoForCausalLM", "Starcoder3ForCausalLM", "Exaone5ForCausalLM", "OlmForCausalLM"),
        *("Ernie4_6_MoeForCausalLM", "XlstmForCausalLM", "Llama5ForCausalLM", "Qwen9MoeForCausalLM"),
    ],
)
def test_a_relative_is_no_slip(name: str) -> None:
    assert nearest_name(name, [known for known in supported() if known != name]) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LlamaForCausalLm", "LlamaForCausalLM"),
        ("Lama", "LlamaForCausalLM"),
        ("Mistal", "MistralForCausalLM"),
        ("GPT2LMHeadmodel", "GPT2LMHeadModel"),
        ("StarCoder2ForCausalLM", "Starcoder2ForCausalLM"),
    ],
)
def test_a_slip_is_told_what_was_meant(name: str, meant: str) -> None:
    assert nearest_name(name, supported()) == meant


MORE = {"run": ("hi",), "serve": ("--port", "0")}
"""Arguments that a command takes beside the model; two servers at a time have two ports."""


@pytest.mark.parametrize("command", ["run", "serve", "show", "plan"])
def test_every_command_says_the_same(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"]}))
    with pytest.raises(ConfigError) as caught:
        LLM(str(tmp_path))
    assert main([command, str(tmp_path), *MORE.get(command, ())]) == 2
    assert caught.value.message in capfd.readouterr().err


@pytest.mark.parametrize("command", ["serve", "show", "plan"])
def test_a_damaged_gguf_file_is_named_by_every_command(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    for place in (tmp_path, tmp_path / "model-q4.gguf"):
        assert main([command, str(place), *MORE.get(command, ())]) == 2
        assert "model-q4.gguf is truncated" in capfd.readouterr().err


def test_an_override_runs_a_known_model_under_another_name(
    tmp_path: Path, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["YiForCausalLM"]}))
    assert main(["plan", str(tmp_path)]) == 2
    (remedy,) = re.findall(r"--hf-overrides '(.*?)'", capsys.readouterr().err)
    assert main(["plan", str(tmp_path), "--json", "--hf-overrides", remedy]) == 0
    assert main(["show", str(tmp_path), "--json", "--hf-overrides", remedy]) == 0
