"""The changelog has the form it claims, and its newest version is the one that is built."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

import quire
from tools.changelog import notes, sections

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
BUILT = Version(quire.__version__)


def test_versions_go_down_and_have_a_date() -> None:
    newest, *older = sections(TEXT)
    released = older if newest == "Unreleased" else [newest, *older]
    assert [str(Version(name)) for name in released] == released
    assert released == sorted(released, key=Version, reverse=True)
    for name in released:
        assert date.fromisoformat(sections(TEXT)[name][0] or "")


def test_changes_are_of_known_kinds() -> None:
    for _, body in sections(TEXT).values():
        assert set(re.findall(r"^### (.*)$", body, re.MULTILINE)) <= KINDS


@pytest.mark.skipif(BUILT.is_devrelease or quire.__version__ == "0.0", reason="not a release")
def test_a_release_has_its_section() -> None:
    assert notes(TEXT, f"v{quire.__version__}")


def test_a_tag_without_a_section_is_refused() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Fixed\n\n- One.\n\n## [0.1.0]\n"
    assert notes(text, "v0.2.0") == "### Fixed\n\n- One."
    for tag in ("v0.3.0", "v0.1.0"):
        with pytest.raises(SystemExit, match=f"no section for {tag[1:]}, only for Unreleased, 0.2.0, 0.1.0"):
            notes(text, tag)


def test_the_readme_and_the_site_lead_to_it() -> None:
    assert "(CHANGELOG.md)" in (ROOT / "README.md").read_text()
    assert "changelog.md" in (ROOT / "mkdocs.yml").read_text()
    assert (ROOT / "docs/changelog.md").read_text().strip() == '--8<-- "CHANGELOG.md"'
