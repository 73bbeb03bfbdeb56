"""What layers need of the KV cache, and how they share one pool of pages. The only place that counts KV bytes.

Layers of one kind form groups. A page, one block of each layer of a group, takes the same bytes in every group, so any
group can use any page: where the layers' blocks are alike, every group has the same number of layers (at most), and
where heads differ from kind to kind, groups of smaller blocks have more layers. A group has a block table of its own.
Recurrent layers have groups, too: there a page holds the layers' states after a token, instead of keys and values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from quire.utils.math import cdiv, round_up

_Place = TypeVar("_Place")
MAX_PADDING = 0.1
"""Groups may have so many layers that at most this share of the pages' bytes, beyond what layers use, is unused."""
TYPICAL_CONTEXT = 1 << 15
"""Tokens of the sequence by which padding is measured where blocks differ: layers with a window keep fewer."""
PART_MULTIPLE = 128
"""Bytes of which parts of pages are a multiple, so that each half begins at a cache line."""
PAGES_PER_STATE = 2
"""That a sequence holds in each group of recurrent layers: one to read and one to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """One block of one attention layer."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """bfloat16, float16, float32, or one of `SCALED_DTYPES`."""
    block_size: int
    """Tokens per block."""
    slot_multiple: int = 1
    """Pages have room for a multiple of so many tokens; see `SLOT_MULTIPLES`."""
    rate: int | None = None
    """Of compressed attention, whose pages are rows one behind the other in every implementation: tokens that share a
    row, half of which lies with the keys and half with the values. None for keys and values as ops lay them out."""

    @property
    def num_slots(self) -> int:
        """Of a block, each for a token, or for the tokens that share one."""
        return self.block_size // (self.rate or 1)

    @property
    def num_elements(self) -> int:
        """Elements of one head's keys (or values) in a block, padding included; a multiple of `block_size`, unless
        tokens share slots."""
        if self.rate is not None:
            return round_up(self.num_slots * self.head_size, 8)
        slot = self.head_size + (4 if self.dtype in SCALED_DTYPES else 0)
        num_slots = round_up(self.block_size, self.slot_multiple)
        if num_slots == self.block_size:
            return num_slots * slot
        return round_up(cdiv(num_slots * slot, self.block_size), 32) * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together: what the plan counts and what is allocated."""
        return 2 * self.num_kv_heads * self.num_elements * DTYPE_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePage:
    """The state of one recurrent layer after a token."""

    num_elements: int
    """float32 numbers of the state."""
    num_bytes: int
    """A multiple of 8. As many as a block of the model's attention layers takes, at least those of the state; the rest
    is unused."""
    block_size: int
    """Tokens per block of the model's attention layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec:
    """A layer whose queries see all tokens before them."""

    page: PageSpec

    def most_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most, while it is computed in chunks."""
        return cdiv(num_tokens, self.page.block_size)

    def num_entries(self, num_tokens: int) -> int:
        """Entries that the block table of a sequence of so many tokens has."""
        return cdiv(num_tokens, self.page.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec:
    """A layer whose queries see the last `window` tokens, themselves included."""

    page: PageSpec
    window: int

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no query will read once so many tokens are computed."""
        return max(0, num_computed_tokens - self.window + 1) // self.page.block_size

    def num_computed_without(self, num_blocks: int) -> int:
        """How many tokens must be computed before no query will read so many leading blocks; at least one block."""
        return num_blocks * self.page.block_size + self.window - 1

    def most_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most, while it is computed in chunks.

        A chunk of c tokens and what its first query sees before it are window - 1 + c adjacent tokens, which lie
        in one block more than fit them exactly if they begin in the middle of one.
        """
        span = self.window - 1 + max_chunk_tokens
        size = self.page.block_size
        return min(cdiv(num_tokens, size), cdiv(span - 1, size) + 1)

    def num_entries(self, num_tokens: int) -> int:
        """Entries that the block table of a sequence of so many tokens has."""
        return cdiv(num_tokens, self.page.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A layer that keeps one state of fixed size, that after the tokens computed so far.

    A step reads the page of the state before it, and writes the new state to another page: so it can be run again.
    """

    page: StatePage

    def most_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most: one to read and one to write."""
        return min(num_tokens, PAGES_PER_STATE)

    def num_entries(self, num_tokens: int) -> int:
        """Entries of its block table: the page to read and the page to write."""
        return PAGES_PER_STATE


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | StateSpec
"""What one layer keeps: how large a block of it is, and for how long a sequence needs it."""
_ORDER = (FullAttentionSpec, SlidingWindowSpec, StateSpec)
"""Of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlace:
    """Where the block of a layer lies in each page."""

    part: int
    first_byte: int = 0
    """In the half of the part that has keys; its values lie as far into the other half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that keep the same tokens and so share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]
    """Their places in the model; the i-th of them has the i-th part of a page."""
    pages: tuple[PageSpec, ...] = ()
    """Of each layer, where they differ; as the spec says without them."""
    places: tuple[KVPlace, ...] = ()
    """Of each layer, where some share a part of the page and others have one for themselves."""

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Bytes that a block of each layer takes."""
        return tuple(page.num_bytes for page in self.pages or (self.spec.page,) * len(self.layers))

    def page_of(self, layer: int) -> PageSpec | StatePage:
        """A block of one of the layers."""
        return self.pages[self.layers.index(layer)] if self.pages else self.spec.page


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How the layers of a model share one pool of pages of equal bytes."""

    groups: tuple[KVGroup, ...]
    """At least one. Groups that keep all tokens come first, those of recurrent layers last."""
    reads: tuple[tuple[int, int], ...] = ()
    """(layer, earlier layer whose keys and values it reads): such layers are in no group and keep nothing."""
    part_bytes: int | None = None
    """Of each part of a page, where states stand beside rows of indexers: a state has a part for itself, and so have
    keys and values, but rows of several layers share one. None where layers say themselves what they take."""

    @property
    def page(self) -> PageSpec | StatePage:
        """One layer's block: of keys and values, if the model has any attention. Those of other groups may differ."""
        return self.groups[0].spec.page

    @property
    def is_mixed(self) -> bool:
        """Whether layers have blocks of different shapes."""
        kept = [group for group in self.groups if not isinstance(group.spec, StateSpec)]
        return len({page for group in kept for page in (group.pages or (group.spec.page,))}) > 1

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.page.block_size

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The indices of the groups of recurrent layers."""
        return tuple(index for index, group in enumerate(self.groups) if isinstance(group.spec, StateSpec))

    def num_entries(self, num_tokens: int) -> int:
        """Entries of the longest block table of a sequence of so many tokens."""
        return max(group.spec.num_entries(num_tokens) for group in self.groups)

    @property
    def num_parts(self) -> int:
        """Tensors that have a part of every page: one for each layer of a group; one for all where blocks differ."""
        if self.part_bytes is not None:
            return 1 + max(place.part for group in self.groups for place in group.places)
        return 1 if self.is_mixed else max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page; groups may leave some of them unused."""
        if self.part_bytes is not None:
            return self.num_parts * self.part_bytes
        return max(sum(group.page_sizes) for group in self.groups)

    @property
    def padding(self) -> float:
        """What of a sequence's pages no layer uses, as a share of what layers use: of one of `TYPICAL_CONTEXT`."""
        return _padding([(group.spec, group.page_sizes) for group in self.groups], self.block_bytes)

    @property
    def group_of_layer(self) -> dict[int, int]:
        """The index of each layer's group, or of the one that it reads."""
        return self._with_readers({layer: index for index, group in enumerate(self.groups) for layer in group.layers})

    @property
    def place_of_layer(self) -> dict[int, KVPlace]:
        """Where in a page of its group the block is that each layer has, or reads."""
        places: dict[int, KVPlace] = {}
        for group in self.groups:
            places.update(zip(group.layers, group.places, strict=False))
            if group.places:
                continue
            firsts = accumulate((size // 2 for size in group.page_sizes), initial=0)
            for number, (layer, first) in enumerate(zip(group.layers, firsts, strict=False)):
                places[layer] = KVPlace(part=0, first_byte=first) if self.is_mixed else KVPlace(part=number)
        return self._with_readers(places)

    def _with_readers(self, places: dict[int, _Place]) -> dict[int, _Place]:
        return places | {layer: places[kept] for layer, kept in self.reads}

    def most_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most, over all groups."""
        return sum(group.spec.most_blocks(num_tokens, max_chunk_tokens) for group in self.groups)

    def largest_chunk(self, num_blocks: int, num_tokens: int, at_most: int) -> int:
        """The most tokens a step may compute of a sequence, at most `at_most`, that finds room in so many pages.

        0 if the sequence does not fit however it is computed.
        """
        return bisect_right(range(1, at_most + 1), num_blocks, key=lambda chunk: self.most_blocks(num_tokens, chunk))

    def longest(self, num_blocks: int, max_chunk_tokens: int, at_most: int) -> int:
        """The length in tokens, at most `at_most`, up to which a sequence finds room in so many pages."""
        size = self.block_size
        lengths = range(0, round_up(at_most, size) + 1, size)
        fitting = bisect_right(lengths, num_blocks, key=lambda length: self.most_blocks(length, max_chunk_tokens))
        return min(at_most, lengths[fitting - 1])


def kv_layout(specs: Sequence[KVCacheSpec], reads: Sequence[tuple[int, int]] = ()) -> KVLayout:
    """Group the layers of a model, given what each one keeps, or would keep if it did not read another's.

    `reads` are those of `KVLayout`.
    """
    assert len({spec.page.block_size for spec in specs}) == 1, "blocks have as many tokens in every group"
    assert all(kept < layer and specs[kept] == specs[layer] for layer, kept in reads), "readers see what was kept"
    if any(isinstance(spec.page, PageSpec) and spec.page.rate is not None for spec in specs):
        has_states = any(isinstance(spec, StateSpec) for spec in specs)
        return _layout_beside_states(specs) if has_states else _layout_of_rows(specs)
    by_spec: dict[KVCacheSpec, list[int]] = {}
    readers = dict(reads)
    for layer, spec in enumerate(specs):
        if layer not in readers:
            by_spec.setdefault(spec, []).append(layer)
    page_bytes = _page_bytes({spec: len(layers) for spec, layers in by_spec.items()})
    groups = [
        KVGroup(spec=spec, layers=tuple(layers[first : first + size]))
        for spec, layers in by_spec.items()
        for size in [page_bytes // spec.page.num_bytes]
        for first in range(0, len(layers), size)
    ]
    groups.sort(key=lambda group: _ORDER.index(type(group.spec)))
    return KVLayout(groups=tuple(groups), reads=tuple(reads))


def _layout_of_rows(specs: Sequence[KVCacheSpec]) -> KVLayout:
    """Of compressed attention, or keys of indexers: what is kept equally long shares groups, however long the rows
    are.
    """
    pages, kinds = [spec.page for spec in specs if isinstance(spec.page, PageSpec)], _kept_alike(specs)
    assert len(pages) == len(specs), "no layer beside them has a state"

    def packed(page_bytes: int) -> list[KVGroup]:
        groups = []
        for layers in kinds:
            for part in _filled([pages[layer].num_bytes for layer in layers], page_bytes):
                own = [layers[place] for place in part]
                kept = tuple(pages[layer] for layer in own)
                groups.append(KVGroup(spec=specs[own[0]], layers=tuple(own), pages=kept))
        return groups

    tried = {size for layers in kinds for size in accumulate(pages[layer].num_bytes for layer in layers)}
    largest = max(page.num_bytes for page in pages)
    layouts = [KVLayout(groups=tuple(packed(size))) for size in sorted({*tried, largest}) if size >= largest]
    fitting = [layout for layout in layouts if layout.padding <= MAX_PADDING]
    best = fitting[-1] if fitting else min(layouts, key=lambda layout: layout.padding)
    return KVLayout(groups=_in_order(best.groups))


def _in_order(groups: Iterable[KVGroup]) -> tuple[KVGroup, ...]:
    return tuple(sorted(groups, key=lambda group: _ORDER.index(type(group.spec))))


def _kept_alike(specs: Sequence[KVCacheSpec]) -> list[list[int]]:
    """The layers of which equally many tokens are kept, or states."""
    kinds: dict[object, list[int]] = {}
    for layer, spec in enumerate(specs):
        window = spec.window if isinstance(spec, SlidingWindowSpec) else None
        kinds.setdefault((type(spec), window), []).append(layer)
    return list(kinds.values())


def _layout_beside_states(specs: Sequence[KVCacheSpec]) -> KVLayout:
    """Of keys of indexers beside states. Pages have parts of one size: a state has one for itself, and blocks share one
    as far as they fit, best those of keys and values with those of the same layer's indexer.
    """
    kinds, sizes = _kept_alike(specs), [spec.page.num_bytes for spec in specs]
    pairs = {sizes[one] + sizes[other] for layers in kinds for one, other in pairwise(layers)}
    layouts = [
        _layout_of_parts(specs, kinds, round_up(part_bytes, PART_MULTIPLE), num_parts)
        for part_bytes in sorted({max(sizes)} | {size for size in pairs if size > max(sizes)})
        for num_parts in range(1, 1 + max(map(len, kinds)))
    ]
    fitting = [layout for layout in layouts if layout.padding <= MAX_PADDING]
    if fitting:
        return min(fitting, key=lambda layout: (len(layout.groups), layout.padding))
    return min(layouts, key=lambda layout: layout.padding)


def _layout_of_parts(
    specs: Sequence[KVCacheSpec], kinds: Sequence[Sequence[int]], part_bytes: int, num_parts: int
) -> KVLayout:
    groups = []
    for layers in kinds:
        has_state = isinstance(specs[layers[0]], StateSpec)
        sizes = [part_bytes if has_state else specs[layer].page.num_bytes for layer in layers]
        parts = [[layers[place] for place in part] for part in _filled(sizes, part_bytes)]
        groups += [
            _group_of_parts(specs, parts[first : first + num_parts]) for first in range(0, len(parts), num_parts)
        ]
    return KVLayout(groups=_in_order(groups), part_bytes=part_bytes)


def _group_of_parts(specs: Sequence[KVCacheSpec], parts: Sequence[Sequence[int]]) -> KVGroup:
    layers = tuple(layer for part in parts for layer in part)
    places = []
    for number, part in enumerate(parts):
        firsts = accumulate((specs[layer].page.num_bytes // 2 for layer in part), initial=0)
        places += [KVPlace(part=number, first_byte=first) for first, _ in zip(firsts, part, strict=False)]
    pages = [specs[layer].page for layer in layers]
    kept = tuple(page for page in pages if isinstance(page, PageSpec))  # states are alike
    return KVGroup(spec=specs[layers[0]], layers=layers, pages=kept, places=tuple(places))


def _filled(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Stretches of things of these sizes that are no larger than `most` together."""
    begin = total = 0
    for place, size in enumerate(sizes):
        if total + size > most:
            yield range(begin, place)
            begin, total = place, 0
        total += size
    yield range(begin, len(sizes))


def _page_bytes(counts: Mapping[KVCacheSpec, int]) -> int:
    """Bytes of a page for so many layers of each kind: the most that leave little unused."""
    sizes = {spec.page.num_bytes for spec in counts}
    if len(sizes) == 1:
        return _layers_per_group([*counts.values()]) * sizes.pop()
    tried = {number * spec.page.num_bytes for spec, count in counts.items() for number in range(1, count + 1)}
    paddings = {size: _padding(list(_groups_of(counts, size)), size) for size in sorted(tried) if size >= max(sizes)}
    fitting = [size for size, padding in paddings.items() if padding <= MAX_PADDING]
    return max(fitting) if fitting else min(paddings, key=paddings.__getitem__)


def _groups_of(counts: Mapping[KVCacheSpec, int], page_bytes: int) -> Iterator[tuple[KVCacheSpec, Sequence[int]]]:
    """What each group keeps, and the bytes of its layers' blocks, of so many layers of each kind."""
    for spec, count in counts.items():
        for part in _filled([spec.page.num_bytes] * count, page_bytes):
            yield spec, [spec.page.num_bytes] * len(part)


def _padding(groups: Sequence[tuple[KVCacheSpec, Sequence[int]]], page_bytes: int) -> float:
    """What of its pages a sequence of `TYPICAL_CONTEXT` tokens leaves unused, as a share of what it uses.

    `groups`: what each keeps, and the bytes of its layers' blocks.
    """
    used = taken = 0
    for spec, sizes in groups:
        num_blocks = spec.most_blocks(TYPICAL_CONTEXT, spec.page.block_size)
        used += num_blocks * sum(sizes)
        taken += num_blocks * page_bytes
    return taken / used - 1


def _layers_per_group(counts: Sequence[int]) -> int:
    """The largest size of groups that leaves little of their pages unused; every group costs each step a table."""

    def padding(size: int) -> float:
        return sum(round_up(count, size) for count in counts) / sum(counts) - 1

    return max(size for size in range(1, max(counts) + 1) if padding(size) <= MAX_PADDING)


SLOT_MULTIPLES = {"reference": 1, "cpu": 16, "triton": 1}
"""By implementation of the ops: native ones read keys in tiles of 16 tokens (`csrc/cpu/kernels/attention/cache.h`)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCALED_DTYPES = ("int8", "fp8")
"""Of 8 bits, with a float32 scale for each token, head, and of keys and values."""
