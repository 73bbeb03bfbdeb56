"""Core <-> worker: the whole instruction for a step, and its result.

Columns instead of objects: entry i of every `seq_*` list belongs to the same sequence. Plain lists and numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages.kv_tiers import PageMove
from quire.messages.output import Failure, PositionLogprobs
from quire.messages.request import EngineCoreRequest

BlockChange = tuple[int, list[int]]
"""(index, blocks): what a block table holds from that index on."""


@dataclass(slots=True)
class NewSequenceData:
    """A sequence the worker does not know (any more): first time scheduled, forked, or resumed after preemption."""

    seq_id: int
    request_id: str
    """Of a request that the worker knows, or learns of in the same instruction."""
    branch: int
    output_token_ids: list[int]
    """What follows the prompt."""
    block_ids: list[BlockChange]
    """Its table in each KV group. Entries before the index are not read."""
    num_prompt_logprobs: int = 0
    """Prompt logprobs that were reported before a preemption: they are not computed again."""


@dataclass(slots=True)
class SchedulerOutputs:
    """The whole instruction for a step. The worker drops finished rows, applies the copies, then runs the model.

    Everything in it is an assignment, and to draw a token does not change a sequence in the worker, which hears of the
    token in the next instruction: what it is or, where that was written before the token was drawn, that it has come
    (`pending_tokens`). So applying an instruction twice is the same as applying it once, and a step that failed can
    be run again in parts. Its copies are the exception: they run once, before anything is computed, since a sequence of
    the same step may write to their destinations, and to a source that nobody else has any more. Pages are moved to
    slots once only: a slot that holds a page already is left alone, for the block that the page came from may have been
    written since.
    """

    new_requests: list[EngineCoreRequest] = field(default_factory=list)
    """Requests that the worker does not know: each comes once, however often it forks or is preempted."""
    new_sequences: list[NewSequenceData] = field(default_factory=list)
    """Sequences to add before the step; each is also scheduled below."""
    seq_ids: list[int] = field(default_factory=list)
    """The scheduled sequences, in order."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Per scheduled sequence: tokens whose KV exists before this step."""
    num_scheduled_tokens: list[int] = field(default_factory=list)
    """Per scheduled sequence: tokens to compute in this step."""
    num_draws: list[int] = field(default_factory=list)
    """Per scheduled sequence: tokens to draw after its last row. 0 where the step does not reach its last known token,
    n where the request forks into n branches, else 1."""
    new_token_ids: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """seq_id -> (position, tokens): what it has from that position on."""
    pending_tokens: dict[int, int] = field(default_factory=dict)
    """seq_id -> position: what it has there is the token that was drawn for it last, which the core has not seen."""
    new_block_ids: dict[int, list[BlockChange]] = field(default_factory=dict)
    """seq_id -> what has changed in its table of each KV group. New sequences carry their whole tables."""
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) pairs, applied in order before the model runs, whatever group they belong to."""
    pages_to_move: list[PageMove] = field(default_factory=list)
    """From slots of one tier to slots of the next, before anything else."""
    blocks_to_swap_out: list[PageMove] = field(default_factory=list)
    """From blocks to slots, before anything writes to the blocks."""
    blocks_to_swap_in: list[PageMove] = field(default_factory=list)
    """From slots to blocks, while the model runs: no sequence of this step uses them."""
    removed_seq_ids: list[int] = field(default_factory=list)
    """Finished, aborted or preempted since the last step: forget them."""
    removed_request_ids: list[str] = field(default_factory=list)
    """Requests that have ended: forget them."""
    preempted_seq_ids: list[int] = field(default_factory=list)
    """Those of `removed_seq_ids` that will come back."""
    num_batched_tokens: int = 0
    """Sum of `num_scheduled_tokens`."""
    num_lookahead_slots: int = 0
    """Slots reserved per sequence for draft tokens; 0 without speculative decoding."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of a step, in the order of `SchedulerOutputs.seq_ids`."""

    token_ids: list[list[int]] = field(default_factory=list)
    """Per scheduled sequence: the tokens that follow it, by position. Empty where nothing was drawn, and at a fork."""
    forks: dict[int, list[int]] = field(default_factory=dict)
    """seq_id -> the next token of each branch, for sequences that fork."""
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    """seq_id -> one entry for each of its tokens here, by position or by branch, for sequences that asked."""
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    """seq_id -> one entry per prompt token scored in this step: positions num_computed+1 up to the end of the chunk,
    without the first `NewSequenceData.num_prompt_logprobs` of the prompt."""
    failed_loads: list[int] = field(default_factory=list)
    """Blocks of `blocks_to_swap_in` whose page was not what the instruction says, and was not loaded."""
    errors: dict[int, Failure] = field(default_factory=dict)
    """seq_id -> what went wrong for that sequence alone (its logits were not finite)."""
