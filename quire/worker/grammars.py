"""`Grammars`: grammars compiled in a thread, and a matcher for each sequence that has one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from quire.structured.backend import GrammarBackend, Matcher, open_backend
from quire.structured.grammar import MAX_COMPILED, MAX_COMPILED_CHARACTERS, Grammar, Vocabulary
from quire.utils.threads import start_essential

STACK_BYTES = 1 << 26
"""More than where they were checked (`checker_process`), which shows what overflows."""
NICENESS = 15
"""A step waits for the slowest of its threads, so this one gives way: it gets 3 % of a core that computes, which adds
less than 5 ms to a step of 125."""

_Job = Callable[[], None]


class Grammars:
    """Compiled grammars by content."""

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads` compute the masks of a step."""
        self._num_threads = num_threads
        self.backend: GrammarBackend | None = None
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
        done = self._compiled.get(grammar)
        if done is None:
            done = self._compiled[grammar] = Future()
            self._put(lambda: self._run(grammar, done))
            self._num_characters += len(grammar.text)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED or self._is_too_much():
            forgotten, _ = self._compiled.popitem(last=False)
            self._num_characters -= len(forgotten.text)
        return done

    def _is_too_much(self) -> bool:
        """The last one stays, however large."""
        return len(self._compiled) > 1 and self._num_characters > MAX_COMPILED_CHARACTERS

    def _run(self, grammar: Grammar, done: Future[Matcher]) -> None:
        """In the thread."""
        try:
            if self.backend is None:
                assert self._vocabulary is not None, "no vocabulary came before the first grammar"
                self.backend = open_backend(grammar.backend, self._vocabulary, self._num_threads)
            done.set_result(self.backend.compile(grammar))
        except BaseException as error:
            done.set_exception(error)

    def _put(self, job: _Job) -> None:
        if self._thread is None:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = start_essential("quire-grammars", self._work)
            finally:
                threading.stack_size(before)
        self._jobs.put(job)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread, on Linux
        while (job := self._jobs.get()) is not None:
            job()
