"""`CheckerProcess` and `serve`: find out whether grammars can be used, each in a child of its own.

A grammar may make the library run for ever, take all memory, or end the process. So every check runs in a fork of this
process with limits on time and memory. The fork has the library and the vocabulary already, and costs a millisecond.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature
from quire.structured.backend import GrammarBackend, Masks, Matcher, grammar_of, load, mask_words, open_backend
from quire.structured.checker_protocol import Answer, Check, Frames, Start, Verdict, frame
from quire.structured.json_schema import JsonSchema, parse_json
from quire.structured.params import StructuredOutputsParams
from quire.utils.process import memory_status
from quire.utils.threads import start_essential

WALL_S = 10.0
"""Seconds after which a check is given up that could not compute as long as it may, for others have the processors."""
MEMORY_BYTES = 1 << 29
"""Beside what this process has."""
STACK_BYTES = 1 << 20
"""Of the thread that compiles: less than where grammars are compiled to be used, so what overflows does so here."""
LOOK_S = 0.005
"""Shortest time between two looks at what a check has computed."""
WALK_TOKENS = 8
MAX_AT_ONCE = 2
NICENESS = 5
"""The engine's threads come first."""
READ_BYTES = 1 << 18
MAX_SHOWN = 400
"""Characters of the library's messages."""


@dataclass(slots=True)
class _Child:
    check_id: int
    pid: int
    pipe: int
    given_up_at: float
    limit_s: float
    """Seconds of computing."""
    said: bytearray = field(default_factory=bytearray)

    @property
    def left_s(self) -> float:
        """How long it may still compute. Its own timer sees only what the ticks of the clock see, and on a busy machine
        a thread that computes in bursts may have the processor at none of them."""
        if sys.platform != "linux":
            return self.limit_s
        try:
            return self.limit_s - time.clock_gettime(~self.pid << 3 | 2)  # the clock of all that a process computes
        except OSError:  # it has ended
            return self.limit_s


