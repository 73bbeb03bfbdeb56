"""Grammars that begin to count later, and budgets of thinking, through the engine: the same bits whatever runs beside
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.receipt import Receipt
from quire.errors import InvalidParameter, QuireError, UnsupportedFeature
from quire.structured.grammar import Gate, Marker, Thinking
from tests.conftest import Checkpoint
from tests.engine.test_structured_outputs import bits

CALL: dict[str, Any] = {"regex": r"[a-c]{3}\)!"}
PROMPT = "import os\n"


def marker(llm: LLM, name: str) -> Marker:
    return Marker(text=name, token_id=llm.get_tokenizer().special_tokens[name])


def thinking(llm: LLM, **fields: Any) -> Thinking:
    """With two tokens that the model has no other use for."""
    marks = {"begin": marker(llm, "<|reserved_0|>"), "end": marker(llm, "<|reserved_1|>")}
    given: dict[str, Any] = {**marks, "is_open": True, **fields}
    forced = () if given["end"].token_id is None else (given["end"].token_id,)
    return Thinking(**{"forced": forced, **given})


def after_brackets() -> Gate:
    return Gate(triggers=(Marker(text="("), Marker(text="def ")))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 1.0, "seed": 3, "logprobs": 2, **fields})


def one(llm: LLM, **fields: Any) -> Any:
    return llm.generate(PROMPT, params(**fields), use_tqdm=False)[0]


def ids(llm: LLM, **fields: Any) -> list[int]:
    found: list[int] = one(llm, **fields).outputs[0].token_ids
    return found


@contextmanager
def knowing(llm: LLM, known: Thinking) -> Iterator[None]:
    """An engine that was told how its model marks its thinking."""
    processor = llm.engine.parts.input_processor
    processor.thinking = known
    yield
    processor.thinking = None


def test_text_before_a_call_is_what_the_model_writes_without_a_grammar(tiny_llm: LLM) -> None:
    num_calls = 0
    for seed in range(12):
        fields: dict[str, Any] = {"seed": seed, "min_tokens": 30, "repetition_penalty": 1.1}
        free = one(tiny_llm, **fields).outputs[0]
        gated = one(tiny_llm, gate=after_brackets(), structured_outputs=CALL, **fields).outputs[0]
        calls = re.findall(r"(?:\(|def )(.*?)(?=\)!|\(|def |$)(\)!)?", gated.text, re.DOTALL)
        same = next((i for i, (a, b) in enumerate(zip(free.token_ids, gated.token_ids, strict=True)) if a != b), None)
        decode = tiny_llm.get_tokenizer().decode
        if same is None:
            continue
        before = decode(gated.token_ids[:same])
        assert re.search(r"\(|def ", before), "what differs comes after a trigger"
        assert free.logprobs[:same] == gated.logprobs[:same]
        num_calls += sum(bool(re.fullmatch("[a-c]{3}", inside) and end) for inside, end in calls)
    assert num_calls >= 8


def test_every_trigger_that_is_the_end_of_a_token_is_followed_by_its_grammar(tiny_llm: LLM) -> None:
    tokenizer, opened, closed = tiny_llm.get_tokenizer(), 0, 0
    for seed in range(12):
        token_ids = ids(tiny_llm, gate=Gate(triggers=(Marker(text="("),)), structured_outputs=CALL, seed=seed)
        text = ""
        for place, token_id in enumerate(token_ids):
            text = text + tokenizer.token_bytes(token_id).decode(errors="replace")
            if text.endswith("("):
                opened += 1
                rest = tokenizer.decode(token_ids[place + 1 :])
                assert re.match(r"[a-c]{3}\)!", rest) or re.fullmatch(r"[a-c]{0,3}\)?", rest), rest
                closed += bool(re.match(r"[a-c]{3}\)!", rest))
    assert opened > 10
    assert closed > 5


def test_a_token_may_be_the_trigger(tiny_llm: LLM) -> None:
    call = marker(tiny_llm, "<|tool_call|>")
    free = ids(tiny_llm)
    gate = Gate(triggers=(call,))
    assert ids(tiny_llm, gate=gate, structured_outputs=CALL) == free, "the model writes no such token by itself"
    likes = {call.token_id: 100.0}
    text = (
        one(tiny_llm, gate=gate, structured_outputs=CALL, logit_bias=likes, skip_special_tokens=False).outputs[0].text
    )
    assert re.fullmatch(r"(<\|tool_call\|>[a-c]{3}\)!)+(<\|tool_call\|>[a-c]{0,3}\)?)?", text)


@pytest.mark.parametrize("budget", [0, 1, 7, 25])
def test_a_budget_holds_exactly(tiny_llm: LLM, budget: int) -> None:
    free = ids(tiny_llm)
    end = thinking(tiny_llm).end.token_id
    given = ids(tiny_llm, gate=Gate(thinking=thinking(tiny_llm, budget=budget)))
    assert given[: budget + 1] == [*free[:budget], end]
    assert len(given) == 60
    assert end not in given[budget + 1 :]


def test_what_is_forced_may_be_several_tokens_and_text(tiny_llm: LLM) -> None:
    forced = tuple(tiny_llm.get_tokenizer().encode("\nSo: ", add_special_tokens=False))
    assert len(forced) > 1
    gate = Gate(thinking=thinking(tiny_llm, begin=Marker(text="<t>"), end=Marker(text="So:"), budget=9, forced=forced))
    output = one(tiny_llm, gate=gate, structured_outputs=CALL).outputs[0]
    assert output.token_ids[9 : 9 + len(forced)] == list(forced)
    assert re.search(r"\nSo: [a-c]{3}\)!$", output.text)
    assert output.finish_reason == "stop"


def test_a_form_counts_after_the_thinking(tiny_llm: LLM) -> None:
    open_end = thinking(tiny_llm)
    free = ids(tiny_llm)
    assert ids(tiny_llm, gate=Gate(thinking=open_end), structured_outputs=CALL) == free, "it thinks to the end"
    places = set()
    for seed in range(8):
        more: dict[str, Any] = {"logit_bias": {open_end.end.token_id: 18.0}, "seed": seed}
        token_ids = ids(tiny_llm, gate=Gate(thinking=open_end), structured_outputs=CALL, **more)
        if open_end.end.token_id in token_ids:
            place = token_ids.index(open_end.end.token_id)
            places.add(place)
            assert re.fullmatch(CALL["regex"], tiny_llm.get_tokenizer().decode(token_ids[place + 1 :]))
    assert len(places) > 2


def test_a_thinking_that_is_not_open_may_begin_with_its_token(tiny_llm: LLM) -> None:
    closed = thinking(tiny_llm, is_open=False, budget=4)
    plain = ids(tiny_llm, structured_outputs=CALL)
    assert ids(tiny_llm, gate=Gate(thinking=closed), structured_outputs=CALL) == plain
    begun = ids(tiny_llm, gate=Gate(thinking=closed), structured_outputs=CALL, logit_bias={closed.begin.token_id: 100})
    assert begun[0] == closed.begin.token_id
    assert begun[5] == closed.end.token_id
    assert re.fullmatch(CALL["regex"], tiny_llm.get_tokenizer().decode(begun[6:]))


def test_a_text_that_ends_the_thinking_is_followed_by_nothing_but_the_form(tiny_llm: LLM) -> None:
    for text in ("e", "self", "="):
        gate = Gate(thinking=thinking(tiny_llm, end=Marker(text=text)))
        for seed in range(6):
            output = one(tiny_llm, gate=gate, structured_outputs=CALL, seed=seed).outputs[0]
            _, found, rest = output.text.partition(text)
            if output.finish_reason == "stop":
                assert not found or re.fullmatch(CALL["regex"], rest.lstrip()), output.text


def test_min_tokens_holds_in_free_parts(tiny_llm: LLM) -> None:
    ends = dict.fromkeys(tiny_llm.engine.config.model_config.eos_token_ids, 100.0)
    for gate in (after_brackets(), Gate(thinking=thinking(tiny_llm))):
        fields: dict[str, Any] = {"gate": gate, "structured_outputs": CALL, "logit_bias": ends}
        assert len(ids(tiny_llm, **fields)) == 1
        assert len(ids(tiny_llm, **fields, min_tokens=20)) >= 21, "a call that has begun is completed"
        if gate.thinking is not None:
            assert ids(tiny_llm, **fields, min_tokens=20) == ids(tiny_llm, logit_bias=ends, min_tokens=20)


def mixed(llm: LLM) -> tuple[list[str], list[SamplingParams]]:
    """All kinds of gates, and neighbours without any."""
    think = thinking(llm, budget=11)
    bracket = tuple(llm.get_tokenizer().encode("(", add_special_tokens=False))
    forms: list[dict[str, Any]] = [
        {"gate": after_brackets(), "structured_outputs": CALL},
        {"gate": Gate(thinking=think)},
        {"gate": Gate(thinking=think), "structured_outputs": CALL},
        {"gate": Gate(thinking=think, triggers=after_brackets().triggers), "structured_outputs": CALL},
        {"gate": Gate(thinking=thinking(llm, end=Marker(text="="))), "structured_outputs": CALL},
        {"gate": Gate(triggers=(Marker(text="\n"),)), "structured_outputs": {"json_object": True}},
        {"gate": Gate(openings=("def", "import")), "structured_outputs": {"regex": r"(def|import) [a-z]{1,4}\(\):\n"}},
        {"gate": replace(after_brackets(), is_open=True), "structured_outputs": CALL},
        {"gate": replace(after_brackets(), takes_triggers=True), "structured_outputs": {"regex": r"\([a-c]{3}\)!"}},
        {
            "gate": Gate(thinking=replace(think, before=bracket), triggers=(Marker(text="(", token_id=bracket[0]),)),
            "structured_outputs": CALL,
        },
        {"structured_outputs": CALL},
        {},
    ]
    prompts, asked = [], []
    for index, form in enumerate([*forms, *forms, *forms]):
        prompts.append(f"import os{index}\n" if index % 3 else "import os\n")
        more: dict[str, Any] = [{}, {"n": 3}, {"temperature": 0.0}, {"min_tokens": 12}, {"stop": ["def", "e("]}][
            index % 5
        ]
        if index % 4 == 3:
            more |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {30: 3.0}}
        asked.append(params(seed=index, **form, **more))
    return prompts, asked


def test_alone_is_as_in_a_crowd(tiny_llm: LLM) -> None:
    prompts, asked = mixed(tiny_llm)
    crowd = tiny_llm.generate(prompts, asked, use_tqdm=False)
    alone = [tiny_llm.generate(p, a, use_tqdm=False)[0] for p, a in zip(prompts, asked, strict=True)]
    assert [bits(output) for output in crowd] == [bits(output) for output in alone]


def test_preemption_changes_nothing(tiny_llm: LLM) -> None:
    prompts, asked = mixed(tiny_llm)
    expected = [bits(output) for output in tiny_llm.generate(prompts, asked, use_tqdm=False)]
    with LLM(num_gpu_blocks_override=12, max_model_len=256, enable_prefix_caching=False) as small:
        given = small.generate(prompts, asked, use_tqdm=False)
        assert small.engine.parts.core.scheduler.num_preemptions > 5
    assert [bits(output) for output in given] == expected


def test_a_receipt_carries_gate_and_budget(tiny_llm: LLM) -> None:
    gate = Gate(thinking=thinking(tiny_llm), triggers=after_brackets().triggers)
    asked = params(gate=gate, structured_outputs=CALL, thinking_token_budget=5)
    first = tiny_llm.generate(PROMPT, asked, use_tqdm=False)
    receipt = Receipt.from_json(tiny_llm.receipt(first, asked).to_json())
    again = receipt.requests[0].params()
    assert (again.gate, again.thinking_token_budget) == (gate, 5)
    (second,) = tiny_llm.generate(PROMPT, again, use_tqdm=False)
    assert second.outputs[0].token_ids == first[0].outputs[0].token_ids
    assert second.outputs[0].token_ids[5] == thinking(tiny_llm).end.token_id


def test_a_budget_without_a_gate_needs_marks_that_the_engine_knows(tiny_llm: LLM) -> None:
    with pytest.raises(UnsupportedFeature, match="--reasoning-parser") as caught:
        one(tiny_llm, thinking_token_budget=3)
    assert caught.value.parameter == "thinking_token_budget"
    known = thinking(tiny_llm, is_open=False, forced=())
    free, end = ids(tiny_llm), known.end.token_id
    with knowing(tiny_llm, known):
        assert ids(tiny_llm, thinking_token_budget=3) == free, "the output does not begin with the begin marker"
        assert ids(tiny_llm, thinking_token_budget=-1) == free
        ended = [known.begin.token_id, 300, end, 301]
        for prompt, place in (([known.begin.token_id, 300], 3), (ended, None), ([*ended, known.begin.token_id], 3)):
            (output,) = tiny_llm.generate([prompt], params(thinking_token_budget=3), use_tqdm=False)
            found = output.outputs[0].token_ids
            assert (found.index(end) if end in found else None) == place
        given = Gate(triggers=(Marker(text="("),))
        both = ids(tiny_llm, thinking_token_budget=3, gate=given, structured_outputs=CALL, seed=1)
        assert both == ids(tiny_llm, gate=given, structured_outputs=CALL, seed=1)


WRONG: list[tuple[dict[str, Any], type[QuireError], str]] = [
    (
        {"gate": Gate(thinking=Thinking(begin=Marker(text="a", token_id=4096), end=Marker(text="b")))},
        InvalidParameter,
        "4096",
    ),
    ({"gate": Gate(triggers=(Marker(text="("),))}, InvalidParameter, "gate.triggers needs structured_outputs"),
    (
        {"gate": Gate(thinking=Thinking(begin=Marker(text="a"), end=Marker(text="b"))), "thinking_token_budget": 5},
        InvalidParameter,
        "needs gate.thinking.forced",
    ),
    (
        {
            "gate": Gate(thinking=Thinking(begin=Marker(text="a"), end=Marker(text="b"), budget=4, forced=(9,))),
            "thinking_token_budget": 5,
        },
        InvalidParameter,
        "must not differ",
    ),
]


@pytest.mark.parametrize(("fields", "kind", "part"), WRONG, ids=[part for _, _, part in WRONG])
def test_what_does_not_fit_is_refused(tiny_llm: LLM, fields: dict[str, Any], kind: type[QuireError], part: str) -> None:
    with pytest.raises(kind, match=part):
        one(tiny_llm, **fields)


def test_what_excludes_the_forced_tokens_fails_alone_and_is_named(tiny_llm: LLM) -> None:
    gate = Gate(thinking=thinking(tiny_llm, budget=2))
    impossible = params(gate=gate, allowed_token_ids=[300, 301, 302])
    expected = bits(one(tiny_llm))
    first, second = tiny_llm.generate([PROMPT] * 2, [params(), impossible], use_tqdm=False)
    assert bits(first) == expected
    assert second.outputs[0].finish_reason == "error"
    assert len(second.outputs[0].token_ids) == 2
    assert "allowed_token_ids, thinking_token_budget together exclude every token" in second.warnings[0]


@pytest.mark.parametrize("family", ["llama"])
def test_a_model_without_a_tokenizer_refuses(checkpoint: Checkpoint, family: str) -> None:
    gate = Gate(
        thinking=Thinking(begin=Marker(text="a", token_id=3), end=Marker(text="b", token_id=4), budget=1, forced=(4,))
    )
    with (
        LLM(checkpoint(family), skip_tokenizer_init=True) as llm,
        pytest.raises(UnsupportedFeature, match=r"^gate is not supported here: it needs a tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(gate=gate, detokenize=False))
