"""Implementations keep the contracts; engines of one process each have their own ops, also at the same time."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.ops import backends
from quire.ops.contracts.ops import Ops
from quire.ops.cpu import library
from tests.engine.test_parity import available_ops, bits

Checkpoint = Callable[..., Path]
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=16, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * row + column) % 250 for column in range(3 + 9 * row)] for row in range(4)]
PAIRS = [
    (("reference", 1), ("cpu", 2)),
    (("cpu", 1), ("cpu", 3)),
    (("reference", 1), ("reference", 1)),
]
"""Of engines: their ops, and the number of their threads."""
WAIT_S = 120
"""For another thread: past any step, so that a fault ends the test."""
IMPLEMENTED = [*available_ops(), *(["triton"] if find_spec("triton") else [])]


# -- contracts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_an_implementation_has_every_op_but_those_that_are_refused(name: str) -> None:
    assert set(backends.implementation_of(name)) == set(backends.OPS) - backends.REFUSED.get(name, frozenset())


def test_only_ops_of_the_contract_are_refused() -> None:
    assert set(backends.REFUSED) <= set(backends.IMPLEMENTATIONS)
    assert frozenset().union(*backends.REFUSED.values()) <= set(backends.OPS)


@pytest.mark.parametrize("name", IMPLEMENTED)
@pytest.mark.parametrize("op", backends.OPS)
def test_an_op_takes_what_its_contract_says(name: str, op: str) -> None:
    if op in backends.REFUSED.get(name, ()):
        pytest.skip("refused")
    assert taken(backends.implementation_of(name)[op]) == taken(getattr(backends.ops_of(name), op))


def taken(op: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter that is not bound already."""
    bound = op.keywords if isinstance(op, partial) else {}
    parameters = inspect.signature(op).parameters.values()
    return [(item.name, item.kind, item.default) for item in parameters if item.name not in bound]


@pytest.mark.parametrize("op", backends.OPS)
def test_a_contract_hands_on_each_argument_and_what_comes_back(op: str) -> None:
    signature = inspect.signature(getattr(Ops("none", {}), op))
    given = {name: object() for name in signature.parameters}
    received: list[inspect.BoundArguments] = []

    def implementation(*args: object, **kwargs: object) -> object:
        received.append(signature.bind(*args, **kwargs))
        return received

    bound = signature.bind(**given)
    result = getattr(Ops("none", {op: implementation}), op)(*bound.args, **bound.kwargs)
    assert received[0].arguments == given
    assert result is (None if signature.return_annotation == "None" else received)


@pytest.mark.parametrize("make", [backends.ops_of, backends.implementation_of])
@pytest.mark.parametrize("name", ["", "Reference", "quire.ops.reference", "cuda"])
def test_an_unknown_implementation_is_refused_and_the_known_ones_are_named(
    make: Callable[[str], object], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"unknown ops '{name}'; known: reference, cpu, triton"):
        make(name)


def test_a_thread_computes_as_the_ops_say_that_it_uses() -> None:
    if "cpu" not in available_ops():
        pytest.skip("the native kernels are not built")
    before = library.num_threads()
    one, two = (backends.ops_of("cpu", num_threads=count) for count in (1, 2))
    with ThreadPoolExecutor(1) as thread:
        for ops, expected in ((one, 1), (two, 2), (one, 1), (backends.ops_of("cpu"), 1)):
            thread.submit(ops.use_this_thread).result()
            assert thread.submit(library.num_threads).result() == expected
    assert library.num_threads() == before, "other threads keep theirs"


# -- engines at the same time ---------------------------------------------------------------------------------


@pytest.fixture(params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[tuple[Engine, Engine]]:
    if not {ops for ops, _ in request.param} <= set(available_ops()):
        pytest.skip("the native kernels are not built")
    with ExitStack() as stack:
        first, second = (Engine(checkpoint("llama"), ops, num_threads) for ops, num_threads in request.param)
        for engine in (first, second):
            stack.callback(engine.llm.close)
        yield first, second


class Engine:
    """An engine, with a hook inside its steps: where its thread is prepared, and ops are called next."""

    def __init__(self, directory: Path, ops: str, num_threads: int) -> None:
        self.llm = LLM(str(directory), ops=ops, num_threads=num_threads, dtype="bfloat16", max_model_len=64)
        worker = self.llm.engine.parts.core.executor.worker  # type: ignore[attr-defined]
        assert worker.ops.name == ops
        self.inside: Callable[[int], object] = lambda step: None
        """Is told how many steps there were before."""
        self.num_steps = 0
        self.num_threads: set[int] = set()
        """Of the kernels, in steps."""
        self._execute, worker.runner.execute = worker.runner.execute, self._step

    def _step(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self.inside(self.num_steps)
        self.num_steps += 1
        if library.available():
            self.num_threads.add(library.num_threads())
        return self._execute(plan)  # type: ignore[no-any-return]

    def generate(self) -> list[object]:
        """Tokens and logprobs, none of them from the prefix cache."""
        self.llm.reset_prefix_cache()
        self.num_steps = 0
        return bits(self.llm.generate(PROMPTS, PARAMS, use_tqdm=False))  # type: ignore[return-value]


def test_engines_that_step_at_the_same_time_compute_what_each_does_alone(pair: tuple[Engine, Engine]) -> None:
    alone = [engine.generate() for engine in pair]
    num_steps = min(engine.num_steps for engine in pair)
    meeting = threading.Barrier(2)
    for engine in pair:
        engine.inside = lambda step: meeting.wait(WAIT_S) if step < num_steps else None
        engine.num_threads.clear()
    with ThreadPoolExecutor(2) as threads:
        together = [threads.submit(engine.generate) for engine in pair]
        assert [future.result(WAIT_S) for future in together] == alone
    for engine in pair:
        ops = engine.llm.engine.config.device_config
        assert ops.ops != "cpu" or engine.num_threads == {ops.num_threads}


@pytest.mark.parametrize("closes_first", [True, False])
def test_an_engine_that_closes_harms_none_in_a_step(pair: tuple[Engine, Engine], closes_first: bool) -> None:
    closing, staying = pair if closes_first else pair[::-1]
    alone = staying.generate()
    closing.generate()
    is_inside, is_closed = threading.Event(), threading.Event()

    def inside(step: int) -> None:
        if step == 5:
            is_inside.set()
            assert is_closed.wait(WAIT_S)

    staying.inside = inside
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(staying.generate)
        assert is_inside.wait(WAIT_S)
        closing.llm.close()
        is_closed.set()
        assert future.result(WAIT_S) == alone
    assert staying.generate() == alone, "and goes on"
