"""Models with recurrent layers: states survive company, forks, preemption and steps that fail, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.checkpoints import ATTENTION_FREE, RECURRENT
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits, prompts

FORKING = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, ignore_eos=True, logprobs=2)
PREFERRED = available_ops()[-1:]


def some_prompts() -> list[Any]:
    return prompts()[:4]


def opened(family: str, checkpoint: Checkpoint, **options: Any) -> LLM:
    return LLM(str(checkpoint(family)), **{"dtype": "float32", "max_model_len": 128, "ops": PREFERRED[0], **options})


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching is not possible"),
        ({"kv_ram": 1 << 20}, "kv_ram keeps cached prefixes"),
        ({"swap_space": 1.0}, "swap_space keeps cached prefixes"),
        ({"kv_disk": "somewhere"}, "kv_disk keeps cached prefixes"),
    ],
)
@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_what_needs_cached_prefixes_is_refused(
    family: str, option: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(family, checkpoint, **option)


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
        assert not config.cache_config.enable_prefix_caching


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
