"""Blocks that leave the pool come back from slots of tiers, and whatever goes wrong there is a miss."""

from __future__ import annotations

import pytest

from quire.core.kv.tiers import KVTiers
from quire.messages.kv_tiers import PageContent, PageMove
from quire.messages.stats import Phase, Wait
from quire.messages.step import SchedulerOutputs
from tests.fakes import STATE, FakeCore, expected_tokens


def prompt(first: int, num_tokens: int = 17) -> list[int]:
    """One that has nothing in common with prompts of another first token."""
    return [first, *range(100, 99 + num_tokens)]


def computed_tokens(core: FakeCore, request_id: str, token_ids: list[int], num_tokens: int = 4) -> int:
    """How many tokens are computed for a request that runs alone and gives the right answer."""
    before = core.lives.totals.num_computed_tokens
    core.submit(request_id, token_ids, max_tokens=num_tokens)
    core.run()
    assert core.tokens[request_id, 0] == expected_tokens(token_ids, 0, num_tokens)
    return core.lives.totals.num_computed_tokens - before


def core_of(tiers: tuple[int, ...], *, num_blocks: int = 8, **options: object) -> FakeCore:
    """Each of the prompts here takes five or six of the eight blocks."""
    return FakeCore(num_blocks=num_blocks, tiers=tiers, max_model_len=32, **options)  # type: ignore[arg-type]


def evict(core: FakeCore) -> None:
    """Fill the pool with other prompts."""
    core.submit("evicts", prompt(60, 26))
    core.run()
    del core.finished["evicts", 0], core.tokens["evicts", 0]


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6), (STATE,), (None, STATE), (4, STATE, STATE)])
@pytest.mark.parametrize("tiers", [(40,), (1, 40), (3, 20)])
def test_an_evicted_prefix_is_loaded_instead_of_computed(
    tiers: tuple[int, ...], windows: tuple[int | None, ...]
) -> None:
    num_blocks = 4 if windows == (STATE,) else 8 * len(windows)
    core = core_of(tiers, num_blocks=num_blocks, windows=windows)
    assert computed_tokens(core, "a", prompt(1)) == 20
    evict(core)
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_saves > 0
    assert computed_tokens(core, "again", prompt(1)) == 4, "the last token, and those that follow"
    assert core.blocks.tiers.num_loads > 0
    assert core.blocks.tiers.num_failures == 0


def test_without_tiers_the_same_prefix_is_computed_again() -> None:
    core = core_of(())
    computed_tokens(core, "a", prompt(1))
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) == 20
    assert core.blocks.tiers is None
    assert not core.blocks.is_moving


def test_what_no_tier_has_room_for_is_computed_again() -> None:
    core = core_of((1, 1))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) > 4


def test_a_page_that_was_loaded_is_not_saved_again() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    computed_tokens(core, "again", prompt(1))
    assert core.blocks.tiers is not None
    num_saves = core.blocks.tiers.num_saves
    evict(core)
    computed_tokens(core, "once more", prompt(1))
    assert core.blocks.tiers.num_saves - num_saves <= 7, "at most what was new: the tail of the two other prompts"
    assert core.blocks.tiers.num_pages == len({*core.executor.pages})


def test_a_loading_sequence_is_computed_from_the_next_step_on_and_holds_nobody_up() -> None:
    core = core_of((40,), num_blocks=16)
    computed_tokens(core, "a", prompt(1))
    for first in range(2, 6):
        computed_tokens(core, str(first), prompt(first))
    core.submit("new", [7, 8, 9], max_tokens=3)
    core.submit("again", prompt(1))
    core.step()
    assert len(core.last_plan.blocks_to_swap_in) == 4
    assert len(core.last_plan.seq_ids) == 1, "only the other one is computed meanwhile"
    core.step()
    assert len(core.last_plan.seq_ids) == 2
    effort = core.lives.groups["again"].effort
    assert effort.held_s[Wait.LOADING] > 0, "and its timeline says so"
    assert Phase.STALLED in effort.phase_s
    core.run()
    assert core.tokens["again", 0] == expected_tokens(prompt(1), 0, 4)


