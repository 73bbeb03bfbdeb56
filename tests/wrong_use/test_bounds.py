"""Every list, mapping and text of a request has a bound that is checked before anything is walked."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import pytest

from quire import LLM, SamplingParams
from quire.engine.front.input_processor import MAX_CACHE_SALT, MAX_REQUEST_ID, check_request_id
from quire.errors import InvalidParameter, PromptTooLong, UnsupportedFeature, shown
from quire.messages.request import EngineCoreRequest
from quire.sampling_params import BOUNDS, MAX_BAD_WORD_TOKENS, RANGES, RequestOutputKind
from tests.expert_checkpoints import VOCAB_SIZE
from tests.wrong_use.conftest import MAX_MODEL_LEN
from tests.wrong_use.refusal import refused


class Untouchable(list[Any]):
    """A list that may be measured and never walked."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked")

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("walked")

    def __repr__(self) -> str:
        raise AssertionError("walked")


class UntouchableMapping(dict[Any, Any]):
    """A mapping that may be measured and never walked."""

    def __len__(self) -> int:
        return 10**7

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked")

    def items(self) -> Any:
        raise AssertionError("walked")


class UntouchableText(str):
    """A text that may be measured and never looked at."""

    __slots__ = ()

    def __len__(self) -> int:
        return 10**7

    def encode(self, *_: Any) -> bytes:
        raise AssertionError("walked")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("walked")


def plain_kinds() -> set[object]:
    return {int, float, bool, type(None), RequestOutputKind}


def kinds_of(annotation: object) -> set[object]:
    """The classes that a field's annotation is made of, without looking into lists."""
    origin = get_origin(annotation)
    if origin is None or (isinstance(origin, type) and origin is not types.UnionType):
        return {origin or annotation}
    return set().union(*(kinds_of(part) for part in get_args(annotation)))


def test_every_field_that_is_no_number_or_flag_has_a_bound() -> None:
    hints = typing.get_type_hints(SamplingParams)
    given = [f.name for f in dataclasses.fields(SamplingParams) if f.init]
    sized = {name for name in given if not kinds_of(hints[name]) <= plain_kinds()}
    assert sized - {"early_stopping"} == set(BOUNDS), "that is a flag or one word"
    for name in given:
        if name not in BOUNDS and kinds_of(hints[name]) & {int, float}:
            assert name in RANGES, f"{name} is a number without a range"


def test_the_check_of_kinds_sees_a_list_a_text_and_a_mapping() -> None:
    for annotation in (list[int] | None, str | None, Mapping[str, int], object, tuple[int, ...]):
        assert not kinds_of(annotation) <= plain_kinds()


