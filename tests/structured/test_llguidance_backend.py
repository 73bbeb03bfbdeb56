"""Masks depend on the grammar and the output's tokens alone, also where lexer states run out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.structured import llguidance_backend
from quire.structured.backend import GrammarBackend, Masks, Matcher, grammar_of, mask_words, open_backend
from quire.structured.params import StructuredOutputsParams
from tests.structured.conftest import VOCABULARY

MANY_STATES = r"(.*[aeiou].{12}z){5}"
"""New ones with nearly every token."""
COUNTED = "[ab]{3000}"
"""One with every token, and none that an earlier one would do for."""
FEW = 400


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", FEW)


def walk(backend: GrammarBackend, matcher: Matcher, seed: int, num_tokens: int) -> tuple[list[bytes], int]:
    """The masks along a random output, and how many tokens it has taken."""
    masks: Masks = np.zeros((1, mask_words(len(VOCABULARY.tokens))), np.int32)
    rng, found = random.Random(seed), []
    for taken in range(num_tokens):
        backend.fill_masks([(matcher, 0)], masks)
        if matcher.error:
            return found, taken
        found.append(masks.tobytes())
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little"))
        matcher.advance(int(allowed[rng.randrange(len(allowed))]))
    return found, num_tokens


def compiled(backend: GrammarBackend, regex: str = MANY_STATES) -> Matcher:
    return backend.compile(grammar_of(StructuredOutputsParams(regex=regex)))


@pytest.mark.usefixtures("few_states")
def test_an_output_is_not_cut_short_by_others_with_its_grammar() -> None:
    backend = open_backend("llguidance", VOCABULARY)
    alone = [walk(backend, compiled(backend), seed, 60) for seed in range(8)]
    assert all(taken == 60 for _, taken in alone), "more states are needed than there may be, but not at once"
    shared = compiled(backend)
    assert [walk(backend, shared.clone(), seed, 60) for seed in range(8)] == alone
    clones = [shared.clone() for _ in range(8)]
    parts = [walk(backend, clone, seed, 30)[0] for seed, clone in enumerate(clones)]
    assert parts == [masks[:30] for masks, _ in alone]


@pytest.mark.usefixtures("few_states")
def test_a_clone_goes_on_where_it_was_made_also_when_states_run_out() -> None:
    backend = open_backend("llguidance", VOCABULARY)
    matcher = compiled(backend)
    walk(backend, matcher, 1, 20)
    fork = matcher.clone()
    assert walk(backend, matcher, 2, 60) == walk(backend, fork, 2, 60)


@pytest.mark.usefixtures("few_states")
def test_what_needs_too_many_states_by_itself_fails_at_the_same_token_alone_and_in_a_crowd() -> None:
    backend = open_backend("llguidance", VOCABULARY)
    alone = [walk(backend, compiled(backend, COUNTED), seed, 3 * FEW) for seed in range(3)]
    assert all(0 < taken < 3 * FEW for _, taken in alone)
    shared = compiled(backend, COUNTED)
    assert [walk(backend, shared.clone(), seed, 3 * FEW) for seed in range(3)] == alone
    failed = shared.clone()
    walk(backend, failed, 0, 3 * FEW)
    assert "too many states" in failed.error
