"""From "auto" to values: explicit ones win, automatic ones have a reason, and the memory adds up."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.engine import Capabilities, QuireConfig
from quire.config.flags.args import EngineArgs
from quire.config.memory.plan import PROCESS_BYTES, MemoryUse, grammar_bytes, host_bytes_per_block, plan_memory
from quire.config.memory.weights.sizes import weight_bytes
from quire.config.resolve import resolve
from quire.errors import ConfigError
from tests.config.test_arch import LLAMA

ARCH = ModelArch.from_config(LLAMA, source="config.json")
MIB, GIB = 1 << 20, 1 << 30
MACHINE = Capabilities(
    name="cpu",
    device_type="cpu",
    num_cores=6,
    total_memory=64 * GIB,
    available_memory=60 * GIB,
    block_size=32,
    ops="cpu",
    ops_reason="native kernels, avx2",
)


def resolved(
    tmp_path: Path, *, machine: Capabilities = MACHINE, generation: dict[str, Any] | None = None, **options: Any
) -> QuireConfig:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return resolve(EngineArgs(**options), ARCH, machine, path=tmp_path, tokenizer_path=tmp_path)


def block_bytes(block_size: int, bytes_per_value: int) -> int:
    """Keys and values of 2 heads of 8 numbers in 4 layers."""
    return 2 * 4 * block_size * 2 * 8 * bytes_per_value


def test_every_automatic_value_has_a_reason(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    automatic = {
        "dtype": config.model_config.dtype,
        "kv_cache_dtype": config.cache_config.dtype,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "num_blocks": config.cache_config.num_blocks,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "scheduling_policy": config.scheduler_config.policy,
        "async_scheduling": config.scheduler_config.max_steps_in_flight > 1,
        "structured_outputs_backend": config.decoding_config.backend.removeprefix("ll"),
        "ops": config.device_config.ops,
        "num_threads": config.device_config.num_threads,
    }
    assert {name: choice.value for name, choice in config.choices.items()} == automatic
    assert all(choice.reason and choice.reason != "given" for choice in config.choices.values())
    assert automatic | {"num_blocks": 0} == {
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 512,
        "block_size": 32,
        "num_blocks": 0,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "scheduling_policy": "fcfs",
        "async_scheduling": False,
        "structured_outputs_backend": "guidance",
        "ops": "cpu",
        "num_threads": 6,
    }


def test_what_is_given_wins_and_says_that_it_was_given(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 100,
        "block_size": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 50,
        "num_threads": 2,
    }
    config = resolved(tmp_path, **given, num_gpu_blocks_override=77, long_prefill_token_threshold=9)
    assert {name: config.choices[name].value for name in given} == given
    assert {config.choices[name].reason for name in given} == {"given"}
    assert config.choices["num_blocks"].reason.startswith("given")
    assert (config.cache_config.num_blocks, config.cache_config.num_tokens) == (77, 77 * 8)
    assert config.scheduler_config.max_chunk_tokens == 9
    assert config.cache_config.dtype == "float32"


@pytest.mark.parametrize(
    ("given", "host_memory", "steps"), [(None, 0, 1), (None, GIB, 2), (True, 0, 2), (False, GIB, 1)]
)
def test_a_step_is_decided_ahead_where_a_device_computes_or_as_told(
    tmp_path: Path, given: bool | None, host_memory: int, steps: int
) -> None:
    config = resolved(tmp_path, machine=replace(MACHINE, host_memory=64 * host_memory), async_scheduling=given)
    assert config.scheduler_config.max_steps_in_flight == steps


@pytest.mark.parametrize(("ageing", "seconds"), [(None, 60.0), (0, 0.0), (2, 2.0), (0.25, 0.25), (10**9, 1e9)])
def test_priorities_age_as_told_or_within_a_minute(tmp_path: Path, ageing: float | None, seconds: float) -> None:
    config = resolved(tmp_path, scheduling_policy="priority", priority_ageing=ageing)
    limits = config.scheduler_config
    assert (limits.policy, limits.priority_ageing_s) == ("priority", seconds)
    assert config.choices["scheduling_policy"].reason == "given"
    assert float(config.choices["priority_ageing"].value) == seconds


def test_without_priorities_nothing_ages(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert (config.scheduler_config.policy, config.scheduler_config.priority_ageing_s) == ("fcfs", 0.0)
    assert "priority_ageing" not in config.choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority, got 'lifo'"),
        ({"scheduling_policy": None}, "scheduling_policy must be str"),
        ({"priority_ageing": 5}, "priority_ageing=5 has no effect with scheduling_policy='fcfs'"),
        ({"priority_ageing": 0, "scheduling_policy": "fcfs"}, "priority_ageing=0 has no effect"),
        ({"priority_ageing": -1, "scheduling_policy": "priority"}, "must be at least 0, got -1"),
        ({"priority_ageing": math.nan, "scheduling_policy": "priority"}, "must be at least 0, got nan"),
        ({"priority_ageing": math.inf, "scheduling_policy": "priority"}, "must be at most 1000000000, got inf"),
        ({"priority_ageing": 10**400, "scheduling_policy": "priority"}, "priority_ageing"),
        ({"priority_ageing": True, "scheduling_policy": "priority"}, "priority_ageing must be float or None"),
        ({"priority_ageing": "60", "scheduling_policy": "priority"}, "priority_ageing must be float or None"),
    ],
)
def test_orders_that_there_are_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineArgs(**options)


@pytest.mark.parametrize(("given", "meant"), [("float", "float32"), ("half", "float16")])
def test_dtypes_have_second_names(tmp_path: Path, given: str, meant: str) -> None:
    assert resolved(tmp_path, dtype=given).model_config.dtype == meant


# -- memory ---------------------------------------------------------------------------------------------------


def test_the_cache_is_never_larger_than_all_sequences_at_full_length(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert config.cache_config.num_blocks == 256 * (512 // 32)
    assert config.memory_plan["kv_cache"] == config.cache_config.num_blocks * block_bytes(32, 2)
    assert "full sequences" in config.choices["num_blocks"].reason


@pytest.mark.parametrize("fraction", [None, 0.25, 0.55, 0.58])
def test_the_plan_fills_the_allowed_share_of_memory_and_not_more(tmp_path: Path, fraction: float | None) -> None:
    machine = replace(MACHINE, total_memory=22 * GIB, available_memory=22 * GIB)
    options: dict[str, Any] = {"max_num_seqs": 16384, "max_num_batched_tokens": 16384}
    allowed = int((fraction or machine.default_memory_fraction) * 22 * GIB)
    if fraction == 0.25:
        with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
            resolved(tmp_path, machine=machine, gpu_memory_utilization=fraction, **options)
        return
    config = resolved(tmp_path, machine=machine, gpu_memory_utilization=fraction, **options)
    plan = config.memory_plan
    assert plan["process"] == PROCESS_BYTES
    use = MemoryUse(
        dtype="bfloat16",
        num_threads=6,
        max_num_seqs=16384,
        max_num_batched_tokens=16384,
        max_model_len=512,
        max_logprobs=20,
        block_size=32,
        kv_cache_dtype="bfloat16",
    )
    assert plan == plan_memory(ARCH, use, config.cache_config.num_blocks).as_dict()
    assert plan["kv_cache"] == config.cache_config.num_blocks * block_bytes(32, 2)
    assert allowed - block_bytes(32, 2) - host_bytes_per_block(32) < sum(plan.values()) <= allowed
    assert "of memory" in config.choices["num_blocks"].reason


@pytest.mark.parametrize(
    ("arch", "options", "has_grammars"),
    [
        (ARCH, {}, True),
        (ARCH, {"skip_tokenizer_init": True}, False),
        (replace(ARCH, eos_token_ids=()), {}, False),
        (replace(ARCH, eos_token_ids=()), {"override_generation_config": {"eos_token_id": 7}}, True),
    ],
    ids=["tokenizer", "no tokenizer", "no end", "end given"],
)
def test_grammars_are_planned_where_a_request_can_have_one(
    tmp_path: Path, arch: ModelArch, options: dict[str, Any], has_grammars: bool
) -> None:
    config = resolve(EngineArgs(**options), arch, MACHINE, path=tmp_path, tokenizer_path=tmp_path)
    assert config.memory_plan["grammars"] == (grammar_bytes(arch.vocab_size) if has_grammars else 0)


def test_what_others_use_now_is_not_planned_with(tmp_path: Path) -> None:
    machine = replace(MACHINE, total_memory=64 * GIB, available_memory=12 * GIB)
    config = resolved(tmp_path, machine=machine, max_num_seqs=16384, max_num_batched_tokens=16384)
    assert sum(config.memory_plan.values()) <= 12 * GIB


def test_bytes_of_cache_may_be_given(tmp_path: Path) -> None:
    config = resolved(tmp_path, kv_cache_memory_bytes=MIB + 5)
    assert config.cache_config.num_blocks == MIB // block_bytes(32, 2)
    assert "kv_cache_memory_bytes" in config.choices["num_blocks"].reason


def test_a_cache_too_small_for_the_model_shortens_the_context_and_says_so(tmp_path: Path) -> None:
    config = resolved(tmp_path, num_gpu_blocks_override=5)
    assert config.model_config.max_model_len == 5 * 32
    assert config.choices["max_model_len"].reason == "all that the KV cache holds"


def test_a_context_that_was_asked_for_is_not_shortened_but_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=300.*160 tokens|160 tokens.*max_model_len=300"):
        resolved(tmp_path, num_gpu_blocks_override=5, max_model_len=300)
    needed = 10 * block_bytes(32, 2)
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes={needed}"):
        resolved(tmp_path, kv_cache_memory_bytes=needed - 1, max_model_len=300)
    assert resolved(tmp_path, kv_cache_memory_bytes=needed, max_model_len=300).cache_config.num_blocks == 10


def test_a_cache_of_less_than_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KV cache"):
        resolved(tmp_path, kv_cache_memory_bytes=100)


def test_a_context_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        resolved(tmp_path, max_model_len=513)


# -- limits of a step -----------------------------------------------------------------------------------------


def test_a_step_always_has_a_token_for_every_sequence(tmp_path: Path) -> None:
    assert resolved(tmp_path, max_num_seqs=3000).scheduler_config.max_num_batched_tokens == 3000
    assert resolved(tmp_path, max_num_batched_tokens=10).scheduler_config.max_num_seqs == 10
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.*max_num_seqs"):
        resolved(tmp_path, max_num_batched_tokens=10, max_num_seqs=11)


@pytest.mark.parametrize(("threshold", "chunk"), [(0, 64), (7, 7), (1000, 64)])
def test_a_chunk_is_at_most_a_step(tmp_path: Path, threshold: int, chunk: int) -> None:
    config = resolved(tmp_path, max_num_batched_tokens=64, long_prefill_token_threshold=threshold)
    assert config.scheduler_config.max_chunk_tokens == chunk


# -- device ---------------------------------------------------------------------------------------------------


def test_reference_ops_run_on_one_thread_and_refuse_more(tmp_path: Path) -> None:
    config = resolved(tmp_path, ops="reference")
    assert config.device_config.num_threads == 1
    assert config.choices["ops"].reason == "given"
    assert "one thread" in config.choices["num_threads"].reason
    with pytest.raises(ConfigError, match="num_threads=4"):
        resolved(tmp_path, ops="reference", num_threads=4)
    bare = replace(MACHINE, ops="reference", ops_reason="no compiler at install")
    config = resolved(tmp_path, machine=bare)
    assert (config.choices["ops"].reason, config.device_config.num_threads) == ("no compiler at install", 1)


# -- generation_config.json -----------------------------------------------------------------------------------


def test_the_models_sampling_defaults_are_taken_from_its_file(tmp_path: Path) -> None:
    file = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 77, "do_sample": True, "min_p": None}
    config = resolved(tmp_path, generation=file)
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 77}
    assert config.model_config.generation_defaults == expected
    assert config.choices["default sampling"].value == expected
    changed = resolved(tmp_path, override_generation_config={"temperature": 0.1})
    assert changed.model_config.generation_defaults == {**expected, "temperature": 0.1}


@pytest.mark.parametrize("ignored", ["vllm", "none"])
def test_the_files_sampling_can_be_ignored_but_not_its_ends_of_sequence(tmp_path: Path, ignored: str) -> None:
    file = {"temperature": 0.6, "eos_token_id": [7, 2, 9]}
    config = resolved(tmp_path, generation=file, generation_config=ignored)
    assert config.model_config.generation_defaults == {}
    assert config.model_config.eos_token_ids == (2, 7, 9), "the config's own first, each once"
    only = resolved(tmp_path, generation_config=ignored, override_generation_config={"top_k": 3})
    assert only.model_config.generation_defaults == {"top_k": 3}


def test_the_least_length_and_the_stop_strings_of_the_file_are_taken(tmp_path: Path) -> None:
    file = {"min_new_tokens": 4, "stop_strings": ["</s>", "User:"]}
    config = resolved(tmp_path, generation=file)
    assert config.model_config.generation_defaults == {"min_tokens": 4, "stop": ["</s>", "User:"]}
    one = resolved(tmp_path, override_generation_config={"stop_strings": "END", "min_new_tokens": 2})
    assert one.model_config.generation_defaults == {"min_tokens": 2, "stop": "END"}
    none = resolved(tmp_path, override_generation_config={"stop_strings": [], "min_new_tokens": None})
    assert none.model_config.generation_defaults == {}


def test_stop_strings_have_no_effect_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = resolved(tmp_path, generation={"stop_strings": ["END"]}, skip_tokenizer_init=True)
    assert config.model_config.generation_defaults == {}
    assert "sets what has no effect: stop_strings (without a tokenizer)" in caplog.text


def test_what_generation_config_says_in_vain_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers would never generate these tokens; keys at what means nothing are not worth a word."""
    generation = {"suppress_tokens": [3], "no_repeat_ngram_size": 2, "num_beams": 1, "bad_words_ids": None}
    resolved(tmp_path, generation=generation)
    assert "generation_config.json sets what has no effect: suppress_tokens, no_repeat_ngram_size" in caplog.text


