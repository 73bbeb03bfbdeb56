"""load_model: what reaches the model, in which dtype, and at what cost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, ConfigError
from quire.layers.weights import ShardSpec, WeightMap
from quire.loader.checkpoint import Checkpoint
from quire.loader.load import load_model
from quire.loader.readers import CheckpointReader
from quire.models.decoder import DecoderForCausalLM
from tests.family_configs import FAMILIES
from tests.loader.safetensors_bytes import join, read, split, write
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import REFERENCE

MakeCheckpoint = Callable[..., Path]
PROMPT = list(range(40))
ROOT = Path(__file__).parents[2]


def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "model"))


def logits(directory: Path) -> Tensor:
    return Harness(REFERENCE, directory).logits(PROMPT)


def test_shards_and_single_file_give_the_same_model(checkpoint: MakeCheckpoint) -> None:
    assert torch.equal(logits(checkpoint("llama")), logits(checkpoint("llama", max_shard_size="60KB")))


def test_shards_are_read_without_their_index(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    sharded = checkpoint("llama", max_shard_size="60KB")
    directory = copied(sharded, tmp_path)
    (directory / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(directory), logits(sharded))


def test_a_file_of_any_name_is_read_if_it_is_the_only_one(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = copied(checkpoint("llama"), tmp_path)
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert torch.equal(logits(directory), logits(checkpoint("llama")))


def test_weights_may_start_at_any_byte(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = copied(checkpoint("llama"), tmp_path)
    header, data = split(directory / "model.safetensors")
    text = json.dumps(header)
    for padding in range(4):
        join(directory / "model.safetensors", text + " " * padding, data)
        assert torch.equal(logits(directory), logits(checkpoint("llama")))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_wanted_dtype(
    checkpoint: MakeCheckpoint, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    directory = copied(checkpoint("llama"), tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in read(directory / "model.safetensors").items()}
    write(directory / "model.safetensors", tensors)
    model = load_model(directory, arch_of(directory), ops=REFERENCE, dtype=wanted, max_model_len=64)
    assert isinstance(model, DecoderForCausalLM)
    layer = model.layers[0]
    assert model.embed_tokens.table.dtype == wanted
    assert layer.input_norm is not None
    assert layer.input_norm.weight.dtype == torch.float32
    assert torch.equal(model.embed_tokens.table, tensors["model.embed_tokens.weight"].to(wanted))
    queries = layer.mixers[0].qkv_proj.weight.tensors["weight"][:64]
    assert torch.equal(queries, tensors["model.layers.0.self_attn.q_proj.weight"].to(wanted))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("qwen3", "lm_head.weight"),
    ],
)
def test_relics_are_ignored(checkpoint: MakeCheckpoint, tmp_path: Path, family: str, name: str) -> None:
    directory = copied(checkpoint(family), tmp_path)
    file = directory / "model.safetensors"
    write(file, {**read(file), name: torch.zeros(320, 64)})
    assert torch.equal(logits(directory), logits(checkpoint(family)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_other", [False, True])
def test_a_head_with_other_numbers_than_the_tied_embedding_is_warned_of(
    checkpoint: MakeCheckpoint, tmp_path: Path, is_other: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied(checkpoint("qwen2", tie_word_embeddings=True), tmp_path)
    file = directory / "model.safetensors"
    tensors = read(file)
    head = tensors["model.embed_tokens.weight"].clone()
    write(file, {**tensors, "lm_head.weight": (head + is_other).to(dtype)})
    assert torch.equal(logits(directory), logits(checkpoint("qwen2", tie_word_embeddings=True)))
    assert ("set tie_word_embeddings to false" in caplog.text) == is_other


def test_a_head_of_another_size_than_the_tied_embedding_is_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = copied(checkpoint("qwen2", tie_word_embeddings=True), tmp_path)
    file = directory / "model.safetensors"
    write(file, {**read(file), "lm_head.weight": torch.ones(7, 64)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[7, 64\], but the embedding"):
        logits(directory)


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_each_number_of_ngrams_that_a_checkpoint_lacks_follows_from_its_config(
    checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    directory = copied(checkpoint("qwen4_exp_text"), tmp_path)
    file = directory / "model.safetensors"
    tensors = read(file)
    kept = {stored: value for stored, value in tensors.items() if not stored.endswith(f".{name}")}
    assert len(kept) < len(tensors)
    write(file, kept)
    assert torch.equal(logits(directory), logits(checkpoint("qwen4_exp_text")))


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("opt", "model."), ("qwen3", "model.")])
def test_base_models_lack_the_prefix(checkpoint: MakeCheckpoint, tmp_path: Path, family: str, prefix: str) -> None:
    directory = copied(checkpoint(family), tmp_path)
    file = directory / "model.safetensors"
    write(file, {name.removeprefix(prefix): tensor for name, tensor in read(file).items()})
    assert torch.equal(logits(directory), logits(checkpoint(family)))


@pytest.mark.parametrize("overrides", [{}, {"max_shard_size": "60KB"}, {"tie_word_embeddings": True}])
def test_progress_ends_at_the_total(checkpoint: MakeCheckpoint, overrides: dict[str, object]) -> None:
    directory, heard = checkpoint("llama", **overrides), []
    load_model(
        directory,
        arch_of(directory),
        ops=REFERENCE,
        dtype=torch.float32,
        max_model_len=64,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] > 0
    assert len({total for _, total in heard}) == 1


def test_dummy_weights_need_no_file_and_follow_the_seed(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    arch = arch_of(checkpoint("llama"))

    def table_of(seed: int) -> Tensor:
        model = load_model(
            tmp_path, arch, ops=REFERENCE, dtype=torch.bfloat16, max_model_len=64, load_format="dummy", seed=seed
        )
        assert isinstance(model, DecoderForCausalLM)
        queries = model.layers[0].mixers[0].qkv_proj.weight.tensors["weight"]
        assert not torch.equal(queries, model.layers[1].mixers[0].qkv_proj.weight.tensors["weight"])
        return model.embed_tokens.table

    assert torch.equal(table_of(0), table_of(0))
    assert not torch.equal(table_of(0), table_of(1))
    assert 0 < table_of(0).float().abs().mean() < 0.1


def test_unknown_load_format_is_refused(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama")
    with pytest.raises(ConfigError, match=r"load_format 'pickle'.*auto, safetensors, gguf, dummy"):
        load_model(
            directory, arch_of(directory), ops=REFERENCE, dtype=torch.float32, max_model_len=64, load_format="pickle"
        )


def test_code_named_by_the_config_is_not_run(
    checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied(checkpoint("llama"), tmp_path)
    (directory / "modeling_evil.py").write_text("raise SystemExit('executed')")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (directory / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(directory), logits(checkpoint("llama")))
    assert "auto_map" in caplog.text


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("part", [0, 1, 3])
def test_reader_gives_only_the_slice_of_a_rank(checkpoint: MakeCheckpoint, dim: int, part: int) -> None:
    directory, name = checkpoint("llama"), "model.layers.0.mlp.down_proj.weight"
    reader = CheckpointReader(Checkpoint(directory), WeightMap(), num_bytes=0)
    actual = reader.read(name, (64, 96), ShardSpec(dim=dim, part=part, parts=4))
    assert torch.equal(actual, read(directory / "model.safetensors")[name].chunk(4, dim)[part])
    assert reader.num_bytes_read == 64 * 96


_PEAK = """
import json, sys
from pathlib import Path
import torch
from quire.config.arch import ModelArch
from quire.loader.load import load_model
from quire.ops.backends import ops_of

