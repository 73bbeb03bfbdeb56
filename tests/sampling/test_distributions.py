"""What is drawn, against probabilities computed from the definition of each parameter."""

import pytest
import torch

from quire.sampling.batch import SamplingBatch
from quire.sampling.sampler import Sampler
from tests.ops.implementations import REFERENCE
from tests.sampling.rows import make_row
from tests.sampling.statistics import chi_square_p

NUM_SEEDS = 8
NUM_STEPS = 1000
NEVER_BY_CHANCE = 1e-6
VOCAB_SIZE = 60
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(7)) * 2


def exact(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The probability of each token, in float64."""
    probabilities = torch.softmax(LOGITS.double() / temperature, dim=-1)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True)
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(dim=-1) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
]


def drawn_over_positions(params: dict[str, float]) -> torch.Tensor:
    """How often each token is drawn when some sequences grow."""
    rows = [make_row(seed=seed, **params) for seed in range(NUM_SEEDS)]
    batch, sampler = SamplingBatch(rows, VOCAB_SIZE, REFERENCE), Sampler(REFERENCE, VOCAB_SIZE, 64)
    logits = LOGITS.repeat(NUM_SEEDS, 1)
    drawn = []
    for _ in range(NUM_STEPS):
        for row, tokens in zip(rows, sampler.sample(logits, batch, [1] * NUM_SEEDS).token_ids, strict=True):
            row.append(tokens[0])
            drawn += tokens
    return torch.bincount(torch.tensor(drawn), minlength=VOCAB_SIZE)


@pytest.mark.parametrize("params", CASES, ids=str)
def test_tokens_drawn_over_positions_have_the_exact_distribution(params: dict[str, float]) -> None:
    assert chi_square_p(drawn_over_positions(params), exact(**params)) > NEVER_BY_CHANCE


@pytest.mark.parametrize("params", CASES, ids=str)
def test_branches_of_a_fork_have_the_exact_distribution(params: dict[str, float]) -> None:
    batch = SamplingBatch([make_row(seed=11, **params)], VOCAB_SIZE, REFERENCE)
    tokens = Sampler(REFERENCE, VOCAB_SIZE, 64).sample(LOGITS.unsqueeze(0).clone(), batch, [10_000]).token_ids[0]
    assert chi_square_p(torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE), exact(**params)) > NEVER_BY_CHANCE


def test_the_test_notices_a_wrong_distribution() -> None:
    counts = drawn_over_positions({"temperature": 1.0})
    assert chi_square_p(counts, exact(temperature=1.1)) < NEVER_BY_CHANCE
    assert chi_square_p(counts, exact(top_k=50)) < NEVER_BY_CHANCE
