"""Tensors that a model does not use, and tensors that it misses: each cause is told once, for every kind of model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.loader.headers import by_cause
from quire.loader.load import load_model
from quire.loader.unread import DRAFTING, UNREAD
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import REFERENCE

Checkpoint = Callable[..., Path]
MORE: dict[str, tuple[str, list[str], str]] = {
    "drafting layers of ERNIE": (
        "ernie4_5_moe",
        ["model.mtp_block.0.a.weight", "model.mtp_norm.weight"],
        DRAFTING,
    ),
    "drafting layers of Qwen": ("qwen3", ["mtp.layers.0.mlp.up_proj.weight", "mtp.fc.weight"], DRAFTING),
    "rotary tables": (
        "mixtral",
        [f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(3)],
        "rotary tables",
    ),
    "masks": ("gpt_neox", [f"gpt_neox.layers.{index}.attention.bias" for index in range(3)], "masks"),
    "a tied head": ("qwen2", ["lm_head.weight"], "a second copy of the embedding"),
}


def copied(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], **config: object) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **config}))
    return target


def problems_of(directory: Path) -> list[str]:
    """What is wrong, one line for each cause."""
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, arch_of(directory), ops=REFERENCE, dtype=torch.float32, max_model_len=64)
    return caught.value.message.splitlines()[1:]


@pytest.mark.parametrize("name", MORE)
def test_what_no_model_needs_is_told_once_and_changes_nothing(
    name: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, names, reason = MORE[name]
    more = {name: torch.ones(320, 64) for name in names}  # as the embedding, whose shape a second head must have
    directory = copied(checkpoint(family), tmp_path, lambda tensors: tensors.update(more))
    caplog.set_level("INFO", "quire")
    found = Harness(REFERENCE, directory).logits([1, 2, 3])
    (line,) = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert reason in line
    assert re.search(rf"\b{len(names)} tensors?\b", line)
    assert torch.equal(found, Harness(REFERENCE, checkpoint(family)).logits([1, 2, 3]))


def test_layers_behind_the_models_own_are_drafting_layers_where_the_config_says_so(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        last = {name: value for name, value in tensors.items() if ".layers.2." in name}
        tensors.update({name.replace(".layers.2.", ".layers.3."): value.clone() for name, value in last.items()})

    directory = copied(checkpoint("qwen3_moe"), tmp_path, add)
    (line,) = problems_of(directory)
    assert "is not used by this model" in line
    copied(checkpoint("qwen3_moe"), tmp_path, add, num_nextn_predict_layers=1)
    caplog.set_level("INFO", "quire")
    Harness(REFERENCE, directory)
    assert DRAFTING in caplog.text


@pytest.mark.parametrize(
    ("family", "part", "count"),
    [
        ("mixtral", ".experts.3.", 9),
        ("mixtral", "layers.1.block_sparse_moe.experts.0.w1", 1),
        ("glm4_moe", "layers.1.mlp.shared_experts.down_proj", 1),
        ("granitemoe", "layers.1.block_sparse_moe.input_linear", 1),
        ("qwen2_moe", ".shared_expert", 4),
        ("ernie4_5_moe", "e_score_correction_bias", 2),
        ("falcon", "query_key_value", 3),
        ("gpt2", ".ln_", 14),
        ("llama", "lm_head", 1),
        ("qwen3", "_norm.weight", 6),
    ],
)
def test_missing_tensors_are_one_cause(
    family: str, part: str, count: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    (line,) = problems_of(copied(checkpoint(family), tmp_path, drop))
    assert "is missing" in line
    assert (f"(and {count - 1} more like it" in line) == (count > 1)
    assert line.count(part) >= min(count, 4)


def test_unused_tensors_of_any_name_and_shape_are_one_cause(checkpoint: Checkpoint, tmp_path: Path) -> None:
    extra = {
        "model.vision.A_log": torch.ones(4),
        "model.vision.experts.gate_up_proj": torch.ones(2, 3, 4),
        "vision.conv1d.bias": torch.ones(1),
        "vision.patch": torch.ones(2, 2, 2, 2),
    }
    lines = problems_of(copied(checkpoint("llama"), tmp_path, lambda tensors: tensors.update(extra)))
    assert len(lines) == 1
    assert "(and 3 more like it" in lines[0]


def test_missing_unused_and_mis_shaped_are_three_causes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        for index in range(3):
            del tensors[f"model.layers.{index}.mlp.up_proj.weight"]
            tensors[f"model.layers.{index}.mlp.wide.weight"] = torch.ones(2, 2)
            tensors[f"model.layers.{index}.input_layernorm.weight"] = torch.ones(2)

    lines = problems_of(copied(checkpoint("llama"), tmp_path, damage))
    assert len(lines) == 3
    assert all("(and 2 more like it" in line for line in lines)
    assert [("missing" in line, "not used" in line, "has shape" in line).count(True) for line in lines] == [1, 1, 1]


def test_files_and_tensors_are_told_apart() -> None:
    lines = by_cause([f"model-0000{index}-of-00002.safetensors: a.b{index}.c [2] is odd" for index in (1, 2)])
    assert lines == ["model-00001-of-00002.safetensors: a.b1.c [2] is odd (and 1 more like it: a.b2.c)"]
    assert len(by_cause(["config.json is odd", "model.safetensors is odd"])) == 2


@pytest.mark.parametrize("family", ["gpt_neox", "ernie4_5_moe"])
def test_what_transformers_leaves_unread_quire_does(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    cls = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
    ignored: list[str] = [
        key for base in cls.__mro__ for key in vars(base).get("_keys_to_ignore_on_load_unexpected") or ()
    ]
    assert ignored
    for key in ignored:
        name = f"model.layers.0.{key}" if "." in key else f"model.{key}.0.weight"
        assert any(pattern.search(name) for pattern in UNREAD.values()), name
