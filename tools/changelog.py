"""What CHANGELOG.md says of a version; fails where it says nothing.

python tools/changelog.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "CHANGELOG.md"
HEADING = re.compile(r"^## \[([^\]]+)\](?: - (.+))?$", re.MULTILINE)


def sections(text: str) -> dict[str, tuple[str | None, str]]:
    """(date, what it says) of each version, newest first; changes that no version has yet are `Unreleased`."""
    parts = HEADING.split(text)[1:]
    return {
        version: (date, body.strip()) for version, date, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def notes(text: str, tag: str) -> str:
    """What is new in a tagged version.

    Raises: SystemExit where there is no section for it.
    """
    known = sections(text)
    version = tag.removeprefix("v")
    if version not in known or not known[version][1]:
        sys.exit(f"CHANGELOG.md has no section for {version}, only for {', '.join(known)}. Rename 'Unreleased' first")
    return known[version][1]


if __name__ == "__main__":
    print(notes(FILE.read_text(encoding="utf-8"), sys.argv[1]))
