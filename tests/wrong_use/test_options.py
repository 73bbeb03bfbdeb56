"""Options that are unknown, impossible, or contradict each other: the engine does not start and says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, EngineArgs
from quire.engine.core_startup import create_config
from quire.errors import ConfigError, ModelNotFound, UnsupportedFeature
from tests.expert_checkpoints import VOCAB_SIZE
from tests.wrong_use.refusal import refused

Options = dict[str, Any]

OPTIONS: dict[str, tuple[Options, list[str]]] = {
    # unknown
    "misspelt": ({"max_modle_len": 5}, ["'max_modle_len'", "did you mean 'max_model_len'?"]),
    "misspelt alias": ({"num_block": 5}, ["'num_block'", "did you mean 'num_blocks'?"]),
    "nothing like it": ({"zzz": 1}, ["unknown option 'zzz'"]),
    "twice": ({"num_blocks": 5, "num_gpu_blocks_override": 5}, ["num_gpu_blocks_override", "given twice"]),
    # known elsewhere
    "tensor_parallel_size": ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "not supported yet", "only 1"]),
    "quantization": ({"quantization": "int7"}, ["quantization", "one of int8, int4, gptq", "'int7'"]),
    "quantised before": ({"quantization": "hqq"}, ["quantization='hqq' is not supported", "int8 or int4"]),
    "another method": ({"quantization": "awq_marlin"}, ["quantization='awq'", "weights are plain"]),
    "nothing to dequantize": ({"dequantize": True}, ["dequantize has no effect"]),
    "format of llama.cpp": ({"load_format": "gguf"}, ["load_format='gguf'", "is no GGUF file", "Leave"]),
    "a grammar library that keeps less": ({"structured_outputs_backend": "xgrammar"}, ["allOf", "Use guidance"]),
    "floats of a GPU": ({"dtype": "fp8"}, ["dtype='fp8' is not supported", "Use bfloat16"]),
    "another fp8": ({"kv_cache_dtype": "FP8_E5M2"}, ["kv_cache_dtype='FP8_E5M2' is not supported", "Use fp8"]),
    "quantization without kernels": ({"quantization": "int8", "ops": "reference"}, ["native kernels", "compiler"]),
    "a config of quantization": ({"quantization_config": {"a": 1}}, ["quantization_config=", "not supported yet"]),
    "an array": ({"tensor_parallel_size": np.array([1, 2])}, ["tensor_parallel_size=array", "not supported yet"]),
    "parallel True": ({"tensor_parallel_size": True}, ["tensor_parallel_size=True", "only 1"]),
    "trust_remote_code": ({"trust_remote_code": True}, ["trust_remote_code=True", "only False"]),
    "speculative_config": ({"speculative_config": {"method": "ngram"}}, ["speculative_config", "not supported yet"]),
    "enable_lora": ({"enable_lora": True}, ["enable_lora=True", "not supported yet"]),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp4"}, ["kv_cache_dtype", "'fp4'", "int8"]),
    "runner": ({"runner": "pooling"}, ["runner='pooling'", "'generate'"]),
    "cpu_offload_gb": ({"cpu_offload_gb": 4}, ["cpu_offload_gb=4", "not supported yet"]),
    "logits_processors": ({"logits_processors": ["a:B"]}, ["logits_processors", "not supported:", "never runs code"]),
    # types
    "max_model_len text": ({"max_model_len": "512"}, ["max_model_len", "int or None", "'512' (str)"]),
    "max_model_len fraction": ({"max_model_len": 512.0}, ["max_model_len", "int or None", "512.0 (float)"]),
    "max_model_len bool": ({"max_model_len": True}, ["max_model_len", "int or None", "True (bool)"]),
    "max_num_seqs None-like": ({"max_num_seqs": "none"}, ["max_num_seqs", "int or None"]),
    "seed True": ({"seed": True}, ["seed", "must be int or None", "True"]),
    "enable_prefix_caching 1": ({"enable_prefix_caching": 1}, ["enable_prefix_caching", "must be bool", "1 (int)"]),
    "disable_log_stats text": ({"disable_log_stats": "yes"}, ["disable_log_stats", "must be bool"]),
    "hf_overrides text": ({"hf_overrides": "{}"}, ["hf_overrides", "must be dict"]),
    "hf_overrides with numbers": ({"hf_overrides": {5: 1}}, ["hf_overrides", "strings as keys", "[5]"]),
    "hf_overrides None": ({"hf_overrides": None}, ["hf_overrides", "must be dict"]),
    "share as text": ({"gpu_memory_utilization": "0.5"}, ["gpu_memory_utilization", "float or None"]),
    "model a number": ({"model": 5}, ["model", "str or None", "5 (int)"]),
    "model bytes": ({"model": b"x"}, ["model", "str or None", "bytes"]),
    "dtype a class": ({"dtype": np.float32}, ["dtype", "must be str"]),
    "chat_template a list": ({"chat_template": []}, ["chat_template", "str or None"]),
    # values
    "dtype unknown": ({"dtype": "int8"}, ["dtype", "bfloat16", "'int8'"]),
    "dtype misspelt": ({"dtype": "bfloat6"}, ["dtype", "did you mean 'bfloat16'?"]),
    "load_format": ({"load_format": "pt"}, ["load_format", "safetensors", "'pt'"]),
    "ops": ({"ops": "cuda"}, ["ops", "auto, reference, cpu", "'cuda'"]),
    "max_model_len 0": ({"max_model_len": 0}, ["max_model_len", "at least 2", "0"]),
    "max_model_len negative": ({"max_model_len": -5}, ["max_model_len", "at least 2", "-5"]),
    "max_model_len 2**63": ({"max_model_len": 2**63}, ["max_model_len", "at most"]),
    "max_model_len of 5000 digits": ({"max_model_len": 10**5000}, ["max_model_len", "too large to print"]),
    "block_size 0": ({"block_size": 0}, ["block_size", "at least 1"]),
    "max_num_seqs 0": ({"max_num_seqs": 0}, ["max_num_seqs", "at least 1"]),
    "max_num_batched_tokens -1": ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens", "at least 1"]),
    "num_threads 0": ({"num_threads": 0}, ["num_threads", "at least 1"]),
    "num_threads 10**6": ({"num_threads": 10**6}, ["num_threads", "at most 512"]),
    "num_threads of the reference": ({"num_threads": 2, "ops": "reference"}, ["num_threads=2", "one thread"]),
    "seed -1": ({"seed": -1}, ["seed", "at least 0"]),
    "seed 2**64": ({"seed": 2**64}, ["seed", "at most"]),
    "max_logprobs -2": ({"max_logprobs": -2}, ["max_logprobs", "at least -1"]),
    "share 0": ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "(0, 1]"]),
    "share above 1": ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "(0, 1]", "1.5"]),
    "share of 90": ({"memory_fraction": 90}, ["gpu_memory_utilization", "(0, 1]", "90"]),
    "share NaN": ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization", "(0, 1]", "nan"]),
    "share of 5000 digits": ({"gpu_memory_utilization": 10**5000}, ["gpu_memory_utilization", "too large to print"]),
    "tokenizer empty": ({"tokenizer": ""}, ["tokenizer", "empty string"]),
    "model empty": ({"model": ""}, ["model", "empty string"]),
    # contradictions, and what does not fit
    "share and bytes": (
        {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 10**6},
        ["gpu_memory_utilization and kv_cache_memory_bytes", "one of them"],
    ),
    "blocks and bytes": (
        {"num_blocks": 5, "kv_cache_memory_bytes": 10**6},
        ["kv_cache_memory_bytes and num_gpu_blocks_override", "one of them"],
    ),
    "tokenizer and none": (
        {"skip_tokenizer_init": True, "tokenizer": "."},
        ["skip_tokenizer_init and tokenizer", "one of them"],
    ),
    "template and no tokenizer": (
        {"skip_tokenizer_init": True, "chat_template": "{{ x }}"},
        ["skip_tokenizer_init and chat_template"],
    ),
    "fewer tokens than sequences": (
        {"max_num_seqs": 64, "max_num_batched_tokens": 32},
        ["max_num_batched_tokens (32)", "max_num_seqs (64)", "Raise the first to 64"],
    ),
    "beyond the model": (
        {"max_model_len": 257},
        ["max_model_len=257", "256 positions", "max_position_embeddings", "hf_overrides"],
    ),
    "too few blocks": (
        {"num_blocks": 1, "block_size": 16, "max_model_len": 64},
        ["holds 16 tokens", "max_model_len=64", "kv_cache_memory_bytes="],
    ),
    "too few bytes": ({"kv_cache_memory_bytes": 1}, ["no room for a single block", "Lower block_size"]),
    "block larger than memory": ({"block_size": 2**60}, ["no room for a single block", "Lower block_size"]),
    "more blocks than memory": ({"num_blocks": 2**40}, ["the engine would take", "Lower num_gpu_blocks_override"]),
    "more bytes than memory": ({"kv_cache_memory_bytes": 2**62}, ["the engine would take", "kv_cache_memory_bytes"]),
    "more sequences than memory": ({"max_num_seqs": 2**50}, ["no memory is left", "lower max_num_batched_tokens"]),
    "share too small": ({"gpu_memory_utilization": 1e-9}, ["no memory is left", "Raise gpu_memory_utilization"]),
    "hf_overrides wrong": ({"hf_overrides": {"num_attention_heads": "8"}}, ["num_attention_heads", "'8'"]),
    "hf_overrides too many layers": ({"hf_overrides": {"num_hidden_layers": 10**9}}, ["num_hidden_layers", "at most"]),
    "hf_overrides too wide": ({"hf_overrides": {"hidden_size": 2**30}}, ["no memory is left"]),
    "hf_overrides beyond words": ({"hf_overrides": {"vocab_size": 10**300}}, ["vocab_size", "at most"]),
    # defaults of sampling
    "generation_config no directory": ({"generation_config": "/no/dir"}, ["generation_config='/no/dir'", "auto, vllm"]),
    "generation_config no name": ({"generation_config": "a" * 300}, ["cannot be read", "File name too long"]),
    "override unknown": (
        {"override_generation_config": {"temprature": 1}},
        ["override_generation_config", "temprature", "no effect"],
    ),
    "override wrong": (
        {"override_generation_config": {"temperature": "hot"}},
        ["override_generation_config", "temperature", "'hot'"],
    ),
    "override eos": (
        {"override_generation_config": {"eos_token_id": VOCAB_SIZE}},
        ["eos_token_id 320", "below 320"],
    ),
    "override eos bool": ({"override_generation_config": {"eos_token_id": True}}, ["eos_token_id True"]),
    # templates
    "chat_template no file": ({"chat_template": "/no/template"}, ["chat_template", "'/no/template'"]),
    "chat_template broken": ({"chat_template": "{% if %}"}, ["chat_template", "line 1"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_option_is_refused(checkpoint: Callable[..., Path], name: str) -> None:
    options, parts = OPTIONS[name]
    with refused(ConfigError, *parts):
        LLM(**{"model": str(checkpoint("llama")), **options})


def test_engine_args_refuse_what_is_unknown_themselves() -> None:
    with refused(ConfigError, "'max_modle_len'", "did you mean 'max_model_len'?"):
        EngineArgs(max_modle_len=5)  # type: ignore[call-arg]
    with refused(ConfigError, "pipeline_parallel_size=2", "not supported yet"):
        EngineArgs(pipeline_parallel_size=2)  # type: ignore[call-arg]
    with refused(ConfigError, "keywords only", "'model'"):
        EngineArgs("model")  # type: ignore[misc]


def test_options_that_describe_what_is_done_anyway_are_accepted() -> None:
    assert (
        EngineArgs.from_options(
            {"tensor_parallel_size": 1, "quantization": None, "enable_chunked_prefill": True, "runner": "auto"}
        )
        == EngineArgs()
    )


def test_paths_and_numbers_of_numpy_are_understood(tmp_path: Path) -> None:
    args = EngineArgs(
        model=tmp_path,  # type: ignore[arg-type]
        max_model_len=np.int64(64),  # type: ignore[arg-type]
        gpu_memory_utilization=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert args == EngineArgs(model=str(tmp_path), max_model_len=64, gpu_memory_utilization=0.5)


def test_eos_of_override_generation_config_counts(checkpoint: Callable[..., Path]) -> None:
    args = EngineArgs(model=str(checkpoint("llama")), override_generation_config={"eos_token_id": [7]})
    assert 7 in create_config(args).model_config.eos_token_ids


def test_engine_without_tokenizer_asks_for_ids(checkpoint: Callable[..., Path]) -> None:
    options: Options = {"skip_tokenizer_init": True, "max_num_seqs": 2, "max_model_len": 32, "num_blocks": 4}
    with LLM(str(checkpoint("llama")), **options) as llm:
        with refused(UnsupportedFeature, "skip_tokenizer_init", "prompt_token_ids", parameter="prompt"):
            llm.generate("text")
        for name, given in (("stop", ["a"]), ("bad_words", ["a"])):
            with refused(UnsupportedFeature, name, "skip_tokenizer_init", parameter=name):
                llm.generate([[1]], {name: given})
        with refused(UnsupportedFeature, "skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "hi"}])
        (output,) = llm.generate([[1, 2]], {"max_tokens": 3, "ignore_eos": True})
        assert len(output.outputs[0].token_ids) == 3


# Names of models

NAMES: dict[str, tuple[str, list[str]]] = {
    "no such directory": ("./nothing", ["no directory './nothing'", "looked in"]),
    "neither": ("what is this", ["no directory 'what is this'", "'org/name'"]),
    "a path too long": ("a" * 5000, ["cannot be looked up", "too long"]),
    "a zero byte": ("a\0b", ["no directory 'a\\x00b'"]),
    "somebody unknown": ("~nobody-of-that-name/x", ["cannot be looked up"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_of_no_model_is_refused(name: str) -> None:
    model, parts = NAMES[name]
    with refused(ModelNotFound, *parts):
        LLM(model)
    with refused(ModelNotFound, *parts):
        LLM(tokenizer=model)


@pytest.mark.parametrize("option", ["model", "tokenizer"])
def test_name_that_is_no_text_is_refused(option: str) -> None:
    """It could not be sent to an engine process, or be written."""
    with refused(ConfigError, f"option {option} must be text in UTF-8", "'\\ud800'"):
        LLM(**{option: "\ud800"})


def test_revision_of_a_directory_is_refused(checkpoint: Callable[..., Path]) -> None:
    with refused(ModelNotFound, "revision='main'", "no effect"):
        LLM(str(checkpoint("llama")), revision="main")


def test_file_instead_of_a_directory_is_refused(checkpoint: Callable[..., Path]) -> None:
    with refused(ModelNotFound, "model.safetensors is a file", "give the directory"):
        LLM(str(checkpoint("llama") / "model.safetensors"))


def test_symlink_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with refused(ModelNotFound, "no directory"):
        LLM(str(tmp_path / "a"))


def test_repository_that_cannot_be_reached_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with refused(ModelNotFound, "'no-such-org/no-such-model'", "HF_HUB_OFFLINE", "local directory"):
        LLM("no-such-org/no-such-model")


def test_chat_template_that_is_a_pipe_is_not_waited_for(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(ConfigError, "chat_template", "no regular file"):
        LLM(str(checkpoint("llama")), chat_template=str(tmp_path / "pipe"))


@pytest.mark.parametrize("variable", ["QUIRE_OPS"])
def test_wrong_environment_variable_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.platforms.cpu import best_ops

    monkeypatch.setenv(variable, "fast")
    with refused(ConfigError, variable, "'fast'", "one of auto, reference, cpu"):
        best_ops()
