"""chunked_attention: against one softmax for each token, and bit for bit against itself in other steps."""

import pytest
import torch

from tests.ops.implementations import assert_close, implementations_of
from tests.ops.pages import Pages, spoil

LENGTHS = [1, 48, 130, 300]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]
"""Of the model, of the cache."""
pytestmark = [
    pytest.mark.parametrize("implementation", implementations_of("chunked_attention")),
    pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES),
    pytest.mark.parametrize("chunk_size", [16, 48, 128, 512]),
]


def test_tokens_see_their_chunk(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, chunk_size: int
) -> None:
    pages = Pages.of(implementation, LENGTHS, dtype=dtype, cache_dtype=cache_dtype)
    outputs = pages.attend([(row, 0, length) for row, length in enumerate(LENGTHS)], chunk_size=chunk_size)
    for row, output in enumerate(outputs):
        assert_close(output, pages.naive(row, chunk_size=chunk_size))


def test_steps_and_neighbours_do_not_change_bits(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, chunk_size: int
) -> None:
    pages = Pages.of(implementation, LENGTHS, dtype=dtype, cache_dtype=cache_dtype)
    alone = [pages.attend([(row, 0, length)], chunk_size=chunk_size)[0] for row, length in enumerate(LENGTHS)]
    for size in (1, 7, 64, 129):
        steps = range(0, LENGTHS[3], size)
        parts = [pages.attend([(3, at, min(at + size, LENGTHS[3]))], chunk_size=chunk_size)[0] for at in steps]
        assert torch.equal(torch.cat(parts), alone[3]), f"steps of {size}"
    mixed = [(3, 200, 300), (0, 0, 1), (2, 100, 130), (1, 47, 48)]
    for (row, start, stop), output in zip(mixed, pages.attend(mixed, chunk_size=chunk_size), strict=True):
        assert torch.equal(output, alone[row][start:stop])


def test_blocks_before_a_chunk_are_not_read(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, chunk_size: int
) -> None:
    pages = Pages.of(implementation, LENGTHS, dtype=dtype, cache_dtype=cache_dtype)
    expected = pages.attend([(3, 0, 300)], chunk_size=chunk_size)[0]
    unread = pages.tables[3, : 299 // chunk_size * chunk_size // pages.block_size].long()
    spoil(pages.cache, unread)
    assert torch.equal(pages.attend([(3, 299, 300)], chunk_size=chunk_size)[0], expected[299:])
