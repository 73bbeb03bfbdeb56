"""What a synthetic trace looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lengths = Literal["fixed", "uniform", "lognormal"]
LENGTHS: tuple[Lengths, ...] = ("fixed", "uniform", "lognormal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a synthetic trace looks like."""

    num_requests: int
    rate: float
    """Requests a second; infinite: all at once."""
    burstiness: float = 1.0
    """As of `due_times`."""
    prompt_len: int
    """Mean, without a shared prefix."""
    output_len: int
    """Mean."""
    lengths: Lengths = "fixed"
    sigma: float = 1.0
    """Of lognormal lengths: the standard deviation of their logarithm."""
    num_prefixes: int = 0
    """How many prefixes there are, one of which each prompt begins with; 0: none."""
    prefix_len: int = 0
    n: int = 1
    max_model_len: int
    """Longer prompts and outputs are cut."""
