"""Fit a cost model to steps that were measured: least squares of relative errors, with no term below 0.

First relative to what was measured, which heeds steps that were held up the least; outliers are then left out, and the
errors are taken relative to what the first fit says, so that the second one is right on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.simulation.cost_model import MAX_SPREAD, CostModel, StepShape

TERMS = (
    "fixed_s",
    "token_s",
    "context_token_s",
    "prompt_s",
    "pair_s",
    "sequence_s",
    "draw_s",
    "new_batch_s",
    "idle_s",
    "record_s",
)
FREE_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Values of `CostModel.free_tokens` that are tried."""
MAX_OUTLIER = 5.0
"""Steps whose relative error exceeds this many times the median one are left out of the second fit: the machine did
something else meanwhile."""
FEWEST_STEPS = 50
SPREAD_DIGITS = 4
LEAST_FIXED_S = 1e-6
"""No step takes no time."""
_SWEEPS = 2000

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was measured."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and how well it says what was measured."""

    cost: CostModel
    num_steps: int
    num_outliers: int
    median_error: float
    """Of a step's time, as a share of it."""
    p90_error: float
    total_error: float
    """Of the sum of all steps' times, signed."""


def fit_cost(steps: Sequence[Step], source: str) -> Fit:
    """The cost model that fits the steps best.

    Raises: ConfigError when there are too few.
    """
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(f"{len(steps)} steps were measured; a cost model takes at least {FEWEST_STEPS}")
    fits = [_fit(steps, float(free), source) for free in FREE_TOKENS]
    return min(fits, key=lambda fit: fit.median_error + fit.p90_error)


def _fit(steps: Sequence[Step], free_tokens: float, source: str) -> Fit:
    seconds = np.array([step.seconds for step in steps])
    features = np.array([_features(step.shape, free_tokens) for step in steps])
    terms = _nonnegative(features / seconds[:, None], np.ones(len(steps)))
    errors = np.abs(features @ terms / seconds - 1)
    usual = errors <= MAX_OUTLIER * np.median(errors) + 1e-9
    all_features, features, seconds = features, features[usual], seconds[usual]
    expected = features @ terms
    terms = _nonnegative(features / expected[:, None], seconds / expected)
    found = features @ terms
    errors = np.abs(found / seconds - 1)
    ratios = np.array([step.seconds for step in steps]) / (all_features @ terms)
    has_prompt = np.array([step.shape.num_pairs > 0 for step in steps])
    values = dict(zip(TERMS, map(float, terms), strict=True))
    values["fixed_s"] = max(values["fixed_s"], LEAST_FIXED_S)
    return Fit(
        cost=CostModel(
            **values,
            free_tokens=free_tokens,
            spread=_spread(ratios[~has_prompt]),
            prompt_spread=_spread(ratios[has_prompt]),
            source=source,
        ),
        num_steps=len(steps),
        num_outliers=int(np.sum(~usual)),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        total_error=float(np.sum(found) / np.sum(seconds) - 1),
    )


def _spread(ratios: Array) -> tuple[float, ...]:
    """The first of them as they came, those of steps that were left out of the fit among them."""
    return tuple(round(float(ratio), SPREAD_DIGITS) for ratio in ratios[:MAX_SPREAD])


def _features(shape: StepShape, free_tokens: float) -> tuple[float, ...]:
    """In the order of `TERMS`."""
    tokens = max(0.0, shape.num_tokens - free_tokens)
    counts = shape.num_pairs, shape.num_sequences, shape.num_draws
    kinds = 1 / shape.num_alike if shape.num_alike else 0.0, shape.is_after_idle, shape.is_recorded
    return (1.0, tokens, shape.num_context_tokens, shape.num_pairs > 0, *counts, *kinds)


def _nonnegative(features: Array, values: Array) -> Array:
    """x >= 0 with the least |features x - values|^2, coordinate by coordinate (Franc et al., CAIP 2005)."""
    scale = np.sqrt(np.sum(features**2, axis=0))
    scale[scale == 0] = 1.0
    scaled = features / scale
    gram, target = scaled.T @ scaled, scaled.T @ values
    terms = np.zeros(len(target))
    for _ in range(_SWEEPS):
        for index in range(len(terms)):
            if gram[index, index] > 0:
                slope = gram[index] @ terms - target[index]
                terms[index] = max(0.0, terms[index] - slope / gram[index, index])
    result: Array = terms / scale
    return result
