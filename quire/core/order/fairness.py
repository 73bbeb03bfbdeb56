"""What each tenant may have of a step while several tenants are active: slots, KV blocks and work.

With one tenant none of this exists. With several, each has an equal share of slots and blocks. A tenant that holds more
gives its latest sequences back when another one waits for them, and starts no further ones. Steps are kept short, so
that nobody waits long for the step that runs: each tenant gets an equal part of a small amount of work, and its
sequences take turns. A tenant that was served less may catch up in few steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from quire.core.order.queue import RequestQueue, Tenant
from quire.core.sequence import Sequence

SHARED_STEP_WORK = 128
"""Work of a step of several tenants that are served alike. It takes some two or three times as long as the shortest
step, since weights are read once in either (benchmarks/serving.md)."""
CATCH_UP_WORK = 128
"""Most work of one tenant in a step, however far it is behind: the others wait for the end of the step."""
URGENT_PART = 4
"""While a tenant that was served less waits to start, the others get this part of what they would."""
CONTEXT_PER_TOKEN = 64
"""To read the keys and values of so many tokens takes about as long as to compute one token."""


@dataclass(slots=True)
class _Usage:
    """What a tenant has in this step."""

    work_left: float
    num_slots: int = 0
    num_blocks: int = 0
    num_running: int = 0
    is_served: bool = False
    """A sequence of it was scheduled."""


class Shares:
    """The shares of one step, and what is left of them."""

    def __init__(
        self,
        queue: RequestQueue,
        running: Iterable[Sequence],
        *,
        max_num_seqs: int,
        num_blocks: int,
        max_num_tokens: int,
        step: int,
    ) -> None:
        tenants = queue.active()
        self._queue = queue
        self._step = step
        self.max_slots = max(1, max_num_seqs // len(tenants))
        self.max_blocks = max(1, num_blocks // len(tenants))
        each = max(1, min(SHARED_STEP_WORK, max_num_tokens) // len(tenants))
        most_served = max(tenant.virtual_time for tenant in tenants)
        if any(tenant.waiting and most_served - tenant.virtual_time > each for tenant in tenants):
            each = max(1, each // URGENT_PART)
        most = max(each, CATCH_UP_WORK)
        self._usage = {tenant: _Usage(min(most, each + most_served - tenant.virtual_time)) for tenant in tenants}
        for seq in running:
            self.started(seq, seq.num_own_blocks)

    def started(self, seq: Sequence, num_blocks: int) -> None:
        """Count a running sequence and its blocks."""
        usage = self._usage[seq.group.tenant]
        usage.num_slots += seq.num_to_fork
        usage.num_blocks += num_blocks
        usage.num_running += 1

    def stopped(self, seq: Sequence) -> None:
        """A running sequence is about to lose its blocks."""
        usage = self._usage[seq.group.tenant]
        usage.num_slots -= seq.num_to_fork
        usage.num_blocks -= seq.num_own_blocks
        usage.num_running -= 1

    def tokens_for(self, seq: Sequence, wanted: int) -> int:
        """How many tokens of the sequence the step may compute; a tenant always gets one in each step."""
        usage = self._usage[seq.group.tenant]
        left = int(usage.work_left - seq.num_computed_tokens / CONTEXT_PER_TOKEN)
        return min(wanted, left) if left > 0 else 0 if usage.is_served else 1

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count what the step computes for a sequence."""
        usage = self._usage[seq.group.tenant]
        work = num_tokens + seq.num_computed_tokens / CONTEXT_PER_TOKEN
        usage.work_left -= work
        usage.is_served = True
        seq.served_at = self._step
        self._queue.charge(seq.group.tenant, work)

    def may_hold(self, seq: Sequence, num_blocks: int, without: Collection[Sequence] = ()) -> bool:
        """Whether its tenant stays within its share with one more sequence of so many blocks, and without others.

        One sequence may always run, however large: who holds nothing is below any share.
        """
        usage = self._usage[seq.group.tenant]
        if usage.num_running <= len(without):
            return True
        num_slots = usage.num_slots - sum(one.num_to_fork for one in without)
        num_held = usage.num_blocks - sum(one.num_own_blocks for one in without)
        return num_slots + seq.num_to_fork <= self.max_slots and num_held + num_blocks <= self.max_blocks

    def in_turn(self, running: list[Sequence]) -> list[Sequence]:
        """The running sequences, those first that have waited longest; the oldest never waits.

        That is the first of some tenant: which of them, arrival decides, as priorities hold within a tenant only.
        """
        firsts: dict[Tenant, Sequence] = {}
        for seq in running:
            firsts.setdefault(seq.group.tenant, seq)
        oldest = min(firsts.values(), key=_arrival, default=None)
        return sorted(running, key=lambda seq: -1 if seq is oldest else seq.served_at)

    def latest_beyond(self, running: list[Sequence], tenant: Tenant, *, slots: bool) -> Sequence | None:
        """The latest sequence of another tenant that holds more than its share of slots, or of blocks."""
        for seq in reversed(running):
            usage = self._usage[seq.group.tenant]
            over = usage.num_slots > self.max_slots if slots else usage.num_blocks > self.max_blocks
            if over and usage.num_running > 1 and seq.group.tenant is not tenant:
                return seq
        return None

    def victim(self, running: list[Sequence], busy: Collection[int]) -> Sequence:
        """Who gives way when no block is free: the latest sequence of the tenant that holds most, if it has others.

        `busy` are sequences of this step, which cannot. The oldest sequence of a tenant gives way to nobody but the
        oldest of all, so every tenant gets on.
        """
        idle = [seq for seq in reversed(running) if seq.seq_id not in busy]
        several = [seq for seq in idle if self._usage[seq.group.tenant].num_running > 1]
        if not several:
            return max(idle, key=_arrival)
        return max(several, key=lambda seq: self._usage[seq.group.tenant].num_blocks)


def _arrival(seq: Sequence) -> tuple[int, int]:
    """Where a sequence stands among those of all tenants."""
    return seq.group.number, seq.branch
