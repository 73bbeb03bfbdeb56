"""Sampling parameters that make no sense, alone, together, or with this model."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestOutputKind, SamplingParams
from quire.errors import InvalidParameter, InvalidUnicode, QuireError, UnsupportedFeature, shown
from quire.sampling_params import FIELD_NAMES
from tests.expert_checkpoints import VOCAB_SIZE
from tests.wrong_use.conftest import MAX_MODEL_LEN, MAX_NUM_SEQS, check_idle
from tests.wrong_use.refusal import refused

NAN, INF, HUGE = math.nan, math.inf, 10**5000
LAST = f"0 to {VOCAB_SIZE - 1}"

# field -> (wrong values, what the message says besides the field)
VALUES: dict[str, tuple[list[Any], str]] = {
    "n": ([0, -1, 16_385, 2**63], "in [1, 16384]"),
    "best_of": ([0, -1, 16_385, 2**63], "in [1, 16384]"),
    "beam_width": ([1, 0, -1, 16_385, 2**63], "in [2, 16384]"),
    "length_penalty": ([-10.5, 11, 1e300], "in [-10, 10]"),
    "temperature": ([-0.1, 2.1, -1e-9], "in [0, 2]"),
    "top_p": ([0, -0.5, 1.01], "in (0, 1]"),
    "top_k": ([-2, 2**63], "in [-1, "),
    "min_p": ([-0.1, 1.1], "in [0, 1]"),
    "presence_penalty": ([3, -2.1], "in [-2, 2]"),
    "frequency_penalty": ([2.1, -3], "in [-2, 2]"),
    "repetition_penalty": ([0, -1, 1e-300, 9e-4, 1e30], "in [0.001, 1000]"),
    "seed": ([2**63, -(2**63) - 1, HUGE], "in ["),
    "max_tokens": ([0, -5, 10**12], "in [1, "),
    "min_tokens": ([-1, 2**63], "in [0, "),
    "logprobs": ([-2, 2**63], "in [-1, "),
    "prompt_logprobs": ([-2], "in [-1, "),
    "thinking_token_budget": ([-2, 2**31, HUGE], "in [-1, "),
    "stop_token_ids": ([[-1], [2**31], [HUGE]], "no token id"),
    "allowed_token_ids": ([[-1], [2**40]], "no token id"),
    "logit_bias": ([{-1: 1.0}, {2**31: 1.0}], "no token id"),
    "stop": ([[""], "", ["a", ""]], "empty string"),
    "bad_words": ([[""], ["  "]], "empty or blank"),
}
TYPES: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), ([None, True, 1.0, 2.5, "2", [1], NAN, INF, 1j], "an integer")),
    **dict.fromkeys(
        ("seed", "max_tokens", "best_of", "beam_width", "thinking_token_budget"),
        ([False, 1.5, "1", NAN, {}], "an integer or None"),
    ),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), ([False, 1.0, "5", [5]], "an integer or None")),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "length_penalty",
        ),
        ([None, True, "0.5", NAN, INF, -INF, [], HUGE, np.float32(NAN), np.bool_(True)], "a finite number"),
    ),
    **dict.fromkeys(
        (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "use_beam_search",
        ),
        ([None, 0, 1, "yes", np.bool_(True)], "True or False"),
    ),
    "early_stopping": ([None, 0, 1, "always", "Never", np.bool_(True), ["never"]], 'True, False or "never"'),
    "skip_reading_prefix_cache": ([1, "no"], "True, False or None"),
    "stop": ([5, [5], [None], {"a"}, b"a", {"a": 1}], "a list of strings or None"),
    "bad_words": (["word", [5], [None], b"a"], "a list of strings or None"),
    "stop_token_ids": ([5, "5", ["5"], [1.5], [True], {5}], "a list of integers or None"),
    "allowed_token_ids": ([5, ["5"], [None], range(5)], "a list of integers or None"),
    "logit_bias": (
        [[1], {"5": 1.0}, {5: "1"}, {5: NAN}, {5: INF}, {5: HUGE}, {True: 1.0}, {1.5: 1.0}],
        "a mapping from token ids to finite numbers",
    ),
    "output_kind": ([0, 5, "DELTA", None], "a RequestOutputKind"),
    "extra_args": ([5, "x", [1]], "a mapping or None"),
    "structured_outputs": ([5, "x", [1]], "StructuredOutputsParams"),
    "gate": ([5, "x", [1], {}], "gate"),
}


def rows(table: dict[str, tuple[list[Any], str]]) -> list[tuple[str, Any, str]]:
    return [(name, value, part) for name, (values, part) in table.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    rows(VALUES) + rows(TYPES),
    ids=lambda item: shown(item).encode("ascii", "replace").decode(),
)
def test_wrong_value_is_refused(name: str, value: Any, part: str) -> None:
    for make in (SamplingParams, SamplingParams().clone):
        with refused(InvalidParameter, name, part, parameter=name):
            make(**{name: value})


def test_every_field_with_a_kind_has_wrong_values_here() -> None:
    assert {*VALUES, *TYPES} == set(FIELD_NAMES)


BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0, "beam_width": 4}
NOT_FOR_BEAMS: dict[str, Any] = {
    "best_of": 8,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": "a",
    "min_tokens": 2,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["a"],
    "structured_outputs": {"regex": "a"},
    "thinking_token_budget": 3,
    "gate": {"thinking": {"begin": {"text": "a"}, "end": {"text": "b"}}},
}
TOGETHER: dict[str, tuple[dict[str, Any], type[QuireError], list[str]]] = {
    "min above max": ({"min_tokens": 9, "max_tokens": 8}, InvalidParameter, ["min_tokens (9)", "max_tokens (8)"]),
    "min above the default max": ({"min_tokens": 17}, InvalidParameter, ["min_tokens (17)", "max_tokens (16)"]),
    "stop without text": ({"stop": "a", "detokenize": False}, InvalidParameter, ["stop needs detokenize=True"]),
    "nothing allowed": ({"allowed_token_ids": []}, InvalidParameter, ["allowed_token_ids must not be empty"]),
    "129 bad words": ({"bad_words": ["a"] * 129}, InvalidParameter, ["bad_words", "129", "128"]),
    "half a pair to stop at": ({"stop": ["a", "b\ud800"]}, InvalidUnicode, ["stop", "U+D800", "character 1"]),
    "half a pair as a bad word": ({"bad_words": ["\udfff"]}, InvalidUnicode, ["bad_words", "U+DFFF"]),
    "structured output of old": ({"guided_json": {}}, UnsupportedFeature, ["guided_json", "use structured_outputs="]),
    "a large bound": ({"max_tokens": -1}, InvalidParameter, ["max_tokens must be in [1, 2147483647], got -1"]),
    "extra arguments": ({"extra_args": {"my": 1}}, UnsupportedFeature, ["extra_args", "'my'"]),
    "misspelt name": ({"temprature": 1.0}, InvalidParameter, ["'temprature'", "did you mean 'temperature'?"]),
    "a name of other libraries": ({"max_new_tokens": 5}, InvalidParameter, ["'max_new_tokens'", "'max_tokens'"]),
    "a name that is gone": ({"truncate_prompt_tokens": 2}, InvalidParameter, ["no parameter 'truncate_prompt_tokens'"]),
    "fewer than are returned": ({"n": 3, "best_of": 2}, InvalidParameter, ["best_of (2)", "n (3)"]),
    "the best, streamed": (
        {"best_of": 2, "output_kind": RequestOutputKind.DELTA},
        InvalidParameter,
        ["best_of cannot be streamed"],
    ),
    "a width without beams": ({"beam_width": 4}, InvalidParameter, ["beam_width needs use_beam_search=True"]),
    "a penalty without beams": ({"length_penalty": 0}, InvalidParameter, ["length_penalty needs use_beam_search"]),
    "an end without beams": ({"early_stopping": True}, InvalidParameter, ["early_stopping needs use_beam_search"]),
    "one beam": ({"use_beam_search": True, "temperature": 0}, InvalidParameter, ["beam_width must be at least 2"]),
    "drawn beams": ({"use_beam_search": True, "n": 2}, InvalidParameter, ["temperature must be 0"]),
    "more than beams": ({**BEAMS, "n": 5}, InvalidParameter, ["n (5) must not exceed beam_width (4)"]),
    "streamed beams": (
        {**BEAMS, "output_kind": RequestOutputKind.DELTA},
        InvalidParameter,
        ["use_beam_search cannot be streamed"],
    ),
    **{
        f"beams with {name}": ({**BEAMS, name: value}, UnsupportedFeature, [f"{name} does not go with use_beam_search"])
        for name, value in NOT_FOR_BEAMS.items()
    },
    "a result as a field": ({"warnings": ("x",)}, InvalidParameter, ["no parameter 'warnings'"]),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_wrong_combination_is_refused(llm: LLM, name: str) -> None:
    given, cls, parts = TOGETHER[name]
    with refused(cls, *parts):
        SamplingParams(**given)
    with refused(cls, *parts):
        SamplingParams().clone(**given)
    with refused(cls, *parts):
        SamplingParams.from_optional(**given)
    with refused(cls, *parts):
        llm.generate("a", given)


def test_values_without_a_name_are_refused() -> None:
    with refused(InvalidParameter, "keywords only", "0.8"):
        SamplingParams(0.8)  # type: ignore[misc]


def test_numbers_of_numpy_become_plain_numbers() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(7),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3)],  # type: ignore[list-item]
        logit_bias={np.int64(4): np.float64(1.5)},  # type: ignore[dict-item]
        logprobs=True,
    )
    assert params == SamplingParams(n=2, temperature=0.5, seed=7, stop_token_ids=[3], logit_bias={4: 1.5}, logprobs=1)
    assert [type(value) for value in (params.n, params.temperature, params.seed)] == [int, float, int]


def test_lists_are_copied_so_that_a_later_change_goes_unnoticed_by_nobody() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop == ["a"]


# What only the engine can know

ENGINE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "n": ({"n": MAX_NUM_SEQS + 1}, ["n=5", f"exceeds {MAX_NUM_SEQS} sequences", "max_num_seqs"]),
    "best_of": ({"best_of": MAX_NUM_SEQS + 1}, ["best_of=5", f"exceeds {MAX_NUM_SEQS} sequences", "max_num_seqs"]),
    "beam_width": ({**BEAMS, "beam_width": MAX_NUM_SEQS + 1}, ["beam_width=5", f"exceeds {MAX_NUM_SEQS} sequences"]),
    "logprobs": ({"logprobs": 21}, ["logprobs=21", "limit is 20", "max_logprobs"]),
    "prompt_logprobs": ({"prompt_logprobs": -1}, [f"asks for {VOCAB_SIZE}", "limit is 20", "max_logprobs"]),
    "stop_token_ids": ({"stop_token_ids": [5, VOCAB_SIZE]}, [f"holds {VOCAB_SIZE}", LAST]),
    "allowed_token_ids": ({"allowed_token_ids": [VOCAB_SIZE]}, [f"holds {VOCAB_SIZE}", LAST]),
    "logit_bias": ({"logit_bias": {VOCAB_SIZE: 1.0}}, [f"holds {VOCAB_SIZE}", LAST]),
    "min_tokens": ({"min_tokens": MAX_MODEL_LEN, "max_tokens": None}, ["cannot be reached", "room for"]),
}


@pytest.mark.parametrize("name", ENGINE)
def test_what_this_model_cannot_do_is_refused(llm: LLM, name: str) -> None:
    given, parts = ENGINE[name]
    with refused(InvalidParameter, name, *parts, parameter=name):
        llm.generate("abc", SamplingParams(**given))
    with refused(InvalidParameter, "prompt 1:", name, *parts, parameter=name):
        llm.generate(["abc", "abc"], [None, given])  # type: ignore[list-item]


def test_beams_that_need_more_candidates_than_the_engine_reports_are_refused(llm: LLM) -> None:
    with refused(InvalidParameter, "beam_width=4", "17 tokens", "21 candidates", "limit is 20", parameter="beam_width"):
        llm.generate("abc", SamplingParams(**BEAMS, stop_token_ids=list(range(15))))


PER_PROMPT: dict[str, tuple[Any, list[str]]] = {
    "too few": ([SamplingParams()], ["1 sampling_params for 2 prompts"]),
    "too many": ([SamplingParams()] * 3, ["3 sampling_params for 2 prompts"]),
    "none at all": ([], ["0 sampling_params for 2 prompts"]),
    "text": ("greedy", ["sampling_params must be SamplingParams", "'greedy'"]),
    "a number": (0, ["sampling_params must be SamplingParams", "got 0"]),
    "a class": (SamplingParams, ["sampling_params must be SamplingParams", "type"]),
    "one of them a number": ([None, 5], ["prompt 1:", "sampling_params must be SamplingParams", "got 5"]),
    "one of them wrong": ([{}, {"top_p": 7}], ["prompt 1:", "top_p", "(0, 1]"]),
    "unknown key": ({"topp": 1}, ["'topp'", "did you mean 'top_p'?"]),
    "key that is a number": ({5: 1}, ["no parameter 5"]),
}


@pytest.mark.parametrize("name", PER_PROMPT)
def test_wrong_sampling_params_are_refused(llm: LLM, name: str) -> None:
    given, parts = PER_PROMPT[name]
    with refused(InvalidParameter, *parts):
        llm.generate(["a", "b"], given)


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "the only token allowed may not come yet": {"allowed_token_ids": [256], "min_tokens": 1},
    "all tokens allowed end the output": {"allowed_token_ids": [256, 5, 6], "min_tokens": 1, "stop_token_ids": [5, 6]},
    "the only token allowed is a bad word": {"allowed_token_ids": [64], "bad_words": ["a"]},
    "one is a bad word, the other may not come yet": {
        "allowed_token_ids": [64, 256],
        "bad_words": ["a"],
        "min_tokens": 2,
    },
    "every token ends the output": {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_request_without_a_possible_first_token_is_refused(llm: LLM, name: str) -> None:
    assert llm.get_tokenizer().encode("a") == [64]
    with refused(InvalidParameter, "no first token", "min_tokens"):
        llm.generate("abc", SamplingParams(**IMPOSSIBLE[name]))


def test_request_that_runs_out_of_tokens_fails_alone_and_says_that_it_is_its_own_fault(llm: LLM) -> None:
    good = SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.get_tokenizer().encode("ab") == [64, 65]
    alone = llm.generate("abc", good)[0].outputs[0].token_ids
    bad = SamplingParams(allowed_token_ids=[64, 65], bad_words=["aa", "ab", "ba", "bb"], max_tokens=4)
    first, failed, last = llm.generate(["abc", "abc", "abc"], [good, bad, good])
    assert failed.outputs[0].finish_reason == "error"
    assert failed.failure is not None
    assert failed.failure.is_request_fault
    assert "allowed_token_ids, bad_words" in failed.failure.message
    assert failed.warnings[-1] == failed.failure.message
    assert first.failure is None
    assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == [alone, alone]


HARMLESS: list[dict[str, Any]] = [
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"top_k": 2**31 - 1},
    {"top_k": 10**9, "top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 2.0, "repetition_penalty": 1e3},
    {"repetition_penalty": 1e-3},
    {"logit_bias": {5: 1e300, 6: -1e300}},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"n": MAX_NUM_SEQS, "temperature": 0.0},
    {"stop": ["never there"] * 50},
    {"max_tokens": 2**31 - 1, "stop_token_ids": list(range(VOCAB_SIZE))},
    {"bad_words": ["\U0001f600", "\x00", "\u0130"]},
    {"allowed_token_ids": [5, 5, 5]},
]


@pytest.mark.parametrize("given", HARMLESS, ids=str)
def test_extreme_values_that_are_allowed_run(llm: LLM, given: dict[str, Any]) -> None:
    (output,) = llm.generate("abc", SamplingParams(**{"max_tokens": 3, **given}))
    assert {completion.finish_reason for completion in output.outputs} <= {"length", "stop"}
    check_idle(llm)


def test_asynchronous_engine_refuses_the_same(checkpoint: Any) -> None:
    from quire import AsyncLLMEngine, EngineArgs

    async def first_of(engine: AsyncLLMEngine, prompt: Any, params: Any, request_id: Any = None) -> Any:
        async for output in engine.generate(prompt, params, request_id):
            return output
        return None

    async def ask() -> None:
        args = EngineArgs(model=str(checkpoint("llama")), max_model_len=MAX_MODEL_LEN, max_num_seqs=2)
        with AsyncLLMEngine.from_engine_args(args) as engine:
            with refused(InvalidParameter, "prompt is empty"):
                await first_of(engine, "", None)
            with refused(InvalidParameter, "sampling_params must be SamplingParams"):
                await first_of(engine, "a", "greedy")
            with refused(InvalidParameter, "n=3", "2 sequences"):
                await first_of(engine, "a", {"n": 3})
            with refused(InvalidParameter, "request_id"):
                await first_of(engine, "a", None, [])
            kind = RequestOutputKind.FINAL_ONLY
            output = await first_of(engine, "a", {"max_tokens": 2, "ignore_eos": True, "output_kind": kind})
            assert len(output.outputs[0].token_ids) == 2

    asyncio.run(ask())
