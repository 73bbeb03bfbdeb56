"""`quire run-batch`: a file of requests in the format of OpenAI's batch API, answered by the routes of the server.

Every line goes through the application that `quire serve` runs, without a socket before it. Replies are written as they
come, each with the number of its line, so that a run that was interrupted can go on: --resume skips the lines that were
answered with success and answers the others, also those that failed. Lines are read one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.batch_files import Earlier, Line, ReplyFile, count_lines, open_input, read_earlier, read_lines
from quire.cli.output import check_writable, reason_of
from quire.config.flags.args import add_flags, from_namespace
from quire.config.flags.knobs import add_knob_flags, knobs_from_namespace
from quire.errors import ConfigError, EngineDeadError, counted, shown

if TYPE_CHECKING:
    from quire.config.flags.args import EngineArgs
    from quire.server.application import Application
    from quire.server.settings import ServerSettings

URLS = ("/v1/chat/completions", "/v1/completions")
SETTINGS = ("served_model_name", "strict_params", "default_chat_template_kwargs", "max_body_size")
"""What of the server's settings concerns requests that come from a file."""
REQUESTS_PER_SEQUENCE = 2
"""Requests in progress per sequence that the engine runs at once: enough that it never waits for one."""
UNBOUNDED = 2**62
OVERLOADED = ("engine_overloaded", "rate_limit_exceeded", "server_overloaded")
"""Codes of replies to requests that would be served if there were fewer of them."""

OnReply = Callable[[dict[str, int]], None]
"""Hears the usage of each reply."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    from quire.server.settings import ServerSettings

    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="replies, as they come")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="answer what the output file lacks, and what failed")
    mode.add_argument("--overwrite", action="store_true", help="replace the output file")
    others = tuple(option.name for option in dataclasses.fields(ServerSettings) if option.name not in SETTINGS)
    add_knob_flags(parser, ServerSettings, "requests", skip=others)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the file; 1 while any line has not been answered with success, or when the output file fails.

    Raises: QuireError.
    """
    from quire.server.settings import ServerSettings

    settings = knobs_from_namespace(args, ServerSettings)
    with open_input(args.input_file) as source:
        earlier = _earlier(args)
        num_lines = count_lines(source, settings.max_body_size, earlier, args)
        batch = _Batch(read_lines(source, settings.max_body_size), num_lines, earlier, args.output_file)
        inner = dataclasses.replace(
            settings,
            max_body_size=UNBOUNDED,
            max_concurrent_requests=UNBOUNDED,
            max_concurrent_sequences=UNBOUNDED,
            max_sequences_per_request=UNBOUNDED,
            max_tokens_per_request=UNBOUNDED,
            max_queued_work=UNBOUNDED,
        )
        failure = None
        try:
            asyncio.run(batch.answer(from_namespace(args), inner))
        except* OutputLost as group:
            failure = group.exceptions[0]
    if failure is not None:
        print(f"quire: {failure}", file=sys.stderr)
    print(f"{batch.summary()}: {args.output_file}", file=sys.stderr)
    return 1 if failure is not None or batch.num_failed else 0


class OutputLost(Exception):
    """The output file cannot be written any more."""


