from collections import Counter

import numpy as np

from quire.sampling.controls import Controls
from quire.sampling.row import SamplingRow
from tests.sampling.rows import make_row


def test_counts_are_kept_up_to_date_token_by_token() -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 1000).tolist()
    row = make_row(prompt=tokens[:100], output=tokens[100:200], repetition_penalty=1.1)
    for token in tokens[200:]:
        row.append(token)
    counted = row.occurrences
    assert counted is not None
    assert dict(zip(counted.token_ids.tolist(), counted.output_counts.tolist(), strict=True)) == {
        token: Counter(tokens[100:])[token] for token in tokens
    }
    assert set(counted.token_ids[counted.in_prompt].tolist()) == set(tokens[:100])


def test_a_rebuilt_row_counts_like_the_one_that_grew() -> None:
    grown = make_row(output=[5], repetition_penalty=1.1)
    for token in (7, 2, 7):
        grown.append(token)
    rebuilt = make_row(output=[5, 7, 2, 7], repetition_penalty=1.1)
    assert grown.occurrences is not None
    assert rebuilt.occurrences is not None
    assert grown.token_ids == rebuilt.token_ids
    assert np.array_equal(grown.occurrences.output_counts, rebuilt.occurrences.output_counts)


def test_the_prompt_is_counted_only_for_the_repetition_penalty() -> None:
    row = make_row(prompt=[1, 2, 3], output=[9], presence_penalty=0.5)
    assert row.occurrences is not None
    assert row.occurrences.token_ids.tolist() == [9]
    assert make_row(temperature=0.5).occurrences is None


def test_a_row_leaves_the_list_it_was_given_alone() -> None:
    tokens = [1, 2]
    request = make_row().request
    row = SamplingRow(request, branch=0, num_prompt_tokens=2, token_ids=tokens, controls=Controls(request))
    row.append(3)
    assert (row.token_ids, row.num_output_tokens) == ([1, 2, 3], 1)
    assert tokens == [1, 2]
