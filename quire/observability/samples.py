"""Counts as plain data, so that what several processes have counted can be added up. No metrics library here."""

from __future__ import annotations

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""
Samples = dict[str, dict[Series, float]]
"""What is counted, by family."""


def add_samples(total: Samples, more: Samples) -> None:
    """Add counts to counts.

    Mutates: total.
    """
    for family, samples in more.items():
        mine = total.setdefault(family, {})
        for series, value in samples.items():
            mine[series] = mine.get(series, 0.0) + value
