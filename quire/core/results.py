"""What a step has given: tokens are appended, full blocks indexed, sequences fork, stop or fail."""

from __future__ import annotations

from quire.core.lifecycle import Lifecycle
from quire.core.sequence import Sequence, SequenceStatus
from quire.core.stop import finish_of
from quire.messages.output import EngineCoreOutput, Failure, FinishReason, PositionLogprobs
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.flight_recorder import Outcome


class Results:
    """Takes in the results of steps."""

    def __init__(self, lives: Lifecycle, *, max_model_len: int) -> None:
        """`max_model_len` ends a sequence whatever was asked, in tokens."""
        self._lives = lives
        self._max_model_len = max_model_len

    def take_in(
        self, scheduled: dict[int, Sequence], plan: SchedulerOutputs, result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Learn from a step that ended at `now`; `scheduled` are its sequences by id, and is emptied. Gives what is
        new."""
        outputs: list[EngineCoreOutput] = []
        for seq_id, num_tokens, drawn in zip(plan.seq_ids, plan.num_scheduled_tokens, result.token_ids, strict=True):
            seq = scheduled.pop(seq_id)
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if seq_id in result.errors:
                outputs += self._fail(seq, result.errors[seq_id])
                continue
            seq.num_computed_tokens += num_tokens
            self._lives.blocks.retire(seq)
            prompt_logprobs = _unreported(seq, num_tokens, result) if result.prompt_logprobs else None
            runs = [drawn] if drawn else [[token_id] for token_id in result.forks.get(seq_id, ())]
            if runs:
                logprobs = result.logprobs.get(seq_id) if result.logprobs else None
                outputs += self._append_tokens(seq, runs, logprobs, prompt_logprobs, now)
            elif prompt_logprobs:
                outputs.append(_output(seq, prompt_logprobs))
        return outputs

    def _append_tokens(
        self,
        seq: Sequence,
        runs: list[list[int]],
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs] | None,
        now: float,
    ) -> list[EngineCoreOutput]:
        """`runs`: the tokens that follow, for each branch; the sequence forks when there are several branches."""
        assert len(runs) == seq.num_to_fork, (seq, runs)
        stats = seq.group.stats
        if not stats.first_token_at:
            stats.first_token_at = now
            self._lives.totals.add_first_token(stats)
        stats.last_token_at = now
        outputs = []
        for branch, run in zip([seq] if len(runs) == 1 else self._lives.fork(seq, len(runs)), runs, strict=True):
            output = _output(branch, prompt_logprobs if branch is seq else None)
            self._extend(branch, run, output)
            if logprobs is not None:
                output.new_logprobs, logprobs = logprobs[: len(output.new_token_ids)], logprobs[len(run) :]
            outputs.append(output)
        return outputs

    def _extend(self, seq: Sequence, run: list[int], output: EngineCoreOutput) -> None:
        """Append tokens as far as the sequence goes on, and say so in the output."""
        stats = seq.group.stats
        for token_id in run:
            seq.token_ids.append(token_id)
            output.new_token_ids.append(token_id)
            stats.num_generation_tokens += 1
            finish = finish_of(seq, self._max_model_len)
            if finish is not None:
                output.finish_reason, output.stop_reason = finish
                output.stats = stats
                self._lives.finish(seq)
                return

    def _fail(self, seq: Sequence, error: Failure) -> list[EngineCoreOutput]:
        outputs = []
        for branch in range(seq.branch, seq.branch + seq.num_to_fork):
            output = _output(seq)
            output.branch, output.finish_reason, output.error = branch, FinishReason.ERROR, error
            outputs.append(output)
        self._lives.timelines.leaves(seq.group, Outcome.FAILED)
        self._lives.finish(seq)
        return outputs


def _unreported(seq: Sequence, num_tokens: int, result: ModelRunnerOutput) -> list[PositionLogprobs] | None:
    """The prompt logprobs of this step without those that an earlier, preempted pass has reported."""
    entries = result.prompt_logprobs.get(seq.seq_id)
    if not entries:
        return None
    group, first = seq.group, seq.num_computed_tokens - num_tokens
    entries = entries[max(0, group.num_prompt_logprobs - first) :]
    group.num_prompt_logprobs += len(entries)
    return entries or None


def _output(seq: Sequence, prompt_logprobs: list[PositionLogprobs] | None = None) -> EngineCoreOutput:
    """What there is to tell of a branch, without tokens yet."""
    group = seq.group
    output = EngineCoreOutput(group.request_id, seq.branch, [], None, prompt_logprobs)
    output.num_cached_tokens = max(group.num_cached_tokens, 0)
    if group.effort_is_news:
        group.effort_is_news = False
        output.stats, output.effort = group.stats, group.effort
    return output
