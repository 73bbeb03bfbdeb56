"""A step that raises is run again in halves until the guilty request stands alone; only that one fails.

Steps are repeatable (see `SchedulerOutputs`) and rows do not influence each other, so the others get exactly the tokens
they would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.log import get_logger
from quire.messages.output import Failure
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs

log = get_logger(__name__)


def execute_guarded(executor: Executor, plan: SchedulerOutputs) -> ModelRunnerOutput:
    """The result of a step; a request that makes it raise is reported in `errors`, alone."""
    if not plan.blocks_to_copy:
        return _execute(executor, plan)
    moved = executor.execute(_housekeeping(plan))
    result = _execute(executor, _computing(plan))
    result.failed_loads = moved.failed_loads
    return result


def submit_guarded(executor: Executor, plan: SchedulerOutputs, failed: set[int]) -> Callable[[], ModelRunnerOutput]:
    """Begin a step; what this gives waits for the result, which is that of `execute_guarded`.

    A step that copies blocks, or that has failed, is run to its end here. `failed`: sequences that earlier steps have
    failed for; this step may have been decided before that was known. They are left out: the worker may lack their
    tokens and blocks, and would write to blocks of others instead. Mutates: failed.
    """
    failed.difference_update(plan.removed_seq_ids)
    if failed.isdisjoint(plan.seq_ids):
        return _submit(executor, plan, failed)
    kept = [index for index, seq_id in enumerate(plan.seq_ids) if seq_id not in failed]
    read = _submit(executor, _part(plan, kept), failed)
    return lambda: _with_left_out(read(), plan, kept)


def _submit(executor: Executor, plan: SchedulerOutputs, failed: set[int]) -> Callable[[], ModelRunnerOutput]:
    if plan.blocks_to_copy:
        found = execute_guarded(executor, plan)
    else:
        try:
            return executor.submit(plan)
        except EngineDeadError:
            raise
        except Exception as error:
            found = _find_guilty(executor, plan, error)
    failed.update(found.errors)
    return lambda: found


def _with_left_out(result: ModelRunnerOutput, plan: SchedulerOutputs, kept: Sequence[int]) -> ModelRunnerOutput:
    """The result of a whole step, of which the sequences in `kept` were computed."""
    computed = dict(zip(kept, result.token_ids, strict=True))
    failure = Failure("a step before this one failed for this request")
    left_out = {seq_id: failure for index, seq_id in enumerate(plan.seq_ids) if index not in computed}
    token_ids = [computed.get(index, []) for index in range(len(plan.seq_ids))]
    return replace(result, token_ids=token_ids, errors=result.errors | left_out)


def _execute(executor: Executor, plan: SchedulerOutputs) -> ModelRunnerOutput:
    try:
        return executor.execute(plan)
    except EngineDeadError:
        raise  # nobody is guilty: there is no worker left to run anything
    except Exception as error:
        return _find_guilty(executor, plan, error)


def _find_guilty(executor: Executor, plan: SchedulerOutputs, error: Exception) -> ModelRunnerOutput:
    """The result of a step that has raised. Called while the error is handled."""
    if not plan.seq_ids:
        raise error
    log.exception("step failed num_seqs=%d; looking for the guilty request", len(plan.seq_ids))
    moved = executor.execute(_housekeeping(plan))
    result = _bisect(executor, _computing(plan), error)
    result.failed_loads = moved.failed_loads
    return result


_ONCE = (
    "pages_to_move",
    "blocks_to_swap_out",
    "blocks_to_swap_in",
    "blocks_to_copy",
    "removed_seq_ids",
    "removed_request_ids",
)


def _housekeeping(plan: SchedulerOutputs) -> SchedulerOutputs:
    """What a step does besides computing: rows to drop, pages to move, blocks to copy.

    Copies run once, before anything is computed: repeated, they would undo what was written to a destination, or bring
    there what a sequence has written to a source that was given back in the same step.
    """
    return SchedulerOutputs(**{name: getattr(plan, name) for name in _ONCE})


def _computing(plan: SchedulerOutputs) -> SchedulerOutputs:
    """The rest of a step."""
    nothing: Any = {name: [] for name in _ONCE}
    return replace(plan, **nothing)


def _bisect(executor: Executor, plan: SchedulerOutputs, error: Exception) -> ModelRunnerOutput:
    if len(plan.seq_ids) == 1:
        failure = Failure(f"the step failed for this request alone: {type(error).__name__}")
        return ModelRunnerOutput(token_ids=[[]], errors={plan.seq_ids[0]: failure})
    middle = len(plan.seq_ids) // 2
    result = ModelRunnerOutput()
    for half in (range(middle), range(middle, len(plan.seq_ids))):
        part = _part(plan, half)
        try:
            done = executor.execute(part)
        except EngineDeadError:
            raise
        except Exception as part_error:
            done = _bisect(executor, part, part_error)
        result.token_ids += done.token_ids
        result.forks |= done.forks
        result.logprobs |= done.logprobs
        result.prompt_logprobs |= done.prompt_logprobs
        result.errors |= done.errors
    return result


def _part(plan: SchedulerOutputs, indices: Sequence[int]) -> SchedulerOutputs:
    """The instruction for some of the sequences."""
    seq_ids = [plan.seq_ids[index] for index in indices]
    num_scheduled_tokens = [plan.num_scheduled_tokens[index] for index in indices]
    here = set(seq_ids)
    new_sequences = [new for new in plan.new_sequences if new.seq_id in here]
    request_ids = {new.request_id for new in new_sequences}
    return replace(
        plan,
        new_requests=[request for request in plan.new_requests if request.request_id in request_ids],
        new_sequences=new_sequences,
        seq_ids=seq_ids,
        num_computed_tokens=[plan.num_computed_tokens[index] for index in indices],
        num_scheduled_tokens=num_scheduled_tokens,
        num_draws=[plan.num_draws[index] for index in indices],
        new_block_ids={seq_id: change for seq_id, change in plan.new_block_ids.items() if seq_id in here},
        new_token_ids={seq_id: change for seq_id, change in plan.new_token_ids.items() if seq_id in here},
        pending_tokens={seq_id: position for seq_id, position in plan.pending_tokens.items() if seq_id in here},
        num_batched_tokens=sum(num_scheduled_tokens),
    )
