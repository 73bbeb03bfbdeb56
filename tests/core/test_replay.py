"""A request that moves from one scheduler to another goes on at exactly the next token."""

from __future__ import annotations

import random

import pytest

from quire.messages.request import RequestProgress
from tests.fakes import FakeCore, expected_tokens

LENGTHS = {"short": 3, "long": 40, "pair": 11, "block": 8}
BRANCHES = {"short": 1, "long": 1, "pair": 3, "block": 2}


def submit_all(core: FakeCore) -> None:
    for name, length in LENGTHS.items():
        core.submit(name, list(range(length)), max_tokens=9, params={"n": BRANCHES[name]})


def move(source: FakeCore, target: FakeCore) -> None:
    for request_id in list(source.scheduler.lives.groups):
        target.scheduler.lives.add(source.scheduler.lives.withdraw(request_id))
    source.scheduler.lives.check()
    target.scheduler.lives.check()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("num_steps", range(14))
def test_moved_requests_produce_what_they_would_have(num_steps: int, windows: tuple[int | None, ...]) -> None:
    first, second = (FakeCore(num_blocks=64, max_num_batched_tokens=16, windows=windows) for _ in range(2))
    submit_all(first)
    for _ in range(num_steps):
        first.step()
    move(first, second)
    assert first.scheduler.blocks.pool.num_free == 64
    second.run()
    for name, length in LENGTHS.items():
        for branch in range(BRANCHES[name]):
            given = [*first.tokens.get((name, branch), []), *second.tokens.get((name, branch), [])]
            assert given == expected_tokens(list(range(length)), branch, 9), (name, branch)
            assert ((name, branch) in first.finished) != ((name, branch) in second.finished)


def test_a_request_may_move_again_and_again() -> None:
    rng = random.Random(5)
    core = FakeCore(num_blocks=64, max_num_batched_tokens=16)
    submit_all(core)
    tokens: dict[tuple[str, int], list[int]] = {}
    while core.lives.has_work():
        for _ in range(rng.randrange(4)):
            if core.lives.has_work():
                core.step()
        for key, ids in core.tokens.items():
            tokens.setdefault(key, []).extend(ids)
        successor = FakeCore(num_blocks=64, max_num_batched_tokens=16)
        move(core, successor)
        core = successor
    for name, length in LENGTHS.items():
        for branch in range(BRANCHES[name]):
            assert tokens[name, branch] == expected_tokens(list(range(length)), branch, 9)


@pytest.mark.parametrize("max_num_batched_tokens", [256, 16])
def test_moved_branches_compute_their_prompt_once_and_nobody_waits_for_them(max_num_batched_tokens: int) -> None:
    first, second = (FakeCore(num_blocks=64, max_num_batched_tokens=max_num_batched_tokens) for _ in range(2))
    first.submit("many", list(range(50)), max_tokens=9, params={"n": 5})
    while len(first.tokens.get(("many", 4), [])) < 3:
        first.step()
    move(first, second)
    second.submit("other", [7, 8, 9], max_tokens=4)
    second.step()
    assert "other" in {seq.group.request_id for seq in second.scheduler.running} or max_num_batched_tokens == 16
    second.run()
    for branch in range(5):
        given = [*first.tokens["many", branch], *second.tokens["many", branch]]
        assert given == expected_tokens(list(range(50)), branch, 9)
    outputs = 5 * 9 + 4
    assert second.scheduler.lives.totals.num_computed_tokens < 53 + outputs + 4 * (50 % 16), (
        "full blocks of the prompt: once"
    )


def test_withdrawn_branches_are_those_that_still_run() -> None:
    core = FakeCore(num_blocks=64)
    core.submit("a", [1, 2, 3], params={"n": 3})
    core.step()
    core.step()
    core.abort("a", branch=1)
    request = core.lives.withdraw("a")
    assert request.progress is not None
    assert {branch: len(ids) for branch, ids in request.progress.branches.items()} == {0: 2, 2: 2}
    assert not core.lives.has_work()


def test_numbers_go_on_where_they_were() -> None:
    first, second = FakeCore(num_blocks=64), FakeCore(num_blocks=64)
    first.submit("warm", list(range(20)), max_tokens=2)
    first.run()
    first.submit("a", list(range(20)), max_tokens=6)
    (output,) = first.step()
    assert output.num_cached_tokens == 16
    assert output.stats is not None
    first_token_at = output.stats.first_token_at
    move(first, second)
    second.run()
    last = second.finished["a", 0]
    assert last.num_cached_tokens == 16
    assert last.stats is not None
    assert last.stats.num_generation_tokens == 6
    assert last.stats.first_token_at == first_token_at


def test_progress_without_tokens_is_a_new_request() -> None:
    core = FakeCore(num_blocks=64)
    core.submit("a", [1, 2, 3], params={"n": 2}, progress=RequestProgress())
    core.run()
    assert core.tokens["a", 1] == expected_tokens([1, 2, 3], 1, 4)


@pytest.mark.parametrize("num_steps", range(9))
def test_branches_without_tokens_are_moved_with_those_that_have_some(num_steps: int) -> None:
    """The core that forked the request ended before it could hand out the first token of every branch."""
    prompt = list(range(41))
    first, second = (FakeCore(num_blocks=64, max_num_batched_tokens=16) for _ in range(2))
    begun = expected_tokens(prompt, 0, 1)
    progress = RequestProgress(branches={0: begun, 1: [], 2: []})
    first.submit("a", prompt, max_tokens=5, params={"n": 3}, progress=progress)
    for _ in range(num_steps):
        first.step()
    move(first, second)
    second.run()
    for branch in range(3):
        given = [*first.tokens.get(("a", branch), []), *second.tokens.get(("a", branch), [])]
        assert [*([] if branch else begun), *given] == expected_tokens(prompt, branch, 5), branch
