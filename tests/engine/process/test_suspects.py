"""Who is suspected, and what it takes to be found guilty."""

from __future__ import annotations

from quire.engine.process.suspects import Suspects


def test_a_core_killed_from_outside_makes_nobody_suspect() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert suspects.core_ended(["a", "b"], crashed=False) is None
    assert "a" not in suspects


def test_a_crash_makes_everybody_in_the_core_suspect_until_a_token_comes() -> None:
    suspects = Suspects()
    assert suspects.core_ended(["a", "b"], crashed=True) is None
    assert "a" in suspects
    assert "c" not in suspects
    suspects.clear("a")
    assert "a" not in suspects
    assert suspects.core_ended(["c"], crashed=False) is None
    assert "b" in suspects


def test_whoever_is_alone_in_a_core_that_crashes_is_guilty() -> None:
    suspects = Suspects()
    suspects.core_ended(["a", "b"], crashed=True)
    suspects.try_alone("b")
    assert suspects.core_ended(["a", "b"], crashed=True) == "b"


def test_being_alone_in_a_core_that_is_killed_proves_nothing() -> None:
    suspects = Suspects()
    suspects.core_ended(["a"], crashed=True)
    for _ in range(3):
        suspects.try_alone("a")
        assert suspects.core_ended(["a"], crashed=False) is None
    assert suspects.core_ended(["a"], crashed=True) is None


def test_a_trial_ends_with_its_token_or_its_core() -> None:
    suspects = Suspects()
    suspects.core_ended(["a"], crashed=True)
    suspects.try_alone("a")
    suspects.clear("a")
    assert suspects.core_ended(["a"], crashed=True) is None
    suspects.try_alone("a")
    suspects.try_alone(None)
    assert suspects.core_ended(["a"], crashed=True) is None
