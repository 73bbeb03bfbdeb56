import math

import numpy as np
import torch

from quire.sampling.processors import processors_for
from quire.sampling.row import SamplingRow
from tests.ops.implementations import REFERENCE
from tests.sampling.rows import make_row

VOCAB_SIZE = 16


def processed(*rows: SamplingRow, logits: torch.Tensor | None = None) -> torch.Tensor:
    logits = torch.zeros(len(rows), VOCAB_SIZE) if logits is None else logits.clone()
    for processor in processors_for(rows, VOCAB_SIZE, REFERENCE):
        processor.apply(logits)
    return logits


def excluded(row: SamplingRow) -> set[int]:
    return set((processed(row)[0] == -math.inf).nonzero().flatten().tolist())


def test_rows_that_ask_for_nothing_need_no_processor() -> None:
    assert processors_for([make_row(), make_row(temperature=0.0), make_row(min_tokens=3)], VOCAB_SIZE, REFERENCE) == ()


def test_only_allowed_tokens_stay_possible() -> None:
    assert excluded(make_row(allowed_token_ids=[3, 5, 3])) == set(range(VOCAB_SIZE)) - {3, 5}


def test_logit_bias_is_added() -> None:
    row = make_row(logit_bias={2: 1.5, 4: -3.0})
    expected = torch.zeros(1, VOCAB_SIZE)
    expected[0, 2], expected[0, 4] = 1.5, -3.0
    assert torch.equal(processed(row), expected)


def test_stop_tokens_are_impossible_until_min_tokens_outputs_exist() -> None:
    row = make_row(output=[9], min_tokens=3, eos_token_ids=(1, 99), stop_token_ids=[4])
    processors = processors_for([row], VOCAB_SIZE, REFERENCE)
    seen = []
    for _ in range(3):
        logits = torch.zeros(1, VOCAB_SIZE)
        for processor in processors:
            processor.apply(logits)
        seen.append(set((logits[0] == -math.inf).nonzero().flatten().tolist()))
        row.append(9)
    assert seen == [{1, 4}, {1, 4}, set()]


def test_min_tokens_counts_outputs_only() -> None:
    assert excluded(make_row(prompt=range(10), min_tokens=1, eos_token_ids=(1,))) == {1}


def test_a_bad_word_of_one_token_is_always_impossible() -> None:
    assert excluded(make_row(bad_words_token_ids=((7,), (8,)))) == {7, 8}


def test_only_the_last_token_of_a_bad_word_is_impossible_and_only_after_the_others() -> None:
    words = ((5, 6, 7), (6, 8), (4, 6, 9))
    assert excluded(make_row(output=[5], bad_words_token_ids=words)) == set()
    assert excluded(make_row(output=[5, 6], bad_words_token_ids=words)) == {7, 8}
    assert excluded(make_row(output=[5, 6, 1], bad_words_token_ids=words)) == set()


def test_a_bad_word_that_begins_in_the_prompt_is_not_seen() -> None:
    assert excluded(make_row(prompt=[5], output=[6], bad_words_token_ids=((5, 6, 7), (6, 8)))) == {8}


def test_a_bad_word_the_model_cannot_produce_is_skipped() -> None:
    assert excluded(make_row(bad_words_token_ids=((VOCAB_SIZE,), (3,)))) == {3}


def test_penalties_equal_a_loop_while_sequences_grow() -> None:
    random = np.random.default_rng(1)
    rows = [
        make_row(prompt=[1, 2, 2, 3], repetition_penalty=1.5),
        make_row(prompt=[1, 2], output=[2, 4], frequency_penalty=0.5),
        make_row(),
        make_row(prompt=[5], repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.25),
    ]
    processors = processors_for(rows, VOCAB_SIZE, REFERENCE)
    for _ in range(12):
        logits = torch.from_numpy(random.normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32))
        expected = torch.stack([penalised(values, row) for values, row in zip(logits, rows, strict=True)])
        for processor in processors:
            processor.apply(logits)
        assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)
        for row in rows:
            row.append(int(random.integers(VOCAB_SIZE)))


def penalised(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    params = row.request.sampling_params
    output = row.token_ids[row.num_prompt_tokens :]
    result = logits.clone()
    for token in set(row.token_ids):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return result


def test_bias_comes_before_penalties_and_after_exclusions() -> None:
    row = make_row(output=[3, 4], logit_bias={3: 2.0, 4: 50.0}, bad_words_token_ids=((4,),), repetition_penalty=2.0)
    logits = processed(row)[0]
    assert logits[3] == 1.0
    assert logits[4] == -math.inf


def test_a_row_changes_no_other() -> None:
    rows = [
        make_row(allowed_token_ids=[1, 2]),
        make_row(bad_words_token_ids=((3,), (2, 5))),
        make_row(min_tokens=2, eos_token_ids=(0,)),
        make_row(logit_bias={6: 1.0}),
        make_row(output=[6], repetition_penalty=1.7, presence_penalty=0.3),
        make_row(),
    ]
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    together = processed(*rows, logits=logits)
    alone = [processed(row, logits=logits[i : i + 1]) for i, row in enumerate(rows)]
    assert torch.equal(together, torch.cat(alone))
