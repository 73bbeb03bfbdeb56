import numpy as np
import pytest
import torch

from quire.sampling.random import NUM_AHEAD, UniformStreams, philox4x32, uniforms
from tests.sampling.statistics import chi_square_p

# philox4x32 with 10 rounds, from kat_vectors of the Random123 distribution: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert np.array_equal(philox4x32(words(counter), words(key)), words(result))


def test_philox_columns_do_not_see_each_other() -> None:
    counters = np.concatenate([words(counter) for counter, _, _ in KNOWN_ANSWERS], axis=1)
    keys = np.concatenate([words(key) for _, key, _ in KNOWN_ANSWERS], axis=1)
    results = np.concatenate([words(result) for _, _, result in KNOWN_ANSWERS], axis=1)
    assert np.array_equal(philox4x32(counters, keys), results)


def test_uniforms_take_53_bits_of_the_first_two_words() -> None:
    # The first known answer: seed 0, branch 0, position 0.
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniforms(0, 0, 0) == expected


def test_the_seed_is_the_key_and_position_and_branch_are_the_counter() -> None:
    seed = 0x1234_5678_9ABC_DEF0
    result = philox4x32(np.array([[7], [3], [0], [0]], np.uint32), np.array([[0x9ABCDEF0], [0x12345678]], np.uint32))
    assert uniforms(seed, 3, 7) == ((int(result[0, 0]) >> 5) * 2**26 + (int(result[1, 0]) >> 6)) / 2**53


def test_uniforms_are_a_pure_function_whatever_stands_beside() -> None:
    seeds = np.array([-(2**63), -1, 0, 5, 2**63 - 1], np.int64)
    together = uniforms(seeds[:, None], np.arange(4), 11)
    alone = [[float(uniforms(seed, branch, 11)) for branch in range(4)] for seed in seeds]
    assert together.shape == (5, 4)
    assert together.tolist() == alone
    assert len(set(together.ravel().tolist())) == 20


@pytest.mark.parametrize("varies", ["seed", "branch", "position"])
def test_neighbouring_uniforms_are_uniform_and_independent(varies: str) -> None:
    numbers = uniforms(
        **{name + suffix: np.arange(20_000) if name == varies else 1 for name, suffix in PLURALS.items()}
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = (numbers[:-1] * 16).astype(int) * 16 + (numbers[1:] * 16).astype(int)
    counts = torch.from_numpy(np.bincount(cells, minlength=256))
    assert chi_square_p(counts, torch.full((256,), 1 / 256)) > 1e-6


PLURALS = {"seed": "s", "branch": "es", "position": "s"}


def test_streams_draw_what_each_position_has_wherever_they_stood_before() -> None:
    seeds, branches = [5, -1, 2**62], [0, 3, 1]
    streams = UniformStreams(seeds, branches)
    positions = [7, 0, 1000]
    steps = [*[(1, 1, 1)] * (3 * NUM_AHEAD), (0, 0, 0), (1, 0, 1), (1, 1, 1), (-3, 2, 1), (1, 1, 1)]
    for index, step in enumerate(steps):
        num_branches = 3 if index % 7 == 3 else 1
        expected = [
            [float(uniforms(seed, branch + i, position)) for i in range(num_branches)]
            for seed, branch, position in zip(seeds, branches, positions, strict=True)
        ]
        assert streams.draw(list(positions), num_branches).tolist() == expected
        positions = [a + b for a, b in zip(positions, step, strict=True)]
