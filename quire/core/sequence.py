"""A request in the core: `SequenceGroup`, and its branches: `Sequence`.

There is no prefill or decode here: a sequence has `num_tokens` and `num_computed_tokens`, and every step closes some of
the difference. The prompt of a group is computed once, by its first sequence, which then forks into `n`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from quire.core.beam import BeamSearch
from quire.core.kv.block_table import BlockTable
from quire.messages.request import EngineCoreRequest, RequestProgress
from quire.messages.stats import RequestEffort, RequestStats
from quire.messages.step import BlockChange

if TYPE_CHECKING:
    from quire.core.order.queue import Tenant


class SequenceStatus(IntEnum):
    """Where a sequence stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """One branch: its tokens, how far they are computed, and the blocks that hold their keys and values."""

    __slots__ = (
        "block_hashes",
        "branch",
        "group",
        "is_known",
        "num_blocks_before",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_found_blocks",
        "num_hashed_blocks",
        "num_pending",
        "num_to_fork",
        "num_tokens_sent",
        "num_writable_tokens",
        "rank",
        "retires_at",
        "seq_id",
        "served_at",
        "status",
        "tables",
        "token_ids",
    )

    def __init__(self, seq_id: int, group: SequenceGroup, branch: int, token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.group = group
        self.branch = branch
        self.token_ids = token_ids
        """Prompt and output."""
        self.rank = (*group.rank, branch)
        """Where it stands among all sequences: lower ones are served first."""
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        """Those that steps have computed or, while some are in flight, will have."""
        self.num_committed_tokens = 0
        """Those of steps that have ended."""
        self.num_pending = 0
        """Tokens that steps in flight draw and that will not end it by its length: it can be scheduled with them."""
        self.tables: list[BlockTable] = []
        """Its blocks, by KV group; empty while it waits."""
        self.block_hashes: list[bytes] = []
        """Hashes of the leading full blocks, as far as needed; the same in all groups, kept over preemption."""
        self.num_hashed_blocks = 0
        """Leading blocks that are in the prefix index (or duplicates of such)."""
        self.num_found_blocks = 0
        """Leading blocks that were in the cache when it started."""
        self.num_blocks_before = 0
        """The most of those it had when it was preempted: it may find them again even if it does not read the cache."""
        self.num_writable_tokens = 0
        """Up to so many tokens can be computed as the tables are: they have blocks, and nobody else has those."""
        self.retires_at = 0
        """Before so many tokens are computed, none of its blocks becomes full, or is read no more."""
        self.num_to_fork = 1
        """Branches to draw when the prompt is complete."""
        self.is_known = False
        """Whether the worker knows it."""
        self.num_tokens_sent = 0
        """Tokens that the worker knows."""
        self.served_at = 0
        """The last step with several active tenants that computed some of it."""

    def __repr__(self) -> str:
        return f"Sequence({self.group.request_id}/{self.branch}, {self.num_computed_tokens} of {self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those that are being drawn included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_draws(self) -> int:
        """Tokens to draw when all it has is computed. Beams are not drawn: one token is, and is not looked at."""
        return 1 if self.group.beams is not None else self.num_to_fork

    @property
    def is_idle(self) -> bool:
        """Whether it is a beam that waits for the other ones to be computed."""
        return self.group.beams is not None and self.branch in self.group.beams.reported

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens."""
        return self.token_ids[self.group.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """Tokens that it has and that are not computed."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def num_unscored(self) -> int:
        """Prompt logprobs that were asked for and are still to be computed."""
        group = self.group
        done = max(self.num_computed_tokens, group.num_prompt_logprobs)
        return max(0, group.num_prompt_logprobs_asked - done)

    def num_scored_by(self, num_tokens: int) -> int:
        """Prompt logprobs that computing its next tokens gives."""
        group, first = self.group, self.num_computed_tokens
        last = min(first + num_tokens, group.num_prompt_logprobs_asked)
        return max(0, last - max(first, group.num_prompt_logprobs))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens."""
        return len(self.token_ids) - self.group.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, shared ones included."""
        return sum(len(table.held) for table in self.tables)

    @property
    def num_own_blocks(self) -> int:
        """Blocks that nobody else had before."""
        return sum(table.num_own for table in self.tables)

    def unsent_blocks(self) -> list[BlockChange]:
        """What the worker does not know of each table yet; from now on it does."""
        return [table.unsent() for table in self.tables]

    def fork(self, seq_id: int, branch: int) -> Sequence:
        """A new branch with the same tokens and state; the caller shares the blocks."""
        child = Sequence(seq_id, self.group, branch, list(self.token_ids))
        child.status = self.status
        child.num_computed_tokens = self.num_computed_tokens
        child.num_committed_tokens = self.num_committed_tokens
        child.tables = [table.fork() for table in self.tables]
        child.block_hashes = list(self.block_hashes)
        child.num_hashed_blocks = self.num_hashed_blocks
        child.num_found_blocks = self.num_found_blocks
        child.served_at = self.served_at
        return child


class SequenceGroup:
    """One request and its live branches."""

    __slots__ = (
        "beams",
        "effort",
        "effort_is_news",
        "is_preparing",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "num_prompt_logprobs_asked",
        "num_prompt_tokens",
        "number",
        "rank",
        "request",
        "request_id",
        "sequences",
        "stats",
        "stop_reasons",
        "tenant",
    )

    def __init__(self, request: EngineCoreRequest, tenant: Tenant, rank: tuple[float, int]) -> None:
        self.request = request
        self.rank = rank
        """Where it stands among all requests (`policy`)."""
        self.number = rank[1]
        """How many were queued before it."""
        self.tenant = tenant
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        params = request.sampling_params
        self.min_num_tokens = self.num_prompt_tokens + (params.min_tokens if request.grammar is None else 0)
        """Until a branch has more, no token ends it. Where there is a grammar, a token that would is drawn before
        only if the grammar allows no other."""
        self.is_preparing = False
        """Its grammar is being compiled: it waits."""
        self.max_num_tokens = self.num_prompt_tokens + request.max_tokens
        self.stop_reasons = _stop_reasons(request)
        """Tokens that end a branch, and the stop reason that they give."""
        self.beams = BeamSearch(request, self.stop_reasons) if params.use_beam_search else None
        """The search that its branches are the beams of."""
        self.sequences: dict[int, Sequence] = {}
        """Live branches by branch number."""
        progress = request.progress or RequestProgress()
        self.stats = progress.stats or RequestStats(received_at=request.received_at, arrived_at=request.arrived_at)
        self.effort = progress.effort or RequestEffort()
        self.effort_is_news = False
        self.num_cached_tokens = progress.num_cached_tokens
        """Prompt tokens found in the prefix cache when first scheduled; -1 before."""
        self.num_prompt_logprobs = progress.num_prompt_logprobs
        """Prompt positions already reported: a recomputed prompt does not score them again."""
        self.num_prompt_logprobs_asked = 0 if params.prompt_logprobs is None else self.num_prompt_tokens - 1
        """Nothing predicts the first token of a prompt."""

    def so_far(self) -> EngineCoreRequest:
        """The request with its progress, as another scheduler (or this one) can go on with it.

        Branches that have no token yet are part of the progress once the request has forked.
        """
        is_forked = all(seq.num_to_fork == 1 for seq in self.sequences.values())
        branches = {seq.branch: seq.output_token_ids for seq in self.sequences.values()}
        if self.beams is not None:
            branches = {index: branches[branch] for index, branch in enumerate(self.beams.branches)}
        progress = RequestProgress(
            branches=branches if is_forked else {},
            beams=self.beams.progress() if is_forked and self.beams is not None else None,
            num_prompt_logprobs=self.num_prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            stats=self.stats,
            effort=self.effort,
        )
        return replace(self.request, progress=progress)


def _stop_reasons(request: EngineCoreRequest) -> dict[int, int | None]:
    """As in vLLM the first end-of-sequence id is reported without reason, further ones and stop tokens with theirs."""
    params = request.sampling_params
    reasons: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids or ()}
    if not params.ignore_eos:
        reasons |= {token_id: token_id for token_id in request.eos_token_ids}
        reasons |= dict.fromkeys(request.eos_token_ids[:1])
    return reasons