class _Batch:
    """The lines on their way through the application."""

    def __init__(self, lines: Iterator[Line], num_lines: int, earlier: Earlier, output: str) -> None:
        self.num_succeeded = 0
        self.num_failed = 0
        self._earlier = earlier
        done = earlier.succeeded
        self._todo = (line for line in lines if line.number not in done)
        self._num_todo = num_lines - len(done)
        self._custom_ids = {earlier.custom_ids[number] for number in done} - {None}
        self._output = output
        self._num_safe = len(done)
        self._num_posted = 0
        """Requests in progress, without those that wait for others."""
        self._num_waiting = 0
        self._ended = asyncio.Condition()

    def summary(self) -> str:
        """What became of the lines, in numbers."""
        return (
            f"{self.num_succeeded} succeeded, {self.num_failed} failed, {self._num_missing} not answered, "
            f"{len(self._earlier.succeeded)} skipped (answered before), {len(self._earlier.failed)} retried"
        )

    @property
    def _num_missing(self) -> int:
        return self._num_todo - self.num_succeeded - self.num_failed

    async def answer(self, args: EngineArgs, settings: ServerSettings) -> None:
        """Answer every line. The output file is not touched before the engine is ready.

        Raises: ConfigError when the engine cannot start; EngineDeadError when it ends; OutputLost, also in a group.
        """
        from quire.engine.async_llm_engine import AsyncLLMEngine
        from quire.engine.front.admission import AdmissionLimits
        from quire.observability.progress import generate_progress
        from quire.server.application import Application

        limits = AdmissionLimits(
            max_queued_requests=UNBOUNDED, max_queued_sequences=UNBOUNDED, max_queued_tokens=UNBOUNDED
        )
        with AsyncLLMEngine.launch(args, limits=limits) as engine:
            await engine.wait_ready()
            app = Application(engine, settings)
            num_workers = engine.config.scheduler_config.max_num_seqs * REQUESTS_PER_SEQUENCE
            with generate_progress(True, self._num_todo) as show:
                num_tokens = [0, 0]

                def on_reply(usage: dict[str, int]) -> None:
                    num_tokens[0] += usage.get("prompt_tokens", 0)
                    num_tokens[1] += usage.get("completion_tokens", 0)
                    show(self.num_succeeded + self.num_failed, *num_tokens)

                await self._run_workers(app, min(num_workers, self._num_todo), on_reply)
            if self._num_missing:
                raise EngineDeadError(
                    f"the engine ended without a reply to {counted(self._num_missing, 'line')}; --resume goes on from "
                    "here"
                )

    async def _run_workers(self, app: Application, num_workers: int, on_reply: OnReply) -> None:
        """Raises: OutputLost, also in a group."""
        with self._writing(), ReplyFile(self._output, self._earlier) as out:
            async with asyncio.TaskGroup() as tasks:  # the first that fails ends the others
                for _ in range(num_workers):
                    tasks.create_task(self._work(app, out, on_reply))
            out.sync()

    async def _work(self, app: Application, out: ReplyFile, on_reply: OnReply) -> None:
        while (line := await self._next_line()) is not None:
            reply, usage = await self._reply(app, line)
            if reply is None:
                return
            with self._writing():
                out.write(reply)
            self._num_safe += 1
            if reply["response"] is not None and reply["response"]["status_code"] == 200:
                self.num_succeeded += 1
            else:
                self.num_failed += 1
            on_reply(usage)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises: OutputLost when the system refuses what the block writes."""
        try:
            yield
        except OSError as error:
            raise OutputLost(
                f"--output-file {self._output} cannot be written: {reason_of(error)}. It holds "
                f"{counted(self._num_safe, 'whole reply', 'whole replies')}. Make room, then --resume goes on from "
                "there."
            ) from None

    async def _reply(self, app: Application, line: Line) -> tuple[dict[str, Any] | None, dict[str, int]]:
        """(what is written about a line, its usage); None when the engine does not serve any more."""
        from quire.server.http.errors import ApiError

        reply: dict[str, Any] = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": None}
        try:
            url, body = self._request(line)
        except ApiError as error:
            return {**reply, "error": {"code": error.code, "message": f"line {line.number}: {error.message}"}}, {}
        request_id = uuid.uuid4().hex
        status, answer = await self._posted(app, url, json.dumps(body).encode(), request_id)
        if status == 503 and not _is_for_load(answer):
            return None, {}
        reply["response"] = {"status_code": status, "request_id": request_id, "body": answer}
        return {**reply, "error": None}, answer.get("usage", {})

    async def _next_line(self) -> Line | None:
        """The next line to answer. While others wait for room none is read: it would take memory and wait, too."""
        async with self._ended:
            await self._ended.wait_for(lambda: not self._num_waiting)
            return next(self._todo, None)

    async def _posted(self, app: Application, url: str, body: bytes, request_id: str) -> tuple[int, dict[str, Any]]:
        """(status, reply). What is refused for load is sent again whenever another request has ended, and the last time
        when there is no other."""
        was_alone = False
        while True:
            self._num_posted += 1
            status, answer = await app.post(url, body, request_id)
            self._num_posted -= 1
            async with self._ended:
                if not _is_for_load(answer) or was_alone:
                    self._ended.notify_all()
                    return status, answer
                was_alone = not self._num_posted
                if not was_alone:
                    self._num_waiting += 1
                    await self._ended.wait()
                    self._num_waiting -= 1

    def _request(self, line: Line) -> tuple[str, dict[str, Any]]:
        """(url, body) of a line.

        Raises: ApiError.
        """
        from quire.server.http.errors import invalid
        from quire.server.http.strict_json import read_json

        if line.is_too_long:
            raise invalid("", "is longer than --max-body-size allows; raise it or split the request")
        value, _ = read_json(line.data, sys.maxsize)
        if not isinstance(value, dict):
            raise invalid("", f"must be a JSON object, got {shown(value)}")
        for name in value:
            if name not in ("custom_id", "method", "url", "body"):
                raise invalid(name, f"unknown field {shown(name)}; known are custom_id, method, url, body")
        custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise invalid("custom_id", f"custom_id must be a non-empty string, got {shown(custom_id)}")
        if custom_id in self._custom_ids:
            raise invalid("custom_id", f"custom_id {shown(custom_id)} is that of an earlier line; make it unique")
        self._custom_ids.add(custom_id)
        if value.get("method", "POST") != "POST":
            raise invalid("method", f"method must be POST, got {shown(value['method'])}")
        if url not in URLS:
            raise invalid("url", f"url must be one of {', '.join(URLS)}, got {shown(url)}")
        if not isinstance(body, dict):
            raise invalid("body", f"body must be an object, got {shown(body)}")
        if body.get("stream"):
            raise invalid("body.stream", "a reply in a file cannot be streamed; leave stream out")
        return str(url), body


def _is_for_load(answer: dict[str, Any]) -> bool:
    """Whether a reply says that others take what the request needs."""
    error = answer.get("error")
    return isinstance(error, dict) and error.get("code") in OVERLOADED


def _earlier(args: argparse.Namespace) -> Earlier:
    """The replies that the output file holds and this run keeps.

    Raises: ConfigError when there is a file that must not be touched, or one that cannot be written.
    """
    path = Path(args.output_file)
    nothing = Earlier({}, frozenset(), 0)
    try:
        if path.exists() and path.samefile(args.input_file):
            raise ConfigError("--output-file is the input file; name another one")
        check_writable("--output-file", path)
        if args.overwrite or not path.is_file() or not path.stat().st_size:
            return nothing
        if not args.resume:
            raise ConfigError(f"--output-file {path} is there already; give --resume to go on, or --overwrite")
        return read_earlier(args.output_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output-file {path} cannot be written: {reason_of(error)}") from None
