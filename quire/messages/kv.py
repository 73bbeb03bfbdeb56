"""What layers need of the KV cache, and how they share one pool of pages. The only place that counts KV bytes.

Layers of one kind form groups. Every group has the same number of layers (at most), so a page, one block of each layer
of a group, takes the same bytes in every group, and any group can use any page. A group has a block table of its own.
Recurrent layers have groups, too: there a page holds the layers' states after a token, instead of keys and values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from quire.utils.math import cdiv, round_up

MAX_PADDING = 0.1
"""Groups may have so many layers that at most this share of the pages' bytes, beyond what layers use, is unused."""


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

    @property
    def num_elements(self) -> int:
        """Elements of one head's keys (or values) in a block, padding included; a multiple of `block_size`."""
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
class KVGroup:
    """Layers that keep the same tokens and so share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]
    """Their places in the model; the i-th of them has the i-th part of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How the layers of a model share one pool of pages of equal bytes."""

    groups: tuple[KVGroup, ...]
    """At least one. Groups that keep all tokens come first, those of recurrent layers last."""
    reads: tuple[tuple[int, int], ...] = ()
    """(layer, earlier layer whose keys and values it reads): such layers are in no group and keep nothing."""

    @property
    def page(self) -> PageSpec | StatePage:
        """One layer's part of a page: a block of keys and values, if the model has any attention."""
        return self.groups[0].spec.page

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
    def layers_per_page(self) -> int:
        """Parts of a page; a group with fewer layers leaves some unused."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return self.layers_per_page * self.page.num_bytes

    @property
    def group_of_layer(self) -> dict[int, int]:
        """The index of each layer's group, or of the one that it reads."""
        return self._with_readers({layer: index for index, group in enumerate(self.groups) for layer in group.layers})

    @property
    def part_of_layer(self) -> dict[int, int]:
        """Which part of a page of its group each layer has, or reads."""
        return self._with_readers({layer: part for group in self.groups for part, layer in enumerate(group.layers)})

    def _with_readers(self, places: dict[int, int]) -> dict[int, int]:
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
    assert len({(spec.page.num_bytes, spec.page.block_size) for spec in specs}) == 1, "all pages are of one size"
    assert all(kept < layer and specs[kept] == specs[layer] for layer, kept in reads), "readers see what was kept"
    by_spec: dict[KVCacheSpec, list[int]] = {}
    readers = dict(reads)
    for layer, spec in enumerate(specs):
        if layer not in readers:
            by_spec.setdefault(spec, []).append(layer)
    size = _layers_per_group([len(layers) for layers in by_spec.values()])
    groups = [
        KVGroup(spec=spec, layers=tuple(layers[first : first + size]))
        for spec, layers in by_spec.items()
        for first in range(0, len(layers), size)
    ]
    groups.sort(key=lambda group: _ORDER.index(type(group.spec)))
    return KVLayout(groups=tuple(groups), reads=tuple(reads))


def _layers_per_group(counts: Sequence[int]) -> int:
    """The largest size of groups that leaves little of their pages unused; every group costs each step a table."""

    def padding(size: int) -> float:
        return sum(round_up(count, size) for count in counts) / sum(counts) - 1

    return max(size for size in range(1, max(counts) + 1) if padding(size) <= MAX_PADDING)


SLOT_MULTIPLES = {"reference": 1, "cpu": 16, "triton": 1}
"""By implementation of the ops: the native kernels read keys in tiles of 16 tokens (`csrc/cpu/kernels/cache.h`)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCALED_DTYPES = ("int8", "fp8")
"""Of 8 bits, with a float32 scale for each token, head, and of keys and values."""
