"""`quire run-batch`: a file of requests in the format of OpenAI's batch API, answered by the routes of the server.

Every line goes through the application that `quire serve` runs, without a socket before it. Replies are written as they
come, each with the number of its line, so that a run that was interrupted can go on.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quire.config.args import add_flags, from_namespace
from quire.config.knobs import add_knob_flags, knobs_from_namespace
from quire.errors import ConfigError, EngineDeadError, shown

if TYPE_CHECKING:
    from quire.config.args import EngineArgs
    from quire.server.application import Application
    from quire.server.settings import ServerSettings

URLS = ("/v1/chat/completions", "/v1/completions")
SETTINGS = ("served_model_name", "max_tokens_policy", "strict_params", "default_chat_template_kwargs")
"""What of the server's settings concerns requests that come from a file."""
REQUESTS_PER_SEQUENCE = 2
"""Requests in progress per sequence that the engine runs at once: enough that it never waits for one."""
UNBOUNDED = 2**62

OnReply = Callable[[dict[str, int]], None]
"""Hears the usage of each reply."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    from quire.server.settings import ServerSettings

    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="replies, as they come")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="answer what the output file lacks")
    mode.add_argument("--overwrite", action="store_true", help="replace the output file")
    others = tuple(option.name for option in dataclasses.fields(ServerSettings) if option.name not in SETTINGS)
    add_knob_flags(parser, ServerSettings, "requests", skip=others)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the file; 1 when any line was not answered with success.

    Raises: QuireError.
    """
    from quire.server.settings import ServerSettings

    lines = _read(args.input_file)
    done = _done(args, lines)
    settings = dataclasses.replace(
        knobs_from_namespace(args, ServerSettings), max_body_size=UNBOUNDED, max_concurrent_requests=UNBOUNDED
    )
    with open(args.output_file, "ab" if args.resume else "wb") as out:
        batch = _Batch(lines, done, out)
        asyncio.run(batch.answer(from_namespace(args), settings))
    before = f", {len(done)} were there before" if done else ""
    print(f"{batch.num_succeeded} succeeded, {batch.num_failed} failed{before}: {args.output_file}", file=sys.stderr)
    return 1 if batch.num_failed else 0


class _Batch:
    """The lines on their way through the application."""

    def __init__(self, lines: dict[int, bytes], done: set[int], out: IO[bytes]) -> None:
        self.num_succeeded = 0
        self.num_failed = 0
        self._lines = {number: line for number, line in lines.items() if number not in done}
        self._custom_ids = {_custom_id(line) for number, line in lines.items() if number in done} - {None}
        self._out = out

    async def answer(self, args: EngineArgs, settings: ServerSettings) -> None:
        """Answer every line.

        Raises: ConfigError when the engine cannot start; EngineDeadError when it ends.
        """
        from quire.engine.admission import AdmissionLimits
        from quire.engine.async_llm_engine import AsyncLLMEngine
        from quire.observability.progress import generate_progress
        from quire.server.application import Application

        limits = AdmissionLimits(max_queued_requests=UNBOUNDED, max_queued_tokens=UNBOUNDED)
        with AsyncLLMEngine.launch(args, limits=limits) as engine:
            await engine.wait_ready()
            app = Application(engine, settings)
            todo = iter(self._lines.items())
            num_workers = engine.config.scheduler_config.max_num_seqs * REQUESTS_PER_SEQUENCE
            with generate_progress(True, len(self._lines)) as show:
                num_tokens = [0, 0]

                def on_reply(usage: dict[str, int]) -> None:
                    num_tokens[0] += usage.get("prompt_tokens", 0)
                    num_tokens[1] += usage.get("completion_tokens", 0)
                    show(self.num_succeeded + self.num_failed, *num_tokens)

                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(num_workers, len(self._lines))):
                        tasks.create_task(self._work(app, todo, on_reply))
            missing = len(self._lines) - self.num_succeeded - self.num_failed
            if missing:
                raise EngineDeadError(f"the engine ended, {missing} lines are not answered; --resume goes on from here")

    async def _work(self, app: Application, todo: Iterator[tuple[int, bytes]], on_reply: OnReply) -> None:
        for number, line in todo:
            reply, usage = await self._reply(app, number, line)
            if reply is None:
                return
            self._out.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._out.flush()
            on_reply(usage)

    async def _reply(self, app: Application, number: int, line: bytes) -> tuple[dict[str, Any] | None, dict[str, int]]:
        """(what is written about a line, its usage); None when the engine does not serve any more."""
        from quire.server.http.errors import ApiError

        reply: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": _custom_id(line), "response": None}
        try:
            url, body = self._request(number, line)
        except ApiError as error:
            self.num_failed += 1
            return {**reply, "error": {"code": error.code, "message": f"line {number}: {error.message}"}}, {}
        request_id = uuid.uuid4().hex
        status, answer = await app.post(url, json.dumps(body).encode(), request_id)
        if status == 503:
            return None, {}
        if status == 200:
            self.num_succeeded += 1
        else:
            self.num_failed += 1
        reply["response"] = {"status_code": status, "request_id": request_id, "body": answer}
        return {**reply, "error": None}, answer.get("usage", {})

    def _request(self, number: int, line: bytes) -> tuple[str, dict[str, Any]]:
        """(url, body) of a line.

        Raises: ApiError.
        """
        from quire.server.http.errors import invalid
        from quire.server.http.strict_json import read_json

        value, _ = read_json(line, sys.maxsize)
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


def _read(path: str) -> dict[int, bytes]:
    """Lines that hold something, by their number."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error}") from None
    lines = {number: line for number, line in enumerate(data.splitlines(), 1) if line.strip()}
    if not lines:
        raise ConfigError(f"--input-file {path} holds no requests")
    return lines


def _done(args: argparse.Namespace, lines: dict[int, bytes]) -> set[int]:
    """Numbers of the lines that are answered in the output file, from which half a last line is cut.

    Raises: ConfigError when there is a file that must not be touched, or one that cannot be written.
    """
    path = Path(args.output_file)
    try:
        if not path.exists():
            path.open("ab").close()
        elif path.samefile(args.input_file):
            raise ConfigError("--output-file is the input file; name another one")
        if args.overwrite:
            path.open("ab").close()
            return set()
        data = path.read_bytes()
        if data and not args.resume:
            raise ConfigError(f"--output-file {path} is there already; give --resume to go on, or --overwrite")
        kept = data[: data.rfind(b"\n") + 1]
        if len(kept) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(kept))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output-file {path} cannot be written: {error}") from None
    return {_answered(path, line, lines) for line in kept.splitlines()}


def _answered(path: Path, reply: bytes, lines: dict[int, bytes]) -> int:
    try:
        value = json.loads(reply)
        number = int(str(value["id"]).removeprefix("batch_req_"))
        same = _custom_id(lines[number]) == value["custom_id"]
    except (ValueError, LookupError, TypeError):
        same = False
    if not same:
        raise ConfigError(f"--output-file {path} does not answer this input file; name another one, or --overwrite it")
    return number


def _custom_id(line: bytes) -> str | None:
    """That of a line, as far as it can be read."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
