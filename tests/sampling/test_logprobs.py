import pytest
import torch

from quire.sampling.logprobs import position_logprobs, prompt_logprobs
from tests.ops.implementations import REFERENCE

LOGITS = torch.randint(-20, 20, (6, 200), generator=torch.Generator().manual_seed(0)).float() / 4  # many ties
CHOSEN = [0, 3, 50, 199, 7, 120]


@pytest.mark.parametrize("k", [0, 1, 5, 20, 200, -1])
def test_logprobs_are_those_of_float32_log_softmax(k: int) -> None:
    expected = torch.log_softmax(LOGITS, dim=-1)
    for row, position in enumerate(prompt_logprobs(REFERENCE, LOGITS, CHOSEN, k)):
        assert position.logprobs == expected[row, position.token_ids].tolist()


@pytest.mark.parametrize("k", [0, 1, 5, 20, 200, -1])
def test_the_chosen_token_comes_first_and_once_then_the_best_in_order(k: int) -> None:
    for row, position in enumerate(prompt_logprobs(REFERENCE, LOGITS, CHOSEN, k)):
        order = sorted(range(200), key=lambda token: (-float(LOGITS[row, token]), token))
        best = order if k == -1 else order[:k]
        assert position.token_ids == [CHOSEN[row], *(token for token in best if token != CHOSEN[row])]
        assert position.rank == order.index(CHOSEN[row]) + 1


@pytest.mark.parametrize("rank", [1, 4, 5, 6])
def test_a_chosen_token_among_the_best_is_not_repeated(rank: int) -> None:
    best = LOGITS[0].sort(descending=True, stable=True).indices.tolist()
    (position,) = prompt_logprobs(REFERENCE, LOGITS[:1], [best[rank - 1]], 5)
    assert position.rank == rank
    assert position.token_ids == [best[rank - 1], *(token for token in best[:5] if token != best[rank - 1])]


def test_five_are_a_prefix_of_twenty() -> None:
    five, twenty, every = (prompt_logprobs(REFERENCE, LOGITS, CHOSEN, k) for k in (5, 20, -1))
    for few, more, all_of_them in zip(five, twenty, every, strict=True):
        assert more.token_ids[: len(few.token_ids)] == few.token_ids
        assert more.logprobs[: len(few.token_ids)] == few.logprobs
        assert all_of_them.token_ids[: len(more.token_ids)] == more.token_ids
        assert few.rank == more.rank == all_of_them.rank


def test_rows_may_ask_for_different_numbers() -> None:
    ks = [5, -1, 0, 20, -1, 1]
    together = position_logprobs(REFERENCE, LOGITS, CHOSEN, ks)
    alone = [prompt_logprobs(REFERENCE, LOGITS[row : row + 1], CHOSEN[row : row + 1], k)[0] for row, k in enumerate(ks)]
    assert together == alone


def test_more_candidates_than_tokens_is_the_whole_vocabulary() -> None:
    assert prompt_logprobs(REFERENCE, LOGITS, CHOSEN, 1000) == prompt_logprobs(REFERENCE, LOGITS, CHOSEN, -1)


def test_no_positions_give_no_logprobs() -> None:
    assert prompt_logprobs(REFERENCE, LOGITS[:0], [], 5) == []
