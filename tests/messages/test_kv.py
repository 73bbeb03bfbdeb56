"""Which layers share a block table, and how many pages a sequence takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.messages.kv import (
    MAX_PADDING,
    FullAttentionSpec,
    KVCacheSpec,
    KVLayout,
    PageSpec,
    SlidingWindowSpec,
    StatePage,
    StateSpec,
    kv_layout,
)
from quire.utils.math import cdiv
from tests.fakes import specs_of

LAYERS = st.lists(st.sampled_from([None, 4, 7]), min_size=1, max_size=40)


def layout_of(windows: list[int | None], block_size: int = 4) -> KVLayout:
    return kv_layout(specs_of(block_size, windows))


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None] * 4, [(None, 4)]),
        ([64] * 32, [(64, 32)]),
        ([64, None] * 13, [(None, 13), (64, 13)]),
        ([None, 64, 64, 64], [(None, 1), (64, 1), (64, 1), (64, 1)]),
        (([64] * 5 + [None]) * 4 + [64] * 2, [(None, 4), *[(64, 4)] * 5, (64, 2)]),
    ],
    ids=["full", "mistral", "gemma2", "qwen2", "gemma3-1b"],
)
def test_layers_form_groups_of_equal_size(windows: list[int | None], groups: list[tuple[int | None, int]]) -> None:
    found = [(getattr(group.spec, "window", None), len(group.layers)) for group in layout_of(windows).groups]
    assert found == groups


@given(windows=LAYERS)
def test_every_layer_has_a_place_of_its_own_and_little_of_a_page_is_unused(windows: list[int | None]) -> None:
    layout = layout_of(windows)
    specs = specs_of(4, windows)
    places = {(layout.group_of_layer[layer], layout.place_of_layer[layer]) for layer in range(len(windows))}
    assert len(places) == len(windows)
    for layer, spec in enumerate(specs):
        assert layout.groups[layout.group_of_layer[layer]].spec == spec
        assert layout.place_of_layer[layer].part < layout.num_parts
    used = len(windows) * layout.page.num_bytes
    assert used <= layout.block_bytes * len(layout.groups) <= used * (1 + MAX_PADDING)
    kinds = [isinstance(group.spec, FullAttentionSpec) for group in layout.groups]
    assert kinds == sorted(kinds, reverse=True)


def test_layers_that_read_others_keep_nothing_and_have_their_places() -> None:
    windows = [8, None, 8, None, 8, None]
    layout = kv_layout(specs_of(4, windows), [(4, 2), (5, 3)])
    assert layout.block_bytes == 2 * layout.page.num_bytes
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2)]
    for places in (layout.group_of_layer, layout.place_of_layer):
        assert (places[4], places[5]) == (places[2], places[3])
        assert sorted(places) == list(range(6))


@given(
    window=st.integers(1, 40),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(1, 100),
    max_chunk=st.integers(1, 30),
    data=st.data(),
)
def test_a_window_never_needs_more_blocks_than_it_says(
    window: int, block_size: int, num_tokens: int, max_chunk: int, data: st.DataObject
) -> None:
    (spec,) = specs_of(block_size, [window])
    computed = 0
    while computed < num_tokens:
        end = min(num_tokens, computed + data.draw(st.integers(1, max_chunk)))
        first_read = max(0, computed - window + 1)
        held = cdiv(end, block_size) - first_read // block_size
        assert held <= spec.most_blocks(num_tokens, max_chunk)
        computed = end
    assert spec.most_blocks(num_tokens, max_chunk) <= cdiv(num_tokens, block_size)


@given(windows=LAYERS, num_blocks=st.integers(0, 60), max_chunk=st.integers(1, 20), at_most=st.integers(1, 100))
def test_the_longest_length_is_the_last_that_fits(
    windows: list[int | None], num_blocks: int, max_chunk: int, at_most: int
) -> None:
    layout = layout_of(windows)
    longest = layout.longest(num_blocks, max_chunk, at_most)
    assert layout.most_blocks(longest, max_chunk) <= num_blocks
    assert longest == at_most or layout.most_blocks(longest + 1, max_chunk) > num_blocks


def specs_with(num_kv_heads: int, head_size: int, count: int, window: int | None) -> list[KVCacheSpec]:
    page = PageSpec(num_kv_heads=num_kv_heads, head_size=head_size, dtype="bfloat16", block_size=16)
    spec = FullAttentionSpec(page=page) if window is None else SlidingWindowSpec(page=page, window=window)
    return [spec] * count


@pytest.mark.parametrize(
    ("window_layers", "full_layers", "groups", "most_padding"),
    [
        ((1, 256, 12), (1, 512, 3), [3, 6, 6], 0.0),
        ((2, 256, 20), (2, 512, 4), [4, 8, 8, 4], 0.02),
        ((8, 256, 25), (2, 512, 5), [5, *[2] * 12, 1], 0.08),
        ((16, 256, 50), (4, 512, 10), [10, *[5] * 10], 0.0),
        ((4, 16, 3), (2, 32, 3), [3, 3], 0.0),
    ],
    ids=["twice the bytes", "the same with more layers", "half the bytes", "half of many", "as many in other shapes"],
)
def test_groups_of_smaller_blocks_have_more_layers(
    window_layers: tuple[int, int, int], full_layers: tuple[int, int, int], groups: list[int], most_padding: float
) -> None:
    specs = [*specs_with(*window_layers, window=1024), *specs_with(*full_layers, window=None)]
    layout = kv_layout(specs)
    assert [len(group.layers) for group in layout.groups] == groups
    assert 0.0 <= layout.padding <= most_padding
    for group in layout.groups:
        assert sum(specs[layer].page.num_bytes for layer in group.layers) <= layout.block_bytes


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([8, 24, 64]), st.sampled_from([None, 7])), min_size=1, max_size=12
    )
)
def test_blocks_of_different_bytes_do_not_meet_within_a_page(sizes: list[tuple[int, int, int | None]]) -> None:
    specs = [specs_with(heads, size, 1, window)[0] for heads, size, window in sizes]
    layout = kv_layout(specs)
    for group in layout.groups:
        pieces: dict[int, list[tuple[int, int]]] = {}
        for layer in group.layers:
            place, half = layout.place_of_layer[layer], specs[layer].page.num_bytes // 2
            pieces.setdefault(place.part, []).append((place.first_byte, place.first_byte + half))
        for own in pieces.values():
            ordered = sorted(own)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
            assert ordered[-1][1] * 2 * layout.num_parts <= layout.block_bytes
    assert layout.padding >= 0


def test_rows_of_indexers_share_parts_of_pages_with_keys_beside_states() -> None:
    page = PageSpec(num_kv_heads=2, head_size=16, dtype="float32", block_size=16)
    rows = [replace(page, num_kv_heads=1, head_size=8, rate=rate) for rate in (1, 4)]
    attention = [
        FullAttentionSpec(page=page),
        SlidingWindowSpec(page=rows[0], window=4),
        FullAttentionSpec(page=rows[1]),
    ]
    state = StateSpec(page=StatePage(num_elements=900, num_bytes=page.num_bytes, block_size=16))
    layout = kv_layout([state, *attention, state, state, *attention, state])
    assert [len(group.layers) for group in layout.groups] == [4, 2, 2, 2]
    part = layout.part_bytes
    assert part is not None
    assert page.num_bytes + rows[1].num_bytes <= part < page.num_bytes + rows[1].num_bytes + 128
    assert layout.block_bytes == 2 * part
    places = layout.place_of_layer
    assert [places[layer].part for layer in (1, 3, 6, 8)] == [0, 0, 1, 1]
    assert [places[layer].first_byte for layer in (1, 3, 6, 8)] == [0, page.num_bytes // 2] * 2
