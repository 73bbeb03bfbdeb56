"""Models with recurrent layers: states survive company, forks, preemption and steps that fail, bit for bit."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits, prompts
from tests.expert_checkpoints import VOCAB_SIZE
from tests.family_configs import ATTENTION_FREE, RECURRENT

FORKING = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
PREFERRED = available_ops()[-1:]


def some_prompts() -> list[Any]:
    return prompts()[:4]


def opened(family: str, checkpoint: Checkpoint, **options: Any) -> LLM:
    return LLM(str(checkpoint(family)), **{"dtype": "float32", "max_model_len": 128, "ops": PREFERRED[0], **options})


def caching(family: str, checkpoint: Checkpoint, **options: Any) -> LLM:
    """With blocks as small as they can be."""
    return opened(family, checkpoint, **{"block_size": 4} if family not in ATTENTION_FREE else {}, **options)


def turns(length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of so many tokens and more: the same one again, longer ones, another one, one that begins like it."""
    rng = random.Random(seed)
    first, other = ([rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(2))
    size = length * 2 // 5
    longer = [*first, *other[: size - 2]]
    return [first, first, longer, [*longer, *other[:3]], other, [*other[: size + 2], *first[:9]]]


def computed_tokens(llm: LLM) -> int:
    return llm.engine.parts.core.lives.totals.num_computed_tokens


@pytest.mark.parametrize("family", RECURRENT)
def test_branches_are_the_same_alone_in_company_and_preempted(family: str, checkpoint: Checkpoint) -> None:
    with opened(family, checkpoint) as llm:
        alone = bits([llm.generate([prompt], FORKING)[0] for prompt in some_prompts()])
        assert len({tuple(tokens) for tokens, _ in alone[:3]}) == 3, "branches must differ"
        assert bits(llm.generate(some_prompts(), FORKING)) == alone
        layout = llm.engine.parts.config.kv_layout
    few = 3 * layout.most_blocks(128, 7) + 1
    with opened(family, checkpoint, num_gpu_blocks_override=few, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(some_prompts(), FORKING)) == alone
        assert llm.engine.parts.core.scheduler.num_preemptions > 0
        pool = llm.engine.parts.core.scheduler.blocks.pool
        assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("family", RECURRENT)
def test_a_step_that_has_run_can_be_run_again(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(family, checkpoint, long_prefill_token_threshold=9) as llm:
        expected = bits(llm.generate(some_prompts(), FORKING))
        worker = llm.engine.parts.core.executor.worker  # type: ignore[attr-defined]
        execute, failed = worker.execute, []

        def fails_in_company(plan: SchedulerOutputs) -> ModelRunnerOutput:
            result = execute(plan)
            if len(plan.seq_ids) > 1:
                failed.append(len(plan.seq_ids))
                raise RuntimeError("after the states were written")
            return result

        monkeypatch.setattr(worker, "execute", fails_in_company)
        assert bits(llm.generate(some_prompts(), FORKING)) == expected
        assert max(failed) > 8, "a sequence's step was run several times, in ever fewer company"


@pytest.mark.parametrize("family", ["mamba2", "jamba", "lfm2"])
def test_the_size_of_steps_changes_no_bit(family: str, checkpoint: Checkpoint) -> None:
    results = []
    for num_tokens in (5, 64, 2048):
        with opened(family, checkpoint, max_num_batched_tokens=num_tokens, max_num_seqs=5, dtype="bfloat16") as llm:
            results.append(bits(llm.generate(some_prompts(), FORKING)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_goes_on_from_a_cached_state_with_the_same_bits(family: str, checkpoint: Checkpoint) -> None:
    with caching(family, checkpoint, enable_prefix_caching=False) as llm:
        size = llm.engine.parts.config.cache_config.block_size
        conversation = turns(2 * size + size // 2)
        cold = bits([llm.generate([prompt], FORKING)[0] for prompt in conversation])
    for options in ({}, {"long_prefill_token_threshold": 7}, {"max_num_batched_tokens": size + 5, "max_num_seqs": 5}):
        with caching(family, checkpoint, state_checkpoint_stride=size, **options) as llm:
            outputs, computed = [], []
            for prompt in conversation:
                before = computed_tokens(llm)
                outputs += llm.generate([prompt], FORKING)
                computed.append(computed_tokens(llm) - before)
            assert bits(outputs) == cold
            cached = [output.num_cached_tokens for output in outputs]
            assert cached == [0, 2 * size, 2 * size, 3 * size, 0, size]
            drawn = (FORKING.n or 1) * ((FORKING.max_tokens or 1) - 1)
            assert computed == [
                len(prompt) - found + drawn for prompt, found in zip(conversation, cached, strict=True)
            ], "the tail, and what each branch draws"
            assert bits(llm.generate(conversation, FORKING)) == cold, "all at once, from states that they share"
            llm.engine.parts.core.lives.check()


@pytest.mark.parametrize("family", ["mamba2", "jamba", "lfm2"])
def test_a_preempted_sequence_goes_on_from_its_cached_state(family: str, checkpoint: Checkpoint) -> None:
    with caching(family, checkpoint, enable_prefix_caching=False) as llm:
        config = llm.engine.parts.config
        size = config.cache_config.block_size
        given = [turns(2 * size + size // 2)[0], *(prompt[: size + 3] for prompt in some_prompts())]
        cold = bits([llm.generate([prompt], FORKING)[0] for prompt in given])
    few = 2 * config.kv_layout.most_blocks(config.model_config.max_model_len, 7) + 1
    changes = {"num_gpu_blocks_override": few, "long_prefill_token_threshold": 7, "state_checkpoint_stride": size}
    with caching(family, checkpoint, **changes) as llm:
        assert bits(llm.generate(given, FORKING)) == cold
        assert llm.engine.parts.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", ["mamba", "bamba", "lfm2"])
def test_states_come_back_from_tiers_after_a_restart_too(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    with caching(family, checkpoint, enable_prefix_caching=False) as llm:
        config = llm.engine.parts.config
        size, layout = config.cache_config.block_size, config.kv_layout
        given = [turns(2 * size + size // 2, first)[0] for first in range(4)]
        cold = bits([llm.generate([prompt], GREEDY)[0] for prompt in given])
    few = layout.most_blocks(config.model_config.max_model_len, size) + 1
    kept = {"kv_disk": tmp_path / "kv", "kv_disk_size": 64 * layout.block_bytes + (1 << 20), "kv_load_min_tokens": 1}
    changes = {"num_gpu_blocks_override": few, "state_checkpoint_stride": size, "kv_ram": 9 * layout.block_bytes}
    for _ in range(2):
        with caching(family, checkpoint, **changes, **kept) as llm:
            for _ in range(2):
                outputs = [llm.generate([prompt], GREEDY)[0] for prompt in given]
                assert bits(outputs) == cold
            assert [output.num_cached_tokens for output in outputs] == [2 * size] * 4
            stats = llm.engine.last_stats
            assert stats is not None
            assert stats.num_tier_loads > 0
            assert stats.tier_hit_tokens > 0
            assert stats.num_tier_failures == 0


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mamba", {"state_checkpoint_stride": 33}, "no multiple of the block size of 32 tokens. Take 64"),
        ("mamba", {"state_checkpoint_stride": 128}, "sequences have 128 tokens at most"),
        ("mamba", {"state_checkpoint_stride": 32, "enable_prefix_caching": False}, "prefix caching is off"),
        ("mamba", {"state_checkpoint_stride": 0}, "state_checkpoint_stride"),
        ("llama", {"state_checkpoint_stride": 32}, "no recurrent layers"),
    ],
)
def test_a_stride_that_caches_nothing_is_refused(
    family: str, options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(family, checkpoint, **options)


def test_the_usual_stride_is_of_whole_blocks(checkpoint: Checkpoint) -> None:
    for block_size in (16, 48):
        with opened("lfm2", checkpoint, block_size=block_size) as llm:
            config = llm.engine.parts.config
            stride = config.cache_config.state_checkpoint_stride
            assert stride % block_size == 0
            assert 512 <= stride < 512 + block_size
            assert config.choices["state_checkpoint_stride"].value == stride


def test_capacity_is_told_in_tokens_or_in_sequences(checkpoint: Checkpoint, caplog: Any) -> None:
    for family, text, tokens in (
        ("mamba", "kv cache states of 15 sequences in 30 blocks", None),
        ("lfm2", "kv cache 384 tokens in 30 blocks", 384),
    ):
        caplog.clear()
        changes = {} if family in ATTENTION_FREE else {"block_size": 16}
        with caplog.at_level(logging.INFO), opened(family, checkpoint, num_gpu_blocks_override=30, **changes) as llm:
            cache = llm.engine.parts.config.cache_config
        assert text in caplog.text
        assert (cache.num_tokens, cache.num_sequences) == (tokens, None if tokens else 15)


@pytest.mark.parametrize("option", [{"block_size": 16}, {"kv_cache_dtype": "bfloat16"}])
def test_what_shapes_keys_and_values_is_refused_without_any(option: dict[str, Any], checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        opened("mamba2", checkpoint, **option)


def test_blocks_are_as_large_as_states(checkpoint: Checkpoint) -> None:
    with opened("bamba", checkpoint, block_size=16) as llm:
        config = llm.engine.parts.config
        (page,) = {group.spec.page for group in config.kv_layout.groups[1:]}
        assert config.cache_config.block_size % 16 == 0
        assert config.cache_config.block_size > 16
        assert page.num_bytes == config.kv_layout.page.num_bytes >= 4 * page.num_elements
        assert "recurrent state" in config.choices["block_size"].reason


@pytest.mark.parametrize("family", ATTENTION_FREE)
def test_memory_does_not_grow_with_the_context(family: str, checkpoint: Checkpoint) -> None:
    with opened(family, checkpoint, max_model_len=256) as llm:
        layout = llm.engine.parts.config.kv_layout
        assert layout.most_blocks(256, 2048) == 2
        pool, held = llm.engine.parts.core.scheduler.blocks.pool, []
        llm.engine.add_request("a", {"prompt_token_ids": [5] * 200}, SamplingParams(max_tokens=20, ignore_eos=True))
        while llm.engine.has_unfinished_requests():
            held.append(pool.num_blocks - pool.num_free)
            llm.engine.step()
        assert max(held) == 1, "between steps"


WRONG = {
    "a width that is none": ("mamba", {"state_size": 0}, "state_size"),
    "another activation": ("mamba", {"hidden_act": "gelu"}, "hidden_act"),
    "heads that do not fit": ("mamba2", {"num_heads": 7}, "expand"),
    "groups that do not fit": ("mamba2", {"n_groups": 3}, "n_groups"),
    "bounds of time steps": ("mamba2", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    "a convolution of a book": ("mamba2", {"conv_kernel": 1 << 20}, "conv_kernel"),
    "layers of another kind": ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba", 3]}, "layer_types"),
    "layers that are no list": ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices"),
    "a negative offset": ("jamba", {"attn_layer_offset": -1}, "attn_layer_offset"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_makes_no_sense_is_refused_by_the_key(case: str, checkpoint: Checkpoint) -> None:
    family, overrides, key = WRONG[case]
    with pytest.raises(ConfigError, match=key):
        opened(family, checkpoint, hf_overrides=json.loads(json.dumps(overrides)))