class CheckerProcess:
    """Reads checks, runs each in a child, and writes verdicts."""

    def __init__(self, source: int, sink: int, give_way: Callable[[], None]) -> None:
        """`give_way` is called in the thread of each check."""
        self._source = source
        self._sink = sink
        self._give_way = give_way
        self._frames = Frames()
        self._waiting: deque[Check] = deque()
        self._children: dict[int, _Child] = {}
        """By pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(source, selectors.EVENT_READ)
        self._backend: GrammarBackend | None = None
        self._backend_name = ""
        self._masks: Masks = np.zeros((1, 1), np.int32)
        self._ends: tuple[int, ...] = ()

    def run(self) -> None:
        """Serve until the front is gone."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._source:
                    data = os.read(self._source, READ_BYTES)
                    if not data:
                        return
                    for body in self._frames.feed(data):
                        self._take(body)
                elif key.fd in self._children:
                    self._hear(self._children[key.fd])
            self._give_up(time.monotonic())
            while self._waiting and len(self._children) < MAX_AT_ONCE:
                self._fork(self._waiting.popleft())

    def _give_up(self, now: float) -> None:
        """End the children whose time is up."""
        for child in [*self._children.values()]:
            if child.given_up_at <= now:
                os.kill(child.pid, signal.SIGKILL)
                self._end(child)
            elif child.left_s <= 0:
                os.kill(child.pid, signal.SIGPROF)  # as its own timer does, and is heard of in the same way

    def _patience(self) -> float | None:
        """Seconds in which no child can have computed for longer than it may."""
        if not self._children:
            return None
        now = time.monotonic()
        return max(0.0, min(min(max(LOOK_S, one.left_s), one.given_up_at - now) for one in self._children.values()))

    def _take(self, body: bytes) -> None:
        if self._backend is None:
            start = msgspec.msgpack.decode(body, type=Start)
            load(start.backend)  # for all children
            self._backend, self._backend_name = open_backend(start.backend, start.vocabulary), start.backend
            self._ends = start.vocabulary.eos_token_ids
            self._masks = np.zeros((1, mask_words(len(start.vocabulary.tokens))), np.int32)
            gc.collect()
            gc.freeze()  # children write to no pages that they share
        else:
            self._waiting.append(msgspec.msgpack.decode(body, type=Check))

    def _fork(self, check: Check) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            self._be_child(check, writing)
        os.close(writing)
        child = _Child(check.check_id, pid, reading, time.monotonic() + WALL_S, check.limit_s)
        self._children[reading] = child
        self._selector.register(reading, selectors.EVENT_READ)

    def _be_child(self, check: Check, pipe: int) -> None:
        """In the child: check, write the verdict, and exit."""
        with contextlib.suppress(BaseException):
            _limit(check.limit_s)
            threading.stack_size(STACK_BYTES)
            start_essential("check", lambda: self._answer(check.params, pipe)).join()
        os._exit(0)

    def _answer(self, params: StructuredOutputsParams, pipe: int) -> None:
        self._give_way()
        _write(pipe, self._verdict(params))

    def _verdict(self, params: StructuredOutputsParams) -> Verdict:
        try:
            grammar = grammar_of(params, self._backend_name)
            assert self._backend is not None
            matcher = self._backend.compile(grammar)
            self._walk(self._backend, matcher)
        except RequestError as error:
            parameter = error.as_wire()[1].get("parameter", "") if isinstance(error, _NAMED) else ""
            return Verdict(
                message=error.message, parameter=parameter, is_unsupported=isinstance(error, UnsupportedFeature)
            )
        except MemoryError:
            return Verdict(message=_MEMORY)
        except BaseException as error:  # the library's panics are no Exceptions
            return Verdict(message=f"the grammar library fails on it ({type(error).__name__}); write it in another way")
        if matcher.error:
            return Verdict(message=_shortened(params, matcher.error), parameter=_place(params))
        return Verdict(grammar=grammar)

    def _walk(self, backend: GrammarBackend, matcher: Matcher) -> None:
        """Take the first steps of some output: many grammars that are too large show it there. Mutates: matcher."""
        for _ in range(WALK_TOKENS):
            if matcher.error:
                return
            backend.fill_masks([(matcher, 0)], self._masks)
            allowed = np.flatnonzero(np.unpackbits(self._masks.view(np.uint8)[0], bitorder="little"))
            allowed = allowed[~np.isin(allowed, self._ends)]
            if not len(allowed):
                return
            matcher.advance(int(allowed[len(allowed) // 2]))

    def _hear(self, child: _Child) -> None:
        data = os.read(child.pipe, READ_BYTES)
        child.said += data
        if not data:
            self._end(child)

    def _end(self, child: _Child) -> None:
        """The child has written all it will write, or was killed."""
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        _, status, usage = os.wait4(child.pid, 0)
        try:
            verdict = msgspec.msgpack.decode(bytes(child.said), type=Verdict)
        except msgspec.MsgspecError:
            verdict = _failure(status, child.limit_s)
        cpu_s = child.limit_s if verdict.is_slow else usage.ru_utime + usage.ru_stime
        _write(self._sink, Answer(check_id=child.check_id, verdict=replace(verdict, cpu_s=cpu_s)), framed=True)


_NAMED = (InvalidParameter, UnsupportedFeature)
_BUSY = "it was not compiled in time on this busy machine; make it smaller or try again"
_MEMORY = f"it takes more than {MEMORY_BYTES >> 20} MiB to compile; make it smaller or simpler"


def _place(params: StructuredOutputsParams) -> str:
    return f"structured_outputs.{params.kind}"


_NOISE = re.compile(r"at \d+\(\d+\): |failed to compile JSON schema: |<non-verbose/>")
_MARK = re.compile(r"\s*(\d+ \||\^)")


def _shortened(params: StructuredOutputsParams, error: str) -> str:
    """The library's message in one line, without the places of the text that `grammar_of` has written."""
    if "NoExtensionBias" in error:
        return f"{_place(params)}: no output can satisfy it"
    if "oneOf constraints are not supported" in error:
        error = (
            "oneOf needs schemas of which no two allow the same value, such as objects with different constants; "
            "use anyOf"
        )
    if error.startswith("panic"):
        error = "the grammar library fails on it; make it smaller or simpler"
    if params.kind != "grammar":
        error = _NOISE.sub("", error)
    text = " ".join(line.strip() for line in error.splitlines() if not _MARK.match(line)) or "it cannot be compiled"
    return f"{_place(params)}: {_pointer(params, text)}{text[:MAX_SHOWN]}"


def _pointer(params: StructuredOutputsParams, error: str) -> str:
    """The JSON pointer to what a message is about, if it is known."""
    if params.kind != "json":
        return ""
    schema = JsonSchema(parse_json(_place(params), str(params.json)))
    unknown = error.partition("Unknown format: ")[2].strip() or None
    for words, keyword in (
        ("oneOf needs", "oneOf"),
        ("Unknown format", "format"),
        ("min/maxProperties", "minProperties"),
    ):
        if words in error:
            pointer = schema.pointer_to(keyword, unknown) or schema.pointer_to("maxProperties")
            return f"{pointer!r}: " if pointer else ""
    return ""


def _failure(status: int, limit_s: float) -> Verdict:
    """Why a child has written nothing."""
    number = -os.waitstatus_to_exitcode(status)
    if number == signal.SIGPROF:
        message = f"it takes longer than {limit_s:.2g} s to compile; make it smaller or simpler"
        return Verdict(message=message, is_slow=True)
    if number == signal.SIGKILL:
        return Verdict(message=_BUSY, is_final=False)
    if number == signal.SIGSEGV:
        return Verdict(message="it is nested too deeply to compile; make it smaller or simpler")
    return Verdict(message=_MEMORY)


def _limit(cpu_s: float) -> None:
    """Limits of a child. What exceeds them ends by a signal, or by a failed allocation."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = memory_status().get("VmSize", 0)
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # a library that ends the process says so, and here it is answered


def _write(sink: int, message: object, *, framed: bool = False) -> None:
    data = memoryview(frame(message) if framed else msgspec.msgpack.encode(message))
    while data:
        data = data[os.write(sink, data) :]


def serve(give_way: Callable[[], None]) -> None:
    """Be the process that checks. Checks come on standard input, verdicts go to standard output; its input ends it.

    `give_way` has the thread that calls it leave its core to others often. Every check calls it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    sink = os.dup(1)
    os.dup2(2, 1)
    CheckerProcess(0, sink, give_way).run()