def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

directory = Path(sys.argv[1])
arch = ModelArch.from_config(json.loads((directory / "config.json").read_text()), source="config.json")
before = status("VmRSS")
model = load_model(directory, arch, ops=ops_of("reference"), dtype=torch.bfloat16, max_model_len=64)
print(status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("tied", [False, True])
def test_peak_memory_is_the_model_and_one_slice(checkpoint: MakeCheckpoint, tied: bool) -> None:
    directory = checkpoint(
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        vocab_size=40_000,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    model_bytes = (directory / "model.safetensors").stat().st_size
    printed = subprocess.run(
        [sys.executable, "-c", _PEAK, str(directory)], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    peak, resident = map(int, printed.split())
    slice_bytes = 40_000 * 512 * 2
    assert peak < model_bytes + slice_bytes + (24 << 20)
    assert resident < model_bytes + (24 << 20)
    assert model_bytes > 90 << 20


_MODULES = """
import json, sys
from pathlib import Path
import torch
from quire.config.arch import ModelArch
from quire.loader.load import load_model
from quire.ops.backends import ops_of
for directory in map(Path, sys.argv[1:]):
    arch = ModelArch.from_config(json.loads((directory / "config.json").read_text()), source="config.json")
    load_model(directory, arch, ops=ops_of("reference"), dtype=torch.bfloat16, max_model_len=64)
    assert "torch._dynamo" not in sys.modules, directory
"""


def test_loading_does_not_import_torch_compiler(checkpoint: MakeCheckpoint) -> None:
    """It takes longer than loading a small model."""
    directories = [str(checkpoint(family)) for family in FAMILIES]
    subprocess.run([sys.executable, "-c", _MODULES, *directories], check=True, cwd=ROOT)
