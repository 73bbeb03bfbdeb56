"""What one request brings for all its prompts is worked out once."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from quire import SamplingParams
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config
from quire.engine.front.input_processor import InputProcessor
from quire.errors import InvalidParameter
from quire.tokenizer.tokenizer import Tokenizer, load_tokenizer


class Counting:
    """A tokenizer that counts what it encodes."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.num_encoded = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num_encoded += 1
        return self._inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    config = create_config(EngineArgs())
    tokenizer: Any = Counting(load_tokenizer(config.model_config.tokenizer_path))
    return InputProcessor(config, tokenizer, time.monotonic, itertools.count())


def test_lists_of_many_prompts_are_worked_out_once(processor: InputProcessor) -> None:
    params = SamplingParams(bad_words=[f"word{n}" for n in range(100)], allowed_token_ids=list(range(4000)))
    tokenizer: Any = processor.tokenizer
    before = tokenizer.num_encoded
    made = [processor.process(str(n), {"prompt_token_ids": [5, n]}, params).core for n in range(20)]
    assert tokenizer.num_encoded - before == 200
    assert len({(core.bad_words_token_ids, core.allowed_tokens) for core in made}) == 1
    assert made[0].allowed_tokens == b"\xff" * 500 + bytes(12)


def test_other_lists_are_not_taken_for_those_before(processor: InputProcessor) -> None:
    def come_to(**given: Any) -> tuple[Any, Any]:
        core = processor.process("x", {"prompt_token_ids": [5]}, SamplingParams(**given)).core
        return core.bad_words_token_ids, core.allowed_tokens

    first = come_to(bad_words=["a"], allowed_token_ids=[7])
    assert come_to(bad_words=["b"], allowed_token_ids=[7])[0] != first[0]
    assert come_to(bad_words=["a"], allowed_token_ids=[8])[1] != first[1]
    assert come_to() == ((), None)
    assert come_to(bad_words=["a"], allowed_token_ids=[7]) == first
    params = SamplingParams(allowed_token_ids=[7])
    processor.process("x", {"prompt_token_ids": [5]}, params)
    assert params.allowed_token_ids is not None
    params.allowed_token_ids.append(10**6)  # a list can be changed under a frozen dataclass
    with pytest.raises(InvalidParameter, match="allowed_token_ids holds 1000000"):
        processor.process("x", {"prompt_token_ids": [5]}, params)
    with pytest.raises(InvalidParameter, match="no first token"):
        come_to(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1)
