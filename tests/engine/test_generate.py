"""`LLM.generate`: what goes in, what comes out, and why it ended."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import InvalidParameter
from quire.outputs import TokenLogprobs
from tests.checkpoints import in_transformers
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE

MAX_MODEL_LEN = 128
EOS, EXTRA_EOS = 256, 258
LETTERS = [*range(94), *range(259, 270)]
"""Tokens that are printable ASCII, one character or more; with them every output is readable text."""
PROMPTS = ["The thing is", "in on an", "a", "reason in the thing"]


def ascii_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 3, "allowed_token_ids": LETTERS, **changes})


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=16) as llm:
        yield llm


def one(llm: LLM, prompt: Any, params: SamplingParams | None = None) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.finished
    return output


def assert_nothing_left(llm: LLM) -> None:
    core, pool = llm.engine.parts.core, llm.engine.parts.core.scheduler.blocks.pool
    core.lives.check()
    assert pool.num_free == pool.num_blocks
    assert not core.has_work()
    assert len(llm.engine.parts.output_processor) == 0


# -- order and parameters -------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_however_long_each_takes(llm: LLM) -> None:
    params = [ascii_params(max_tokens=length) for length in (20, 1, 11, 5)]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 11, 5]
    assert_nothing_left(llm)


def test_one_set_of_parameters_serves_all_and_a_mapping_will_do(llm: LLM) -> None:
    as_object = llm.generate(PROMPTS, ascii_params())
    as_mapping = llm.generate(PROMPTS, {"max_tokens": 24, "seed": 3, "allowed_token_ids": LETTERS})
    assert [o.outputs for o in as_object] == [o.outputs for o in as_mapping]


def test_a_prompt_may_be_text_or_tokens_or_a_mapping_of_either(llm: LLM) -> None:
    text = PROMPTS[0]
    ids = llm.get_tokenizer().encode(text)
    kinds: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(kinds, ascii_params())
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert one(llm, ids, ascii_params()).outputs == outputs[0].outputs, "a list of integers is one prompt"


def test_the_models_own_defaults_hold_when_no_parameters_are_given(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    values = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 7, "eos_token_id": [EOS]}
    (directory / "generation_config.json").write_text(json.dumps(values))
    with LLM(str(directory), max_model_len=64, dtype="float32") as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.7, 5, 7)
        output = one(llm, PROMPTS[0])
        assert len(output.outputs[0].token_ids) == 7
        assert one(llm, PROMPTS[0], defaults.clone(seed=output.seed)).outputs == output.outputs


def test_the_models_least_length_and_stop_strings_hold_when_no_parameters_are_given(checkpoint: Checkpoint) -> None:
    values = {"temperature": 0, "min_new_tokens": 9, "max_new_tokens": 20}
    options: dict[str, Any] = {"max_model_len": 64, "dtype": "float32"}
    model = str(checkpoint("llama"))
    with LLM(model, **options, override_generation_config=values) as llm:
        tokens, text = (output := one(llm, PROMPTS[0]).outputs[0]).token_ids, output.text
    assert len(tokens) >= 9
    stop = {"stop_strings": [text[4:6]], "min_new_tokens": 0}
    with LLM(model, **options, override_generation_config={**values, **stop}) as llm:
        stopped = one(llm, PROMPTS[0]).outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", text[4:6])
        assert text.startswith(stopped.text)
        assert text[4:6] not in stopped.text


def test_nothing_runs_unless_every_prompt_is_valid(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="prompt 1"):
        llm.generate([PROMPTS[0], ""], ascii_params())
    assert_nothing_left(llm)


def test_warnings_about_parameters_and_lengths_reach_the_output(llm: LLM) -> None:
    params = ascii_params(temperature=0.001, max_tokens=10_000)
    first, second = one(llm, PROMPTS[0], params).warnings
    assert "temperature" in first
    assert "the answer can have " in second


def test_a_closed_engine_says_so(checkpoint: Checkpoint) -> None:
    from quire.errors import EngineDeadError

    llm = LLM(str(checkpoint("llama")), max_model_len=32)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("a", SamplingParams(max_tokens=1))


# -- how it ends ----------------------------------------------------------------------------------------------


def test_the_end_of_sequence_token_ends_the_output_and_is_no_text(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], SamplingParams(logit_bias={EOS: 100})).outputs[0]
    assert (output.token_ids, output.text) == ([EOS], "")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_further_end_of_sequence_id_is_reported_as_the_reason(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], SamplingParams(logit_bias={EXTRA_EOS: 100})).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EXTRA_EOS], "stop", EXTRA_EOS)


def test_ignore_eos_goes_on_to_the_length(llm: LLM) -> None:
    params = SamplingParams(logit_bias={EOS: 100}, ignore_eos=True, max_tokens=5)
    output = one(llm, PROMPTS[0], params).outputs[0]
    assert output.token_ids == [EOS] * 5
    assert (output.finish_reason, output.stop_reason, output.text) == ("length", None, "")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_output_and_is_text_only_if_included(llm: LLM, include: bool) -> None:
    free = one(llm, PROMPTS[0], ascii_params()).outputs[0]
    token = free.token_ids[6]
    end = free.token_ids.index(token) + 1
    params = ascii_params(stop_token_ids=[token], include_stop_str_in_output=include)
    output = one(llm, PROMPTS[0], params).outputs[0]
    assert output.token_ids == free.token_ids[:end]
    assert output.text == llm.get_tokenizer().decode(free.token_ids[: end if include else end - 1])
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [0, 3, 9])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_text_and_tokens_where_it_is_complete(
    llm: LLM, include: bool, start: int, length: int
) -> None:
    free = one(llm, PROMPTS[1], ascii_params(logprobs=1)).outputs[0]
    stop = free.text[start : start + length]
    params = ascii_params(stop=["\u00e4\u00f6", stop], include_stop_str_in_output=include, logprobs=1)
    output = one(llm, PROMPTS[1], params).outputs[0]
    at = free.text.index(stop)
    assert output.text == free.text[: at + len(stop) if include else at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    decode = llm.get_tokenizer().decode
    needed = next(n for n in range(1, 25) if stop in decode(free.token_ids[:n]))
    assert output.token_ids == free.token_ids[:needed]
    assert output.logprobs is not None
    assert free.logprobs is not None
    assert output.logprobs == free.logprobs[:needed]
    assert output.cumulative_logprob == pytest.approx(sum(chosen(p) for p in free.logprobs[:needed]))


def test_a_stop_string_that_the_last_token_completes_wins_over_the_length(llm: LLM) -> None:
    free = one(llm, PROMPTS[1], ascii_params(max_tokens=9)).outputs[0]
    stop = free.text[-3:]
    assert stop not in free.text[:-1]
    output = one(llm, PROMPTS[1], ascii_params(max_tokens=9, stop=stop)).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (free.text[:-3], "stop", stop)


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_at_the_end(llm: LLM) -> None:
    free = one(llm, PROMPTS[1], ascii_params()).outputs[0]
    output = one(llm, PROMPTS[1], ascii_params(stop=free.text[-4:] + "\u00e4")).outputs[0]
    assert (output.text, output.finish_reason) == (free.text, "length")


def test_no_stop_string_counts_before_min_tokens(llm: LLM) -> None:
    free = one(llm, PROMPTS[1], ascii_params()).outputs[0]
    decode = llm.get_tokenizer().decode
    stop = list(dict.fromkeys(free.text))
    output = one(llm, PROMPTS[1], ascii_params(stop=stop, min_tokens=10, include_stop_str_in_output=True)).outputs[0]
    assert output.token_ids == free.token_ids[:11], "any character ends it, the first one after ten tokens"
    assert output.text == decode(free.token_ids[:10]) + decode(free.token_ids[:11])[len(decode(free.token_ids[:10]))]


def test_no_end_of_sequence_and_no_stop_token_comes_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, min_tokens=6, max_tokens=20, stop_token_ids=[5], logit_bias={EOS: 100, EXTRA_EOS: 100, 5: 100}
    )
    output = one(llm, PROMPTS[0], params).outputs[0]
    assert len(output.token_ids) == 7
    assert not {EOS, EXTRA_EOS, 5} & set(output.token_ids[:6])
    assert output.finish_reason == "stop"


def test_without_max_tokens_the_context_is_the_limit(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], ascii_params(max_tokens=None))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == MAX_MODEL_LEN
    assert output.outputs[0].finish_reason == "length"
    assert output.warnings == []


def test_a_prompt_that_leaves_room_for_one_token_gets_one(llm: LLM) -> None:
    output = one(llm, [7] * (MAX_MODEL_LEN - 1), ascii_params(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 1


def test_metrics_tell_the_story_of_a_request_however_it_ended(llm: LLM) -> None:
    free = one(llm, PROMPTS[1], ascii_params())
    for params in (ascii_params(), ascii_params(stop=free.outputs[0].text[4:6]), SamplingParams(logit_bias={EOS: 100})):
        output = one(llm, PROMPTS[1], params)
        metrics = output.metrics
        assert metrics is not None
        assert 0 < metrics.arrived_at <= metrics.scheduled_at <= metrics.first_token_at <= metrics.last_token_at
        assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)


# -- text -----------------------------------------------------------------------------------------------------


def test_special_tokens_are_text_only_when_asked_for(llm: LLM) -> None:
    allowed = {"allowed_token_ids": [10, 257], "seed": 2, "max_tokens": 30}
    hidden = one(llm, PROMPTS[0], SamplingParams(**allowed)).outputs[0]
    shown = one(llm, PROMPTS[0], SamplingParams(**allowed, skip_special_tokens=False)).outputs[0]
    assert hidden.token_ids == shown.token_ids
    assert 257 in hidden.token_ids
    assert set(hidden.text) == {"+"}
    assert shown.text.replace("<|im_start|>", "") == hidden.text
    assert shown.text.count("<|im_start|>") == shown.token_ids.count(257)


def test_without_detokenizing_there_are_tokens_and_no_text(llm: LLM) -> None:
    with_text = one(llm, PROMPTS[0], ascii_params()).outputs[0]
    output = one(llm, PROMPTS[0], ascii_params(detokenize=False)).outputs[0]
    assert (output.token_ids, output.text) == (with_text.token_ids, "")


def test_an_engine_without_tokenizer_takes_and_gives_tokens(llm: LLM, checkpoint: Checkpoint) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    expected = one(llm, ids, ascii_params(logprobs=1)).outputs[0]
    with LLM(
        str(checkpoint("llama")), dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=16, skip_tokenizer_init=True
    ) as bare:
        output = one(bare, ids, ascii_params(logprobs=1)).outputs[0]
        assert (output.token_ids, output.text) == (expected.token_ids, "")
        assert output.logprobs is not None
        assert {candidate.decoded_token for p in output.logprobs for candidate in p.values()} == {None}


# -- randomness -----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_whatever_runs_beside_it(llm: LLM) -> None:
    alone = [one(llm, prompt, ascii_params(seed=5)).outputs for prompt in PROMPTS]
    crowd = [PROMPTS[i % 4] for i in range(23)]
    together = llm.generate(crowd, [ascii_params(seed=5 if i % 3 else i, n=1 + (i % 3 == 0)) for i in range(23)])
    for i, output in enumerate(together):
        if i % 3:
            assert output.outputs == alone[i % 4]


def test_different_seeds_and_different_branches_give_different_texts(llm: LLM) -> None:
    texts = {one(llm, PROMPTS[0], ascii_params(seed=seed)).outputs[0].text for seed in range(6)}
    assert len(texts) == 6
    branches = one(llm, PROMPTS[0], ascii_params(n=6)).outputs
    assert [branch.index for branch in branches] == list(range(6))
    assert len({branch.text for branch in branches}) == 6


def test_calls_of_several_threads_give_what_each_gives_alone(llm: LLM) -> None:
    """The engine runs one call at a time. Steps of two at once would mix their requests."""
    calls = [[f"{prompt} {index}" for prompt in PROMPTS] for index in range(6)]

    def texts(prompts: list[str]) -> list[str]:
        outputs = llm.generate(prompts, ascii_params(), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    expected = [texts(prompts) for prompts in calls]
    with ThreadPoolExecutor(len(calls)) as threads:
        assert list(threads.map(texts, calls)) == expected


def test_without_a_seed_each_request_draws_one_and_reports_it(llm: LLM) -> None:
    outputs = llm.generate([PROMPTS[0]] * 4, ascii_params(seed=None, n=2))
    assert len({output.seed for output in outputs}) == 4
    assert len({output.outputs[0].text for output in outputs}) == 4
    for output in outputs:
        assert one(llm, PROMPTS[0], ascii_params(seed=output.seed, n=2)).outputs == output.outputs


# -- log-probabilities ----------------------------------------------------------------------------------------


def chosen(position: TokenLogprobs) -> float:
    return next(iter(position.values())).logprob


@pytest.fixture(scope="module")
def expected_logprobs(checkpoint: Checkpoint) -> Any:
    """tokens -> float32 log-probabilities of what follows each, by transformers."""
    model = in_transformers(checkpoint("llama"))

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)

    return compute


def assert_position(position: TokenLogprobs, token_id: int, row: torch.Tensor, k: int, llm: LLM) -> None:
    """One position's candidates against a row of log-probabilities."""
    ids = list(position)
    assert ids[0] == token_id
    order = row.argsort(descending=True, stable=True).tolist()
    rank = order.index(token_id) + 1
    assert position[token_id].rank == rank
    assert len(ids) == (k if rank <= k else k + 1) or k == 0
    assert [i for i in order[:k] if i != token_id] == ids[1:]
    for candidate_id, candidate in position.items():
        assert candidate.logprob == pytest.approx(float(row[candidate_id]), rel=1e-4, abs=1e-4)
        assert candidate.rank == order.index(candidate_id) + 1
        assert candidate.decoded_token == llm.get_tokenizer().decode([candidate_id], skip_special_tokens=False)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_the_models_own_logits(llm: LLM, expected_logprobs: Any, k: int) -> None:
    # Parameters that change logits must leave no trace in the reported values.
    params = ascii_params(
        logprobs=k, temperature=0.5, top_k=40, repetition_penalty=1.3, logit_bias={7: 3.0}, presence_penalty=0.5
    )
    output = one(llm, PROMPTS[3], params)
    completion = output.outputs[0]
    rows = expected_logprobs(output.prompt_token_ids + completion.token_ids)[len(output.prompt_token_ids) - 1 :]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for position, token_id, row in zip(completion.logprobs, completion.token_ids, rows, strict=False):
        assert_position(position, token_id, row, k, llm)
    assert completion.cumulative_logprob == pytest.approx(sum(map(chosen, completion.logprobs)))


