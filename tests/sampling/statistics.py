"""Whether draws fit a distribution."""

import torch


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of Pearson's test. Cells expected fewer than 5 times are put together; impossible ones must be empty."""
    counts, expected = counts.double(), probabilities.double() * counts.sum()
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum().unsqueeze(0)))
    expected = torch.cat((expected[~rare], expected[rare].sum().unsqueeze(0)))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
