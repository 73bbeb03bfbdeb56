"""Write docs/limits.md: every limit of a server with its flag, default and meaning, from the knobs themselves.

python -m tools.limits > docs/limits.md
"""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.engine.front.admission import AdmissionLimits
from quire.engine.process.restart_policy import RestartPolicy
from quire.server.settings import ServerSettings

HEAD = """\
# Limits

Every limit of `quire serve` that a flag sets. Sizes are bytes, times are seconds. `tools/limits.py` writes
this page from the flags themselves. What is answered beyond a limit, and why it is there, is in [Running a
server](operations.md). The bounds of single fields of a request have no flag; they are in
[Security](security.md).
"""
NO_LIMITS = {"port", "api_server_count"}
SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("Connections, requests and bodies", ServerSettings),
    ("The queue", AdmissionLimits),
    ("Processes that fail", RestartPolicy),
)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {title}\n\n{table(knobs)}" for title, knobs in SECTIONS)


def table(knobs: type[Any]) -> str:
    """One row for each number in a class of knobs."""
    rows = [_row(option) for option in dataclasses.fields(knobs) if _is_limit(option)]
    return "| flag | default | what it bounds |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _is_limit(option: dataclasses.Field[Any]) -> bool:
    return type(option.default) is int and option.name not in NO_LIMITS


def _row(option: dataclasses.Field[Any]) -> str:
    flag = option.name.replace("_", "-")
    return f"| `--{flag}` | {option.default:,} | {option.metadata['help']} |"


if __name__ == "__main__":
    print(page(), end="")
