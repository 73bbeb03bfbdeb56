"""paged_attention: against one big softmax, and bit for bit against itself in other company and other chunks."""

from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from tests.ops.implementations import assert_close, implementations_of, torch_threads
from tests.ops.pages import Pages, spoil

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float32),
]
"""Of the model, of the cache."""
BIASES: dict[str, dict[str, torch.Tensor]] = {
    "none": {},
    "slopes": {"slopes": torch.tensor([0.5, 0.01, 0.1, 0.0])},
    "sinks": {"sinks": torch.tensor([-3.0, 0.5, 9.0, 200.0])},
    "both": {"slopes": torch.tensor([0.5, 0.01, 0.1, 0.0]), "sinks": torch.tensor([-3.0, 0.5, 9.0, -200.0])},
}
each_implementation = pytest.mark.parametrize("implementation", implementations_of("paged_attention"))
each_view = pytest.mark.parametrize(
    ("sliding_window", "soft_cap"), [(None, None), (24, None), (1, None), (None, 5.0), (130, 5.0)]
)


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@each_view
def test_attention_is_softmax_over_what_is_visible(
    implementation: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    pages = Pages.of(implementation, [1, 7, 130, 300], dtype=dtype, cache_dtype=cache_dtype)
    outputs = pages.attend(
        [(0, 0, 1), (1, 0, 7), (2, 0, 130), (3, 0, 300)], sliding_window=sliding_window, soft_cap=soft_cap
    )
    for row, output in enumerate(outputs):
        assert output.dtype == dtype
        assert_close(output, pages.naive(row, sliding_window=sliding_window, soft_cap=soft_cap))


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 24])
def test_blocks_may_lie_apart_in_a_pool_of_several_layers(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, sliding_window: int | None
) -> None:
    pages = Pages.of(implementation, [40, 300], head_size=24, dtype=dtype, cache_dtype=cache_dtype)
    others = Pages.of(implementation, [40, 300], head_size=24, dtype=dtype, cache_dtype=cache_dtype, is_apart=True)
    raw = others.cache.view(torch.uint8).flatten(2)
    pool = torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage()).view(2, raw.shape[1], 3, raw.shape[2])
    was = pool.clone()
    work = [(0, 0, 40), (1, 0, 300)]
    outputs, expected = (own.attend(work, sliding_window=sliding_window) for own in (others, pages))
    assert all(torch.equal(*both) for both in zip(outputs, expected, strict=True))
    assert not torch.equal(pool[:, :, 1], was[:, :, 1])
    assert torch.equal(pool[:, :, ::2], was[:, :, ::2]), "blocks of other layers are left alone"


@each_implementation
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("head_size", [16, 24, 64, 80, 128, 1152])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_attention_takes_any_grouping_and_head_size(
    implementation: str, heads: tuple[int, int], head_size: int, cache_dtype: torch.dtype
) -> None:
    pages = Pages.of(
        implementation, [40], heads=heads[0], kv_heads=heads[1], head_size=head_size, cache_dtype=cache_dtype
    )
    assert_close(pages.attend([(0, 0, 40)])[0], pages.naive(0))


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), [both for both in DTYPES if both[1].itemsize > 1])
@pytest.mark.parametrize("head_size", [2, 6, 34])
def test_heads_without_scales_need_only_be_even(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int
) -> None:
    pages = Pages.of(implementation, [40], head_size=head_size, dtype=dtype, cache_dtype=cache_dtype)
    assert_close(pages.attend([(0, 0, 40)])[0], pages.naive(0))