def test_ends_of_sequence_can_be_overridden(tmp_path: Path) -> None:
    config = resolved(tmp_path, generation={"eos_token_id": 7}, override_generation_config={"eos_token_id": [11]})
    assert config.model_config.eos_token_ids == (2, 11)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": "high"}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens: max_tokens must be"),
        ({"min_new_tokens": -1}, "min_new_tokens: min_tokens must be"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: min_tokens .9. must not exceed"),
        ({"stop_strings": [""]}, "stop_strings: stop must not"),
        ({"stop_strings": 5}, "stop_strings: stop must be"),
        ({"eos_token_id": 1000}, "eos_token_id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    ],
)
def test_a_wrong_value_in_the_file_is_named_at_the_start(tmp_path: Path, file: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(tmp_path, generation=file)


def test_an_override_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        resolved(tmp_path, override_generation_config={"num_beams": 3})


def test_logprobs_have_no_limit_when_so_asked(tmp_path: Path) -> None:
    assert resolved(tmp_path).model_config.max_logprobs == 20
    assert resolved(tmp_path, max_logprobs=-1).model_config.max_logprobs == ARCH.vocab_size


# -- windows --------------------------------------------------------------------------------------------------


def windowed(tmp_path: Path, layers: list[str], **options: Any) -> QuireConfig:
    """Resolve a model of 4 layers whose windows are 32 tokens long."""
    keys = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 32, "layer_types": layers}
    arch = ModelArch.from_config({**LLAMA, "head_dim": 8, **keys}, source="config.json")
    return resolve(EngineArgs(**options), arch, MACHINE, path=tmp_path, tokenizer_path=tmp_path)


def test_every_rotation_is_planned_with_a_table_of_its_own(tmp_path: Path) -> None:
    """Of 512 positions and 8 elements in float32; all layers with a window share one, and so do the others."""
    for pattern, num_tables in ((2, 2), (1, 1), (9, 1)):
        keys = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window_pattern": pattern}
        arch = ModelArch.from_config({**LLAMA, **keys}, source="config.json")
        config = resolve(EngineArgs(), arch, MACHINE, path=tmp_path, tokenizer_path=tmp_path)
        tables = config.memory_plan["weights"] - weight_bytes(arch, "bfloat16", ops="cpu")
        assert tables == num_tables * 512 * 8 * 4


FULL, WINDOW = "full_attention", "sliding_attention"


def test_layers_of_windows_share_the_memory_of_full_ones(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 16, "kv_cache_memory_bytes": MIB, "max_model_len": 512}
    full = windowed(tmp_path, [FULL] * 4, **options)
    half = windowed(tmp_path, [FULL, WINDOW] * 2, **options)
    assert full.cache_config.num_groups == 1
    assert half.cache_config.num_groups == 2
    assert half.cache_config.num_blocks == 2 * full.cache_config.num_blocks, "a page has half as many layers"
    assert half.memory_plan["kv_cache"] == full.memory_plan["kv_cache"]
    assert half.cache_config.num_tokens == full.cache_config.num_tokens


def test_the_cache_is_as_large_as_all_sequences_can_use(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert windowed(tmp_path, [WINDOW] * 4, **options).cache_config.num_blocks == 8 * 7  # 95 tokens lie in 7 blocks
    assert windowed(tmp_path, [WINDOW, FULL] * 2, **options).cache_config.num_blocks == 8 * (7 + 32)


def test_chunks_are_as_small_as_the_cache_needs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 512}
    config = windowed(tmp_path, [WINDOW] * 4, num_gpu_blocks_override=5, **options)
    assert config.scheduler_config.max_chunk_tokens == 34
    assert "5 blocks would not hold" in config.choices["max_chunk_tokens"].reason
    assert "max_chunk_tokens" not in windowed(tmp_path, [WINDOW] * 4, num_gpu_blocks_override=32, **options).choices
    with pytest.raises(ConfigError, match="KV cache holds 32 tokens"):
        windowed(tmp_path, [WINDOW] * 4, num_gpu_blocks_override=2, **options)


def test_a_context_is_shortened_to_what_all_groups_hold(tmp_path: Path) -> None:
    config = windowed(tmp_path, [FULL, WINDOW] * 2, block_size=16, num_gpu_blocks_override=30)
    length, chunk = config.model_config.max_model_len, config.scheduler_config.max_chunk_tokens
    layout = config.kv_layout
    assert layout.most_blocks(length, chunk) <= 30 < layout.most_blocks(length + 1, 256)
    with pytest.raises(ConfigError, match="in each of 2 groups"):
        windowed(tmp_path, [FULL, WINDOW] * 2, block_size=16, num_gpu_blocks_override=1)
