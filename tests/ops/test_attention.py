"""paged_attention: against one big softmax, and bit for bit against itself in other company and other chunks."""

import pytest
import torch

from tests.ops.implementations import assert_close, implementations_of, torch_threads
from tests.ops.pages import Pages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_implementation = pytest.mark.parametrize("implementation", implementations_of("paged_attention"))
each_view = pytest.mark.parametrize(
    ("sliding_window", "soft_cap"), [(None, None), (24, None), (1, None), (None, 5.0), (130, 5.0)]
)


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@each_view
def test_attention_is_softmax_over_what_is_visible(
    implementation: str, dtype: torch.dtype, sliding_window: int | None, soft_cap: float | None
) -> None:
    pages = Pages.of(implementation, [1, 7, 130, 300], dtype=dtype)
    outputs = pages.attend(
        [(0, 0, 1), (1, 0, 7), (2, 0, 130), (3, 0, 300)], sliding_window=sliding_window, soft_cap=soft_cap
    )
    for row, output in enumerate(outputs):
        assert output.dtype == dtype
        assert_close(output, pages.naive(row, sliding_window=sliding_window, soft_cap=soft_cap))


@each_implementation
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("head_size", [16, 24, 64, 80, 128])
def test_attention_takes_any_grouping_and_head_size(
    implementation: str, heads: tuple[int, int], head_size: int
) -> None:
    pages = Pages.of(implementation, [40], heads=heads[0], kv_heads=heads[1], head_size=head_size)
    assert_close(pages.attend([(0, 0, 40)])[0], pages.naive(0))


@each_implementation
@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
def test_attention_takes_any_block_size(implementation: str, block_size: int) -> None:
    pages = Pages.of(implementation, [150], block_size=block_size)
    assert_close(pages.attend([(0, 0, 150)])[0], pages.naive(0))


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (1, 1)])
@each_view
def test_chunks_do_not_change_bits(
    implementation: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    length = 290
    pages = Pages.of(implementation, [length], heads=heads[0], kv_heads=heads[1], dtype=dtype)
    whole = pages.attend([(0, 0, length)], sliding_window=sliding_window, soft_cap=soft_cap)[0]
    for chunk in (1, 7, 64, 129):
        parts = [
            pages.attend([(0, start, min(start + chunk, length))], sliding_window=sliding_window, soft_cap=soft_cap)[0]
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}"


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@each_view
def test_neighbours_and_threads_do_not_change_bits(
    implementation: str, dtype: torch.dtype, sliding_window: int | None, soft_cap: float | None
) -> None:
    lengths = [1, 130, 64, 257, 3, 128]
    pages = Pages.of(implementation, lengths, dtype=dtype)
    alone = [
        pages.attend([(row, 0, length)], sliding_window=sliding_window, soft_cap=soft_cap)[0]
        for row, length in enumerate(lengths)
    ]
    mixed = [(3, 200, 257), (0, 0, 1), (5, 127, 128), (1, 0, 130), (2, 60, 64), (4, 0, 3)]
    for threads in (1, 2):
        with torch_threads(threads):
            outputs = pages.attend(mixed, sliding_window=sliding_window, soft_cap=soft_cap)
        for (row, start, stop), output in zip(mixed, outputs, strict=True):
            assert torch.equal(output, alone[row][start:stop]), f"sequence {row}, {threads} threads"


@each_implementation
def test_a_broken_neighbour_changes_nothing(implementation: str) -> None:
    pages = Pages.of(implementation, [40, 40])
    alone = pages.attend([(1, 0, 40)])[0]
    pages.qkv[0].fill_(float("nan"))
    assert torch.equal(pages.attend([(0, 0, 40), (1, 0, 40)])[1], alone)
