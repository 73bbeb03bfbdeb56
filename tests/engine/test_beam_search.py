"""Beam search gives what transformers gives, order and scores included, and the same bits whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.engine.front import input_processor
from quire.errors import EngineError, InvalidParameter, UnsupportedFeature
from quire.messages.codec import Codec
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.checkpoints import one_thread
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE

FAMILIES = ("llama", "qwen3", "gemma2")
NUM_PROMPTS, NUM_TOKENS = 4, 16
TOLERANCE = 1e-4
ENDINGS = list(range(3, VOCAB_SIZE, 5))
"""A random model hardly ever says its end-of-sequence token. With so many of them it does."""


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 50))] for _ in range(NUM_PROMPTS)]


@dataclass(frozen=True)
class Search:
    """What differs from one search to the next."""

    width: int
    penalty: float = 1.0
    early: bool | str = False
    endings: tuple[int, ...] = ()
    max_tokens: int = NUM_TOKENS

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            use_beam_search=True,
            n=self.width,
            max_tokens=self.max_tokens,
            length_penalty=self.penalty,
            early_stopping=self.early,
            ignore_eos=True,
            stop_token_ids=list(self.endings),
        )


ENDING = tuple(ENDINGS)
VARIANTS = {
    "penalty 0": Search(4, penalty=0.0, endings=ENDING),
    "penalty 2": Search(4, penalty=2.0, endings=ENDING),
    "penalty -1": Search(3, penalty=-1.0, endings=ENDING),
    "early": Search(4, early=True, endings=ENDING),
    "never": Search(4, early="never", endings=ENDING),
    "never, penalty 0": Search(4, penalty=0.0, early="never", endings=ENDING),
    "never, penalty 2": Search(2, penalty=2.0, early="never", endings=ENDING),
    "early, penalty 2": Search(8, penalty=2.0, early=True, endings=ENDING),
    "one token": Search(4, endings=ENDING, max_tokens=1),
}


@cache
def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()  # what a search does not say would be taken from there
    return model


@cache
def generated_by_transformers(directory: Path, prompt: tuple[int, ...], search: Search) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=search.max_tokens,
        length_penalty=search.penalty,
        early_stopping=search.early,
        eos_token_id=list(search.endings) or None,
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode(), one_thread():
        return transformers_model(directory).generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )


def found_by_transformers(directory: Path, prompt: tuple[int, ...], search: Search) -> list[tuple[list[int], float]]:
    """(output tokens, score) of each completion, best first."""
    given = generated_by_transformers(directory, prompt, search)
    return [
        (_without_padding(row[len(prompt) :], search), score)
        for row, score in zip(given.sequences.tolist(), given.sequences_scores.tolist(), strict=True)
    ]


def scored_by_transformers(directory: Path, prompt: tuple[int, ...], search: Search) -> list[list[float]]:
    """The logprob of each token of each completion, best completion first."""
    given = generated_by_transformers(directory, prompt, search)
    scores = transformers_model(directory).compute_transition_scores(
        given.sequences, given.scores, given.beam_indices, normalize_logits=False
    )
    counts = (given.beam_indices >= 0).sum(dim=1).tolist()
    return [row[:count] for row, count in zip(scores.tolist(), counts, strict=True)]


def _without_padding(tokens: list[int], search: Search) -> list[int]:
    for index, token_id in enumerate(tokens):
        if token_id in search.endings:
            return tokens[: index + 1]
    return tokens


def bits(outputs: list[RequestOutput]) -> list[list[tuple[list[int], float | None]]]:
    return [[(found.token_ids, found.cumulative_logprob) for found in output.outputs] for output in outputs]


def check(directory: Path, outputs: list[RequestOutput], search: Search) -> None:
    for output in outputs:
        expected = found_by_transformers(directory, tuple(output.prompt_token_ids), search)
        assert [found.token_ids for found in output.outputs] == [tokens for tokens, _ in expected]
        for found, (tokens, score) in zip(output.outputs, expected, strict=True):
            assert found.cumulative_logprob is not None
            assert abs(found.cumulative_logprob / len(tokens) ** search.penalty - score) < TOLERANCE * max(
                1, abs(score)
            )
            assert found.finish_reason == ("stop" if tokens[-1] in search.endings else "length")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[tuple[Path, LLM]]:
    directory = checkpoint(request.param)
    with LLM(str(directory), dtype="float32", max_model_len=128, max_logprobs=-1) as llm:
        yield directory, llm


@pytest.mark.parametrize("endings", [(), ENDING], ids=["to the length", "to an ending"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_completions_order_and_scores_are_those_of_transformers(
    family: tuple[Path, LLM], width: int, endings: tuple[int, ...]
) -> None:
    directory, llm = family
    search = Search(width, endings=endings)
    outputs = llm.generate(list(prompts()), search.params)
    check(directory, outputs, search)
    reasons = {found.finish_reason for output in outputs for found in output.outputs}
    assert ("stop" in reasons) == bool(endings)


@pytest.mark.parametrize("name", VARIANTS)
def test_penalties_and_ways_to_stop_are_those_of_transformers(family: tuple[Path, LLM], name: str) -> None:
    directory, llm = family
    search = VARIANTS[name]
    check(directory, llm.generate(list(prompts()[:4]), search.params), search)


def test_the_embedded_model_searches_as_in_transformers() -> None:
    from quire.engine.core_startup import EMBEDDED_MODEL

    directory = Path(EMBEDDED_MODEL)
    with LLM(dtype="float32") as llm:
        texts = ["import os", "def read_lines(path):", "class Block", "The KV cache"]
        given = [llm.get_tokenizer().encode(text) for text in texts]
        for width in (2, 4, 8):
            search = Search(width, endings=(2, 0))
            check(directory, llm.generate(list(given), search.params), search)


# -- the same bits, however it runs ------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "in chunks of 7": {"long_prefill_token_threshold": 7},
    "without a prefix cache": {"enable_prefix_caching": False},
    "with too little memory for all beams": {"block_size": 16, "num_gpu_blocks_override": 14},
    "with too little memory and no prefix cache": {
        "block_size": 16,
        "num_gpu_blocks_override": 14,
        "enable_prefix_caching": False,
    },
    "eight sequences at a time": {"max_num_seqs": 8},
}
SEARCHES = (Search(2), Search(4, penalty=2.0, endings=ENDING), Search(6, early="never", endings=ENDING))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_bits_do_not_depend_on_company_chunks_memory_or_cache(checkpoint: Checkpoint, model: str, dtype: str) -> None:
    given: list[Any] = prompts()[:4]
    cases = [(prompt, search.params) for prompt in given for search in SEARCHES]
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 96, "max_logprobs": -1}
    with LLM(str(checkpoint(model)), **options, enable_prefix_caching=False) as llm:
        alone = [bits(llm.generate([prompt], params))[0] for prompt, params in cases]
    for way, more in WAYS.items():
        with LLM(str(checkpoint(model)), **{**options, **more}) as llm:
            outputs = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases])
            assert bits(outputs) == alone, way
            if "memory" in way:
                assert llm.engine.parts.core.scheduler.num_preemptions > 0
            core = llm.engine.parts.core
            core.lives.check()
            assert core.scheduler.blocks.pool.num_free == core.scheduler.blocks.pool.num_blocks


# -- LLM.beam_search ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=128, max_num_seqs=8) as llm:
        yield llm


def test_beam_search_gives_what_vllm_gives(llm: LLM) -> None:
    (output,) = llm.beam_search("The thing", BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5))
    ids = llm.get_tokenizer().encode("The thing")
    assert len(output.sequences) == 3
    for found in output.sequences:
        assert found.tokens[: len(ids)] == ids
        assert len(found.tokens) == len(ids) + 5
        assert found.text == llm.get_tokenizer().decode(found.tokens)
        assert found.score == found.cum_logprob / 5**0.5
        assert (found.finish_reason, found.stop_reason) == ("length", None)
    scores = [found.score for found in output.sequences]
    assert scores == sorted(scores, reverse=True)
    assert llm.beam_search([ids], {"beam_width": 3, "max_tokens": 5, "length_penalty": 0.5}) == [output]


# -- logprobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endings", [(), ENDING], ids=["to the length", "to an ending"])
def test_logprobs_are_the_transition_scores_of_transformers(family: tuple[Path, LLM], endings: tuple[int, ...]) -> None:
    directory, llm = family
    search = Search(4, endings=endings)
    outputs = llm.generate(list(prompts()), search.params.clone(logprobs=0))
    check(directory, outputs, search)
    for output in outputs:
        expected = scored_by_transformers(directory, tuple(output.prompt_token_ids), search)
        for found, scores in zip(output.outputs, expected, strict=True):
            assert found.logprobs is not None
            chosen = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
            assert chosen == pytest.approx(scores, abs=TOLERANCE)
            assert sum(chosen) == found.cumulative_logprob


@pytest.mark.parametrize("count", [0, 1, 4, 30, -1])
def test_candidates_are_those_of_the_tokens_in_a_prompt(checkpoint: Checkpoint, count: int) -> None:
    """What a search says of a position is what the model says of it without one, to the bit."""
    params = Search(4, endings=ENDING[:3]).params.clone(logprobs=count)
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=128, max_logprobs=-1) as llm:
        prompt: Any = prompts()[1]
        (output,) = llm.generate([prompt], params)
        assert bits([output]) == bits(llm.generate([prompt], params.clone(logprobs=None)))
        for found in output.outputs:
            whole: Any = [*prompt, *found.token_ids]
            (again,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=count))
            assert again.prompt_logprobs is not None
            assert found.logprobs == again.prompt_logprobs[len(prompt) :]


def test_sequences_have_logprobs_as_in_vllm(llm: LLM) -> None:
    given = BeamSearchParams(beam_width=3, max_tokens=5, logprobs=6)
    (plain,), (output,) = llm.beam_search("The thing", replace(given, logprobs=0)), llm.beam_search("The thing", given)
    for found, bare in zip(output.sequences, plain.sequences, strict=True):
        tokens = found.tokens[-5:]
        assert (found.tokens, found.cum_logprob) == (bare.tokens, bare.cum_logprob)
        assert [list(entry) for entry in bare.logprobs] == [[token] for token in tokens]
        assert sum(entry[token].logprob for entry, token in zip(found.logprobs, tokens, strict=True)) == (
            found.cum_logprob
        )
        for entry, token in zip(found.logprobs, tokens, strict=True):
            assert sorted(one.rank or 0 for one in entry.values() if one is not entry[token] or one.rank < 7)[:6] == (
                [1, 2, 3, 4, 5, 6]
            )
            assert entry[token].decoded_token == llm.get_tokenizer().decode([token])


def test_logprobs_of_searches_are_bounded(checkpoint: Checkpoint, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="logprobs=21 asks for 21 candidates"):
        llm.beam_search("a", BeamSearchParams(2, 2, logprobs=21))
    monkeypatch.setattr(input_processor, "MAX_BEAM_CANDIDATES", 4 * VOCAB_SIZE - 1)
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=64, max_logprobs=-1) as boundless:
        with pytest.raises(InvalidParameter, match=f"asks for {4 * VOCAB_SIZE} candidates per step") as refusal:
            boundless.beam_search("a", BeamSearchParams(4, 2, logprobs=-1))
        assert refusal.value.parameter == "logprobs"
        boundless.beam_search("a", BeamSearchParams(3, 2, logprobs=-1))


@pytest.mark.parametrize("max_num_batched_tokens", [16, 128])
def test_prompts_are_scored_beside_a_search(checkpoint: Checkpoint, max_num_batched_tokens: int) -> None:
    more = {"max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 128}
    with LLM(str(checkpoint("llama")), dtype="float32", **more) as llm:
        plain = llm.generate(list(prompts()), SamplingParams(max_tokens=1, prompt_logprobs=2))
        found = llm.generate(list(prompts()), Search(3).params.clone(prompt_logprobs=2, logprobs=1))
        assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in plain]


def test_the_end_of_sequence_ends_a_beam_unless_it_is_ignored(checkpoint: Checkpoint) -> None:
    directory = checkpoint("qwen3", eos_token_id=[256, *ENDINGS])
    with LLM(str(directory), dtype="float32", max_model_len=64, max_logprobs=-1) as llm:
        prompt = prompts()[0]
        (output,) = llm.beam_search([prompt], BeamSearchParams(4, 12))
        assert any(found.finish_reason == "stop" for found in output.sequences)
        for found in output.sequences:
            assert (found.tokens[-1] in (256, *ENDINGS)) == (found.finish_reason == "stop")
        (output,) = llm.beam_search([prompt], BeamSearchParams(4, 12, ignore_eos=True))
        assert {len(found.tokens) for found in output.sequences} == {len(prompt) + 12}


def test_what_a_beam_search_cannot_do_is_refused(llm: LLM) -> None:
    for wrong, name in (
        ({"beam_width": 1}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": None}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"beam_with": 4}, "beam_with"),
    ):
        with pytest.raises(InvalidParameter) as refusal:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})
        assert refusal.value.parameter == name, wrong
        assert name in refusal.value.message
    for beams, parts in ((9, "exceeds 8 sequences"), (8, None)):
        params = BeamSearchParams(beams, 2)
        if parts is None:
            llm.beam_search("a", params)
        else:
            with pytest.raises(InvalidParameter, match=parts):
                llm.beam_search("a", params)
    with pytest.raises(InvalidParameter, match="a beam search needs max_tokens"):
        llm.beam_search("a", {"beam_width": 2})
    with pytest.raises(InvalidParameter, match="params must be BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="concurrency_limit"):
        llm.beam_search("a", BeamSearchParams(2, 2), concurrency_limit=3)  # type: ignore[arg-type]


def test_a_search_that_fails_says_so(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=64) as llm:
        executor = llm.engine.parts.core.executor
        monkeypatch.setattr(executor, "execute", _raise)
        with pytest.raises(EngineError, match="alone: RuntimeError"):
            llm.beam_search("a", BeamSearchParams(2, 4))
        assert not llm.engine.has_unfinished_requests()


def _raise(plan: SchedulerOutputs) -> ModelRunnerOutput:
    if plan.seq_ids:
        raise RuntimeError("broken")
    return ModelRunnerOutput()


# -- best_of -----------------------------------------------------------------------------------------------------

DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)


def test_best_of_returns_the_likeliest_in_order(llm: LLM) -> None:
    (every,) = llm.generate("The thing", DRAWN.clone(n=6, logprobs=1))
    (best,) = llm.generate("The thing", DRAWN.clone(n=3, best_of=6, logprobs=1))
    ranked = sorted(every.outputs, key=lambda found: -(found.cumulative_logprob or 0.0))
    assert [found.token_ids for found in best.outputs] == [found.token_ids for found in ranked[:3]]
    assert [found.cumulative_logprob for found in best.outputs] == [found.cumulative_logprob for found in ranked[:3]]
    assert [found.logprobs for found in best.outputs] == [found.logprobs for found in ranked[:3]]
    assert [found.index for found in best.outputs] == [0, 1, 2]
    assert [found.index for found in ranked] != sorted(found.index for found in ranked), "an order to be changed"


def test_best_of_reports_no_logprobs_that_nobody_asked_for(llm: LLM) -> None:
    with_logprobs, without = (
        llm.generate("The thing", DRAWN.clone(n=2, best_of=5, logprobs=count))[0] for count in (0, None)
    )
    assert [found.token_ids for found in without.outputs] == [found.token_ids for found in with_logprobs.outputs]
    assert [(found.logprobs, found.cumulative_logprob) for found in without.outputs] == [(None, None)] * 2


def test_best_of_ranks_what_is_left_in_front_of_a_stop_string(llm: LLM) -> None:
    params = DRAWN.clone(stop=["e", "t", "a"], max_tokens=40, logprobs=0)
    (every,) = llm.generate("The thing", params.clone(n=8))
    (best,) = llm.generate("The thing", params.clone(n=8, best_of=8))
    assert any(found.stop_reason for found in every.outputs)
    ranked = sorted(every.outputs, key=lambda found: -(found.cumulative_logprob or 0.0))
    assert [found.text for found in best.outputs] == [found.text for found in ranked]


def test_best_of_is_given_out_when_all_have_ended(llm: LLM) -> None:
    llm.engine.add_request("a", "The thing", DRAWN.clone(n=2, best_of=3))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert [output.finished for output in outputs] == [True]
    llm.engine.add_request("b", "The thing", DRAWN.clone(n=2, best_of=3))
    llm.engine.step()
    (aborted,) = llm.engine.abort_request("b")
    assert [found.finish_reason for found in aborted.outputs] == ["abort"] * 2


def test_receipts_of_beams_and_of_the_best_are_replayed(llm: LLM) -> None:
    for params in (Search(3).params, DRAWN.clone(n=2, best_of=4)):
        outputs = llm.generate("The thing", params)
        (request,) = llm.receipt(outputs, params).requests
        again = llm.generate([request.prompt_token_ids], request.params())
        assert bits(again) == bits(outputs)
    with pytest.raises(InvalidParameter, match="got BeamSearchOutput"):
        llm.receipt(llm.beam_search("a", BeamSearchParams(2, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 11])
def test_another_core_goes_on_where_the_front_says_the_search_stands(checkpoint: Checkpoint, num_steps: int) -> None:
    params = Search(4, penalty=2.0, early="never", endings=ENDING).params.clone(logprobs=2)
    prompt: Any = prompts()[1]
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=128, max_logprobs=-1) as llm:
        (alone,) = llm.generate([prompt], params)
        parts = llm.engine.parts
        llm.engine.add_request("a", prompt, params)
        for _ in range(num_steps):
            llm.engine.step()
        request = parts.output_processor.so_far("a")
        assert request.progress is not None
        assert [len(tokens) for tokens in request.progress.branches.values()] == [num_steps] * (4 if num_steps else 0)
        assert (request.progress.beams is None) == (num_steps == 0)
        parts.core.abort(AbortRequest(request_id="a"))
        parts.core.add(Codec([EngineCoreRequest]).decode(0, _body(Codec([EngineCoreRequest]).encode(request))))
        outputs: list[RequestOutput] = []
        count = 0
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
            count += 1
        assert bits(outputs) == bits([alone])
        assert [found.logprobs for found in outputs[0].outputs] == [found.logprobs for found in alone.outputs]
        assert count <= NUM_TOKENS - num_steps + 4, "nothing is searched again"


def _body(frame: bytearray) -> memoryview:
    return memoryview(frame)[5:]
