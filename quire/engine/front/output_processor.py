"""From the core's tokens to what a user sees: text, stop strings, logprobs, finish reasons.

One path for streaming and not: the text of a finished request is the concatenation of what was streamed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from quire.core.beam import BestHypotheses
from quire.engine.front.input_processor import ProcessedRequest
from quire.messages.output import (
    BeamStep,
    EngineCoreOutput,
    EngineCoreOutputs,
    Failure,
    FinishReason,
    PositionLogprobs,
)
from quire.messages.request import AbortRequest, BeamProgress, EngineCoreRequest, RequestProgress
from quire.messages.stats import Phase, RequestEffort, RequestStats
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Branch:
    """One completion as it grows."""

    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens_sent: int = 0
    new_text: str = ""


class _Beams:
    """Where a beam search stands, for the case that its core ends."""

    def __init__(self, params: SamplingParams) -> None:
        self._width = params.num_sequences
        self._token_ids: list[list[int]] = [[]]
        self._cum_logprobs = [0.0]
        self._best = BestHypotheses(self._width, params.length_penalty)
        self._num_logprobs = params.logprobs
        self._logprobs: list[list[PositionLogprobs]] = [[]]
        """Of the running beams' tokens, when they are asked for."""
        self._logprobs_of_ended: dict[tuple[int, ...], list[PositionLogprobs]] = {}
        """Of the best completions so far, by their tokens."""

    def follow(self, step: BeamStep, token_ids: list[int]) -> None:
        """Take a step."""
        self._best.add(step.ended)
        if self._num_logprobs is not None:
            self._remember(step, token_ids, self._num_logprobs)
        pairs = zip(step.parents, token_ids, strict=True)
        self._token_ids = [[*self._token_ids[parent], token_id] for parent, token_id in pairs]
        self._cum_logprobs = step.cum_logprobs

    def logprobs_of(self, token_ids: list[int]) -> list[PositionLogprobs] | None:
        """Those of a completion that was found, when they are asked for."""
        return None if self._num_logprobs is None else self._logprobs_of_ended[tuple(token_ids)]

    def _remember(self, step: BeamStep, token_ids: list[int], count: int) -> None:
        """Keep the logprobs of the beams that run on and of the best completions, with `count` candidates each."""

        def scored(parent: int, token_id: int) -> list[PositionLogprobs]:
            return [*self._logprobs[parent], step.candidates[parent].of(token_id, count)]

        known = self._logprobs_of_ended
        for found in step.ended:
            *before, last = found.token_ids
            known[tuple(found.token_ids)] = scored(self._token_ids.index(before), last)
        best = (tuple(found.token_ids) for found in self._best.first(self._width))
        self._logprobs_of_ended = {key: known[key] for key in best}
        self._logprobs = [scored(*pair) for pair in zip(step.parents, token_ids, strict=True)]

    def so_far(self) -> RequestProgress:
        """What a core needs to go on; nothing before the first step."""
        if not any(self._token_ids):
            return RequestProgress()
        beams = BeamProgress(cum_logprobs=self._cum_logprobs, ended=self._best.first(self._width))
        return RequestProgress(branches=dict(enumerate(self._token_ids)), beams=beams)


@dataclass(slots=True)
class _State:
    """One request as it runs."""

    request: ProcessedRequest
    kind: RequestOutputKind
    branches: list[_Branch]
    num_unfinished: int
    prompt_logprobs: list[TokenLogprobs | None] | None
    stats: RequestStats
    effort: RequestEffort = field(default_factory=RequestEffort)
    num_cached_tokens: int = 0
    failure: Failure | None = None
    ended_at: float = 0.0
    """When its last branch ended."""
    beams: _Beams | None = None
    """Of a beam search. Its branches are the completions that it returns: all of them come when it ends."""


