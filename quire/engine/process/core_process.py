"""`python -m quire.engine.process.core_process`: an EngineCore in a process of its own; only this one imports torch.

The main thread steps, and between steps it does what has come in; without work it sleeps until something comes. A
second thread sends heartbeats, so that a step that takes long and a process that does nothing can be told apart.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from quire.engine.core_startup import create_config, importing_torch, load_core
from quire.engine.engine_core import EngineCore
from quire.engine.identity import Identity
from quire.engine.process.protocol import (
    CONTROL,
    DATA,
    ActivityCall,
    ActivityResult,
    CoreConfigured,
    CoreFailed,
    CoreReady,
    Heartbeat,
    RestartCore,
    StartCore,
    StopCore,
    TraceWanted,
    Trial,
    UtilityCall,
    UtilityResult,
)
from quire.errors import EngineError, QuireError
from quire.loader.digest import digesting
from quire.log import get_logger
from quire.messages.codec import FrameReader, FrameTooLong, MalformedFrame
from quire.messages.framed_socket import FramedSocket
from quire.messages.output import EngineCoreOutput, EngineCoreOutputs, Failure, FinishReason
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import StepStats
from quire.observability.flight_recorder import map_memory
from quire.observability.ledger import Ledger
from quire.structured.grammar import Vocabulary
from quire.utils.process import die_with_parent, num_storage_bytes
from quire.utils.threads import start_essential

log = get_logger(__name__)

HEARTBEAT_S = 0.4
READ_BYTES = 1 << 18
STATS_S = 0.1
"""While steps run, statistics go to the fronts this often; a step costs the less to report."""
MAX_UNSENT_BYTES = 256 << 20
"""A front that lets more than this pile up does not read any more; it is let go."""

MAX_BACKLOG_BYTES = 1 << 20
"""No step begins while a front that reads has more than this to read: steps can give more than a socket takes between
two of them, and what piles up is in no memory plan."""
PATIENCE_S = 0.1
"""A front that reads nothing for so long is not waited for until it reads again."""


class Control:
    """The connection to the supervisor. When it ends, so does this process."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = FramedSocket(sock, CONTROL)
        self.start: Ledger | None = Ledger()
        """How far the start is; None once steps can run."""
        self._step_started_at = 0.0
        self._longest_step_s = 0.0

    def step_started(self) -> None:
        """Start the clock of a step."""
        self._step_started_at = time.monotonic()

    def step_ended(self) -> None:
        """Stop the clock of a step."""
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - self._step_started_at)
        self._step_started_at = 0.0

    def beat(self) -> None:
        """Send heartbeats for ever; for a thread of its own."""
        while True:
            try:
                self.socket.send(self._heartbeat())
            except OSError:
                os._exit(1)  # nobody is left who could want anything
            time.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        started_at, start = self._step_started_at, self.start
        return Heartbeat(
            step_s=time.monotonic() - started_at if started_at else 0.0,
            longest_step_s=self._longest_step_s,
            stage="" if start is None else start.current or "process",
            progress=0 if start is None else start.progress + len(sys.modules) + num_storage_bytes(),
        )


