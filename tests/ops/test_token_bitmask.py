"""apply_token_bitmask, for every implementation that provides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_sampling import implementations_of, run


@pytest.mark.parametrize("impl", implementations_of("apply_token_bitmask"))
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 4096, 151_936])
def test_exactly_the_tokens_without_a_bit_become_impossible(impl: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for share in (0.0, 0.001, 0.5, 0.999, 1.0):
        allowed = rng.random((3, -(-vocab_size // 32) * 32)) < share
        masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
        logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
        rows = [4, 0, 2]
        expected = logits.clone()
        for row, bits in zip(rows, allowed, strict=True):
            for token_id in np.flatnonzero(~bits[:vocab_size]):
                expected[row, token_id] = -torch.inf
        run(impl, "apply_token_bitmask", logits, torch.tensor(rows), masks)
        assert torch.equal(logits, expected)