class OutputProcessor:
    """The text side of every running request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._states: dict[str, _State] = {}
        self._texts: dict[int, str] = {}
        """Of single tokens, as they are asked for; at most one for each token of the vocabulary."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._states

    def add(self, request: ProcessedRequest) -> None:
        """Start to follow a request."""
        params = request.core.sampling_params
        count = params.n if params.use_beam_search else params.num_sequences
        self._states[request.core.request_id] = _State(
            request=request,
            kind=params.output_kind if params.is_streamable else RequestOutputKind.FINAL_ONLY,
            branches=[self._new_branch(request) for _ in range(count)],
            num_unfinished=count,
            beams=_Beams(params) if params.use_beam_search else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            stats=RequestStats(received_at=request.core.received_at, arrived_at=request.core.arrived_at),
            effort=RequestEffort(phase_at=request.core.arrived_at),
        )

    def so_far(self, request_id: str) -> EngineCoreRequest:
        """The request with its progress, for a core that has never heard of it."""
        state = self._states[request_id]
        request = state.request.core
        state.effort = _lost(state.effort, state.stats.last_token_at)
        live = {i: branch.token_ids for i, branch in enumerate(state.branches) if branch.finish_reason is None}
        started = any(branch.token_ids or branch.finish_reason is not None for branch in state.branches)
        num_prompt_logprobs = 0
        if request.sampling_params.prompt_logprobs is not None:  # complete before the first token
            reported = state.prompt_logprobs or []
            num_prompt_logprobs = len(request.prompt_token_ids) - 1 if started else max(0, len(reported) - 1)
        begun = state.beams.so_far() if state.beams else RequestProgress(branches=live if started else {})
        started = bool(begun.branches)
        progress = replace(
            begun,
            num_prompt_logprobs=num_prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens if started else -1,
            stats=self._metrics(state),
            effort=state.effort,
        )
        return replace(request, progress=progress)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop following a request; its last output, or None when it is not (or no longer) known."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        state.ended_at = time.monotonic()
        running = [index for index, branch in enumerate(state.branches) if branch.finish_reason is None]
        for index in running:
            self._finish(state, state.branches[index], FinishReason.ABORT, None)
        return self._render(state, running)

    def process(self, news: EngineCoreOutputs) -> tuple[list[RequestOutput], list[AbortRequest]]:
        """Take in a step's news: what to hand out, and what the core should stop because its text is complete."""
        touched: dict[str, tuple[_State, list[int]]] = {}
        aborts: list[AbortRequest] = []
        for output in news.outputs:
            request_id = output.request_id
            state = self._states.get(request_id)
            if state is None:
                continue
            if output.beam_step is not None:
                self._follow(state, output, output.beam_step, news.stepped_at)
                continue
            branch = state.branches[output.branch]
            if branch.finish_reason is not None:
                continue
            if self._take(state, branch, output, news.stepped_at) and output.finish_reason is None:
                aborts.append(AbortRequest(request_id=request_id, branch=output.branch))
            if output.new_token_ids or branch.finish_reason is not None:
                if request_id in touched:
                    touched[request_id][1].append(output.branch)
                else:
                    touched[request_id] = state, [output.branch]
        outputs: list[RequestOutput] = []
        for state, branches in touched.values():
            if state.num_unfinished == 0:
                del self._states[state.request.core.request_id]
            elif state.kind is RequestOutputKind.FINAL_ONLY:
                continue
            outputs.append(self._render(state, branches))
        return outputs, aborts

    def _new_branch(self, request: ProcessedRequest) -> _Branch:
        params = request.core.sampling_params
        detokenizer = None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                request.core.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        wants = params.logprobs is not None or params.is_ranked
        return _Branch(detokenizer, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None)

    def _take(self, state: _State, branch: _Branch, output: EngineCoreOutput, stepped_at: float) -> bool:
        """Add one branch's news; True when a stop string ended it."""
        self._take_numbers(state, output, stepped_at)
        if output.new_prompt_logprobs and state.prompt_logprobs is not None:
            state.prompt_logprobs += [TokenLogprobs(entry, self._text_of) for entry in output.new_prompt_logprobs]
        branch.token_ids += output.new_token_ids
        new_logprobs = output.new_logprobs
        if state.beams is not None and output.cum_logprob is not None:
            new_logprobs = state.beams.logprobs_of(output.new_token_ids)
        if branch.logprobs is not None and branch.cumulative_logprob is not None:
            for entry in new_logprobs or ():
                branch.logprobs.append(TokenLogprobs(entry, self._text_of))
                branch.cumulative_logprob += entry.logprobs[0]
        if output.cum_logprob is not None:
            branch.cumulative_logprob = output.cum_logprob
        stopped = False
        detokenizer = branch.detokenizer
        if detokenizer is not None:
            core = state.request.core
            token_ids = output.new_token_ids
            if output.finish_reason is FinishReason.STOP and not core.sampling_params.include_stop_str_in_output:
                token_ids = token_ids[:-1]  # the end-of-sequence or stop token itself is no text
            branch.new_text += detokenizer.append(token_ids)
            stopped = detokenizer.stop_reason is not None
        if stopped or output.finish_reason is not None:
            state.ended_at = stepped_at
            self._finish(state, branch, output.finish_reason, output.stop_reason)
        return stopped

    def _take_numbers(self, state: _State, output: EngineCoreOutput, stepped_at: float) -> None:
        """Add what an output says about the request as a whole."""
        state.num_cached_tokens = output.num_cached_tokens
        state.stats = output.stats or state.stats
        state.effort = output.effort or state.effort
        state.failure = output.error or state.failure
        if output.new_token_ids:
            state.stats.last_token_at = stepped_at

    def _follow(self, state: _State, output: EngineCoreOutput, step: BeamStep, stepped_at: float) -> None:
        """Remember where a beam search stands."""
        assert state.beams is not None
        self._take_numbers(state, output, stepped_at)
        state.beams.follow(step, output.new_token_ids)

    def _finish(
        self, state: _State, branch: _Branch, reason: FinishReason | None, stop_reason: int | str | None
    ) -> None:
        """Close a branch: flush its text; a stop string found in it wins over the core's reason."""
        state.num_unfinished -= 1
        detokenizer = branch.detokenizer
        if detokenizer is not None:
            branch.new_text += detokenizer.finish()
            if detokenizer.stop_reason is not None:
                reason, stop_reason = FinishReason.STOP, detokenizer.stop_reason
                self._cut(branch, detokenizer.num_tokens_used)
        assert reason is not None
        branch.finish_reason, branch.stop_reason = reason.value, stop_reason

    def _cut(self, branch: _Branch, num_tokens: int) -> None:
        """Drop tokens that came after the one which completed the stop string."""
        del branch.token_ids[num_tokens:]
        if branch.logprobs is not None:
            del branch.logprobs[num_tokens:]
            branch.cumulative_logprob = sum(entry.chosen for entry in branch.logprobs)

    def _text_of(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _render(self, state: _State, touched: list[int]) -> RequestOutput:
        core = state.request.core
        delta = state.kind is RequestOutputKind.DELTA
        branches = _best_of(state) if core.sampling_params.is_ranked else state.branches
        shown = range(len(branches)) if not delta else touched if len(touched) == 1 else sorted(touched)
        finished = state.num_unfinished == 0
        failure = state.failure
        prompt_logprobs = state.prompt_logprobs
        if delta:
            state.prompt_logprobs = None  # complete before the first token, and handed out once
        return RequestOutput(  # by position: names would double what an output costs
            core.request_id,
            state.request.prompt,
            core.prompt_token_ids,
            [self._completion(branches[index], index, delta=delta) for index in shown],
            finished,
            prompt_logprobs,
            state.num_cached_tokens,
            core.seed,
            self._metrics(state) if finished else None,
            state.effort.ended(state.ended_at) if finished else None,
            [*state.request.warnings] if failure is None else [*state.request.warnings, failure.message],
            failure,
        )

    def _metrics(self, state: _State) -> RequestStats:
        """The core's numbers, without tokens that it drew beyond a stop string or after an abort."""
        return replace(state.stats, num_generation_tokens=sum(len(branch.token_ids) for branch in state.branches))

    def _completion(self, branch: _Branch, index: int, *, delta: bool) -> CompletionOutput:
        token_ids, logprobs, text = branch.token_ids, branch.logprobs, branch.new_text
        branch.new_text = ""
        if delta:  # must not cost more the longer the text is
            first, branch.num_tokens_sent = branch.num_tokens_sent, len(token_ids)
            token_ids = token_ids[first:]
            logprobs = None if logprobs is None else logprobs[first:]
        else:
            token_ids = token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
            text = "" if branch.detokenizer is None else branch.detokenizer.text
        return CompletionOutput(
            index, text, token_ids, branch.cumulative_logprob, logprobs, branch.finish_reason, branch.stop_reason
        )


def _best_of(state: _State) -> list[_Branch]:
    """The branches to return, the most likely first. Those that did not end by themselves come last."""
    params = state.request.core.sampling_params
    cut_off = (FinishReason.ABORT.value, FinishReason.ERROR.value)
    ranked = sorted(
        state.branches,
        key=lambda branch: (branch.finish_reason not in cut_off, branch.cumulative_logprob),
        reverse=True,
    )
    if params.logprobs is None:
        for branch in ranked:
            branch.logprobs = branch.cumulative_logprob = None
    return ranked[: params.n]


def _lost(effort: RequestEffort, last_token_at: float) -> RequestEffort:
    """The effort of a request whose core has ended. What that did since the last token is done again."""
    lost = effort.ended(last_token_at)
    lost.phase = Phase.RESTART
    lost.num_replays += 1
    return lost
