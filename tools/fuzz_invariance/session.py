"""`Session`: a front and a core, driven step by step through the events of a case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from quire import RequestOutput, SamplingParams
from quire.engine.front.input_processor import InputProcessor, ProcessedRequest
from quire.engine.front.output_processor import OutputProcessor
from quire.engine.front.seeds import same_seeds
from quire.errors import RequestError
from quire.inputs import TokensPrompt
from quire.messages.request import AbortRequest, EngineCoreRequest
from tools.fuzz_invariance.cases import Case, EngineChoice, Event, Kind, RequestChoice
from tools.fuzz_invariance.engines import DisturbedExecutor, Engines, Lost, ticking_clock

MAX_STEPS = 3000
"""A case takes some hundred."""


class Session:
    """One front, and the core it has now."""

    def __init__(self, engines: Engines, engine: EngineChoice, *, checks: bool) -> None:
        """`checks`: verify every invariant of the core after each step."""
        self._engines = engines
        self._engine = engine
        self._checks = checks
        self._clock = ticking_clock()
        config, tokenizer = engines.config_of(engine), engines.tokenizer_of(engine.model)
        self._inputs = InputProcessor(config, tokenizer, self._clock, same_seeds(config.model_config))
        self._inputs.grammars = engines.grammars_of(self._inputs)
        self._front = OutputProcessor(tokenizer)
        self.poisoned: dict[str, bool] = {}
        """See `DisturbedExecutor`."""
        self.aborted: set[str] = set()
        self.requests: dict[str, ProcessedRequest] = {}
        """What was asked, as it was."""
        self.answers: dict[str, RequestOutput] = {}
        """The latest output of each request."""
        self.counts: Counter[str] = Counter()
        """What has happened, so that one can see what cases reach."""
        self._start_core()

    def _start_core(self) -> None:
        make = partial(DisturbedExecutor, poisoned=self.poisoned, grammar_steps=self._engine.grammar_steps)
        self.core = self._engines.core(self._engine, self._clock, make)
        self.core.use_vocabulary(self._inputs.grammars.vocabulary())
        executor = self.core.executor
        assert isinstance(executor, DisturbedExecutor)
        self.executor = executor

    # -- what clients do -------------------------------------------------------------------------------------------

    def submit(self, request_id: str, choice: RequestChoice) -> None:
        """Add a request; one that the front refuses is counted and forgotten."""
        prompt = TokensPrompt(prompt_token_ids=self._prompt(choice))
        if choice.cache_salt is not None:
            prompt["cache_salt"] = choice.cache_salt
        try:
            processed = self._inputs.process(request_id, prompt, SamplingParams(**choice.params), choice.tenant)
        except RequestError:
            self.counts["refused"] += 1
            return
        self.add(replace(processed, core=replace(processed.core, priority=choice.priority)))

    def add(self, request: ProcessedRequest) -> None:
        """Add a request that was processed already."""
        self.requests[request.core.request_id] = request
        self._front.add(request)
        self.core.add(request.core)

    def _prompt(self, choice: RequestChoice) -> list[int]:
        """A prompt that follows another request is cut at the end of the context."""
        before = self.answers.get(str(choice.follows))
        if before is None:
            return list(choice.token_ids)
        room = self._inputs.config.model_config.max_model_len - 1
        return [*before.prompt_token_ids, *before.outputs[0].token_ids, *choice.token_ids][:room]

    def abort(self, request_id: str) -> None:
        """The client gives up."""
        self.core.abort(AbortRequest(request_id=request_id))
        output = self._front.abort(request_id)
        if output is not None:
            self.counts["aborted"] += 1
            self.aborted.add(request_id)
            self.answers[request_id] = output

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one step and tell the front."""
        self.executor.end_preparations()
        try:
            news = self.core.step()
        except Lost:
            self.counts["interrupted steps"] += 1
            return
        self.counts["steps"] += 1
        self.counts["steps decided ahead"] += self.core.num_in_flight
        self.counts["failed"] += sum(output.error is not None for output in news.outputs)
        outputs, aborts = self._front.process(news)
        for abort in aborts:
            self.counts["stopped by a string"] += 1
            self.core.abort(abort)
        self.answers |= {output.request_id: output for output in outputs}
        if self._checks:
            self.core.lives.check()

    def run(self) -> None:
        """Step until all is done."""
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"requests did not end within {MAX_STEPS} steps")

    def close(self) -> None:
        """Count what the core has done, see that it is empty, and let it go."""
        scheduler = self.core.scheduler
        self.counts["cases with steps in flight"] += self._engine.max_steps_in_flight > 1
        self.counts["preemptions"] += scheduler.num_preemptions
        self.counts["cached prompt tokens"] += scheduler.blocks.num_hit_tokens
        self.counts["copied blocks"] += self.executor.num_copies
        self.counts["tokens taken on the device"] += self.executor.num_taken
        asked = [request.core.sampling_params for request in self.requests.values()]
        self.counts["forked requests"] += sum(params.num_sequences > 1 for params in asked)
        self.counts["beam searches"] += sum(params.use_beam_search for params in asked)
        bound = [name for name, request in self.requests.items() if request.core.grammar is not None]
        self.counts["with a grammar"] += len(bound)
        ends = [one.finish_reason for name in bound if name in self.answers for one in self.answers[name].outputs]
        self.counts["ended with a grammar"] += ends.count("stop")
        self.counts["loaded pages"] += scheduler.blocks.tiers.num_loads if scheduler.blocks.tiers else 0
        pool = scheduler.blocks.pool
        if self._checks:
            assert self.core.has_work() or pool.num_free == pool.num_blocks, "blocks are lost"
        self.core.close()

    # -- what happens to the core ------------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Let an event happen."""
        request_id = str(event.request)
        match event.kind:
            case Kind.ABORT:
                self.abort(request_id)
            case Kind.POISON | Kind.POISON_LATE:
                self.poisoned[request_id] = event.kind is Kind.POISON_LATE
            case Kind.INTERRUPT:
                self.executor.loses_next = True
            case Kind.WITHDRAW if request_id in self.core.lives.groups:
                self.core.add(self.core.lives.withdraw(request_id))
            case Kind.TRIAL if request_id in self.core.lives.groups:
                self._try_alone(request_id)
            case Kind.MOVE:
                self._replace_core(self._set_aside())
            case Kind.CRASH:
                self._crash()
            case Kind.FORGET:
                self.core.reset_prefix_cache()
            case _:
                return  # the request is not there any more
        self.counts[event.kind] += 1

    def _set_aside(self) -> list[EngineCoreRequest]:
        """Take all requests out of the core."""
        return [self.core.lives.withdraw(request_id) for request_id in list(self.core.lives.groups)]

    def _try_alone(self, request_id: str) -> None:
        """As `EngineCoreProc` does with suspects."""
        others = {request.request_id: request for request in self._set_aside()}
        self.core.add(others.pop(request_id))
        before = self._num_tokens(request_id)
        while self.core.has_work() and self._num_tokens(request_id) == before:
            self.step()
        for request in [*self._set_aside(), *others.values()]:
            self.core.add(request)

    def _num_tokens(self, request_id: str) -> int:
        output = self.answers.get(request_id)
        return 0 if output is None else sum(len(completion.token_ids) for completion in output.outputs)

    def _crash(self) -> None:
        """As `AsyncLLMEngine` does when a core has died."""
        if self.core.has_work():
            try:
                self.core.step()
            except Lost:
                pass
        known = [request_id for request_id in self.requests if request_id in self._front]
        self._replace_core([self._front.so_far(request_id) for request_id in known])

    def _replace_core(self, requests: list[EngineCoreRequest]) -> None:
        self.counts["preemptions"] += self.core.scheduler.num_preemptions
        self.core.close()
        self._start_core()
        for request in requests:
            self.core.add(request)


def play(engines: Engines, case: Case, *, checks: bool) -> Session:
    """Run a case to its end."""
    session = Session(engines, case.engine, checks=checks)
    last = max([request.arrives_at for request in case.requests] + [event.at for event in case.events])
    for step in range(MAX_STEPS):
        for index, request in enumerate(case.requests):
            if request.arrives_at == step:
                session.submit(str(index), request)
        for event in case.events:
            if event.at == step:
                session.happen(event)
        if session.core.has_work():
            session.step()
        elif step >= last:
            session.close()
            return session
    raise AssertionError(f"the case did not end within {MAX_STEPS} steps")
