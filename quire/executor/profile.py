"""What a start has taken of memory, compared with the plan that sized the KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.memory.plan import gib
from quire.log import get_logger

log = get_logger(__name__)

TOLERANCE = 0.03
"""Share of the plan by which a measurement may differ without a word."""
PARTS = ("process", "weights")
"""What a start takes whole. KV cache and workspace are taken as requests come."""


def compare_profile(plan: Mapping[str, int], measured: Mapping[str, int]) -> str | None:
    """Log and return one line where process and weights together differ from the plan; None where they do not.

    `measured` has bytes by the plan's names. Zeros mean that the system does not say.
    """
    if not all(measured[name] for name in PARTS):
        return None
    planned, found = (sum(source[name] for name in PARTS) for source in (plan, measured))
    if abs(found - planned) <= TOLERANCE * planned:
        return None
    parts = ", ".join(f"{name} {gib(measured[name])} (planned {gib(plan[name])})" for name in PARTS)
    line = (
        f"the start took {gib(found)} of memory, {found / planned - 1:+.1%} against the plan's {gib(planned)}: {parts}"
    )
    log.info("%s", line)
    return line
