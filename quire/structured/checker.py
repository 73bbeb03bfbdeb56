"""`GrammarChecker`: asks a process of its own whether what a request asks for can be kept, and remembers the answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec

from quire.errors import EngineOverloaded, EngineUnavailable, InvalidParameter, UnsupportedFeature
from quire.structured.checker_protocol import CPU_S, Answer, Check, Frames, Start, Verdict, frame
from quire.structured.grammar import Grammar, Vocabulary
from quire.structured.params import StructuredOutputsParams
from quire.utils.cancellation import check_cancelled
from quire.utils.threads import start_essential

MAX_KEPT = 256
"""Verdicts that are remembered."""
MAX_KEPT_CHARACTERS = 1 << 24
MAX_WAITING = 64
"""Checks in the process, running or not."""
PATIENCE_S = 30.0
"""A check waits for those before it, of which each may compute for a second."""
LOOK_S = 0.02
"""Between two looks whether anybody still waits for a verdict."""
READ_BYTES = 1 << 18


class _Process:
    """One checker process. Verdicts arrive in a thread."""

    def __init__(self, module: str, start: Start) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._waiting: dict[int, Future[Verdict]] = {}
        self._ids = itertools.count()
        self.is_alive = True
        with contextlib.suppress(OSError):
            self._send(start)
        self._thread = start_essential("quire-grammars", self._listen)

    def check(self, params: StructuredOutputsParams, limit_s: float) -> Future[Verdict]:
        """The verdict, later. Raises: EngineOverloaded, EngineUnavailable."""
        with self._lock:
            if not self.is_alive:
                raise _ended()
            if len(self._waiting) >= MAX_WAITING:
                raise EngineOverloaded(f"{MAX_WAITING} grammars wait to be checked; try again", retry_after=1)
            check_id, done = next(self._ids), Future[Verdict]()
            self._waiting[check_id] = done
        with contextlib.suppress(OSError):  # it has ended, as the thread that listens finds out
            self._send(Check(check_id=check_id, params=params, limit_s=limit_s))
        return done

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not written is wanted by nobody
                    stream.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(frame(message))
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        frames, descriptor = Frames(), self._process.stdout.fileno()
        while data := os.read(descriptor, READ_BYTES):
            for body in frames.feed(data):
                answer = msgspec.msgpack.decode(body, type=Answer)
                with self._lock:
                    done = self._waiting.pop(answer.check_id)
                done.set_result(answer.verdict)
        with self._lock:
            self.is_alive = False
            waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done.set_exception(_ended())


def _ended() -> EngineUnavailable:
    return EngineUnavailable("the process that checks grammars has ended; another one is started", retry_after=1)


def _patiently(verdict: Future[Verdict]) -> Verdict:
    """The verdict, once it is there.

    Raises: EngineOverloaded, EngineUnavailable; what ends abandoned work.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with contextlib.suppress(FutureTimeout):
            return verdict.result(LOOK_S)
        check_cancelled()
    raise EngineOverloaded(f"the grammar was not checked within {PATIENCE_S:.0f} s; try again", retry_after=5)


class GrammarChecker:
    """Turns what requests ask for into grammars. Safe to use from several threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], backend: str = "llguidance", *, module: str) -> None:
        """`vocabulary` is asked once, before the first check. Starts no process yet.

        `module`: run as a program, it is `checker_process.serve`.
        """
        self._module = module
        self._make_vocabulary = vocabulary
        self._backend = backend
        self._vocabulary: Vocabulary | None = None
        self._process: _Process | None = None
        self._lock, self._making_vocabulary = threading.Lock(), threading.Lock()
        self._known: OrderedDict[StructuredOutputsParams, Verdict] = OrderedDict()
        self._num_characters = 0
        self._closed = False

    def vocabulary(self) -> Vocabulary:
        """The bytes of the model's tokens.

        Raises: UnsupportedFeature where they are not known.
        """
        if self._vocabulary is None:
            with self._making_vocabulary:
                self._vocabulary = self._vocabulary or self._make_vocabulary()
        return self._vocabulary

    def check(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar. Takes a second of computing at most, and the time of those that wait before it.

        Raises: InvalidParameter or UnsupportedFeature, with the reason; EngineOverloaded, EngineUnavailable.
        """
        verdict = self.verdict(params)
        if verdict.grammar is not None:
            return verdict.grammar
        parameter = verdict.parameter or f"structured_outputs.{params.kind}"
        message = verdict.message if verdict.parameter else f"{parameter}: {verdict.message}"
        if not verdict.is_final:
            raise EngineOverloaded(message, retry_after=5)
        raise (UnsupportedFeature if verdict.is_unsupported else InvalidParameter)(message, parameter=parameter)

    def verdict(self, params: StructuredOutputsParams, limit_s: float = CPU_S) -> Verdict:
        """The grammar or why there is none, found with so many seconds of computing at most.

        Raises: EngineOverloaded, EngineUnavailable.
        """
        with self._lock:
            verdict = self._known.get(params)
            if verdict is not None and verdict.is_slow and verdict.cpu_s < limit_s:
                verdict = None
            if verdict is not None:
                self._known.move_to_end(params)
        if verdict is None:
            verdict = self._ask(params, limit_s)
            if verdict.is_final:
                self._keep(params, verdict)
        return verdict

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _ask(self, params: StructuredOutputsParams, limit_s: float) -> Verdict:
        vocabulary = self.vocabulary()
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the engine was closed", retry_after=1)
            process, ended = self._process, None
            if process is None or not process.is_alive:
                ended = process
                process = self._process = _Process(self._module, Start(vocabulary=vocabulary, backend=self._backend))
        if ended is not None:
            ended.close()
        return _patiently(process.check(params, limit_s))

    def _keep(self, params: StructuredOutputsParams, verdict: Verdict) -> None:
        with self._lock:
            if params not in self._known:
                self._num_characters += params.num_characters
            if params not in self._known or self._known[params].is_slow:
                self._known[params] = verdict
            while len(self._known) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
                forgotten, _ = self._known.popitem(last=False)
                self._num_characters -= forgotten.num_characters
