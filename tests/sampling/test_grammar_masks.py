"""Grammar masks in the sampler: as if the logits of other tokens were -inf, for every parameter beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from quire.sampling.batch import SamplingBatch
from quire.sampling.drawn import SampledTokens
from quire.sampling.row import SamplingRow
from quire.sampling.sampler import Sampler
from quire.structured.backend import Masks, Matcher
from tests.ops.implementations import REFERENCE
from tests.ops.test_sampling import implementations_of
from tests.sampling.rows import make_row

VOCAB_SIZE = 97


class Fixed:
    """A matcher that always allows the same tokens."""

    error = ""
    is_free = is_complete = False

    def __init__(self, allowed: Sequence[int], error: str = "") -> None:
        self.allowed, self.error = list(allowed), error

    def advance(self, token_id: int) -> None: ...

    def clone(self) -> Fixed:
        return Fixed(self.allowed, self.error)


class FixedMasks:
    """A `GrammarBackend` of `Fixed`."""

    def compile(self, grammar: object) -> Matcher:
        raise NotImplementedError

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Masks) -> None:
        for matcher, row in matchers:
            assert isinstance(matcher, Fixed)
            bits = np.zeros(32 * masks.shape[1], np.uint8)
            bits[matcher.allowed] = 1
            masks[row] = np.packbits(bits, bitorder="little").view(np.int32)


def bound(allowed: Sequence[int], error: str = "", **params: object) -> SamplingRow:
    row = make_row(**params)  # type: ignore[arg-type]
    row.matcher = Fixed(allowed, error)
    return row


def sample(
    rows: list[SamplingRow], logits: torch.Tensor, draws: list[int], beside: bool = False, ops: Ops = REFERENCE
) -> SampledTokens:
    batch = SamplingBatch(rows, VOCAB_SIZE, ops)
    with ThreadPoolExecutor(1) as thread:
        if batch.grammar_masks is not None:
            batch.grammar_masks.begin(FixedMasks(), thread if beside else None)
        return Sampler(ops, VOCAB_SIZE, 64).sample(logits.clone(), batch, draws)


def random_rows(rng: np.random.Generator) -> list[SamplingRow]:
    """Rows with and without grammars, and all parameters beside them."""
    rows = []
    for index in range(8):
        params: dict[str, object] = {
            "temperature": float(rng.choice([0.0, 0.7, 1.3])),
            "top_k": int(rng.choice([0, 2, 90])),
            "top_p": float(rng.choice([1.0, 0.7])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "logprobs": [None, 2][rng.integers(2)],
            "seed": index,
        }
        if rng.random() < 0.5:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "output": (4, 9, 9)}
        if rng.random() < 0.5:
            params |= {"logit_bias": {7: 4.0, 11: -2.0}}
        if rng.random() < 0.3:
            params |= {"allowed_token_ids": rng.permutation(VOCAB_SIZE)[:80].tolist()}
        allowed = np.flatnonzero(rng.random(VOCAB_SIZE) < rng.choice([0.05, 0.5, 0.98]))
        rows.append(bound(allowed.tolist(), **params) if rng.random() < 0.7 else make_row(**params))  # type: ignore[arg-type]
    return rows


def expected_of(ops: Ops, row: SamplingRow, logits: torch.Tensor, num_draws: int) -> SampledTokens:
    """The row alone, its grammar as allowed_token_ids and those, if there are any, as one intersection."""
    matcher = row.matcher
    if not isinstance(matcher, Fixed):
        return sample([row], logits, [num_draws], ops=ops)
    allowed = set(matcher.allowed)
    if row.controls.has_allowed:
        allowed &= set((~row.controls.excluded(VOCAB_SIZE)).nonzero().flatten().tolist())
    plain = SamplingRow(row.request, row.branch, row.num_prompt_tokens, row.token_ids, row.controls)
    reported = sample([plain], logits, [num_draws], ops=ops) if allowed else None
    if reported is None:
        return SampledTokens([[]], [None])
    kept = torch.full_like(logits, -math.inf)
    batch = SamplingBatch([plain], VOCAB_SIZE, ops)
    changed = logits.clone()
    for processor in batch.processors:
        processor.apply(changed)
    kept[0, list(allowed)] = changed[0, list(allowed)]
    bare = SamplingBatch([plain], VOCAB_SIZE, ops)
    bare.processors = ()
    return Sampler(ops, VOCAB_SIZE, 64).sample(kept, bare, [num_draws])


@pytest.mark.parametrize("implementation", implementations_of("allowed_max"))
@pytest.mark.parametrize("seed", range(12))
def test_other_tokens_are_as_if_they_were_impossible(implementation: str, seed: int) -> None:
    ops = ops_of(implementation)
    rng = np.random.default_rng(seed)
    rows, draws = random_rows(rng), rng.integers(1, 4, 8).tolist()
    logits = torch.from_numpy(rng.standard_normal((8, VOCAB_SIZE)).astype(np.float32).round(1) * 3)
    found = sample(rows, logits, draws, beside=bool(seed % 2), ops=ops)
    for index, row in enumerate(rows):
        alone = expected_of(ops, row, logits[index : index + 1], draws[index])
        assert found.token_ids[index] == alone.token_ids[0]
        assert (index in found.errors) == (not alone.token_ids[0])


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found = sample([bound([5], logprobs=3), make_row(logprobs=3)], logits, [1, 1])
    exact = torch.log_softmax(logits, dim=-1)
    for row in range(2):
        reported = found.logprobs[row]
        assert reported is not None
        assert reported[0].logprobs[0] == pytest.approx(float(exact[row, found.token_ids[row][0]]), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_go_on_fails_alone_and_says_why(temperature: float) -> None:
    logits = torch.randn(4, VOCAB_SIZE)
    logits[3, 8] = math.nan
    heat = {"temperature": temperature}
    rows = [
        bound([], error="too complex\nline", **heat),
        bound([3], **heat),
        bound([6], allowed_token_ids=[7], **heat),
        bound([8, 9], **heat),
    ]
    found = sample(rows, logits, [1] * 4)
    assert found.token_ids == [[], [3], [], []]
    assert "too complex; make it simpler" in found.errors[0].message
    assert "allowed_token_ids" in found.errors[2].message
    assert "not finite" in found.errors[3].message


def test_a_batch_of_draws_that_follow_grammars_needs_ops_alone() -> None:
    assert SamplingBatch([bound([1]), make_row()], VOCAB_SIZE, REFERENCE).only_ops
    assert SamplingBatch([make_row()], VOCAB_SIZE, REFERENCE).grammar_masks is None
