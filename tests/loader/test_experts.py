"""Experts by the names that checkpoints give them: one tensor for each, or all of a layer in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError
from quire.loader.load import load_model
from tests.checkpoints import random_model
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import REFERENCE

Checkpoint = Callable[..., Path]
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "ernie4_5_moe",
    "glm4_moe",
    "hy_v3",
    "minimax_m2",
    "exaone_moe",
    "phimoe",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_are_the_same_model(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path, save_original_format=False)
    stacked = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    assert not any(".experts.0." in name for name in stacked)
    single = load_file(checkpoint(family) / "model.safetensors")
    assert any(".experts.0." in name for name in single)
    token_ids = list(range(40))
    assert torch.equal(
        Harness(REFERENCE, tmp_path).logits(token_ids), Harness(REFERENCE, checkpoint(family)).logits(token_ids)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_expert_is_named(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, tensors = checkpoint(family), load_file(checkpoint(family) / "model.safetensors")
    missing = sorted(name for name in tensors if ".experts.2." in name)[0]
    del tensors[missing]
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
        load_model(tmp_path, arch_of(tmp_path), ops=REFERENCE, dtype=torch.float32, max_model_len=64)


@pytest.mark.parametrize("family", ["granitemoe", "granitemoeshared"])
def test_stacked_experts_of_granite_have_one_spelling_more(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, stacked = checkpoint(family), "block_sparse_moe.input_linear.weight"
    assert any(name.endswith(stacked) for name in load_file(directory / "model.safetensors"))
    random_model(family).save_pretrained(tmp_path, save_original_format=False)
    assert not any(name.endswith(stacked) for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(Harness(REFERENCE, tmp_path).logits([1, 2, 3]), Harness(REFERENCE, directory).logits([1, 2, 3]))


def test_layers_that_draft_tokens_are_not_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, size = checkpoint("ernie4_5_moe"), torch.ones(3, 3)
    tensors = load_file(directory / "model.safetensors")
    drafting = {"model.mtp_block.0.mlp.down_proj.weight": size, "mtp.layers.0.mlp.down_proj.weight": size.clone()}
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file({**tensors, **drafting}, tmp_path / "model.safetensors")
    assert torch.equal(Harness(REFERENCE, tmp_path).logits([1, 2, 3]), Harness(REFERENCE, directory).logits([1, 2, 3]))


def test_layers_behind_the_last_one_are_not_read_if_the_config_counts_them(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("glm4_moe")
    tensors = {
        **load_file(directory / "model.safetensors"),
        "model.layers.3.eh_proj.weight": torch.ones(3, 3),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.ones(3, 3),
    }
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert torch.equal(Harness(REFERENCE, tmp_path).logits([1, 2, 3]), Harness(REFERENCE, directory).logits([1, 2, 3]))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight \[3, 3\] is not used"):
        Harness(REFERENCE, tmp_path)


def test_another_number_of_experts_is_another_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("mixtral")
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    save_file(load_file(directory / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"gate\.weight has shape \[5, 64\], but config\.json asks for \[4, 64\]"):
        load_model(tmp_path, arch_of(tmp_path), ops=REFERENCE, dtype=torch.float32, max_model_len=64)