def test_sequences_that_want_a_page_while_it_is_loaded_wait_for_it_and_share_it() -> None:
    core = core_of((40,), num_blocks=16)
    computed_tokens(core, "a", prompt(1))
    for first in range(2, 6):
        computed_tokens(core, str(first), prompt(first))
    for name in ("b", "c"):
        core.submit(name, prompt(1))
    core.step()
    assert len(core.last_plan.blocks_to_swap_in) == 4, "each page once"
    assert not core.last_plan.seq_ids
    core.run()
    assert core.tokens["b", 0] == core.tokens["c", 0] == expected_tokens(prompt(1), 0, 4)


def test_a_corrupted_page_is_a_miss_and_the_prefix_before_it_counts() -> None:
    core = core_of((40,), num_blocks=16)
    computed_tokens(core, "a", prompt(1))
    for first in range(2, 6):
        computed_tokens(core, str(first), prompt(first))
    slots = [slot for slot, (content, _) in core.executor.pages.items() if content[3] == tuple(prompt(1)[8:12])]
    assert len(slots) >= 1
    core.executor.corrupt |= {
        slot for slot in slots if core.blocks.tiers is not None and core.blocks.tiers.find(core.executor.pages[slot][0])
    }
    chain = [core.executor.pages[slot][0] for slot in core.executor.corrupt]
    assert chain
    for name in ("b", "c"):
        core.submit(name, prompt(1))
    core.run()
    assert core.tokens["b", 0] == core.tokens["c", 0] == expected_tokens(prompt(1), 0, 4)
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_failures == 1
    assert core.finished["b", 0].num_cached_tokens in (8, 12), "as found in the end: not what was promised first"


def test_a_save_that_did_not_happen_is_found_out() -> None:
    core = core_of((40,))
    core.executor.skipped_saves = set(range(8))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) == 20
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_failures > 0


def test_the_check_of_these_tests_finds_a_page_with_the_wrong_bytes() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    for slot, (content, _) in core.executor.pages.items():
        core.executor.pages[slot] = content, ([(0, 0, 99)] * 4, None)
    core.submit("again", prompt(1))
    with pytest.raises(AssertionError, match="again"):
        core.run()


def test_prefixes_that_spare_too_little_are_computed() -> None:
    core = core_of((40,), min_load_tokens=17)
    computed_tokens(core, "a", prompt(1))
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) == 20
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_loads == 0
    core = core_of((40,), min_load_tokens=16)
    computed_tokens(core, "a", prompt(1))
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) == 4


@pytest.mark.parametrize("tiers", [(), (40,)])
def test_a_request_that_does_not_read_the_cache_finds_its_own_blocks_after_a_preemption(tiers: tuple[int, ...]) -> None:
    core = FakeCore(num_blocks=8, tiers=tiers, max_model_len=32)
    skips = {"skip_reading_prefix_cache": True}
    computed_tokens(core, "other", prompt(2))
    before = core.lives.totals.num_computed_tokens
    core.submit("first", prompt(1), max_tokens=12)
    core.submit("second", prompt(2, 9), max_tokens=12, params=skips)
    core.step()
    assert core.lives.totals.num_computed_tokens - before == 17 + 9, "nothing of another one's"
    core.run()
    assert core.scheduler.num_preemptions > 0
    assert core.tokens["second", 0] == expected_tokens(prompt(2, 9), 0, 12)
    num_recomputed = core.lives.totals.num_computed_tokens - before - (17 + 11) - (9 + 11)
    assert num_recomputed < 4 * core.scheduler.num_preemptions + 1 or not tiers


