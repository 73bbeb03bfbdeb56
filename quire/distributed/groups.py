"""Which share of the model this process holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """One process's place among those that split a model between them."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The groups a process belongs to. So far there is one process: every group has size one."""

    tp: ParallelGroup = ParallelGroup()
    """Tensor parallel: each rank holds a slice of every weight."""
