"""Schemas and labelled instances in the files of the two collections."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema, and instances of which is known whether they are valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]] = field(default_factory=list)


def cases(directory: Path, limit: int | None, seed: int = 0) -> list[Case]:
    """All cases below a directory; with a limit, so many of them, drawn at random."""
    paths = sorted(path for path in directory.rglob("*.json") if "optional" not in path.parts)
    if limit is not None:
        random.Random(seed).shuffle(paths)
    found: list[Case] = []
    for path in paths:
        found += _read(path)
        if limit is not None and len(found) >= limit:
            return found[:limit]
    return found


def _read(path: Path) -> Iterator[Case]:
    raw = json.loads(path.read_text())
    if isinstance(raw, list):  # JSON-Schema-Test-Suite
        for group in raw:
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Case(f"{path.stem}: {group['description']}", group["schema"], tests)
    elif "tests" in raw and "schema" in raw:  # MaskBench
        yield Case(path.stem, raw["schema"], [(test["data"], test["valid"]) for test in raw["tests"]])
    else:
        yield Case(path.stem, raw)
