"""What a step has given: tokens are appended, full blocks indexed, sequences fork, stop or fail."""

from __future__ import annotations

from collections.abc import Collection

from quire.core.beam import BeamSearch, Continuation
from quire.core.lifecycle import Lifecycle
from quire.core.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.core.stop import finish_of
from quire.messages.output import BeamStep, EngineCoreOutput, Failure, FinishReason, PositionLogprobs
from quire.messages.request import BeamHypothesis
from quire.messages.stats import RequestStats
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.flight_recorder import Outcome


class Results:
    """Takes in the results of steps."""

    def __init__(self, lives: Lifecycle, *, max_model_len: int) -> None:
        """`max_model_len` ends a sequence whatever was asked, in tokens."""
        self._lives = lives
        self._max_model_len = max_model_len

    def take_in(
        self, scheduled: Collection[Sequence], plan: SchedulerOutputs, result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Learn from a step that ended at `now`; `scheduled` are its sequences, in order. Gives what is new."""
        outputs: list[EngineCoreOutput] = []
        running, retire = SequenceStatus.RUNNING, self._lives.blocks.retire  # looked up once: this is most of a step
        for seq, num_tokens, drawn in zip(scheduled, plan.num_scheduled_tokens, result.token_ids, strict=True):
            seq_id = seq.seq_id
            if seq.status is not running:
                continue  # aborted while the step ran
            prompt_logprobs = result.prompt_logprobs.get(seq_id) if result.prompt_logprobs else None
            if prompt_logprobs:
                seq.group.num_prompt_logprobs += len(prompt_logprobs)
            if seq_id in result.errors:
                if prompt_logprobs:  # as where the prompt was computed in earlier steps
                    outputs.append(_output(seq, [], None, prompt_logprobs))
                outputs += self._fail(seq, result.errors[seq_id])
                continue
            seq.num_committed_tokens += num_tokens
            retire(seq)
            logprobs = result.logprobs.get(seq_id) if result.logprobs else None
            if seq.group.beams is not None:
                if prompt_logprobs:
                    outputs.append(_output(seq, [], None, prompt_logprobs))
                if drawn:
                    outputs += self._report(seq, seq.group.beams, result.logprobs[seq_id][0], now)
            elif drawn:
                outputs.append(self._extend(seq, drawn, now, logprobs, prompt_logprobs))
            elif seq_id in result.forks:
                outputs += self._fork(seq, result.forks[seq_id], now, logprobs, prompt_logprobs)
            elif prompt_logprobs:
                outputs.append(_output(seq, [], None, prompt_logprobs))
        return outputs

    def _fork(
        self,
        seq: Sequence,
        token_ids: list[int],
        now: float,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs] | None,
    ) -> list[EngineCoreOutput]:
        """The sequence becomes several branches, each with a token of its own."""
        assert len(token_ids) == seq.num_to_fork, (seq, token_ids)
        outputs = []
        for index, branch in enumerate(self._lives.fork(seq, len(token_ids))):
            found = None if logprobs is None else logprobs[index : index + 1]
            scored = prompt_logprobs if branch is seq else None
            outputs.append(self._extend(branch, [token_ids[index]], now, found, scored))
        return outputs

    def _extend(
        self,
        seq: Sequence,
        run: list[int],
        now: float,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs] | None,
    ) -> EngineCoreOutput:
        """Append tokens as far as the sequence goes on, and tell of them."""
        assert seq.num_to_fork == 1, seq
        stats, token_ids = seq.group.stats, seq.token_ids
        self._has_token(stats, now)
        output, num_before = _output(seq, run, logprobs, prompt_logprobs), len(token_ids)
        for token_id in run:
            token_ids.append(token_id)
            if seq.num_pending:
                seq.num_pending -= 1
            stats.num_generation_tokens += 1
            finish = finish_of(seq, self._max_model_len)
            if finish is not None:
                output.finish_reason, output.stop_reason = finish
                self._end(seq, output, len(token_ids) - num_before)
                break
        return output

    def _end(self, seq: Sequence, output: EngineCoreOutput, num_tokens: int) -> None:
        """The sequence ends after so many of the tokens in its output."""
        output.stats = seq.group.stats
        if num_tokens < len(output.new_token_ids):
            output.new_token_ids = output.new_token_ids[:num_tokens]
            output.new_logprobs = output.new_logprobs and output.new_logprobs[:num_tokens]
        self._lives.finish(seq)

    def _has_token(self, stats: RequestStats, now: float) -> None:
        """Take down when a request's tokens came."""
        if not stats.first_token_at:
            stats.first_token_at = now
            self._lives.totals.add_first_token(stats)
        stats.last_token_at = now

    def _report(self, seq: Sequence, beams: BeamSearch, found: PositionLogprobs, now: float) -> list[EngineCoreOutput]:
        """A beam's continuations are known; when those of all beams are, the search takes a step."""
        beams.reported[seq.branch] = found
        if not beams.is_complete:
            return []
        group = seq.group
        parents = [group.sequences[branch] for branch in beams.branches]
        candidates = beams.candidates() if group.request.sampling_params.logprobs is not None else []
        running, ended = beams.choose(lambda parent: parents[parent].output_token_ids)
        self._has_token(group.stats, now)
        group.stats.num_generation_tokens += max(len(running), len(ended))
        output = _output(seq, [one.token_id for one in running])
        output.branch = 0
        output.beam_step = BeamStep([one.parent for one in running], beams.cum_logprobs, ended, candidates)
        if beams.is_done:
            return [output, *self._end_search(group, beams)]
        beams.branches = [child.branch for child in self._continue(parents, running)]
        return [output]

    def _continue(self, parents: list[Sequence], running: list[Continuation]) -> list[Sequence]:
        """Let the sequences be what the search has chosen; the first child of a beam takes over its sequence."""
        chosen = {one.parent for one in running}
        for index, parent in enumerate(parents):
            if index not in chosen:
                self._lives.finish(parent)
        free = iter([branch for branch in range(len(running)) if branch not in parents[0].group.sequences])
        children: list[Sequence] = []
        for one in running:
            parent = parents[one.parent]
            if parent not in children:
                children.append(parent)
            else:
                children.append(self._lives.branch_off(parent, next(free)))
        for child, one in zip(children, running, strict=True):
            child.token_ids.append(one.token_id)
        return children

    def _end_search(self, group: SequenceGroup, beams: BeamSearch) -> list[EngineCoreOutput]:
        """The best completions become the branches of the request, in order."""
        best = beams.best.first(group.request.sampling_params.n)
        outputs = [_found(group, index, hypothesis) for index, hypothesis in enumerate(best)]
        for seq in list(group.sequences.values()):
            self._lives.finish(seq)
        return outputs

    def _fail(self, seq: Sequence, error: Failure) -> list[EngineCoreOutput]:
        """The sequence and all that it was to become fail; one beam of a search takes the whole request with it."""
        group = seq.group
        branches = range(seq.branch, seq.branch + seq.num_to_fork)
        if group.beams is not None:
            branches = range(group.request.sampling_params.n)
        outputs = []
        for branch in branches:
            output = _output(seq, [])
            output.branch, output.finish_reason, output.error = branch, FinishReason.ERROR, error
            outputs.append(output)
        self._lives.timelines.leaves(group, Outcome.FAILED)
        for one in [seq] if group.beams is None else list(group.sequences.values()):
            self._lives.finish(one)
        return outputs


def _found(group: SequenceGroup, branch: int, hypothesis: BeamHypothesis) -> EngineCoreOutput:
    """A whole completion."""
    output = EngineCoreOutput(group.request_id, branch, hypothesis.token_ids, stats=group.stats)
    output.num_cached_tokens = max(group.num_cached_tokens, 0)
    output.finish_reason = FinishReason.STOP if hypothesis.is_stopped else FinishReason.LENGTH
    output.stop_reason, output.cum_logprob = hypothesis.stop_reason, hypothesis.cum_logprob
    return output


def _output(
    seq: Sequence,
    token_ids: list[int],
    logprobs: list[PositionLogprobs] | None = None,
    prompt_logprobs: list[PositionLogprobs] | None = None,
) -> EngineCoreOutput:
    """What there is to tell of a branch."""
    group = seq.group
    output = EngineCoreOutput(group.request_id, seq.branch, token_ids, logprobs, prompt_logprobs)
    if group.num_cached_tokens > 0:
        output.num_cached_tokens = group.num_cached_tokens
    if group.effort_is_news:
        group.effort_is_news = False
        output.stats, output.effort = group.stats, group.effort
    return output
