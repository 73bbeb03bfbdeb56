"""Random mixes in random engines: some seeds in each run of the tests, and that faults would be seen.

`python -m tools.fuzz_invariance --seeds 0:10000` runs many more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tools.fuzz_invariance.__main__ import main
from tools.fuzz_invariance.cases import Case, EngineChoice, Event, Kind, RequestChoice
from tools.fuzz_invariance.check import Checker
from tools.fuzz_invariance.draw import draw_case
from tools.fuzz_invariance.engines import Engines
from tools.fuzz_invariance.faults import FAULTS
from tools.fuzz_invariance.run import verdicts
from tools.fuzz_invariance.shrink import shrink

REACHED = (
    "preemptions",
    "cached prompt tokens",
    "copied blocks",
    "loaded pages",
    "beam searches",
    "failed",
    "stopped by a string",
    "with a grammar",
    "ended with a grammar",
    "steps decided ahead",
    "tokens taken on the device",
    *Kind,
)
"""What has to happen in some cases, or they show little."""


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    engines = Engines(tmp_path_factory.mktemp("models"))
    yield Checker(engines)
    engines.close()


def assert_clean(checker: Checker, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for verdict in verdicts(checker, seeds, None, 1):
        assert not verdict.problems, f"seed {verdict.seed}: {verdict.problems}"
        counts += verdict.counts
    assert not set(REACHED) - counts.keys()
    assert counts["refused"] < counts["requests"] / 20


def test_requests_get_what_they_get_alone(checker: Checker) -> None:
    assert_clean(checker, range(60))


def test_what_fails_does_not_write_to_blocks_that_others_read(checker: Checker) -> None:
    """One step of a request fails before it is begun, the next one, decided already, after it was computed."""
    prompt = tuple((7 * index) % 250 + 30 for index in range(41))
    late = Event(at=7, kind=Kind.POISON_LATE, request=0)
    case = Case(
        seed=0,
        engine=EngineChoice(long_prefill_token_threshold=7, max_steps_in_flight=2),
        requests=(
            RequestChoice(token_ids=prompt, params={"max_tokens": 1}),
            RequestChoice(token_ids=(132, 222, 270, 129), params={"max_tokens": 6}, arrives_at=18, follows=0),
        ),
        events=(Event(at=3, kind=Kind.POISON, request=0), late),
    )
    for at in range(4, 9):  # of two steps in flight, which one has begun when depends on the clock
        assert not checker.check(replace(case, events=(case.events[0], replace(late, at=at)))).problems


@pytest.mark.slow
def test_requests_get_what_they_get_alone_in_many_cases(checker: Checker) -> None:
    assert_clean(checker, range(10_000, 12_000))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, checker: Checker) -> None:
    assert any(verdict.problems for verdict in verdicts(checker, range(300), fault, 1))


def test_a_failing_case_is_made_smaller(checker: Checker) -> None:
    def fails(case: Case) -> bool:
        return bool(checker.check(case, "early-trim").problems)

    case = next(case for case in map(draw_case, range(60)) if fails(case))
    smaller = shrink(case, fails)
    assert fails(smaller)
    assert len(smaller.requests) < len(case.requests)
    assert f"seed {case.seed}" in smaller.describe()


def test_equal_seeds_give_equal_cases() -> None:
    assert draw_case(7) == draw_case(7)
    assert draw_case(7) != draw_case(8)


def test_what_refers_to_a_request_that_is_left_out_goes_with_it() -> None:
    case = draw_case(0)
    abort, move = Event(at=3, kind=Kind.ABORT, request=0), Event(at=4, kind=Kind.MOVE)
    seen: list[Case] = []

    def note(smaller: Case) -> bool:
        seen.append(smaller)
        return False

    shrink(Case(seed=0, engine=case.engine, requests=case.requests[:2], events=(abort, move)), note)
    assert [len(smaller.events) for smaller in seen if len(smaller.requests) == 1] == [2, 1]


def test_the_command_says_how_to_run_a_failing_seed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2"]) == 0
    assert main(["--seeds", "0:60", "--planted", "stale-parameters"]) == 1
    printed = capsys.readouterr().out
    assert "again: python -m tools.fuzz_invariance --seeds" in printed
    assert "--planted stale-parameters" in printed


@pytest.mark.multiproc
def test_several_processes_share_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:30", "--jobs", "2"]) == 0
    assert "30 cases" in capsys.readouterr().out
