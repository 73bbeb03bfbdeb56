"""Weights rounded at load: how much the embedded model's predictions change, and that rows still ignore each other."""

from __future__ import annotations

import math
import textwrap
from inspect import getsource
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits, prompts

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="the native kernels are not built")


def perplexity(llm: LLM) -> float:
    """Of a standard library module, in pieces of 512 tokens."""
    token_ids = llm.get_tokenizer().encode(getsource(textwrap))
    pieces: list[list[int]] = [token_ids[i : i + 512] for i in range(0, len(token_ids), 512)]
    outputs = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))  # type: ignore[arg-type]
    logprobs = [
        next(iter(position.values())).logprob
        for output in outputs
        for position in output.prompt_logprobs or ()
        if position is not None
    ]
    assert len(logprobs) > 3000
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.01), ("int4", 1.05)])
def test_perplexity_hardly_grows(quantization: str, limit: float, tiny_llm: LLM) -> None:
    with LLM(quantization=quantization) as llm:
        assert perplexity(llm) / perplexity(tiny_llm) < limit


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_request_does_not_notice_its_neighbours(quantization: str) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(quantization=quantization, num_threads=2) as llm:
        alone = bits([llm.generate([prompt], params)[0] for prompt in prompts()])  # type: ignore[list-item]
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts(), params)) == alone  # type: ignore[arg-type]
    with LLM(quantization=quantization, num_threads=1, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(prompts(), params)) == alone, "in chunks, on one thread"  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_experts_and_heads_do_not_notice_the_neighbours_of_their_tokens(
    quantization: str, family: str, checkpoint: Checkpoint
) -> None:
    directory, params = str(checkpoint(family)), SamplingParams(temperature=0.9, seed=3, max_tokens=24, logprobs=2)
    options: dict[str, Any] = {"quantization": quantization, "dtype": "bfloat16", "max_model_len": 128}
    with LLM(directory, **options, num_threads=2) as llm:
        alone = bits([llm.generate([prompt], params)[0] for prompt in prompts()])  # type: ignore[list-item]
        llm.reset_prefix_cache()
        assert bits(llm.generate(prompts(), params)) == alone  # type: ignore[arg-type]
    with LLM(directory, **options, num_threads=1, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(prompts(), params)) == alone, "in chunks, on one thread"  # type: ignore[arg-type]


def test_the_plan_counts_what_quantised_weights_take() -> None:
    plans = {}
    for quantization in (None, "int8", "int4"):
        with LLM(quantization=quantization) as llm:
            plans[quantization] = llm.engine.config.memory_plan["weights"]
    assert plans["int4"] < plans["int8"] < plans[None]
