"""What the page shows of a family and of a package is what the files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adding_a_model.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "tests/packages/quire-example-family"


def added() -> dict[str, str]:
    """Path -> the lines that the page's diff adds to it."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^--- .*\n\+\+\+ b/(.*)\n@@.*\n", diff, flags=re.MULTILINE)[1:]
    return {
        path: "".join(line[1:] for line in lines.splitlines(keepends=True))
        for path, lines in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_diff_has_a_spec_a_line_of_the_registry_and_rows_of_the_tests() -> None:
    assert list(added()) == [
        "quire/config/families/starcoder2.py",
        "quire/config/families/__init__.py",
        "tests/family_configs.py",
        "tests/models/cases/unlike_llama.py",
    ]


@pytest.mark.parametrize("path", added())
def test_the_diff_shows_what_the_files_say(path: str) -> None:
    text, shown = (ROOT / path).read_text(encoding="utf-8"), added()[path]
    assert text == shown if path.endswith("starcoder2.py") else shown in text


def test_the_package_is_shown_as_it_is() -> None:
    files = [PACKAGE / "pyproject.toml", *sorted((PACKAGE / "quire_example_family").glob("*.py"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    section = PAGE[PAGE.index("## Out of tree") :]
    blocks = [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]
    shown = [code for code in blocks if "register_model" not in code]
    assert len(shown) == 3
    assert all(code in text for code in shown)