@pytest.mark.parametrize("name", [name for name, bound in BOUNDS.items() if bound.items])
def test_what_is_too_long_is_refused_before_it_is_walked(name: str) -> None:
    limit = BOUNDS[name].items
    assert limit is not None
    value = UntouchableMapping() if name == "logit_bias" else Untouchable(limit + 1)
    with refused(InvalidParameter, name, str(limit), parameter=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_are_bounded_one_by_one_and_together(name: str) -> None:
    bound = BOUNDS[name]
    assert bound.characters is not None
    assert bound.total_characters is not None
    with refused(InvalidParameter, name, f"the limit is {bound.characters}", parameter=name):
        SamplingParams(**{name: ["a", UntouchableText("b")]})  # type: ignore[arg-type]
    count = bound.total_characters // (bound.characters // 2) + 1
    texts = [f"{index:04}".ljust(bound.characters // 2, "x") for index in range(count)]
    with refused(InvalidParameter, name, f"the limit is {bound.total_characters}", parameter=name):
        SamplingParams(**{name: texts})  # type: ignore[arg-type]
    SamplingParams(**{name: texts[:-1]})  # type: ignore[arg-type]


def test_one_stop_text_is_bounded_like_a_list_of_one() -> None:
    with refused(InvalidParameter, "stop", "10000000 characters", parameter="stop"):
        SamplingParams(stop=UntouchableText("b"))


def test_a_refused_mapping_is_not_listed_in_the_message() -> None:
    with refused(UnsupportedFeature, "extra_args", parameter="extra_args"):
        SamplingParams(extra_args={f"key{index}": 1 for index in range(10_000)})
    with refused(InvalidParameter, "structured_outputs", parameter="structured_outputs"):
        SamplingParams(structured_outputs=UntouchableMapping(a=1))  # type: ignore[arg-type]


def test_repeated_entries_count_once() -> None:
    params = SamplingParams(
        stop=["b", "a", "b"], stop_token_ids=[5, 5], allowed_token_ids=[9, 3, 9] * 1000, bad_words=["x", "x"]
    )
    assert params.stop == ["b", "a"]
    assert params.stop_token_ids == [5]
    assert params.allowed_token_ids == [9, 3]
    assert params.bad_words == ["x"]


def test_a_prompt_is_measured_before_it_is_walked(llm: LLM) -> None:
    process = llm.engine.parts.input_processor.process
    for prompt in (Untouchable(10**7), {"prompt_token_ids": Untouchable(10**7)}):
        with refused(PromptTooLong, str(MAX_MODEL_LEN)):
            process("r", prompt)  # type: ignore[arg-type]
    for text in (UntouchableText("a"), {"prompt": UntouchableText("a"), "prompt_token_ids": [1]}):
        with refused(PromptTooLong, "characters"):
            process("r", text)  # type: ignore[arg-type]
    with refused(InvalidParameter, str(MAX_CACHE_SALT), parameter="cache_salt"):
        process("r", {"prompt": "a", "cache_salt": UntouchableText("a")})
    with refused(InvalidParameter, str(MAX_REQUEST_ID), parameter="request_id"):
        check_request_id(UntouchableText("a"), set())


def test_every_way_in_checks_the_same_bounds(llm: LLM) -> None:
    too_many = {"allowed_token_ids": Untouchable(5_000_000)}
    with refused(InvalidParameter, "allowed_token_ids", parameter="allowed_token_ids"):
        llm.generate("a", too_many)
    with refused(InvalidParameter, "allowed_token_ids", parameter="allowed_token_ids"):
        llm.engine.add_request("r", "a", too_many)  # type: ignore[arg-type]
    with refused(InvalidParameter, "allowed_token_ids", parameter="allowed_token_ids"):
        SamplingParams().clone(**too_many)


def test_bad_words_are_bounded_in_tokens(llm: LLM) -> None:
    words = [f"{index:03}" + "\u2603" * 60 for index in range(100)]  # three bytes, so three tokens, for each character
    with refused(InvalidParameter, "bad_words", str(MAX_BAD_WORD_TOKENS), parameter="bad_words"):
        llm.generate("a", SamplingParams(bad_words=words))


def test_what_the_core_is_sent_does_not_hold_a_list_of_allowed_tokens(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=list(range(VOCAB_SIZE)), temperature=0.0)
    request = llm.engine.parts.input_processor.process("r", [1], params).core
    assert request.sampling_params.allowed_token_ids is None
    assert request.sampling_params == params.clone(allowed_token_ids=None)
    assert request.allowed_tokens is not None
    assert len(request.allowed_tokens) == (VOCAB_SIZE + 7) // 8


def test_a_shown_value_is_read_no_further_than_it_is_shown() -> None:
    class Endless(list[int]):
        pass

    seen = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal seen
            seen += 1
            return "x"

    assert len(shown([Counted() for _ in range(10**5)])) == 80
    assert len(shown({Counted(): Counted() for _ in range(1)} | dict.fromkeys(range(10**5), Counted()))) == 80
    assert seen < 200
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "[" * 77 + "..."
    while nested:
        nested = nested.pop()
    for value in ([], [1, "a"], (1,), (1, 2), {"a": [1]}, {3}, "it's", b"x", None, 1.5):
        assert shown(value) == repr(value)


def test_a_request_holds_no_list_that_is_not_bounded_here() -> None:
    """A new field of what is sent to the core must be bounded, too."""
    bounded = {
        "request_id",  # MAX_REQUEST_ID
        "prompt_token_ids",  # max_model_len
        "sampling_params",  # BOUNDS
        "eos_token_ids",  # the model's
        "bad_words_token_ids",  # MAX_BAD_WORD_TOKENS
        "allowed_tokens",  # a bit for each token of the vocabulary
        "grammar",  # written of structured_outputs, which is bounded
        "cache_salt",  # MAX_CACHE_SALT
        "tenant",  # the server's own
        "progress",  # the engine's own
    }
    hints = typing.get_type_hints(EngineCoreRequest)
    sized = {f.name for f in dataclasses.fields(EngineCoreRequest) if not kinds_of(hints[f.name]) <= plain_kinds()}
    assert sized == bounded
