"""The page of limits is what the flags say, and other pages lead to it."""

from __future__ import annotations

from pathlib import Path

from tools.limits import page

ROOT = Path(__file__).parents[2]


def test_the_page_of_limits_is_what_the_flags_say() -> None:
    assert (ROOT / "docs/limits.md").read_text() == page(), "run: python -m tools.limits > docs/limits.md"


def test_operators_are_led_to_it() -> None:
    assert "limits.md" in (ROOT / "docs/operations.md").read_text()
    assert "docs/limits.md" in (ROOT / "SECURITY.md").read_text()
    assert "limits.md" in (ROOT / "mkdocs.yml").read_text()
