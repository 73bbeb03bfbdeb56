"""How often, and after what pause, a process is replaced."""

from __future__ import annotations

import pytest

from quire.engine.process.restart_policy import RestartBudget, RestartPolicy
from quire.errors import ConfigError


def test_pauses_grow_and_the_budget_ends() -> None:
    budget = RestartBudget(RestartPolicy(max_engine_restarts=7), clock=lambda: 0.0)
    assert [budget.spend() for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, None]
    assert len(budget) == 7


def test_restarts_are_forgotten_after_the_window() -> None:
    now = 0.0
    budget = RestartBudget(RestartPolicy(max_engine_restarts=2, engine_restart_window=100), clock=lambda: now)
    assert [budget.spend(), budget.spend(), budget.spend()] == [0.0, 0.5, None]
    now = 101.0
    budget.worked()
    assert budget.spend() == 0.0


def test_the_longest_pause_can_be_set() -> None:
    budget = RestartBudget(RestartPolicy(engine_restart_pause=1), clock=lambda: 0.0)
    assert [budget.spend() for _ in range(4)] == [0.0, 0.5, 1.0, 1.0]


def test_no_restart_at_all_is_a_policy_too() -> None:
    assert RestartBudget(RestartPolicy(max_engine_restarts=0)).spend() is None


@pytest.mark.parametrize(("name", "value"), [("max_engine_restarts", -1), ("step_timeout", 0), ("step_timeout", "x")])
def test_the_policy_is_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        RestartPolicy(**{name: value})  # type: ignore[arg-type]


def test_restarts_in_a_row_count_however_long_they_take() -> None:
    now = 0.0
    budget = RestartBudget(RestartPolicy(max_engine_restarts=3, engine_restart_window=100), clock=lambda: now)
    for _ in range(3):
        assert budget.spend() is not None
        now += 300  # a start that hangs until its timeout
    assert (len(budget), budget.spend()) == (0, None)
    budget.worked()
    assert budget.spend() is not None