def test_salted_prefixes_stay_with_their_salt() -> None:
    core = core_of((40,))
    core.submit("a", prompt(1), cache_salt="x")
    core.run()
    evict(core)
    assert computed_tokens(core, "again", prompt(1)) == 20


def test_a_reset_forgets_the_tiers_too() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    core.blocks.forget_cached()
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_pages == 0
    assert computed_tokens(core, "again", prompt(1)) == 20


def test_an_interrupted_step_leaves_nothing_that_was_not_moved() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    core.submit("b", prompt(60, 26))
    assert core.interrupt().blocks_to_swap_out, "it evicts"
    core.run()
    assert core.tokens["b", 0] == expected_tokens(prompt(60, 26), 0, 4)
    core.submit("again", prompt(1))
    core.run()
    assert core.tokens["again", 0] == expected_tokens(prompt(1), 0, 4)


def test_a_reset_after_an_interrupted_step_loses_no_slot() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    core.submit("again", prompt(1))
    assert core.interrupt().blocks_to_swap_in
    core.blocks.forget_cached()
    core.executor.pages.clear()
    core.run()
    core.lives.check()
    assert core.tokens["again", 0] == expected_tokens(prompt(1), 0, 4)


def test_a_failing_step_does_not_save_what_it_has_written_over() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    core.executor.fail_on = lambda request_id: request_id == "poison"
    core.submit("poison", prompt(30, 20))
    core.submit("other", prompt(31, 5))
    core.run()
    core.executor.fail_on = lambda request_id: False
    assert computed_tokens(core, "again", prompt(1)) == 4
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_failures == 0


def test_a_load_that_fails_beside_a_failing_request_is_told_too() -> None:
    core = core_of((40,), num_blocks=16)
    computed_tokens(core, "a", prompt(1))
    for first in range(2, 6):
        computed_tokens(core, str(first), prompt(first))
    core.executor.corrupt |= set(core.executor.pages)
    core.executor.fail_on = lambda request_id: request_id == "poison"
    core.submit("poison", [7, 8, 9])
    core.submit("again", prompt(1))
    core.step()
    assert core.last_plan.blocks_to_swap_in
    assert ("poison", 0) in core.finished
    core.run()
    assert core.tokens["again", 0] == expected_tokens(prompt(1), 0, 4)
    assert core.blocks.tiers is not None
    assert core.blocks.tiers.num_failures > 0


def test_aborting_a_sequence_while_it_is_loaded_leaves_what_was_loaded() -> None:
    core = core_of((40,))
    computed_tokens(core, "a", prompt(1))
    evict(core)
    core.submit("again", prompt(1))
    plan = core.scheduler.schedule()
    assert plan.blocks_to_swap_in
    core.abort("again")
    core.scheduler.update(plan, core.executor.execute(plan))
    core.lives.check()
    assert computed_tokens(core, "once more", prompt(1)) == 4


# -- slots -----------------------------------------------------------------------------------------------------


def content(number: int) -> PageContent:
    return 0, number.to_bytes(16), b"", (number,)


def test_pages_go_down_the_tiers_the_least_recently_used_first() -> None:
    tiers = KVTiers((2, 2), min_load_tokens=1)
    for number in range(5):
        tiers.save(number, content(number))
        plan = SchedulerOutputs()
        tiers.write(plan)
        assert [move[2] for move in plan.blocks_to_swap_out] == [content(number)]
        tiers.ended([])
        tiers.check()
    assert [tiers.find(content(number)) is not None for number in range(5)] == [False, True, True, True, True]
    assert [(tiers.find(content(number)) or 0) >= 2 for number in range(1, 5)] == [True, True, False, False]


def test_a_page_with_the_same_hash_and_other_tokens_is_another_page() -> None:
    tiers = KVTiers((2,), min_load_tokens=1)
    tiers.save(0, content(1))
    group, own, parent, tokens = content(1)
    assert tiers.find(content(1)) == 0
    assert tiers.find((group, own, parent, (*tokens, 5))) is None
    assert tiers.find((group, own, b"x", tokens)) is None
    assert tiers.find((group + 1, own, parent, tokens)) is None


