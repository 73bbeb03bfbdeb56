"""Memory for weights that is got ready before they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops import functional, table
from quire.ops.cpu import ahead
from quire.ops.cpu.ahead import HUGE_PAGE, PIECE, weights_ahead
from tests.ops.implementations import implementations_of, rand

MIB = 1 << 20


@pytest.fixture(autouse=True)
def native() -> None:
    if "cpu" not in implementations_of("linear"):
        pytest.skip("the native kernels are not built")
    table.use("cpu")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_for(pool: ThreadPoolExecutor) -> None:
    """Until the only thread has done all that it was given."""
    pool.submit(int).result()


def test_memory_is_there_before_it_is_taken(pool: ThreadPoolExecutor) -> None:
    before = resident()
    with weights_ahead(3 * PIECE, pool):
        wait_for(pool)
        assert ahead.ready_bytes() == 3 * PIECE
        assert resident() - before > 3 * PIECE - 8 * MIB


def test_what_nobody_took_goes_back(pool: ThreadPoolExecutor) -> None:
    from quire.ops.cpu.memory import weight_zeros

    before = resident()
    with weights_ahead(4 * PIECE, pool):
        wait_for(pool)
        weight = weight_zeros(PIECE)
    assert resident() - before < PIECE + 8 * MIB
    assert not weight.any()


def test_what_is_left_to_do_ends_with_the_first_weight(pool: ThreadPoolExecutor) -> None:
    from quire.ops.cpu.memory import weight_zeros

    gate = threading.Event()
    pool.submit(gate.wait)
    before = resident()
    with weights_ahead(8 * PIECE, pool):
        weight_zeros(HUGE_PAGE)
        gate.set()
        wait_for(pool)
        assert ahead.ready_bytes() == 0
        assert resident() - before < PIECE


def test_weights_do_not_touch_each_other_nor_end_early(pool: ThreadPoolExecutor) -> None:
    from quire.ops.cpu.memory import weight_zeros

    with weights_ahead(40 * MIB, pool):
        weights = [weight_zeros(size) for size in (3 * MIB, 1, 100, 30 * MIB, 63 * MIB, 65, 2 * MIB)]
        assert not any(weight.any() for weight in weights)
        assert not any(weight.data_ptr() % 64 for weight in weights)
        for index, weight in enumerate(weights):
            weight.fill_(index + 1)
    for index, weight in enumerate(weights):
        assert (weight == index + 1).all()
    taken = resident()
    del weight, weights
    assert taken - resident() > 80 * MIB


def test_what_was_given_back_is_zero_when_it_is_taken_again(pool: ThreadPoolExecutor) -> None:
    from quire.ops.cpu.memory import give_back, weight_zeros

    with weights_ahead(40 * MIB, pool):
        first, last = weight_zeros(1000), weight_zeros(3 * MIB).fill_(7)
        address = last.data_ptr()
        give_back(last)
        again = weight_zeros(2 * MIB)
        assert again.data_ptr() == address
        give_back(first)  # not the last one
    assert not again.any()


def test_another_thread_has_memory_of_its_own(pool: ThreadPoolExecutor) -> None:
    with weights_ahead(HUGE_PAGE, pool), ThreadPoolExecutor(1) as other:
        assert other.submit(ahead.take, 64).result() is None
        assert ahead.take(64) is not None


def test_a_weight_got_ready_gives_the_same_bits(pool: ThreadPoolExecutor) -> None:
    x, parts = rand(5, 600), [rand(700, 600, seed=1), rand(330, 600, seed=2)]
    expected = functional.linear(x, functional.pack_linear(parts, dtype=torch.float32))
    with weights_ahead(40 * MIB, pool):
        weight = functional.pack_linear(parts, dtype=torch.float32)
    assert torch.equal(functional.linear(x, weight), expected)


def test_an_engine_takes_its_weights_from_there() -> None:
    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    with LLM(kv_cache_memory_bytes=16 * MIB) as llm:
        planned = llm.engine.config.memory_plan["weights"]
        layers = llm.engine.parts.core.executor.worker.model.layers  # type: ignore[attr-defined]
        first, last = (layer.mlp.down_proj.weight.tensors["packed"].data_ptr() for layer in (layers[0], layers[-1]))
        assert abs(first - last) < planned, "they lie in one region"
        assert llm.generate("import os", params)[0].outputs[0].token_ids
