"""Which tokens count as looked up in the prefix cache."""

from __future__ import annotations

from tests.fakes import FakeCore


def test_requests_that_do_not_read_the_cache_do_not_count_as_misses() -> None:
    core = FakeCore()
    for name, params in (
        ("reads", {}),
        ("scores", {"prompt_logprobs": 1}),
        ("skips", {"skip_reading_prefix_cache": True}),
    ):
        core.submit(name, list(range(9)), params=params)
        core.run()
    assert (core.blocks.num_queried_tokens, core.blocks.num_hit_tokens) == (9, 0)
    core.submit("again", list(range(9)))
    core.run()
    assert (core.blocks.num_queried_tokens, core.blocks.num_hit_tokens) == (18, 8)


def test_nothing_counts_while_caching_is_off() -> None:
    core = FakeCore(enable_prefix_caching=False)
    core.submit("a", list(range(9)))
    core.run()
    assert core.blocks.num_queried_tokens == 0