@each_implementation
@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_attention_takes_any_block_size(implementation: str, block_size: int, cache_dtype: torch.dtype) -> None:
    pages = Pages.of(implementation, [150], block_size=block_size, cache_dtype=cache_dtype)
    assert_close(pages.attend([(0, 0, 150)])[0], pages.naive(0))


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (1, 1)])
@each_view
def test_chunks_do_not_change_bits(
    implementation: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    length = 290
    pages = Pages.of(implementation, [length], heads=heads[0], kv_heads=heads[1], dtype=dtype, cache_dtype=cache_dtype)
    whole = pages.attend([(0, 0, length)], sliding_window=sliding_window, soft_cap=soft_cap)[0]
    for chunk in (1, 7, 64, 129):
        parts = [
            pages.attend([(0, start, min(start + chunk, length))], sliding_window=sliding_window, soft_cap=soft_cap)[0]
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}"


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@each_view
def test_neighbours_and_threads_do_not_change_bits(
    implementation: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    lengths = [1, 130, 64, 257, 3, 128]
    pages = Pages.of(implementation, lengths, dtype=dtype, cache_dtype=cache_dtype)
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


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize(("sliding_window", "bias"), [(None, "none"), (700, "none"), (700, "both")])
def test_a_long_context_divided_among_threads_keeps_its_bits(
    dtype: torch.dtype, cache_dtype: torch.dtype, sliding_window: int | None, bias: str
) -> None:
    library = pytest.importorskip("quire.ops.cpu.library")
    if not library.available():
        pytest.skip(library.unavailable_reason())
    lengths = [2500, 40, 700]
    pages = Pages.of("cpu", lengths, dtype=dtype, cache_dtype=cache_dtype)
    work = [(0, 0, 2500), (1, 0, 40), (2, 0, 700)]
    view: dict[str, Any] = {"sliding_window": sliding_window, **BIASES[bias]}
    whole = pages.attend(work, **view)
    before = library.num_threads()
    try:
        for threads in (1, 2, 5):
            library.set_num_threads(threads)
            last = pages.attend([(row, stop - 3, stop) for row, _, stop in work], **view)
            for row, output in enumerate(last):
                assert torch.equal(output, whole[row][-3:]), f"sequence {row}, {threads} threads"
    finally:
        library.set_num_threads(before)


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize(("window", "chunk"), [(1, 7), (24, 1), (24, 129), (130, 7)])
def test_blocks_behind_the_window_are_not_read(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int, window: int, chunk: int
) -> None:
    """They are given back when nothing sees them, and whoever gets them may write NaN."""
    length = 290
    pages = Pages.of(implementation, [length], block_size=block_size, dtype=dtype, cache_dtype=cache_dtype)
    whole = pages.attend([(0, 0, length)], sliding_window=window)[0]
    parts, free = [], 0
    for start in range(0, length, chunk):
        for index in range(free, max(0, start - window + 1) // block_size):
            spoil(pages.cache, pages.tables[0, index])
            pages.tables[0, index] = pages.tables[0, 0]
            free = index + 1
        parts.extend(pages.attend([(0, start, min(start + chunk, length))], sliding_window=window))
    assert torch.equal(torch.cat(parts), whole)


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_a_broken_neighbour_changes_nothing(implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    pages = Pages.of(implementation, [40, 40], dtype=dtype, cache_dtype=cache_dtype)
    alone = pages.attend([(1, 0, 40)])[0]
    pages.qkv[0].fill_(float("nan"))
    broken, output = pages.attend([(0, 0, 40), (1, 0, 40)])
    assert torch.equal(output, alone)
    assert broken.isnan().all(), "and is seen to be broken"


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_one_broken_query_is_broken_alone(implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    pages = Pages.of(implementation, [40], dtype=dtype, cache_dtype=cache_dtype)
    before = pages.attend([(0, 0, 40)])[0]
    queries = pages.spec.num_heads * pages.spec.head_size
    pages.qkv[0][39, :queries] = float("nan")
    after = pages.attend([(0, 0, 40)])[0]
    assert torch.equal(after[:39], before[:39])
    assert after[39].isnan().all()


@each_implementation
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize(
    ("bias", "sliding_window", "soft_cap", "block_size"),
    [("slopes", None, None, 16), ("sinks", 24, None, 32), ("both", 130, 5.0, 5)],
)
def test_slopes_and_sinks_change_the_softmax_and_no_bits_of_others(
    implementation: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    bias: str,
    sliding_window: int | None,
    soft_cap: float | None,
    block_size: int,
) -> None:
    lengths = [1, 160, 40]
    pages = Pages.of(implementation, lengths, dtype=dtype, cache_dtype=cache_dtype, block_size=block_size)
    view: dict[str, Any] = {"sliding_window": sliding_window, "soft_cap": soft_cap, **BIASES[bias]}
    whole = [pages.attend([(row, 0, length)], **view)[0] for row, length in enumerate(lengths)]
    for row, output in enumerate(whole):
        assert output.dtype == dtype
        assert_close(output, pages.naive(row, **view))
    mixed = [(2, 39, 40), (1, 101, 160), (0, 0, 1)]
    for threads in (1, 2):
        with torch_threads(threads):
            outputs = pages.attend(mixed, **view)
        for (row, start, stop), output in zip(mixed, outputs, strict=True):
            assert torch.equal(output, whole[row][start:stop]), f"sequence {row}, {threads} threads"
    parts = [pages.attend([(1, start, min(start + 13, 160))], **view)[0] for start in range(0, 160, 13)]
    assert torch.equal(torch.cat(parts), whole[1])


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_given_scales_are_those_of_all_tokens(
    implementation: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    pages = Pages.of(implementation, [7, 40], dtype=dtype, cache_dtype=cache_dtype)
    pages.scales = torch.tensor([[0.01, 0.002], [0.0005, 0.03]])  # some too small for the largest numbers
    whole = pages.attend([(1, 0, 40)])[0]
    assert_close(whole, pages.naive(1))
    pages.qkv[0].fill_(float("nan"))
    broken, *parts = pages.attend([(0, 0, 7), (1, 0, 33)]) + pages.attend([(1, 33, 40)])
    assert broken.isnan().all()
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_8_bits_takes_heads_in_fours(cache_dtype: torch.dtype) -> None:
    library = pytest.importorskip("quire.ops.cpu.library")
    if not library.available():
        pytest.skip(library.unavailable_reason())
    with pytest.raises(ConfigError, match=r"multiple of 4, not 18; use --kv-cache-dtype bfloat16"):
        Pages.of("cpu", [1], head_size=18, cache_dtype=cache_dtype)
