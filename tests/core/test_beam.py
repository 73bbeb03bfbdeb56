"""A beam search finds the same completions whatever happens to its sequences: those of a search written plainly."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from quire.messages.output import FinishReason
from tests.fakes import VOCAB_SIZE, FakeCore, next_logprobs

Found = list[tuple[list[int], float]]
"""Output tokens and the sum of their logprobs, best first."""
SEARCHES: dict[str, dict[str, Any]] = {
    "two": {"prompt": [1, 2, 3], "width": 2, "max_tokens": 12},
    "four": {"prompt": list(range(21)), "width": 4, "max_tokens": 9, "ends": range(8)},
    "one token": {"prompt": [7] * 9, "width": 3, "max_tokens": 1, "ends": range(20)},
    "early": {"prompt": list(range(10)), "width": 3, "max_tokens": 20, "ends": range(12), "early": True},
    "never": {"prompt": list(range(10)), "width": 3, "max_tokens": 20, "ends": range(12), "early": "never"},
    "short": {"prompt": list(range(10)), "width": 3, "max_tokens": 20, "ends": range(12), "penalty": -1.0},
    "long": {"prompt": list(range(10)), "width": 4, "max_tokens": 14, "ends": range(12), "penalty": 2.0},
}


def plainly(
    prompt: list[int],
    width: int,
    max_tokens: int,
    ends: Any = (),
    early: bool | str = False,
    penalty: float = 1.0,
) -> Found:
    """The search of transformers, from all continuations of all beams, with nothing shared and nothing kept."""

    def score(found: tuple[list[int], float]) -> float:
        return found[1] / len(found[0]) ** penalty

    beams: Found = [([], 0.0)]
    best: Found = []
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                ([*tokens, token], total + next_logprobs((*prompt, *tokens))[token])
                for tokens, total in beams
                for token in range(VOCAB_SIZE)
            ),
            key=lambda found: -found[1],
        )
        is_last = length == max_tokens
        best += [found for found in ranked[:width] if is_last or found[0][-1] in ends]
        best = sorted(best, key=score, reverse=True)[:width]
        beams = [found for found in ranked if found[0][-1] not in ends][:width]
        if len(best) == width:
            hoped = max_tokens if early == "never" and penalty > 0 else length
            if early is True or beams[0][1] / hoped**penalty <= score(best[-1]):
                break
    return best


def submit(core: FakeCore, name: str, **fields: Any) -> None:
    search = {"ends": (), "early": False, "penalty": 1.0, **SEARCHES[name]}
    params = {
        "temperature": 0,
        "use_beam_search": True,
        "n": search["width"],
        "stop_token_ids": list(search["ends"]),
        "early_stopping": search["early"],
        "length_penalty": search["penalty"],
        **fields.pop("params", {}),
    }
    core.submit(name, search["prompt"], max_tokens=search["max_tokens"], params=params, **fields)


def found(core: FakeCore, name: str) -> Found:
    outputs = []
    while (name, len(outputs)) in core.finished:
        outputs.append(core.finished[name, len(outputs)])
    return [(output.new_token_ids, output.cum_logprob or 0.0) for output in outputs]


def check(actual: Found, name: str) -> None:
    expected = plainly(**SEARCHES[name])
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected], name
    for (_, given), (_, total) in zip(actual, expected, strict=True):
        assert math.isclose(given, total, abs_tol=1e-9)


@pytest.mark.parametrize("name", SEARCHES)
def test_alone(name: str) -> None:
    core = FakeCore(num_blocks=64)
    submit(core, name)
    core.run()
    check(found(core, name), name)
    ends = SEARCHES[name].get("ends", ())
    for tokens, _ in found(core, name):
        output = core.finished[name, found(core, name).index((tokens, _))]
        assert output.finish_reason is (FinishReason.STOP if tokens[-1] in ends else FinishReason.LENGTH)
        assert output.stop_reason == (tokens[-1] if tokens[-1] in ends else None)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_together_and_with_others(windows: tuple[int | None, ...], enable_prefix_caching: bool) -> None:
    core = FakeCore(
        num_blocks=256,
        max_num_seqs=40,
        max_num_batched_tokens=48,
        windows=windows,
        enable_prefix_caching=enable_prefix_caching,
    )
    for index, name in enumerate(SEARCHES):
        submit(core, name)
        core.submit(f"other {index}", list(range(index, 20 + index)), max_tokens=7, params={"n": 2})
    core.run()
    for name in SEARCHES:
        check(found(core, name), name)


@pytest.mark.parametrize("num_blocks", [10, 11, 12])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_with_too_little_memory_for_all_beams_at_once(seed: int, enable_prefix_caching: bool, num_blocks: int) -> None:
    rng = random.Random(seed)
    core = FakeCore(num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching, max_num_seqs=6)
    names = rng.sample(list(SEARCHES), len(SEARCHES))
    for index, name in enumerate(names):
        submit(core, name)
        core.submit(f"other {index}", list(range(12)), max_tokens=rng.randrange(1, 12), params={"n": 2})
        for _ in range(rng.randrange(6)):
            core.step()
    core.run()
    for name in names:
        check(found(core, name), name)
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", range(4))
def test_with_several_tenants(seed: int) -> None:
    rng = random.Random(seed)
    core = FakeCore(num_blocks=20, max_num_seqs=6)
    for index, name in enumerate(SEARCHES):
        submit(core, name, tenant=rng.choice("ab"))
        core.submit(f"other {index}", list(range(12)), max_tokens=9, params={"n": 3}, tenant="c")
        for _ in range(rng.randrange(4)):
            core.step()
    core.run()
    for name in SEARCHES:
        check(found(core, name), name)


@pytest.mark.parametrize("seed", [*range(20), 806, 952])
def test_searches_of_several_tenants_never_wait_for_each_other(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([9, 10, 12, 16, 24, 48])
    core = FakeCore(
        num_blocks=num_blocks,
        max_num_seqs=rng.choice([4, 5, 6, 8]),
        enable_prefix_caching=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice([8, 16, 32]),
        windows=rng.choice([(None,), (None, 6)]) if num_blocks >= 24 else (None,),
    )
    fits = {name for name, search in SEARCHES.items() if len(search["prompt"]) + search["max_tokens"] <= num_blocks * 4}
    names, aborted = [name for name in SEARCHES if name in fits], set()
    rng.shuffle(names)
    for index, name in enumerate(names):
        submit(core, name, tenant=rng.choice("ab"))
        prompt, max_tokens = list(range(rng.randrange(1, 20))), rng.randrange(1, 12)
        params = {"n": rng.randrange(1, 4)}
        core.submit(f"other {index}", prompt, max_tokens=max_tokens, params=params, tenant=rng.choice("abc"))
        for _ in range(rng.randrange(5)):
            core.step()
        if rng.random() < 0.15 and core.abort(name):
            aborted.add(name)
        if rng.random() < 0.15 and core.lives.has_work():
            core.interrupt()
    core.run(5000)
    for name in fits - aborted:
        check(found(core, name), name)


def test_steps_that_are_interrupted() -> None:
    core = FakeCore(num_blocks=64, max_num_seqs=40, max_num_batched_tokens=48)
    rng = random.Random(3)
    for name in SEARCHES:
        submit(core, name)
    while core.lives.has_work():
        if rng.random() < 0.2:
            core.interrupt()
        else:
            core.step()
    for name in SEARCHES:
        check(found(core, name), name)


@pytest.mark.parametrize("seed", range(6))
def test_moved_from_core_to_core(seed: int) -> None:
    rng = random.Random(seed)
    core = FakeCore(num_blocks=64, max_num_seqs=24, max_num_batched_tokens=24)
    results: dict[str, Found] = {}
    for name in SEARCHES:
        submit(core, name)
    while core.lives.has_work():
        for _ in range(rng.randrange(1, 5)):
            if core.lives.has_work():
                core.step()
        results |= {name: found(core, name) for name in SEARCHES if (name, 0) in core.finished}
        successor = FakeCore(num_blocks=64, max_num_seqs=24, max_num_batched_tokens=24)
        for request_id in list(core.lives.groups):
            successor.lives.add(core.lives.withdraw(request_id))
        assert core.blocks.pool.num_free == 64
        core = successor
    for name in SEARCHES:
        check(results[name], name)


def test_a_beam_that_fails_takes_its_request_with_it_and_no_other() -> None:
    core = FakeCore(num_blocks=128, max_num_seqs=40)
    for name in SEARCHES:
        submit(core, name)
    steps = iter(range(100))
    core.executor.fail_on = lambda request_id: request_id == "four" and next(steps) > 8
    core.run()
    for name in SEARCHES:
        if name == "four":
            assert [core.finished[name, i].finish_reason for i in range(4)] == [FinishReason.ERROR] * 4
        else:
            check(found(core, name), name)


def test_the_best_n_of_the_beams_are_returned() -> None:
    core = FakeCore(num_blocks=64)
    submit(core, "four", params={"n": 2, "beam_width": 4})
    core.run()
    assert found(core, "four") == found_of_all("four")[:2]


def found_of_all(name: str) -> Found:
    core = FakeCore(num_blocks=64)
    submit(core, name)
    core.run()
    return found(core, name)


def test_beams_take_their_seats_from_the_start_and_share_what_they_have_in_common() -> None:
    core = FakeCore(num_blocks=64)
    submit(core, "four")
    core.step()
    assert core.lives.num_slots == 4
    prompt = -(-len(SEARCHES["four"]["prompt"]) // 4)
    core.step()
    used = core.blocks.pool.num_blocks - core.blocks.pool.num_free
    assert used <= prompt + 3, "beams share the full blocks of the prompt"
    assert core.abort("four", branch=2), "one beam cannot go alone"
    assert not core.lives.has_work()
    assert core.blocks.pool.num_free == core.blocks.pool.num_blocks


def test_a_request_that_takes_all_seats_is_not_kept_out_by_a_search_of_another_tenant() -> None:
    core = FakeCore(num_blocks=64, max_num_seqs=4)
    submit(core, "never")
    core.submit("all seats", [1], max_tokens=1, params={"n": 4}, tenant="other")
    core.run(200)
    check(found(core, "never"), "never")
