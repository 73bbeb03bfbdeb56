"""One engine for all wrong use, and a canary that must sing the same after every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 4
CANARY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    """A tiny random Llama with a small context."""
    with LLM(
        str(checkpoint("llama")), max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, num_gpu_blocks_override=32
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def song(engine: LLM) -> list[int]:
    """What the canary sings before anybody does anything wrong."""
    return sing(engine)


@pytest.fixture
def llm(engine: LLM, song: list[int]) -> Iterator[LLM]:
    """The engine; afterwards it must be idle, without a leak, and answer as ever."""
    yield engine
    check_idle(engine)
    assert sing(engine) == song
    check_idle(engine)


def sing(llm: LLM) -> list[int]:
    return llm.generate("the canary", CANARY)[0].outputs[0].token_ids


def check_idle(llm: LLM) -> None:
    scheduler = llm.engine.parts.core.scheduler
    scheduler.lives.check()
    pool = scheduler.blocks.pool
    assert pool.num_free == pool.num_blocks
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.get_num_unfinished_requests() == 0
