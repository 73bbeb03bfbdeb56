"""Models with sliding windows: full and window layers share one pool, and no way of using it changes a bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.core.kv.groups import SlidingWindow
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits, expected_by_transformers
from tests.expert_checkpoints import VOCAB_SIZE

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma2": ("gemma2", {"sliding_window": 24, "num_hidden_layers": 4}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 4, "max_window_layers": 1},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "num_hidden_layers": 7}),
    "granite with sinks": ("granite_swa", {}),
    "mimo v2 flash": ("mimo_v2_flash", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 0,
            "head_dim": 40,
            "global_head_dim": 16,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}
"""Groups of full layers and of windows: 0 and 1; 1 and 1; 1 and 3; 2 and 5; 1 and 1; 1 and 2; 1 and 1; 1 and 5, the
last three with blocks of other bytes."""
MAX_MODEL_LEN, NUM_TOKENS = 200, 30
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "in chunks of 7": {"long_prefill_token_threshold": 7},
    "in chunks of 40, preempted": {"long_prefill_token_threshold": 40, "spare_blocks": 3},
    "blocks of 32": {"block_size": 32},
}


def prompts() -> list[Any]:
    """Some that begin alike and some that do not; most are several windows long."""
    rng = random.Random(5)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(100)]
    alone = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 30, 90, 150)]
    return [*alone, *[[*shared[:length], length] for length in (20, 47, 64, 81, 100)], shared[:64], shared[:90]]


def smallest_pool(directory: str, options: dict[str, Any]) -> int:
    """Blocks that the longest sequence needs."""
    with LLM(directory, load_format="dummy", **options) as llm:
        config = llm.engine.parts.config
        return config.kv_layout.most_blocks(MAX_MODEL_LEN, config.scheduler_config.max_chunk_tokens)


def free_blocks(llm: LLM) -> tuple[int, int]:
    """Free, and all."""
    pool = llm.engine.parts.core.scheduler.blocks.pool  # type: ignore[attr-defined]
    return pool.num_free, pool.num_blocks


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("model", MODELS)
def test_tokens_beyond_the_window_are_those_of_transformers_however_they_are_run(
    model: str, ops: str, checkpoint: Checkpoint
) -> None:
    family, overrides = MODELS[model]
    directory, given = checkpoint(family, **overrides), prompts()[:: 1 if ops == "cpu" else 2]
    with LLM(str(directory), ops=ops, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = bits([llm.generate([prompt], PARAMS)[0] for prompt in given])
    for prompt, (token_ids, _) in zip(given, alone, strict=True):
        assert token_ids == expected_by_transformers(directory, prompt, token_ids)
    for way, changes in list(WAYS.items())[:: 1 if ops == "cpu" else 2]:  # the reference takes seven times as long
        options = {**OPTIONS, **changes}
        spare = options.pop("spare_blocks", None)
        if spare is not None:
            options["num_gpu_blocks_override"] = smallest_pool(str(directory), {"ops": ops, **options}) + spare
        with LLM(str(directory), ops=ops, **options) as llm:
            assert bits(llm.generate(given, PARAMS)) == alone, way
            again = llm.generate(given, PARAMS)
            assert bits(again) == alone, f"{way}, a second time"
            scheduler = llm.engine.parts.core.scheduler  # type: ignore[attr-defined]
            assert (scheduler.num_preemptions > 0) == ("preempted" in way)
            if way == "batched":
                assert sum(output.num_cached_tokens for output in again) > 0, "from the prefix cache"
            scheduler.lives.check()
            free, blocks = free_blocks(llm)
            assert free == blocks


@pytest.mark.parametrize("model", MODELS)
def test_branches_of_windowed_models_are_those_of_single_requests(model: str, checkpoint: Checkpoint) -> None:
    family, overrides = MODELS[model]
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=60, ignore_eos=True, logprobs=1)
    given = prompts()[1:4]
    with LLM(str(checkpoint(family, **overrides)), **OPTIONS) as llm:
        together = bits(llm.generate(given, params))
        llm.reset_prefix_cache()
        assert together == [entry for prompt in given for entry in bits(llm.generate([prompt], params))]
        assert together[0] == bits(llm.generate([given[0]], params.clone(n=1)))[0]


def test_a_cached_prefix_needs_only_what_the_window_reaches(checkpoint: Checkpoint) -> None:
    directory, prompt = checkpoint("mistral", sliding_window=24), prompts()[3]
    with LLM(str(directory), **OPTIONS, max_num_seqs=1, num_gpu_blocks_override=12) as llm:
        first = llm.generate([prompt], PARAMS)
        again = llm.generate([prompt], PARAMS)
        assert bits(again) == bits(first)
        assert again[0].num_cached_tokens == 144, "150 tokens: nine full blocks, of which two are left"


def peak_of(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[int, RequestOutput]:
    """The most blocks that are held between two steps."""
    llm.engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    peak, outputs = 0, list[RequestOutput]()
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
        free, blocks = free_blocks(llm)
        peak = max(peak, blocks - free)
    return peak, outputs[-1]


def test_a_window_bounds_the_memory_of_a_long_sequence(checkpoint: Checkpoint) -> None:
    """1,960 tokens in blocks of 16 are 123 blocks; a window of 64 needs 5, and as many as a chunk while it is read."""
    directory = str(checkpoint("mistral", sliding_window=64, max_position_embeddings=2048))
    prompt = [i * i % VOCAB_SIZE for i in range(1900)]
    expected, given = [], {"block_size": 16, "max_model_len": 1960, "dtype": "float32", "enable_prefix_caching": False}
    for num_blocks in (200, 48, 24, 6):
        with LLM(directory, **given, num_gpu_blocks_override=num_blocks) as llm:
            peak, output = peak_of(llm, prompt, 60)
            assert peak <= 5
            chunk = llm.engine.parts.config.scheduler_config.max_chunk_tokens
            assert chunk == {200: 2048, 48: 690, 24: 306, 6: 18}[num_blocks]
            expected.append(output.outputs[0].token_ids)
    assert expected == [expected[0]] * 4


def test_full_and_window_layers_share_one_pool_without_waste(checkpoint: Checkpoint) -> None:
    """Two full layers and ten windows: six groups of two layers, of which one keeps all tokens."""
    directory = str(
        checkpoint(
            "gemma3_text",
            sliding_window=64,
            sliding_window_pattern=6,
            num_hidden_layers=12,
            max_position_embeddings=1024,
        )
    )
    given = {"block_size": 16, "max_model_len": 960, "dtype": "float32", "enable_prefix_caching": False}
    prompt = [i * i % VOCAB_SIZE for i in range(900)]
    expected = []
    for num_blocks in (400, 120, 90):
        with LLM(directory, **given, num_gpu_blocks_override=num_blocks) as llm:
            layout = llm.engine.parts.config.kv_layout
            assert [len(group.layers) for group in layout.groups] == [2] * 6, "no part of a page is unused"
            peak, output = peak_of(llm, prompt, 60)
            assert peak == 60 + 5 * 5, "60 blocks for 959 tokens in the full group; 5 in each that has a window of 64"
            expected.append(output.outputs[0].token_ids)
    assert expected == [expected[0]] * 3
    assert expected[0] == expected_by_transformers(directory, prompt, expected[0])


def test_an_early_trim_changes_tokens_and_is_seen(checkpoint: Checkpoint) -> None:
    """What the other tests compare would show it."""
    family, overrides = MODELS["gemma2"]
    given = prompts()
    with LLM(str(checkpoint(family, **overrides)), **OPTIONS, num_gpu_blocks_override=40) as llm:
        right = bits(llm.generate(given, PARAMS))
        llm.reset_prefix_cache()
        manager = llm.engine.parts.core.scheduler.blocks.groups[1]  # type: ignore[attr-defined]
        assert isinstance(manager, SlidingWindow)
        manager.__class__ = type("EarlyTrim", (SlidingWindow,), {"trim": lambda self, table, n: early(self, table, n)})
        assert bits(llm.generate(given, PARAMS)) != right


def early(manager: SlidingWindow, table: Any, num_computed: int) -> None:
    """Blocks go back 16 tokens too soon."""
    SlidingWindow.trim(manager, table, num_computed + 16 if num_computed > 40 else num_computed)