def test_the_best_five_are_a_prefix_of_the_best_twenty(llm: LLM) -> None:
    greedy = {"temperature": 0, "max_tokens": 12, "prompt_logprobs": 5}
    few = one(llm, PROMPTS[0], SamplingParams(**greedy, logprobs=5)).outputs[0].logprobs
    many = one(llm, PROMPTS[0], SamplingParams(**greedy, logprobs=20)).outputs[0].logprobs
    assert few is not None
    assert many is not None
    for five, twenty in zip(few, many, strict=True):
        assert list(five.items()) == list(twenty.items())[:5]


def test_logprobs_of_each_branch_belong_to_its_own_tokens(llm: LLM, expected_logprobs: Any) -> None:
    output = one(llm, PROMPTS[0], ascii_params(n=3, logprobs=2, max_tokens=6))
    for completion in output.outputs:
        rows = expected_logprobs(output.prompt_token_ids + completion.token_ids)[len(output.prompt_token_ids) - 1 :]
        for position, token_id, row in zip(completion.logprobs or (), completion.token_ids, rows, strict=False):
            assert_position(position, token_id, row, 2, llm)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "preempted": {"num_gpu_blocks_override": 8, "long_prefill_token_threshold": 20},
}


@pytest.fixture(scope="module")
def scored(llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=3, logprobs=1, n=2, seed=1)
    params = params.clone(temperature=0.9)
    return [one(llm, prompt, params) for prompt in long_prompts()]


