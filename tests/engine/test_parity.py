"""Promise one: the same request gives the same tokens, whatever runs beside it, and they are those of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import ConfigError
from quire.ops import backends
from tests.checkpoints import in_transformers, one_thread
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE
from tests.family_configs import ATTENTION_FREE, FAMILIES, ONE_OF_EACH_KIND, RECURRENT

NUM_PROMPTS, NUM_TOKENS = 20, 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "16-token blocks, preempted": {"block_size": 16, "num_gpu_blocks_override": 16, "max_model_len": 128},
}
POOLS = {
    "deepseek_v4": 24,
    "hy_v4": 24,
    "qwen4_exp_text": 24,
    "granite_swa": 12,
    **dict.fromkeys(("mistral", "ministral", "starcoder2"), 10),
}
"""Blocks of the family, where 16 are too few for its KV groups, or too many for its windows to preempt anything."""


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 70))] for _ in range(NUM_PROMPTS)]


def prompts_for(ops: str) -> list[Any]:
    """All of them, but every fourth for the reference: it takes seven times as long."""
    return prompts() if ops == "cpu" else prompts()[1::4]


def ways_of(family: str) -> dict[str, dict[str, Any]]:
    """Without blocks of keys and values nothing grows, so only branches of a request need more memory than it has."""
    pool = {"num_gpu_blocks_override": POOLS[family]} if family in POOLS else {}
    return {
        way: {**options, **pool} if "preempted" in way else options
        for way, options in WAYS.items()
        if not ("preempted" in way and family in ATTENTION_FREE)
    }


def families_and_ops() -> list[tuple[str, str]]:
    """Every family with the fastest ops that there are, one of each kind with the reference ops.

    What the engine adds (scheduler, blocks, sampler) is the same for all families of a kind. Each single family is
    compared with transformers under all ops, in chunks and in company, in tests/models.
    """
    fastest = available_ops()[-1]
    return [(family, fastest) for family in FAMILIES] + [
        (family, ops) for ops in available_ops() if ops != fastest for family in ONE_OF_EACH_KIND
    ]


def available_ops() -> list[str]:
    names = []
    for name in backends.ON_CPU:
        try:
            backends.implementation_of(name)
        except ConfigError:
            continue
        names.append(name)
    return names


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[list[tuple[int, float]]]]]:
    """Tokens, and the logprobs of every candidate at every position."""
    return [
        (
            completion.token_ids,
            [[(token_id, c.logprob) for token_id, c in position.items()] for position in completion.logprobs or ()],
        )
        for output in outputs
        for completion in output.outputs
    ]


def expected_by_transformers(directory: Any, prompt: list[int], produced: list[int]) -> list[int]:
    """The greedy continuation, checked position by position in one pass over prompt and output."""
    with torch.inference_mode(), one_thread():
        logits = in_transformers(directory)(torch.tensor([prompt + produced])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize(("family", "ops"), families_and_ops())
def test_greedy_tokens_are_those_of_transformers_however_they_are_run(
    family: str, ops: str, checkpoint: Checkpoint
) -> None:
    directory = checkpoint(family)
    given = prompts_for(ops if family in ONE_OF_EACH_KIND else "reference")
    with LLM(str(directory), ops=ops, dtype="float32", max_model_len=128, enable_prefix_caching=False) as llm:
        alone = bits([llm.generate([prompt], GREEDY)[0] for prompt in given])
        assert llm.engine.parts.core.executor.worker.runner.graphs.recordable  # type: ignore[attr-defined]
    for prompt, (token_ids, _) in zip(given, alone, strict=True):
        assert token_ids == expected_by_transformers(directory, prompt, token_ids)
    for way, options in ways_of(family).items():
        with LLM(str(directory), ops=ops, dtype="float32", **{"max_model_len": 128, **options}) as llm:
            assert bits(llm.generate(given, GREEDY)) == alone, way
            if "preempted" in way:
                assert llm.engine.parts.core.scheduler.num_preemptions > 0
            if way == "batched" and family not in RECURRENT:
                again = llm.generate(given, GREEDY)
                assert bits(again) == alone, "from the prefix cache"
                assert sum(output.num_cached_tokens for output in again) > 0


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_too_a_request_does_not_notice_its_neighbours(dtype: str, ops: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
    given = prompts_for(ops)
    with LLM(str(directory), ops=ops, dtype=dtype, max_model_len=128) as llm:
        alone = bits([llm.generate([prompt], params)[0] for prompt in given])
        llm.reset_prefix_cache()
        assert bits(llm.generate(given, params)) == alone
        assert bits(llm.generate(given, params)) == alone, "from the prefix cache"
    with LLM(str(directory), ops=ops, dtype=dtype, max_model_len=128, long_prefill_token_threshold=7) as llm:
        assert bits(llm.generate(given, params)) == alone, "in chunks"


@pytest.mark.parametrize(("ops", "quantization"), [*((ops, None) for ops in available_ops()), ("cpu", "int8")])
def test_greedy_tokens_do_not_depend_on_whether_logits_are_reported(
    ops: str, quantization: str | None, checkpoint: Checkpoint
) -> None:
    """Without them, only the largest logit of each row is computed; beside a request that reports, all are."""
    if ops not in available_ops():
        pytest.skip("the native kernels are not built")
    plain, given = GREEDY.clone(logprobs=None), prompts_for(ops)
    with LLM(str(checkpoint("gemma2")), ops=ops, max_model_len=128, quantization=quantization) as llm:
        expected = [token_ids for token_ids, _ in bits(llm.generate(given, GREEDY))]
        for params in (plain, [GREEDY, *[plain] * (len(given) - 1)]):
            llm.reset_prefix_cache()
            assert [token_ids for token_ids, _ in bits(llm.generate(given, params))] == expected


def test_the_number_of_threads_changes_no_bit(checkpoint: Checkpoint) -> None:
    if "cpu" not in available_ops():
        pytest.skip("the native kernels are not built")
    results = []
    for num_threads in (1, 2, 3):
        with LLM(str(checkpoint("qwen3")), ops="cpu", dtype="bfloat16", num_threads=num_threads) as llm:
            results.append(bits(llm.generate(prompts(), GREEDY)))  # type: ignore[arg-type]
    assert results[0] == results[1] == results[2]


def test_forked_branches_are_those_of_single_requests(checkpoint: Checkpoint) -> None:
    prompt: Any = prompts()[3]
    params = SamplingParams(n=5, temperature=1.0, seed=11, max_tokens=20, ignore_eos=True, logprobs=1)
    with LLM(str(checkpoint("llama")), dtype="float32") as llm:
        together = bits(llm.generate([prompt] * 3, params))
        assert together[:5] == together[5:10] == together[10:]
        assert len({tuple(tokens) for tokens, _ in together[:5]}) > 1, "branches must differ"
        alone = bits(llm.generate([prompt], params.clone(n=1)))
        assert together[0] == alone[0], "branch 0 is the request without branches"
