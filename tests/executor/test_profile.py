"""What a start took is compared with the plan, and a difference of more than 3 % is said in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire import LLM
from quire.executor.profile import compare_profile

LOGGER = "quire.executor.profile"
MIB = 1 << 20
PLAN = {"weights": 700 * MIB, "process": 300 * MIB, "kv_cache": 1 << 40}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged."""
    with caplog.at_level(logging.INFO, logger=LOGGER):
        yield caplog


@pytest.mark.parametrize("measured", [1000, 1030, 970])
def test_up_to_3_percent_is_not_worth_a_line(measured: int, said: pytest.LogCaptureFixture) -> None:
    assert compare_profile(PLAN, {"weights": (measured - 300) * MIB, "process": 300 * MIB}) is None
    assert said.records == []


@pytest.mark.parametrize(("measured", "difference"), [(1031, "+3.1%"), (1500, "+50.0%"), (969, "-3.1%")])
def test_more_is_said_with_every_number(measured: int, difference: str, said: pytest.LogCaptureFixture) -> None:
    line = compare_profile(PLAN, {"weights": (measured - 300) * MIB, "process": 300 * MIB})
    assert line is not None
    assert [record.getMessage() for record in said.records] == [line]
    for part in (difference, "0.98 GiB", "0.68 GiB", "0.29 GiB"):
        assert part in line


def test_a_system_that_measures_nothing_says_nothing() -> None:
    assert compare_profile(PLAN, {"weights": 0, "process": 0}) is None


def test_a_start_measures_its_weights_and_keeps_the_planned_blocks() -> None:
    with LLM(num_gpu_blocks_override=100, use_tqdm_on_load=False) as llm:
        executor, config = llm.engine.parts.core.executor, llm.engine.config
        executor.worker.cache._thread.join()  # type: ignore[attr-defined]
        assert executor.determine_num_available_blocks() == 100 == config.cache_config.num_blocks
        measured, planned = llm.engine.parts.ledger.memory["weights"], config.memory_plan["weights"]
        assert abs(measured - planned) < 4 * MIB, "what Python and the allocator take meanwhile"


def test_a_wrong_plan_is_noticed_at_the_start(said: pytest.LogCaptureFixture) -> None:
    with LLM(num_gpu_blocks_override=100, use_tqdm_on_load=False) as llm:
        executor = llm.engine.parts.core.executor
        executor.worker.cache._thread.join()  # type: ignore[attr-defined]
        wrong = {**llm.engine.config.memory_plan, "weights": 1 << 30}
        executor._config = replace(llm.engine.config, memory_plan=wrong)  # type: ignore[attr-defined]
        executor.determine_num_available_blocks()
    assert "against the plan's" in said.text