def long_prompts() -> list[Any]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (40, 70, 33, 90, 2, 1)]


def test_prompt_logprobs_score_every_token_but_the_first(
    llm: LLM, scored: list[RequestOutput], expected_logprobs: Any
) -> None:
    for output in scored:
        positions, ids = output.prompt_logprobs, output.prompt_token_ids
        assert positions is not None
        assert len(positions) == len(ids)
        assert positions[0] is None
        for position, token_id, row in zip(positions[1:], ids[1:], expected_logprobs(ids), strict=False):
            assert position is not None
            assert_position(position, token_id, row, 3, llm)


@pytest.mark.parametrize("way", WAYS)
def test_prompt_logprobs_come_once_and_the_same_in_chunks_and_after_preemption(
    way: str, scored: list[RequestOutput], checkpoint: Checkpoint
) -> None:
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 16, **WAYS[way]}
    params = SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True, prompt_logprobs=3, logprobs=1, n=2, seed=1)
    with LLM(str(checkpoint("llama")), **options) as other:
        outputs = other.generate(long_prompts(), params)
        outputs_again = other.generate(long_prompts(), params)
        for output, again, expected in zip(outputs, outputs_again, scored, strict=True):
            assert output.outputs == expected.outputs
            assert output.prompt_logprobs == again.prompt_logprobs == expected.prompt_logprobs
        assert (other.engine.parts.core.scheduler.num_preemptions > 0) == (way == "preempted")
        assert_nothing_left(other)


