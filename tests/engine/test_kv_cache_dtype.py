"""KV caches of 8 bits: how much the embedded model's predictions change, and that requests still ignore each other."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.conftest import Checkpoint
from tests.engine.test_parity import POOLS, available_ops, bits, prompts, prompts_for
from tests.engine.test_quantization import perplexity

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_perplexity_hardly_grows(kv_cache_dtype: str, tiny_llm: LLM) -> None:
    with LLM(kv_cache_dtype=kv_cache_dtype) as llm:
        assert perplexity(llm) / perplexity(tiny_llm) < 1.01


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        *((family, "int8") for family in ("qwen3", "gemma2", "gemma3_text", "minicpm3", "bloom", "granite_swa")),
        *((family, "fp8") for family in ("gemma2", "minicpm3", "granite_swa")),
    ],
)
def test_a_request_does_not_notice_how_it_is_run(
    family: str, kv_cache_dtype: str, ops: str, checkpoint: Checkpoint
) -> None:
    directory, given = str(checkpoint(family)), prompts_for(ops)
    kinds = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    options: dict[str, Any] = {"ops": ops, "max_model_len": 128, **kinds}
    with LLM(directory, **options) as llm:
        alone = bits([llm.generate([prompt], GREEDY)[0] for prompt in given])
        llm.reset_prefix_cache()
        assert bits(llm.generate(given, GREEDY)) == alone
        assert bits(llm.generate(given, GREEDY)) == alone, "from the prefix cache"
    with LLM(directory, **options, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(given, GREEDY)) == alone, "in chunks"
    with LLM(directory, **options, block_size=16, num_gpu_blocks_override=POOLS.get(family, 16)) as llm:
        assert bits(llm.generate(given, GREEDY)) == alone, "preempted"
        assert llm.engine.parts.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", ["qwen3", "bloom", "granite_swa", "deepseek_v2"])
def test_the_number_of_threads_changes_no_bit(family: str, checkpoint: Checkpoint) -> None:
    if "cpu" not in available_ops():
        pytest.skip("the native kernels are not built")
    results = []
    for num_threads in (1, 2, 3):
        with LLM(str(checkpoint(family)), ops="cpu", kv_cache_dtype="int8", num_threads=num_threads) as llm:
            results.append(bits(llm.generate(prompts(), GREEDY)))
    assert results[0] == results[1] == results[2]


def test_the_plan_counts_the_scales(checkpoint: Checkpoint) -> None:
    plans = {}
    for kv_cache_dtype in ("float32", "bfloat16", "int8", "fp8"):
        with LLM(str(checkpoint("qwen3")), kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=64) as llm:
            plans[kv_cache_dtype] = llm.engine.config.memory_plan["kv_cache"]
    assert plans["float32"] == 2 * plans["bfloat16"]
    assert plans["int8"] == plans["fp8"]
    assert plans["int8"] / plans["bfloat16"] == (32 + 4) / (32 * 2)
