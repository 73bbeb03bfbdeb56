"""Faults that are planted in the real classes, one at a time, to see that the comparison notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quire.core.kv.block_manager import BlockManager
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.block_table import NULL_BLOCK, BlockTable
from quire.core.kv.groups import FullAttention, RecurrentState, SlidingWindow
from quire.core.plan_writer import PlanWriter
from quire.core.sequence import SequenceGroup
from quire.messages.kv import SlidingWindowSpec
from quire.messages.step import SchedulerOutputs
from quire.utils.hashing import block_hashes
from quire.worker.cache_engine import CacheEngine
from quire.worker.input_batch import InputBatch
from quire.worker.last_tokens import LastTokens
from quire.worker.model_runner import ModelRunner
from tools.fuzz_invariance.patches import replaced

Replacement = Callable[[Any], Any]
"""What stands there -> what shall stand there."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Let the engine have a fault of `FAULTS` inside the block."""
    owner, attribute, replacement = FAULTS[name]
    with replaced(owner, attribute, replacement(getattr(owner, attribute))):
        yield


def _stale_page(forget: Any) -> Any:
    """A page that was given away is still found by what it held before."""

    def _forget(pool: BlockPool, block: Any) -> None:
        if block.content is not None:
            pool.num_evictable -= block.ref_count == 0

    return _forget