def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(llm: LLM) -> None:
    prompt = long_prompts()[1]
    plain = SamplingParams(max_tokens=1)
    one(llm, prompt, plain)
    assert one(llm, prompt, plain).num_cached_tokens > 0
    output = one(llm, prompt, plain.clone(prompt_logprobs=0))
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs or ()) == len(prompt)
    with pytest.raises(InvalidParameter, match="skip_reading_prefix_cache"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


# -- what may be produced -------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_produced_and_a_strong_bias_decides_among_them(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], SamplingParams(max_tokens=40, allowed_token_ids=[33, 34, 35], seed=0)).outputs[0]
    assert set(output.token_ids) == {33, 34, 35}
    assert set(output.text) == {"B", "C", "D"}
    biased = SamplingParams(max_tokens=9, allowed_token_ids=[33, 34, 35], logit_bias={34: 90.0, 40: 100.0}, seed=0)
    assert one(llm, PROMPTS[0], biased).outputs[0].text == "C" * 9


def test_a_bad_word_never_stands_in_the_text(llm: LLM) -> None:
    only = {"allowed_token_ids": [64, 65, 66], "max_tokens": 80, "seed": 4}
    assert "ab" in one(llm, PROMPTS[0], SamplingParams(**only)).outputs[0].text
    text = one(llm, PROMPTS[0], SamplingParams(**only, bad_words=["ab", "ccc"])).outputs[0].text
    assert "ab" not in text
    assert "ccc" not in text
    assert set(text) == set("abc"), "each letter alone remains possible"


def test_contradicting_restrictions_fail_the_request_alone_and_say_why(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[64], bad_words=["aa"], min_tokens=3, max_tokens=5)
    bad, good = llm.generate([PROMPTS[0], PROMPTS[1]], [impossible, ascii_params()])
    assert bad.outputs[0].finish_reason == "error"
    assert "allowed_token_ids" in bad.warnings[-1]
    assert "min_tokens" in bad.warnings[-1]
    assert bad.failure is not None
    assert bad.failure.is_request_fault
    assert good.outputs == one(llm, PROMPTS[1], ascii_params()).outputs
    assert_nothing_left(llm)


# -- the prefix cache -----------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_read_from_the_cache_in_whole_blocks(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = [random.Random(9).randrange(VOCAB_SIZE) for _ in range(50)]
    first, second = one(llm, prompt, ascii_params()), one(llm, prompt, ascii_params())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs == second.outputs
    llm.reset_prefix_cache()
    assert one(llm, prompt, ascii_params()).num_cached_tokens == 0


def test_requests_with_different_salts_do_not_see_each_others_cache(llm: LLM) -> None:
    ids = [random.Random(10).randrange(VOCAB_SIZE) for _ in range(40)]
    salted: list[Any] = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("one", "two", "one")]
    outputs = [one(llm, prompt, ascii_params()) for prompt in salted]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
    assert outputs[0].outputs == outputs[1].outputs == outputs[2].outputs


@pytest.mark.parametrize(("num_prompts", "n", "captures"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_a_single_answer_does_not_wait_for_graphs_of_several(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, num_prompts: int, n: int, captures: bool
) -> None:
    missing, core = [True, True, False], tiny_llm.engine.parts.core
    monkeypatch.setattr(core, "capture_graph", lambda: missing.pop(0))
    tiny_llm.generate(["x"] * num_prompts, SamplingParams(n=n, max_tokens=1), use_tqdm=False)
    assert missing == ([] if captures else [True, True, False])


def test_what_is_refused_captures_nothing(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llm.engine.parts.core, "capture_graph", lambda: pytest.fail("captured"))
    with pytest.raises(InvalidParameter):
        tiny_llm.generate(["x", {"prompt_token_ids": [-1]}], SamplingParams(max_tokens=1), use_tqdm=False)
