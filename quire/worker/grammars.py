"""`Grammars`: grammars compiled beside the model, and a matcher for each sequence that has one.

Two threads: one takes the jobs in order and tells their results. For each job it starts another one, which gives way to
the threads that compute the model, and compiles: native code without the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue

from quire.structured.backend import Matcher, open_backend
from quire.structured.gate import GatedBackend
from quire.structured.grammar import MAX_COMPILED, MAX_COMPILED_CHARACTERS, Grammar, Vocabulary
from quire.utils.threads import give_way, start_essential

STACK_BYTES = 1 << 26
"""More than where they were checked (`checker_process`), which shows what overflows."""

_Job = Callable[[], None]


class Grammars:
    """Compiled grammars by content."""

    def __init__(self, num_threads: int = 1, give_way: Callable[[], None] = give_way) -> None:
        """`num_threads` compute the masks of a step. `give_way` has the calling thread compute beside the model."""
        self._num_threads = num_threads
        self._give_way = give_way
        self.backend: GatedBackend | None = None
        """None before there was a vocabulary."""
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()
        self._num_characters = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def use(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the model's tokens; each engine has one vocabulary, so the first one counts."""
        self._vocabulary = self._vocabulary or vocabulary

    def prepare(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar in the thread; done when `matcher` answers at once."""
        ready: Future[None] = Future()
        self._compile(grammar).add_done_callback(lambda _: ready.set_result(None))
        return ready

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher of an empty output; waits where `prepare` was not heard, or is long ago."""
        return self._compile(grammar).result().clone()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _compile(self, grammar: Grammar) -> Future[Matcher]:
        """A gate is a thin thing around a grammar that is compiled once for all gates."""
        root = None if grammar.gate is None else self._compile(replace(grammar, gate=None))
        done = self._compiled.get(grammar)
        if done is None:
            done = self._compiled[grammar] = Future()
            self._put(lambda: self._run(grammar, root, done))
            self._num_characters += len(grammar.text)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED or self._is_too_much():
            forgotten, _ = self._compiled.popitem(last=False)
            self._num_characters -= len(forgotten.text)
        return done

    def _is_too_much(self) -> bool:
        """The last one stays, however large."""
        return len(self._compiled) > 1 and self._num_characters > MAX_COMPILED_CHARACTERS

    def _run(self, grammar: Grammar, root: Future[Matcher] | None, done: Future[Matcher]) -> None:
        """In the thread, where `root`, of a grammar with a gate, came before."""
        try:
            if self.backend is None:
                assert self._vocabulary is not None, "no vocabulary came before the first grammar"
                opened = open_backend(grammar.backend, self._vocabulary, self._num_threads)
                self.backend = GatedBackend(opened, self._vocabulary)
            if root is None or grammar.gate is None:
                done.set_result(self._beside(self.backend.compile, grammar))
            else:
                done.set_result(self.backend.gated(grammar.gate, root.result()))
        except BaseException as error:
            done.set_exception(error)

    def _beside(self, compile_: Callable[[Grammar], Matcher], grammar: Grammar) -> Matcher:
        """Compile in a thread that gives way.

        Raises: what `compile_` raises.
        """
        done: Future[Matcher] = Future()

        def work() -> None:
            self._give_way()
            try:
                done.set_result(compile_(grammar))
            except BaseException as error:  # the library's panics are no Exceptions
                done.set_exception(error)

        before = threading.stack_size(STACK_BYTES)
        try:
            start_essential("quire-compile", work).join()
        finally:
            threading.stack_size(before)
        return done.result()

    def _put(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = start_essential("quire-grammars", self._work)
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
