"""Ctrl-C waits for what must not be left half done."""

from __future__ import annotations

import signal

import pytest

from quire import LLM, SamplingParams
from quire.utils.interrupts import interrupts_deferred


@pytest.fixture(autouse=True)
def handler_is_pythons(handlers_stay: None) -> None:
    """Ctrl-C may be ignored where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_it_is_raised_at_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_is_raised_at_once() -> None:
    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second Ctrl-C waited")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_stays() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("method", ["add", "step"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_nothing_is_left_in_the_engine(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str, call: int) -> None:
    """Ctrl-C in the middle of either operation of the core, at its first call or a later one."""
    core = tiny_llm.engine.parts.core
    inner, num_calls = getattr(core, method), 0

    def interrupted(*args: object) -> object:
        nonlocal num_calls
        if num_calls == call:
            signal.raise_signal(signal.SIGINT)
        num_calls += 1
        return inner(*args)

    monkeypatch.setattr(core, method, interrupted)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(["a", "b", "c", "d", "e"], params, use_tqdm=False)
    assert num_calls == call + 1
    assert tiny_llm.engine.get_num_unfinished_requests() == 0
    assert not tiny_llm.engine.has_unfinished_requests()
    monkeypatch.undo()
    assert len(tiny_llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) == 20