class FrontConnection:
    """One front: what it has said and what it has not read yet."""

    def __init__(self, sock: socket.socket, number: int, max_unsent_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.max_unsent_bytes = max_unsent_bytes
        self.prefix = f"{number}:"
        """Leads the ids of this front's requests in the core, so that fronts need not agree on ids."""
        self.reader = FrameReader(DATA)
        self.unsent = bytearray()
        self.is_stuck = False
        """It has read nothing for a while."""
        self.on_trial = False

    def send(self, message: object) -> None:
        """Queue a message and write what the socket takes.

        Raises: OSError when the front is gone or does not read; FrameTooLong.
        """
        frame = DATA.encode(message)
        if self.unsent:
            self.unsent += frame
        else:
            self.unsent = frame  # it may be large: no second copy
        self.flush()
        if len(self.unsent) > self.max_unsent_bytes:
            raise BrokenPipeError(f"{len(self.unsent)} bytes were not read")

    def flush(self) -> None:
        """Write what the socket takes."""
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
                self.is_stuck = False
        except BlockingIOError:
            pass

    @property
    def is_behind(self) -> bool:
        """Whether steps should wait for it."""
        return len(self.unsent) > MAX_BACKLOG_BYTES and not self.is_stuck


class EngineCoreProc:
    """Sockets around an EngineCore."""

    def __init__(self, core: EngineCore, control: Control, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self.core = core
        self._max_unsent_bytes = max_unsent_bytes
        self.control = control
        self._fronts: dict[str, FrontConnection] = {}
        """By prefix."""
        self._num_fronts = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(control.socket, selectors.EVENT_READ)
        self._suspects: deque[EngineCoreRequest] = deque()
        """Requests that must run alone, one after the other, before anything else."""
        self._on_trial: str | None = None
        self._held: list[EngineCoreRequest] = []
        """Everybody else, while one is on trial."""
        self._methods: dict[str, Callable[[], bytes | None]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "recording": core.recording,
            "finished_requests": core.finished_requests,
        }
        core.on_quarantine = lambda: control.socket.send(TraceWanted(reason="a request was quarantined"))
        self._stop: StopCore | None = None
        """The supervisor's last order."""
        self._stats_are_stale = False
        """What the fronts know is older than what has happened."""
        self._stats_sent_at = 0.0
        self._graphs_are_missing = True
        """As far as is known: one is captured whenever there is nothing else to do."""

    def run(self) -> None:
        """Step until the supervisor is gone, or wants an end; then keep what the next core can use."""
        while self._poll():
            if self._suspects and self._on_trial is None:
                self._next_trial()
            if self.core.has_work():
                self.control.step_started()
                news = self.core.step()
                self.control.step_ended()
                self._publish(news)
                self._judge(news)
                self.core.report()
                del news  # what the fronts have is not held twice
                self._wait_for_readers()
            elif self._on_trial is not None:
                self._end_trial()
            elif self._graphs_are_missing:
                self.control.step_started()
                self._graphs_are_missing = self.core.capture_graph()
                self.control.step_ended()
        if self._stop is not None:
            self.core.close(self._stop.flush_s)

    def close(self) -> None:
        """Let everybody go; harmless when called again."""
        for front in list(self._fronts.values()):
            self._drop(front, "the core ends")
        self._selector.close()
        self.core.close()

    def _poll(self) -> bool:
        """Take in what has come; sleeps while there is nothing to do. False when the supervisor is gone or wants an
        end."""
        busy = self.core.has_work() or self._on_trial is not None or bool(self._suspects)
        if not busy and self._stats_are_stale:
            self._publish(EngineCoreOutputs(stats=self.core.stats()))
        for key, events in self._selector.select(0 if busy or self._graphs_are_missing else None):
            front = key.data
            if front is None:
                try:
                    self._obey_supervisor()
                except (EOFError, OSError, MalformedFrame):
                    return False
            elif front.prefix in self._fronts:
                self._serve(front, events)
        return self._stop is None

    def _obey_supervisor(self) -> None:
        for message, descriptor in self.control.socket.receive():
            if isinstance(message, StopCore):
                self._stop = message
            elif descriptor >= 0:
                front = FrontConnection(socket.socket(fileno=descriptor), self._num_fronts, self._max_unsent_bytes)
                self._num_fronts += 1
                self._fronts[front.prefix] = front
                self._selector.register(front.sock, selectors.EVENT_READ, front)
                self._send(front, EngineCoreOutputs(stats=self.core.stats()))

    def _serve(self, front: FrontConnection, events: int) -> None:
        """Read from and write to one front; what goes wrong there concerns nobody else."""
        try:
            if events & selectors.EVENT_WRITE:
                front.flush()
                self._watch_writes(front)
            if events & selectors.EVENT_READ:
                data = front.sock.recv(READ_BYTES)
                if not data:
                    raise EOFError
                for message in front.reader.feed(data):
                    self._obey(front, message)
        except BlockingIOError:
            pass
        except (EOFError, OSError) as error:
            self._drop(front, repr(error))
        except MalformedFrame as error:
            log.error("a front sent what is no message: %s", error)
            self._drop(front, "malformed frame")

    def _obey(self, front: FrontConnection, message: object) -> None:
        match message:
            case EngineCoreRequest():
                self._add(replace(message, request_id=front.prefix + message.request_id))
            case AbortRequest():
                self._abort(AbortRequest(request_id=front.prefix + message.request_id, branch=message.branch))
            case Vocabulary():
                self.core.use_vocabulary(message)
            case UtilityCall():
                method = self._methods.get(message.method)
                if method is None:
                    self._send(front, UtilityResult(call_id=message.call_id, error=f"no method {message.method!r}"))
                    return
                self._send(front, UtilityResult(call_id=message.call_id, data=method() or b""))
            case ActivityCall():
                activity = self.core.activity(message.tenant)
                self._send(front, ActivityResult(call_id=message.call_id, activity=activity))
            case _:
                raise MalformedFrame(f"{type(message).__name__} is not for the core")

    def _add(self, request: EngineCoreRequest) -> None:
        if request.request_id in self.core.lives.groups:
            raise MalformedFrame(f"request id {request.request_id!r} is in use")
        if request.runs_alone:
            self._suspects.append(replace(request, runs_alone=False))
        elif self._on_trial is not None:
            self._held.append(request)
        else:
            self.core.add(request)

    def _abort(self, abort: AbortRequest) -> None:
        if self.core.abort(abort):
            self._stats_are_stale = True
            return
        for place in (self._suspects, self._held):
            for index, request in enumerate(place):
                if request.request_id == abort.request_id:
                    del place[index]
                    rest = _without(request, abort.branch)
                    if rest is not None:
                        place.insert(index, rest)
                    return

    def _next_trial(self) -> None:
        """Set everything aside but one suspect, and say so before anything is computed."""
        self._set_aside()
        request = self._suspects.popleft()
        front = self._front_of(request.request_id)
        if front is not None:
            self._on_trial = request.request_id
            front.on_trial = True
            self._send(front, Trial(request_id=request.request_id.removeprefix(front.prefix)))
            self.core.add(request)

    def _judge(self, news: EngineCoreOutputs) -> None:
        """A suspect that has a new token did not end this core."""
        if self._on_trial is not None and any(output.new_token_ids or output.error for output in news.outputs):
            self._end_trial()

    def _end_trial(self) -> None:
        self._set_aside()
        self._on_trial = None
        for front in list(self._fronts.values()):
            if front.on_trial:
                front.on_trial = False
                self._send(front, Trial(request_id=None))
        if not self._suspects:
            held, self._held = self._held, []
            for request in held:
                self.core.add(request)

    def _set_aside(self) -> None:
        if self.core.num_in_flight:  # one that runs alone must not be blamed for what others' step does
            self.control.step_started()
            self.core.settle()
            self.control.step_ended()
        self._held += [self.core.lives.withdraw(request_id) for request_id in list(self.core.lives.groups)]

    def _publish(self, news: EngineCoreOutputs) -> None:
        """Send each front what concerns its requests, in one frame; and all of them statistics, if they are due."""
        stats = self._due(news.stats)
        mine: dict[str, list[EngineCoreOutput]] = {prefix: [] for prefix in self._fronts}
        for output in news.outputs:
            number, colon, output.request_id = output.request_id.partition(":")
            outputs = mine.get(number + colon)
            if outputs is not None:
                outputs.append(output)
        for prefix, outputs in mine.items():
            if outputs or stats is not None:
                mine_alone = EngineCoreOutputs(outputs=outputs, stepped_at=news.stepped_at, stats=stats)
                self._send(self._fronts[prefix], mine_alone)

    def _due(self, stats: StepStats | None) -> StepStats | None:
        """The statistics, when the last ones are old or no step may follow that would bring others."""
        now = time.monotonic()
        self._stats_are_stale = self.core.has_work() and now - self._stats_sent_at < STATS_S
        if self._stats_are_stale:
            return None
        self._stats_sent_at = now
        return stats

    def _send(self, front: FrontConnection, message: object) -> None:
        try:
            front.send(message)
        except FrameTooLong as error:
            if isinstance(message, EngineCoreOutputs):
                self._send_one_by_one(front, message, error)
        except OSError as error:
            self._drop(front, repr(error))
        else:
            self._watch_writes(front)

    def _send_one_by_one(self, front: FrontConnection, news: EngineCoreOutputs, error: FrameTooLong) -> None:
        """Outputs that are too long together; one that is too long alone ends its branch of its request."""
        for output in news.outputs:
            if len(news.outputs) == 1:
                self._abort(AbortRequest(request_id=front.prefix + output.request_id, branch=output.branch))
                output = EngineCoreOutput(
                    request_id=output.request_id,
                    branch=output.branch,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=Failure(
                        f"one step's output is too long to be sent ({error}); ask for fewer logprobs",
                        is_request_fault=True,
                    ),
                )
            self._send(front, EngineCoreOutputs(outputs=[output], stepped_at=news.stepped_at))

    def _wait_for_readers(self) -> None:
        """Let fronts that are behind catch up."""
        while behind := [front for front in self._fronts.values() if front.is_behind]:
            poll = select.poll()
            for front in behind:
                poll.register(front.sock, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * PATIENCE_S)}
            for front in behind:
                if front.sock.fileno() in ready:
                    self._serve(front, selectors.EVENT_WRITE)
                front.is_stuck = not ready

    def _watch_writes(self, front: FrontConnection) -> None:
        """Ask for write events only while data is queued."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.unsent else 0)
        if front.prefix in self._fronts and self._selector.get_key(front.sock).events != wanted:
            self._selector.modify(front.sock, wanted, front)

    def _drop(self, front: FrontConnection, why: str) -> None:
        """Forget a front and end its requests."""
        if self._fronts.pop(front.prefix, None) is None:
            return
        log.info("front %s is gone: %s", front.prefix[:-1], why)
        self._selector.unregister(front.sock)
        front.sock.close()
        for request_id in [i for i in self.core.lives.groups if i.startswith(front.prefix)]:
            self.core.abort(AbortRequest(request_id=request_id))
            self._stats_are_stale = True
        self._suspects = deque(r for r in self._suspects if not r.request_id.startswith(front.prefix))
        self._held = [r for r in self._held if not r.request_id.startswith(front.prefix)]

    def _front_of(self, request_id: str) -> FrontConnection | None:
        number, colon, _ = request_id.partition(":")
        return self._fronts.get(number + colon)


def _without(request: EngineCoreRequest, branch: int | None) -> EngineCoreRequest | None:
    """A request that waits, without one of its branches; None when nothing is left of it."""
    if branch is None or request.progress is None:
        return None
    branches = {number: ids for number, ids in request.progress.branches.items() if number != branch}
    return replace(request, progress=replace(request.progress, branches=branches)) if branches else None


MakeProc = Callable[[EngineCore, Control], EngineCoreProc]


def serve(
    control: Control, make_proc: MakeProc = EngineCoreProc, ledger: Ledger | None = None, *, memory: mmap.mmap
) -> int:
    """Load what the first message asks for, then run; the exit status. `memory` is the flight recorder's."""
    ledger = control.start = ledger or Ledger()
    start_essential("quire-heartbeat", control.beat)
    try:
        identity: Identity | None = None
        with ExitStack() as stack:
            order = _first_order(control)
            with ledger.stage("config"):  # before torch is imported: what is refused here needs none
                if isinstance(order, StartCore):
                    config = create_config(order.args)
                    control.socket.send(CoreConfigured(config=config))
                else:
                    config, identity = order.config, order.identity
            with importing_torch(ledger):
                weights_digest = stack.enter_context(digesting(config))
            core = load_core(config, time.monotonic, ledger, weights_digest, identity)
        core.record_in(memory)
        gc.freeze()  # what is here now stays: no collection needs to look at it again
        proc = make_proc(core, control)
        control.start = None
        control.socket.send(CoreReady(stages=ledger.stages, identity=core.identity))
        proc.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("engine core died")
            error = EngineError(f"the engine stopped: {type(error).__name__}: {error}")
        name, fields = error.as_wire()
        control.socket.send(CoreFailed(name=name, fields=fields, starting=control.start is not None))
        control.socket.flush()
        return 1
    return 0


def _first_order(control: Control) -> StartCore | RestartCore:
    for order, _ in control.socket.messages():
        if isinstance(order, StartCore | RestartCore):
            return order
        raise MalformedFrame(f"{type(order).__name__} is no order to start")
    raise EOFError


def main(make_proc: MakeProc = EngineCoreProc, ledger: Ledger | None = None) -> None:
    """Entry point: `core_process CONTROL_DESCRIPTOR PARENT_PID RECORDER_DESCRIPTOR`.

    Signals that ask for an end are for the parent to answer: it drains, and this process serves until it is let go.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent_pid, recorder = map(int, sys.argv[1:])
    die_with_parent(parent_pid)
    memory = map_memory(recorder)
    os.close(recorder)
    status = serve(Control(socket.socket(fileno=descriptor)), make_proc, ledger, memory=memory)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)  # nothing is worth the time that tearing down a model takes


if __name__ == "__main__":
    main()