def _skipped_copy(append: Any) -> Any:
    """A fork writes to a page of its own, which lacks what stood in the shared one."""

    def skipping(manager: Any, table: Any, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        append(manager, table, num_computed, num_tokens)
        return []

    return skipping


def _shared_write(shared: Any) -> Any:
    """A fork writes to a page that other branches read."""
    return lambda manager, table, num_computed: []


def _wrong_hash(content: Any) -> Any:
    """A block is found by its own tokens, whatever stands before it."""

    def without_parent(manager: BlockManager, seq: Any, index: int) -> Any:
        tokens = tuple(seq.token_ids[index * manager.block_size : (index + 1) * manager.block_size])
        return block_hashes(b"", tokens, len(tokens))[0], b"", tokens

    return without_parent


def _early_trim(trim: Any) -> Any:
    """A window gives a block back while it is still read."""

    def early(manager: Any, table: Any, num_computed: int) -> None:
        trim(manager, table, num_computed + manager._block_size)

    return early


def _wrong_window_match(match: Any) -> Any:
    """A cached prefix counts although the first block is missing that the window reaches."""

    def short(manager: SlidingWindow, find: Any, limit: int) -> list[int]:
        spec = manager._spec
        manager._spec = _ShorterReach(page=spec.page, window=spec.window)
        try:
            found: list[int] = match(manager, find, limit)
        finally:
            manager._spec = spec
        return found

    return short


class _ShorterReach(SlidingWindowSpec):
    """A window that is believed to end one block earlier."""

    __slots__ = ()

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        unread = max(0, num_computed_tokens - self.window + 1) // self.page.block_size
        return min(unread + 1, num_computed_tokens // self.page.block_size)


def _stale_state(cacheable: Any) -> Any:
    """The state before a step is found as the one after it."""

    def before(manager: RecurrentState, table: BlockTable, index: int, num_computed: int) -> int | None:
        page = cacheable(manager, table, index, num_computed)
        return None if page is None or table.block_ids[0] == NULL_BLOCK else table.block_ids[0]

    return before


def _state_of_another_boundary(match: Any) -> Any:
    """A sequence goes on from its first state, whichever it should be."""

    def first(manager: RecurrentState, find: Any, limit: int) -> list[int]:
        found: list[int] = match(manager, find, limit)
        page = find(manager._state_stride // manager._block_size - 1) if found else None
        return found if page is None else [*found[:-1], page]

    return first


def _state_in_place(append: Any) -> Any:
    """A step writes over the state that it reads, and that others may find."""

    def over(manager: RecurrentState, table: BlockTable, *tokens: int) -> list[tuple[int, int]]:
        copies: list[tuple[int, int]] = append(manager, table, *tokens)
        read, write = table.block_ids
        if read != NULL_BLOCK:
            manager._pool.release(write)
            manager._pool.share(read)
            table.block_ids[1] = read
        return copies

    return over


def _token_sent_twice(so_far: Any) -> Any:
    """A request that moves to another core has forgotten its last token."""

    def behind(group: SequenceGroup) -> Any:
        request = so_far(group)
        branches = {branch: ids[:-1] for branch, ids in request.progress.branches.items()}
        return replace(request, progress=replace(request.progress, branches=branches))

    return behind


def _stale_token(apply: Any) -> Any:
    """A step goes on from the token before the one that the step before it has drawn."""

    def behind(batch: InputBatch, plan: SchedulerOutputs) -> None:
        for seq_id in plan.pending_tokens:
            batch.rows[seq_id].drawn = batch.rows[seq_id].token_ids[-1]
        apply(batch, plan)

    return behind


def _stale_token_on_device(put: Any) -> Any:
    """The device keeps the token that it drew two positions before, of every other position."""

    def forgetful(tokens: LastTokens, places: Any, token_ids: Any) -> None:
        put(tokens, places - places % 2, token_ids)

    return forgetful


def _token_lost(tell_tokens: Any) -> Any:
    """The worker is not told of a token in a step in which the block tables change."""

    def forgetful(writer: PlanWriter, plan: Any) -> None:
        tell_tokens(writer, plan)
        for seq_id in plan.new_block_ids:
            plan.new_token_ids.pop(seq_id, None)

    return forgetful


def _missed_preemption(allocate_prefix: Any) -> Any:
    """A preempted sequence goes on as if its pages were still there."""

    def unaware(manager: BlockManager, seq: Any, matched: list[list[int]]) -> None:
        allocate_prefix(manager, seq, matched)
        if seq.num_output_tokens:
            seq.num_computed_tokens = max(seq.num_computed_tokens, seq.num_tokens - 1)

    return unaware


def _missed_load(swap_in: Any) -> Any:
    """A page that should come back from memory does not, and nobody is told."""
    return lambda cache, loads: []


def _stale_parameters(batch_of: Any) -> Any:
    """Rows are sampled with the parameters of those that stood there before."""

    def unchanged(runner: ModelRunner, seq_ids: list[int]) -> Any:
        before = runner.__dict__.get("_before")
        if before is None or len(before.rows) != len(seq_ids):
            before = runner.__dict__["_before"] = batch_of(runner, seq_ids)
        return before

    return unchanged


FAULTS: dict[str, tuple[Any, str, Replacement]] = {
    "stale-page": (BlockPool, "_forget", _stale_page),
    "skipped-copy": (FullAttention, "append", _skipped_copy),
    "shared-write": (FullAttention, "_shared", _shared_write),
    "wrong-hash": (BlockManager, "_content", _wrong_hash),
    "early-trim": (SlidingWindow, "trim", _early_trim),
    "wrong-window-match": (SlidingWindow, "match", _wrong_window_match),
    "stale-state": (RecurrentState, "cacheable", _stale_state),
    "state-of-another-boundary": (RecurrentState, "match", _state_of_another_boundary),
    "state-in-place": (RecurrentState, "append", _state_in_place),
    "token-sent-twice": (SequenceGroup, "so_far", _token_sent_twice),
    "token-lost": (PlanWriter, "_tell_tokens", _token_lost),
    "stale-token": (InputBatch, "apply", _stale_token),
    "stale-token-on-device": (LastTokens, "put", _stale_token_on_device),
    "missed-preemption": (BlockManager, "allocate_prefix", _missed_preemption),
    "missed-load": (CacheEngine, "swap_in", _missed_load),
    "stale-parameters": (ModelRunner, "_batch_of", _stale_parameters),
}
"""name -> (class, attribute, what to put there)."""
