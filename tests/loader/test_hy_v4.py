"""Checkpoints of HY V4 as their publisher names tensors, beside what transformers writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.ops.backends import ops_of
from tests.engine.test_parity import available_ops
from tests.models.harness import Harness

TOKENS = list(range(40, 101))


def published(tmp_path: Path, written: Path) -> Path:
    """A copy with the publisher's names: gates of MLPs are `gate_proj`, and layers that draft tokens are there."""
    place = tmp_path / "published"
    shutil.copytree(written, place)
    tensors = {_published(name): value for name, value in load_file(written / "model.safetensors").items()}
    tensors["model.mtp_layers.0.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors, place / "model.safetensors")
    config = json.loads((written / "config.json").read_text())
    config |= {"num_key_value_heads": 1, "layer_types": ["deepseek_sparse_attention"] * config["num_hidden_layers"]}
    (place / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return place


def _published(name: str) -> str:
    for layer in ("hc_attn_layer", "hc_mlp_layer"):
        name = name.replace(f"hc_pre.{layer}.", f"{layer}.hc_pre.")
    name = name.replace("hc_pre.hc_head.", "hc_head.")
    return name.replace("linear_gate", "gate_proj") if ".mlp." in name else name


@pytest.mark.parametrize("implementation", available_ops())
def test_the_names_of_the_publisher_mean_what_transformers_writes(
    checkpoint: Callable[..., Path], tmp_path: Path, implementation: str
) -> None:
    written, ops = checkpoint("hy_v4"), ops_of(implementation)
    place = published(tmp_path, written)
    names = {*load_file(place / "model.safetensors")}
    assert "model.layers.0.hc_attn_layer.hc_pre.hc_fn" in names
    assert "model.layers.1.mlp.shared_experts.gate_proj.weight" in names
    expected, found = (Harness(ops, directory) for directory in (written, place))
    assert torch.equal(*(harness.step([(harness.add(TOKENS), len(TOKENS))])[0] for harness in (expected, found)))


def test_a_tensor_that_is_missing_is_named_as_the_publisher_does(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from quire.errors import CheckpointError

    place = published(tmp_path, checkpoint("hy_v4"))
    tensors = load_file(place / "model.safetensors")
    del tensors["model.hc_head.hc_head_base"]
    save_file(tensors, place / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.hc_head\.hc_head_base .*is missing"):
        Harness(ops_of("reference"), place)
