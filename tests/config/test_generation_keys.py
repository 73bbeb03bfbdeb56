"""A request over the model's defaults, whichever way it comes in."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.generation_keys import over_defaults

DEFAULTS = {"temperature": 0.7, "max_tokens": 50, "min_tokens": 8, "stop": ["END"]}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"stop": []}, {"stop": []}),
        ({"min_tokens": 0}, {"min_tokens": 0}),
        ({"max_tokens": None}, {"max_tokens": 50}),
        ({"max_tokens": 20}, {"max_tokens": 20}),
        ({"max_tokens": 5}, {"max_tokens": 5, "min_tokens": 5}),
        ({"max_tokens": 5, "min_tokens": 6}, {"max_tokens": 5, "min_tokens": 6}),
    ],
)
def test_what_a_request_says_counts_and_the_rest_is_the_models(given: dict[str, Any], changed: dict[str, Any]) -> None:
    assert over_defaults(DEFAULTS, given) == {**DEFAULTS, **changed}


def test_a_request_without_text_has_no_stop_strings_of_the_model() -> None:
    assert over_defaults({"stop": ["END"]}, {"detokenize": False}) == {"detokenize": False}


def test_a_model_without_defaults_bounds_nothing() -> None:
    assert over_defaults({}, {"max_tokens": None}) == {"max_tokens": None}
