"""Outputs that follow a grammar: valid, and the same bits whatever runs beside them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.outputs import CompletionOutput
from tests.conftest import Checkpoint

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"[12]\d{3}-(0[1-9]|1[0-2])"
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/'
EBNF = 'root ::= "(" item ("," item){1,3} ")"\nitem ::= "x" | "y"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=", "schema": {"type": "boolean"}, "end": ">"}],
    "triggers": ["<f="],
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "compact json": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": DATE},
    "choice": {"choice": ["yes", "no", "d\u00e9j\u00e0 vu \u2603"]},
    "lark": {"grammar": SUM},
    "ebnf": {"grammar": EBNF},
    "json object": {"json_object": True},
    "tag": {"structural_tag": TAG},
}


def fits(name: str, completion: CompletionOutput) -> bool:
    """Whether a text that has ended follows its form."""
    text = completion.text
    match name:
        case "json" | "compact json":
            jsonschema.validate(json.loads(text), PERSON)
            return name == "json" or not re.search(r'[^"\w] ', re.sub(r'"[^"]*"', '""', text))
        case "regex":
            return re.fullmatch(DATE, text) is not None
        case "choice":
            return text in FORMS["choice"]["choice"]
        case "lark":
            return re.fullmatch(r"[0-9+()]+", text.replace(" ", "")) is not None and eval_sum(text) is not None
        case "ebnf":
            return re.fullmatch(r"\([xy](,[xy]){1,3}\)", text) is not None
        case "json object":
            return isinstance(json.loads(text), dict)
        case _:
            return all(re.match("<f=(true|false)>", part) for part in re.findall("<f=.*", text, re.DOTALL))


def eval_sum(text: str) -> int | None:
    numbers = [int(number) for number in re.findall("[0-9]+", text)]
    return sum(numbers) if text.count("(") == text.count(")") else None


def params(name: str, **more: Any) -> SamplingParams:
    given = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "logprobs": 1, **more}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**FORMS[name]), **given)


def bits(output: RequestOutput) -> Any:
    return [
        (c.token_ids, c.text, c.finish_reason, [[(i, p.logprob) for i, p in at.items()] for at in c.logprobs or ()])
        for c in output.outputs
    ]


@pytest.mark.parametrize("name", FORMS)
def test_every_output_that_ends_follows_its_form(tiny_llm: LLM, name: str) -> None:
    asked = [params(name, seed=seed, temperature=temperature) for seed in range(6) for temperature in (0.0, 0.9, 1.5)]
    ended = 0
    for output in tiny_llm.generate(["Write it."] * len(asked), asked, use_tqdm=False):
        (completion,) = output.outputs
        if completion.finish_reason == "stop":
            ended += 1
            assert fits(name, completion), completion.text
    assert ended or name == "tag", "text without an end is allowed to go on"


def mixed() -> tuple[list[str], list[SamplingParams]]:
    """All forms, and neighbours without any."""
    prompts, asked = [], []
    for index, name in enumerate([*FORMS, *FORMS]):
        prompts += [f"Write {index}.", f"import os{index}"]
        more: dict[str, Any] = [{}, {"n": 3}, {"temperature": 0.0}, {"min_tokens": 12}, {"stop": ["1", "e"]}][index % 5]
        if index % 4 == 3:
            more |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {30: 3.0}}
        asked.append(params(name, seed=index, **more))
        asked.append(SamplingParams(max_tokens=50, seed=index, logprobs=1, n=1 + index % 2))
    return prompts, asked


def test_alone_is_as_in_a_crowd(tiny_llm: LLM) -> None:
    prompts, asked = mixed()
    crowd = tiny_llm.generate(prompts, asked, use_tqdm=False)
    alone = [tiny_llm.generate(p, a, use_tqdm=False)[0] for p, a in zip(prompts, asked, strict=True)]
    assert [bits(output) for output in crowd] == [bits(output) for output in alone]


def test_neighbours_are_as_without_those_who_follow_a_form(tiny_llm: LLM) -> None:
    prompts, asked = mixed()
    crowd = tiny_llm.generate(prompts, asked, use_tqdm=False)
    free = tiny_llm.generate(prompts[1::2], asked[1::2], use_tqdm=False)
    assert [bits(output) for output in crowd[1::2]] == [bits(output) for output in free]


def test_preemption_changes_nothing(tiny_llm: LLM) -> None:
    prompts, asked = mixed()
    expected = [bits(output) for output in tiny_llm.generate(prompts, asked, use_tqdm=False)]
    with LLM(num_gpu_blocks_override=20, max_model_len=256, enable_prefix_caching=False) as small:
        given = small.generate(prompts, asked, use_tqdm=False)
        assert small.engine.parts.core.scheduler.num_preemptions > 5
    assert [bits(output) for output in given] == expected


def test_min_tokens_holds_while_the_grammar_allows_more(tiny_llm: LLM) -> None:
    form: Any = {"regex": "[ab]{1,20}"}
    given = SamplingParams(structured_outputs=form, min_tokens=8, max_tokens=30, temperature=0.0)
    (completion,) = tiny_llm.generate("x", given, use_tqdm=False)[0].outputs
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) > 8
    form = {"choice": ["yes"]}
    given = given.clone(structured_outputs=form, min_tokens=25)
    (completion,) = tiny_llm.generate("x", given, use_tqdm=False)[0].outputs
    assert (completion.text, completion.finish_reason) == ("yes", "stop"), "the grammar wins"


def test_what_excludes_every_token_of_the_grammar_fails_alone(tiny_llm: LLM) -> None:
    form: Any = {"choice": ["yes"]}
    impossible = SamplingParams(structured_outputs=form, allowed_token_ids=[5, 6], max_tokens=5)
    fine = params("regex")
    expected = bits(tiny_llm.generate("a", fine, use_tqdm=False)[0])
    first, second = tiny_llm.generate(["a", "b"], [fine, impossible], use_tqdm=False)
    assert bits(first) == expected
    assert second.outputs[0].finish_reason == "error"
    assert "allowed_token_ids, structured_outputs together exclude every token" in second.warnings[0]


def test_a_request_that_fails_at_its_first_token_still_tells_all_of_its_prompt(tiny_llm: LLM) -> None:
    form: Any = {"choice": ["yes"]}
    given = SamplingParams(structured_outputs=form, allowed_token_ids=[5, 6], max_tokens=5, prompt_logprobs=1)
    with LLM(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=256) as small:
        found = [llm.generate("import os, sys", given, use_tqdm=False)[0] for llm in (tiny_llm, small)]
    scores = [[sorted((i, p.logprob) for i, p in (at or {}).items()) for at in one.prompt_logprobs] for one in found]  # type: ignore[union-attr]
    assert [one.outputs[0].finish_reason for one in found] == ["error", "error"]
    assert scores[0] == scores[1]
    assert len(scores[0]) == len(found[0].prompt_token_ids)


def test_bad_words_and_allowed_tokens_narrow_a_grammar(tiny_llm: LLM) -> None:
    form: Any = {"regex": "[abc]{5}"}
    ids = [token for text in "bc" for token in tiny_llm.get_tokenizer().encode(text, add_special_tokens=False)]
    ends = tiny_llm.engine.config.model_config.eos_token_ids
    given = SamplingParams(structured_outputs=form, allowed_token_ids=[*ids, *ends], max_tokens=20, seed=1)
    assert re.fullmatch("[bc]{5}", tiny_llm.generate("x", given, use_tqdm=False)[0].outputs[0].text)


def test_special_tokens_are_never_part_of_an_output(tiny_llm: LLM) -> None:
    special = set(tiny_llm.get_tokenizer().special_ids)
    form: Any = {"regex": r"(.|\n){30}"}
    asked = [SamplingParams(structured_outputs=form, max_tokens=40, temperature=2.0, seed=seed) for seed in range(8)]
    for output in tiny_llm.generate(["<|im_start|>"] * 8, asked, use_tqdm=False):
        (completion,) = output.outputs
        end = 1 if completion.finish_reason == "stop" else 0
        assert special.isdisjoint(completion.token_ids[: len(completion.token_ids) - end])


def test_a_form_may_be_asked_for_as_a_mapping_and_refused_with_its_pointer(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="'#/properties/a/not': not is not supported"):
        tiny_llm.generate("x", {"structured_outputs": {"json": {"properties": {"a": {"not": {}}}}}})


@pytest.mark.parametrize("family", ["llama"])
def test_a_model_without_a_tokenizer_refuses(checkpoint: Checkpoint, family: str) -> None:
    with (
        LLM(checkpoint(family), skip_tokenizer_init=True) as llm,
        pytest.raises(UnsupportedFeature, match="needs a tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}, detokenize=False))  # type: ignore[arg-type]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """One of the shapes that people ask for."""
    kind = rng.choice(["object", "array", "string", "integer", "number", "enum", "any", "ref"][: 8 if depth < 3 else 6])
    match kind if depth < 3 or kind not in ("object", "array") else "string":
        case "object":
            names = rng.sample(["a", "b c", "\u00fc", "long_name", "x/y", 'q"'], rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            low = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": low,
                "maxItems": low + rng.randint(0, 3),
            }
        case "string":
            more: Any = rng.choice(
                [
                    {"maxLength": 6},
                    {"pattern": "^[a-c]{1,4}x?$"},
                    {"format": "date"},
                    {"format": "ipv4"},
                    {"minLength": 3},
                ]
            )
            return {"type": "string", **more, **({} if "minLength" not in more else {"maxLength": 9})}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 2.5, 100])}
        case "enum":
            return {"enum": rng.sample(["x", 5, None, True, [1], {"k": "v"}, 1.5], rng.randint(1, 5))}
        case "any":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return {"$ref": "#/$defs/leaf"}


def test_hundreds_of_outputs_validate(tiny_llm: LLM) -> None:
    rng = random.Random(3)
    leaf = {"type": ["boolean", "null"]}
    schemas = [{**random_schema(rng), "$defs": {"leaf": leaf}} for _ in range(120)]
    asked = [
        SamplingParams(structured_outputs={"json": schema}, max_tokens=300, seed=seed, temperature=1.2)  # type: ignore[arg-type]
        for schema in schemas
        for seed in range(3)
    ]
    ended = 0
    for index, output in enumerate(tiny_llm.generate(["{"] * len(asked), asked, use_tqdm=False)):
        (completion,) = output.outputs
        if completion.finish_reason == "stop":
            ended += 1
            checker = jsonschema.Draft202012Validator(schemas[index // 3], format_checker=jsonschema.FormatChecker())
            checker.validate(json.loads(completion.text))
    assert ended >= 0.85 * len(asked), f"bounded schemas end by themselves, and {ended} of {len(asked)} did"
