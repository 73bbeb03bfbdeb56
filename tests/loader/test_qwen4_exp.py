"""Tables of n-grams of Qwen4-Exp: in parts, as checkpoints are published and written, or whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.ops.backends import ops_of
from tests.engine.test_parity import available_ops
from tests.models.harness import Harness

TOKENS = list(range(40, 101))
EMBEDDING = "model.layers.1.ple.ple_embedding"
Tensors = dict[str, Tensor]


def changed(tmp_path: Path, written: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with other tensors."""
    place = tmp_path / "changed"
    shutil.copytree(written, place)
    save_file(change(load_file(written / "model.safetensors")), place / "model.safetensors", {"format": "pt"})
    return place


def parts_of(tensors: Tensors) -> list[Tensor]:
    names = [f"{EMBEDDING}.ngram_embedding.shard_{number}.weight" for number in range(4)]
    return [tensors.pop(name) for name in names]


def whole(tensors: Tensors) -> Tensors:
    """The table in one tensor."""
    rows = torch.cat(parts_of(tensors))
    return {**tensors, f"{EMBEDDING}.ngram_embedding.weight": rows}


def unequal(tensors: Tensors) -> Tensors:
    """The table in three tensors, without what follows from config.json, and with layers that draft."""
    table = torch.cat(parts_of(tensors))
    rows = table.split([1, 200, len(table) - 201])
    kept = {name: value for name, value in tensors.items() if value.dtype != torch.int64}
    named = {f"{EMBEDDING}.ngram_embedding.shard_{n}.weight": part.contiguous() for n, part in enumerate(rows)}
    return {**kept, **named, "mtp.fc.weight": torch.zeros(4, 8)}


def inside(tensors: Tensors) -> Tensors:
    """As in a model for text and images."""
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    return {**named, "model.visual.patch_embed.proj.weight": torch.zeros(4, 8)}


@pytest.mark.parametrize("change", [whole, unequal, inside])
@pytest.mark.parametrize("implementation", available_ops())
def test_a_table_may_be_in_any_number_of_parts(
    checkpoint: Callable[..., Path], tmp_path: Path, implementation: str, change: Callable[[Tensors], Tensors]
) -> None:
    written, ops = checkpoint("qwen4_exp_text"), ops_of(implementation)
    assert f"{EMBEDDING}.ngram_embedding.shard_3.weight" in load_file(written / "model.safetensors")
    place = changed(tmp_path, written, change)
    if change is inside:
        config = json.loads((written / "config.json").read_text())
        whole_config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": config}
        (place / "config.json").write_text(json.dumps(whole_config))
    expected, found = (Harness(ops, directory).logits(TOKENS) for directory in (written, place))
    assert torch.equal(found, expected)


def test_a_part_that_is_missing_is_noticed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def without_last(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if "shard_3" not in name}

    place = changed(tmp_path, checkpoint("qwen4_exp_text"), without_last)
    with pytest.raises(CheckpointError, match=r"ngram_embedding\.shard_0\.weight and those that follow have \d+ rows"):
        Harness(ops_of("reference"), place)


def test_rows_that_a_table_lacks_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def beyond(tensors: Tensors) -> Tensors:
        tensors[f"{EMBEDDING}.ngram_heads_offsets"] += 1000
        return tensors

    place = changed(tmp_path, checkpoint("qwen4_exp_text"), beyond)
    with pytest.raises(
        CheckpointError, match=r"ple_embedding: heads of n-grams have rows up to \d+, but the table has"
    ):
        Harness(ops_of("reference"), place)
