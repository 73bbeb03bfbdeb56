"""`EngineCoreProc` between its sockets: what one front says or fails to read concerns no other.

Its loop runs in a thread here, over the executor that checks memory.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.core_startup import create_config
from quire.engine.engine_core import EngineCore
from quire.engine.process import core_process
from quire.engine.process.core_process import Control, EngineCoreProc, FrontConnection
from quire.engine.process.protocol import CONTROL, DATA, Attach, Trial, UtilityCall, UtilityResult
from quire.messages import codec
from quire.messages.codec import FrameReader
from quire.messages.framed_socket import FramedSocket
from quire.messages.output import EngineCoreOutput, EngineCoreOutputs, FinishReason, PositionLogprobs
from quire.messages.request import AbortRequest, EngineCoreRequest, RequestProgress
from quire.messages.stats import StepStats
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.fakes import MemoryExecutor, expected_tokens

TIMEOUT = 60
NUM_BLOCKS = 64


class Front:
    """The other end of a front's connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT)
        self.sock = sock
        self.reader = FrameReader(DATA)
        self.pending: list[Any] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], EngineCoreOutput] = {}
        self.stats: StepStats | None = None
        self.order: list[str | None] = []
        """Requests, at each of their first tokens; None for the end of the trials, `trial X` for their announcement."""

    def say(self, *messages: object) -> None:
        self.sock.sendall(b"".join(DATA.encode(message) for message in messages))

    def is_heard(self, message: object) -> bool:
        """Say something; False when the connection is closed."""
        try:
            self.say(message)
        except ConnectionError:
            return False
        return True

    def hear(self) -> Any:
        while not self.pending:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.pending += self.reader.feed(data)
        message = self.pending.pop(0)
        if isinstance(message, Trial):
            self.order.append(None if message.request_id is None else f"trial {message.request_id}")
        elif isinstance(message, EngineCoreOutputs):
            self.stats = message.stats
            for output in message.outputs:
                key = (output.request_id, output.branch)
                if key not in self.tokens:
                    self.order.append(output.request_id)
                self.tokens.setdefault(key, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finished[key] = output
        return message

    def until(self, *keys: tuple[str, int]) -> None:
        while not self.finished.keys() >= set(keys):
            self.hear()

    def until_idle(self) -> None:
        while self.stats is None or self.stats.num_running + self.stats.num_waiting:
            self.hear()
        assert self.stats.num_free_blocks == NUM_BLOCKS

    def until_closed(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                self.hear()


class Harness:
    def __init__(self, executor: MemoryExecutor | None = None, **options: Any) -> None:
        config = create_config(
            EngineArgs(num_gpu_blocks_override=NUM_BLOCKS, block_size=16, max_model_len=512, max_num_seqs=16)
        )
        self.core = EngineCore(config, executor or MemoryExecutor(NUM_BLOCKS, 16))
        ours, theirs = socket.socketpair()
        self.control, self.theirs = FramedSocket(ours, CONTROL), Control(theirs)
        self.proc = EngineCoreProc(self.core, self.theirs, **options)
        self.thread = threading.Thread(target=self.proc.run)
        self.thread.start()
        self.fronts: list[Front] = []

    def attach(self) -> Front:
        ours, theirs = socket.socketpair()
        with theirs:
            self.control.send(Attach(), theirs.fileno())
        front = Front(ours)
        self.fronts.append(front)
        assert front.hear().stats.num_total_blocks == NUM_BLOCKS
        return front

    def close(self) -> None:
        self.control.close()
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()
        self.proc.close()
        self.proc.close()
        self.theirs.socket.close()
        for front in self.fronts:
            front.sock.close()


class CapturingExecutor(MemoryExecutor):
    """Has graphs to capture, and notes when it is asked to."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, 16)
        self.num_missing = 3
        self.captured_after: list[int] = []
        """Steps that were run before each capture."""
        self.is_full = threading.Event()

    def capture_graph(self) -> bool:
        self.captured_after.append(self.num_steps)
        self.num_missing -= 1
        if not self.num_missing:
            self.is_full.set()
        return self.num_missing > 0


def test_graphs_are_captured_while_nothing_is_asked_and_until_none_is_missing() -> None:
    executor = CapturingExecutor()
    harness = Harness(executor)
    try:
        assert executor.is_full.wait(TIMEOUT)
        front = harness.attach()
        front.say(request("a", [5]))
        front.until(("a", 0))
        assert executor.captured_after == [0, 0, 0]
    finally:
        harness.close()


@pytest.fixture
def proc() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


def request(request_id: str, prompt: list[int], max_tokens: int = 5, n: int = 1, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(n=n, max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        **fields,
    )


def test_fronts_have_ids_of_their_own(proc: Harness) -> None:
    fronts = [proc.attach() for _ in range(3)]
    for index, front in enumerate(fronts):
        front.say(request("same", [index, index], n=2))
    for index, front in enumerate(fronts):
        front.until(("same", 0), ("same", 1))
        for branch in range(2):
            assert front.tokens["same", branch] == expected_tokens([index, index], branch, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5,
        b"\0\0\0\1\0\xc1",
        DATA.encode(Trial(request_id="a")),
        DATA.encode(request("twice", [1], 400)) * 2,
    ],
    ids=["http", "too long", "no msgpack", "not for the core", "an id that is in use"],
)
def test_a_front_that_sends_nonsense_is_let_go_and_its_requests_with_it(proc: Harness, data: bytes) -> None:
    good, bad = proc.attach(), proc.attach()
    bad.say(request("long", [7], 400))
    bad.hear()
    bad.sock.sendall(data)
    bad.until_closed()
    good.say(request("a", [1, 2, 3]))
    good.until(("a", 0))
    assert good.tokens["a", 0] == expected_tokens([1, 2, 3], 0, 5)
    good.until_idle()


def test_requests_of_a_front_that_goes_away_are_aborted(proc: Harness) -> None:
    good, gone = proc.attach(), proc.attach()
    for index in range(5):
        gone.say(request(str(index), [index], 400))
    gone.say(request("suspect", [3], 400, runs_alone=True))
    gone.hear()
    gone.sock.close()
    good.say(request("a", [1]))
    good.until(("a", 0))
    good.until_idle()


def test_a_front_that_does_not_read_is_let_go() -> None:
    proc = Harness(max_unsent_bytes=10_000)
    try:
        good, deaf = proc.attach(), proc.attach()
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        number = 0
        while deaf.is_heard(request(str(number), [number % 50], 400, n=8)):
            good.say(request(str(number), [number % 50], 2))
            good.until((str(number), 0))
            number += 1
        good.say(request("last", [1]))
        good.until(("last", 0))
        good.until_idle()
    finally:
        proc.close()


def test_methods_are_called_and_unknown_ones_refused(proc: Harness) -> None:
    front = proc.attach()
    front.say(UtilityCall(call_id=1, method="reset_prefix_cache"), UtilityCall(call_id=2, method="__class__"))
    assert front.hear() == UtilityResult(call_id=1)
    assert front.hear() == UtilityResult(call_id=2, error="no method '__class__'")


def test_suspects_run_alone_one_after_the_other_and_then_all_together(proc: Harness) -> None:
    front, other = proc.attach(), proc.attach()
    other.say(request("free", [9, 9], 300))
    other.hear()
    before = len(other.tokens["free", 0])
    progress = RequestProgress(branches={0: [4], 2: [6]})
    front.say(
        request("a", [1, 2], 8, runs_alone=True),
        request("b", [3], 8, n=3, runs_alone=True, progress=progress),
        request("c", [5], 8),
    )
    front.until(("a", 0), ("b", 0), ("b", 2), ("c", 0))
    other.until(("free", 0))
    assert [event for event in front.order if event][:4] == ["trial a", "a", "trial b", "b"]
    assert None in front.order[: front.order.index("c")], "the trials end before anybody else runs"
    assert front.tokens["a", 0] == expected_tokens([1, 2], 0, 8)
    assert front.tokens["c", 0] == expected_tokens([5], 0, 8)
    assert len(front.tokens["b", 0]) == len(front.tokens["b", 2]) == 7
    assert other.tokens["free", 0] == expected_tokens([9, 9], 0, 300)
    assert before < 300


def test_aborted_suspects_hold_nobody_up(proc: Harness) -> None:
    front = proc.attach()
    front.say(
        request("a", [1], 300, runs_alone=True),
        request("b", [2], 300, runs_alone=True),
        AbortRequest(request_id="b"),
        AbortRequest(request_id="a"),
        request("c", [3]),
    )
    front.until(("c", 0))
    front.until_idle()
    assert front.tokens["c", 0] == expected_tokens([3], 0, 5)


def test_outputs_too_long_for_one_frame_are_sent_one_by_one(proc: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    front = proc.attach()
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 800)
    front.say(*(request(str(index), [index]) for index in range(6)))
    front.until(*((str(index), 0) for index in range(6)))
    for index in range(6):
        assert front.tokens[str(index), 0] == expected_tokens([index], 0, 5)


class WideExecutor(MemoryExecutor):
    """Reports a hundred candidates for each token of prompts that begin with 1, and of branch 0 of those with 3 once
    it has forked."""

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        result = super().execute(plan)
        for seq_id, drawn in zip(plan.seq_ids, result.token_ids, strict=True):
            first = self.token_ids[seq_id][0]
            is_first_branch = self.sequences[seq_id].branch == 0 and len(drawn) == 1
            if first == 1 or (first == 3 and is_first_branch):
                result.logprobs[seq_id] = [PositionLogprobs([5] * 100, [-0.5] * 100, 1) for _ in drawn]
        return result


def test_an_output_too_long_for_any_frame_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Harness(WideExecutor(NUM_BLOCKS, 16))
    try:
        front = proc.attach()
        monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
        front.say(request("wide", [1], 400), request("narrow", [2], 20))
        front.until(("narrow", 0), ("wide", 0))
        assert front.tokens["narrow", 0] == expected_tokens([2], 0, 20)
        ended = front.finished["wide", 0]
        assert ended.finish_reason is FinishReason.ERROR
        assert "ask for fewer logprobs" in str(ended.error)
        front.until_idle()
    finally:
        proc.close()


def test_an_output_too_long_for_any_frame_ends_no_other_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Harness(WideExecutor(NUM_BLOCKS, 16))
    try:
        front = proc.attach()
        monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
        front.say(request("half", [3], 20, n=2))
        front.until(("half", 0), ("half", 1))
        assert front.finished["half", 0].finish_reason is FinishReason.ERROR
        assert front.tokens["half", 1] == expected_tokens([3], 1, 20)
        front.until_idle()
    finally:
        proc.close()


def test_no_step_begins_while_a_front_that_reads_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "MAX_BACKLOG_BYTES", 0)
    monkeypatch.setattr(core_process, "PATIENCE_S", TIMEOUT)
    waiting: list[int] = []
    send = FrontConnection.send

    def counted(front: FrontConnection, message: object) -> None:
        waiting.append(len(front.unsent))
        send(front, message)

    monkeypatch.setattr(FrontConnection, "send", counted)
    proc = Harness(WideExecutor(NUM_BLOCKS, 16))
    try:
        front = proc.attach()
        front.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        front.say(request("wide", [1], 500))
        front.until(("wide", 0))
        assert front.tokens["wide", 0] == expected_tokens([1], 0, 500)
        assert sum(waiting) == 0
    finally:
        proc.close()


def test_a_front_that_reads_nothing_delays_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "MAX_BACKLOG_BYTES", 0)
    proc = Harness(WideExecutor(NUM_BLOCKS, 16))
    try:
        stuck, front = proc.attach(), proc.attach()
        stuck.say(request("wide", [1], 500))
        front.say(request("narrow", [2], 400))
        front.until(("narrow", 0))
        assert front.tokens["narrow", 0] == expected_tokens([2], 0, 400)
        stuck.until(("wide", 0))
        assert stuck.tokens["wide", 0] == expected_tokens([1], 0, 500)
    finally:
        proc.close()