def test_within_a_step_no_slot_is_used_twice() -> None:
    tiers = KVTiers((2, 3), min_load_tokens=1)
    for number in range(2):
        tiers.save(number, content(number))
    tiers.write(SchedulerOutputs())
    tiers.ended([])
    for number in range(2, 8):
        tiers.save(number, content(number))
    plan = SchedulerOutputs()
    tiers.write(plan)
    sources, destinations = ([move[end] for move in plan.pages_to_move] for end in (0, 1))
    written = destinations + [move[1] for move in plan.blocks_to_swap_out]
    assert sorted(written) == list(range(5)), "each slot once; what comes then finds none"
    assert sorted(sources) == [0, 1]
    assert min(destinations) >= 2
    tiers.ended([])
    tiers.check()


def filled(sizes: tuple[int, ...], numbers: range) -> KVTiers:
    """Tiers in which pages were saved in this order."""
    tiers = KVTiers(sizes, min_load_tokens=1)
    for number in numbers:
        tiers.save(number, content(number))
        moved(tiers)
    return tiers


def moved(tiers: KVTiers) -> SchedulerOutputs:
    """What a step moves."""
    plan = SchedulerOutputs()
    tiers.write(plan)
    tiers.ended([])
    tiers.check()
    return plan


def flushed(tiers: KVTiers, blocks: list[int], most: int) -> list[tuple[list[int], list[int]]]:
    """(pages saved, pages moved) of each step of a flush of these blocks."""
    pages, kept = tiers.pages_to_flush([(number, content(number)) for number in blocks]), set[int]()
    steps = []
    while tiers.flush(pages, kept, most):
        plan = moved(tiers)
        steps.append(
            ([number_of(move) for move in plan.blocks_to_swap_out], [number_of(m) for m in plan.pages_to_move])
        )
    return steps


def number_of(move: PageMove) -> int:
    return next(number for number in range(100) if content(number) == move[2])


def in_file(tiers: KVTiers, first_slot: int) -> set[int]:
    slots = {number: tiers.find(content(number)) for number in range(100)}
    return {number for number, slot in slots.items() if slot is not None and slot >= first_slot}


def test_flushing_brings_what_was_used_last_down_first() -> None:
    tiers = filled((3, 2), range(3))
    assert flushed(tiers, [7, 1], most=5) == [([7], [1])], "and then the file is full"
    assert in_file(tiers, 3) == {7, 1}


def test_flushing_takes_many_steps_and_stops_where_it_is_told_to() -> None:
    tiers = filled((3, 9), range(3))
    assert flushed(tiers, [7, 8, 9], most=2) == [([7, 8], []), ([9], [2]), ([], [1, 0])]
    assert in_file(tiers, 3) == {7, 8, 9, 0, 1, 2}
    tiers = filled((3, 9), range(3))
    pages = tiers.pages_to_flush([(7, content(7))])
    assert tiers.flush(pages, set(), 1) == 1
    moved(tiers)
    assert in_file(tiers, 3) == {7}, "all that was written is there, and nothing else is lost"
    assert tiers.num_pages == 4


@pytest.mark.parametrize("most", [1, 2, 10])
def test_flushing_replaces_older_pages_of_the_file_and_none_that_are_newer(most: int) -> None:
    tiers = filled((4,), range(4))
    written = flushed(tiers, [9, 0, 8, 2], most)
    assert [number for saves, _ in written for number in saves] == [9, 8]
    assert in_file(tiers, 0) == {9, 0, 8, 2}
    tiers = filled((4,), range(4))
    flushed(tiers, [10, 11, 12, 13, 14, 15], most)
    assert in_file(tiers, 0) == {10, 11, 12, 13}
