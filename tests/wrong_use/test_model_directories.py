"""Model directories that lack something, hold something else, or hold it damaged.

Here through `LLM`, one fault of each kind; every damage a weights file can have is in tests/loader/test_damage.py, and
the tokenizer's files have theirs in tests/tokenizer/test_tokenizer_files.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import CheckpointError, ConfigError, QuireError, TokenizerError
from tests.expert_checkpoints import VOCAB_SIZE
from tests.wrong_use.refusal import refused

Damage = Callable[[Path], object]
Case = tuple[Damage, type[QuireError], list[str]]
CONFIG, WEIGHTS, TOKENIZER, GENERATION = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "generation_config.json",
)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def without(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def holding(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def cut(name: str, share: float) -> Damage:
    def change(directory: Path) -> None:
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * share)])

    return change


def a_pipe(name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def a_directory(name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return change


def a_link(name: str, target: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(target)

    return change


def config(**changes: Any) -> Damage:
    """Change keys of config.json; None removes one."""

    def change(directory: Path) -> None:
        values = {**json.loads((directory / CONFIG).read_text()), **changes}
        values = {key: value for key, value in values.items() if value is not None}
        (directory / CONFIG).write_text(json.dumps(values))

    return change


def generation(**values: Any) -> Damage:
    return holding(GENERATION, json.dumps(values))


def renamed(name: str, other: str) -> Damage:
    return lambda directory: (directory / name).rename(directory / other)


def tokenizer_with_many_ids(directory: Path) -> None:
    file = directory / TOKENIZER
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {f"word {i}": i for i in range(270, 340)}
    file.write_text(json.dumps(tokenizer))


CASES: dict[str, Case] = {
    # config.json
    "config absent": (without(CONFIG), CheckpointError, ["no config.json", "no model directory"]),
    "config empty": (holding(CONFIG, ""), CheckpointError, [CONFIG, "cannot be read", "Download"]),
    "config truncated": (cut(CONFIG, 0.5), CheckpointError, [CONFIG, "cannot be read", "Download"]),
    "config no JSON": (holding(CONFIG, "<html>404</html>"), CheckpointError, [CONFIG, "cannot be read"]),
    "config a list": (holding(CONFIG, "[1]"), CheckpointError, [CONFIG, "JSON object, not list"]),
    "config null": (holding(CONFIG, "null"), CheckpointError, [CONFIG, "JSON object, not NoneType"]),
    "config no text": (holding(CONFIG, b"\xff\xfe\x00"), CheckpointError, [CONFIG, "cannot be read"]),
    "config nested deeply": (
        holding(CONFIG, "[" * 100_000),
        CheckpointError,
        [CONFIG, "cannot be read", "nested too deeply"],
    ),
    "config with endless digits": (holding(CONFIG, '{"a": ' + "9" * 5000 + "}"), CheckpointError, [CONFIG, "digits"]),
    "config a Git LFS pointer": (holding(CONFIG, LFS), CheckpointError, [CONFIG, "cannot be read"]),
    "config a pipe": (a_pipe(CONFIG), CheckpointError, [CONFIG, "no regular file"]),
    "config a directory": (a_directory(CONFIG), CheckpointError, [CONFIG, "no regular file"]),
    "config a device": (a_link(CONFIG, "/dev/zero"), CheckpointError, [CONFIG, "no regular file"]),
    "config a loop": (a_link(CONFIG, CONFIG), CheckpointError, [CONFIG, "cannot be read", "symbolic links"]),
    "config empty object": (holding(CONFIG, "{}"), ConfigError, ["model_type is missing", "'llama'"]),
    "hidden_size missing": (config(hidden_size=None), ConfigError, ["hidden_size is missing", "above 0"]),
    "vocab_size missing": (config(vocab_size=None), ConfigError, ["vocab_size is missing"]),
    "layers text": (config(num_hidden_layers="3"), ConfigError, ["num_hidden_layers is '3'", "whole number"]),
    "layers fraction": (config(num_hidden_layers=2.5), ConfigError, ["num_hidden_layers is 2.5"]),
    "layers negative": (config(num_hidden_layers=-1), ConfigError, ["num_hidden_layers is -1"]),
    "layers true": (config(num_hidden_layers=True), ConfigError, ["num_hidden_layers is True"]),
    "layers endless": (config(num_hidden_layers=10**12), ConfigError, ["num_hidden_layers", "at most 10000"]),
    "architecture unknown": (
        config(architectures=["LlamaForCausalLm"]),
        ConfigError,
        ["'LlamaForCausalLm' is not supported", "did you mean 'LlamaForCausalLM'?", "`quire models`"],
    ),
    "architecture of another kind": (
        config(architectures=["BertModel"]),
        ConfigError,
        ["'BertModel'", "`quire models`"],
    ),
    "architectures empty": (config(architectures=[]), ConfigError, ["architectures is []", "exactly one"]),
    "architectures text": (config(architectures="LlamaForCausalLM"), ConfigError, ["architectures is 'Llama"]),
    "heads that do not divide": (
        config(num_attention_heads=5, num_key_value_heads=5, head_dim=None),
        ConfigError,
        ["hidden_size is 64", "num_attention_heads (5)"],
    ),
    "kv heads that do not divide": (config(num_key_value_heads=3), ConfigError, ["num_key_value_heads is 3", "(4)"]),
    "quantised": (
        config(quantization_config={"quant_method": "quip"}),
        ConfigError,
        ["quantization_config", "'quip'", "the original with --quantization"],
    ),
    "dtype unknown": (config(dtype="float8"), ConfigError, ["float8", "bfloat16"]),
    "activation unknown": (config(hidden_act="banana"), ConfigError, ["'banana' is not supported. Supported: silu"]),
    "rope unknown": (config(rope_scaling={"rope_type": "spiral"}, rope_parameters=None), ConfigError, ["'spiral'"]),
    "eps zero": (config(rms_norm_eps=0), ConfigError, ["rms_norm_eps is 0"]),
    "eps NaN": (config(rms_norm_eps=float("nan")), ConfigError, ["rms_norm_eps is nan"]),
    "eos beyond the vocabulary": (config(eos_token_id=VOCAB_SIZE), ConfigError, ["eos_token_id is 320", "0 to 319"]),
    "code of its own": (
        config(architectures=["MyModel"], auto_map={"AutoModelForCausalLM": "modeling.MyModel"}),
        ConfigError,
        ["'MyModel' is not supported"],
    ),
    # weights
    "weights absent": (without(WEIGHTS), CheckpointError, ["no .safetensors file"]),
    "weights truncated": (cut(WEIGHTS, 0.9), CheckpointError, [WEIGHTS, "truncated", "copy it again"]),
    "weights empty": (holding(WEIGHTS, ""), CheckpointError, [WEIGHTS, "0 bytes"]),
    "weights a Git LFS pointer": (holding(WEIGHTS, LFS), CheckpointError, [WEIGHTS, "Git LFS pointer", "git lfs pull"]),
    "weights pickled": (renamed(WEIGHTS, "pytorch_model.bin"), CheckpointError, ["pickle", "save_pretrained"]),
    "weights a pipe": (a_pipe(WEIGHTS), CheckpointError, [WEIGHTS, "no regular file"]),
    "weights a directory": (a_directory(WEIGHTS), CheckpointError, [WEIGHTS, "no regular file"]),
    "weights a device": (a_link(WEIGHTS, "/dev/zero"), CheckpointError, [WEIGHTS, "no regular file"]),
    "weights a loop": (a_link(WEIGHTS, WEIGHTS), CheckpointError, [WEIGHTS, "cannot be read", "symbolic links"]),
    "weights of another width": (
        config(intermediate_size=97),
        CheckpointError,
        ["[96, 64]", "[97, 64]", "another model"],
    ),
    "weights of fewer layers": (config(num_hidden_layers=4), CheckpointError, ["model.layers.3.", "is missing"]),
    "weights of more layers": (config(num_hidden_layers=2), CheckpointError, ["model.layers.2.", "not used"]),
    # tokenizer
    "tokenizer absent": (without(TOKENIZER), TokenizerError, ["no tokenizer.json", "Download"]),
    "tokenizer truncated": (cut(TOKENIZER, 0.5), TokenizerError, [TOKENIZER, "damaged", "Download"]),
    "tokenizer a pipe": (a_pipe(TOKENIZER), TokenizerError, [TOKENIZER, "no regular file"]),
    "tokenizer a loop": (a_link(TOKENIZER, TOKENIZER), TokenizerError, [TOKENIZER, "cannot be read"]),
    "its settings no JSON": (
        holding("tokenizer_config.json", "{"),
        TokenizerError,
        ["tokenizer_config.json", "not valid JSON"],
    ),
    "its settings a pipe": (a_pipe("tokenizer_config.json"), TokenizerError, ["tokenizer_config.json", "no regular"]),
    "its template a pipe": (a_pipe("chat_template.jinja"), TokenizerError, ["chat_template.jinja", "no regular"]),
    "tokenizer of another model": (
        tokenizer_with_many_ids,
        ConfigError,
        ["tokenizer", "ids up to", f"vocabulary has {VOCAB_SIZE} entries", "another model"],
    ),
    # generation_config.json
    "defaults no JSON": (holding(GENERATION, "{"), ConfigError, [GENERATION, "cannot be read", "Mend or remove"]),
    "defaults a list": (holding(GENERATION, "[]"), ConfigError, [GENERATION, "JSON object, not list"]),
    "defaults nested deeply": (holding(GENERATION, "[" * 100_000), ConfigError, [GENERATION, "cannot be read"]),
    "defaults a pipe": (a_pipe(GENERATION), ConfigError, [GENERATION, "no regular file"]),
    "default temperature text": (generation(temperature="hot"), ConfigError, [GENERATION, "temperature", "'hot'"]),
    "default top_p 2": (generation(top_p=2), ConfigError, [GENERATION, "top_p", "(0, 1]"]),
    "default length 0": (generation(max_new_tokens=0), ConfigError, [GENERATION, "max_tokens", "got 0"]),
    "default eos beyond": (generation(eos_token_id=[256, 400]), ConfigError, ["eos_token_id 400", "below 320"]),
    "default eos text": (generation(eos_token_id="</s>"), ConfigError, ["eos_token_id '</s>'"]),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_model_directory_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, name: str) -> None:
    change, cls, parts = CASES[name]
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    change(directory)
    with refused(cls, *parts):
        LLM(str(directory), max_num_seqs=2)


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, str(tmp_path), "no config.json"):
        LLM(str(tmp_path))


def test_missing_shard_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama", max_shard_size="60KB"), tmp_path / "model"))
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with refused(CheckpointError, shard.name, "not there", "download"):
        LLM(str(directory), max_num_seqs=2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(("file", "cls"), [(CONFIG, CheckpointError), (WEIGHTS, CheckpointError)])
def test_unreadable_file_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, cls: type[QuireError]
) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (directory / file).chmod(0)
    with refused(cls, file, "cannot be read", "ermission"):
        LLM(str(directory), max_num_seqs=2)


def test_nothing_in_a_directory_is_executed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (directory / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config(auto_map={"AutoModelForCausalLM": "modeling.MyModel"})(directory)
    with LLM(str(directory), max_num_seqs=2, max_model_len=32, num_blocks=2) as llm:
        llm.generate("a", {"max_tokens": 1})
    assert not (tmp_path / "ran").exists()
