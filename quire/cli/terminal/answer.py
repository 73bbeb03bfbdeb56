"""Streaming an answer to the terminal, with what it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.cli.output import printable, say
from quire.cli.signals import SIGINT_STATUS, interruptible
from quire.errors import InvalidParameter, counted
from quire.inputs import PromptType
from quire.message_formats.parts import CallArguments, CallStart, Text, ToolCall
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.message_formats.parts import Part
    from quire.outputs import CompletionOutput, RequestOutput

MAX_CHARACTERS = 64 << 20
"""Of standard input: more than any model's context holds."""
Write = Callable[[str], None]
"""Shows a piece of an answer."""
Read = Callable[["CompletionOutput"], "list[Part]"]
"""The parts of a message that a piece of an output brings."""


@dataclass(slots=True)
class Answer:
    """One streamed answer. Times in seconds."""

    text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def status(self) -> int:
        """The exit status of a command that asked for this answer alone."""
        return {"error": 1, "abort": SIGINT_STATUS}.get(self.finish_reason or "", 0)

    def line(self) -> str:
        """For people."""
        rest = self.total_s - self.first_token_s
        rate = f", {(self.num_output_tokens - 1) / rest:.0f} tok/s" if self.num_output_tokens > 1 and rest > 0 else ""
        return (
            f"{counted(self.num_prompt_tokens, 'prompt token')}, {counted(self.num_output_tokens, 'output token')} "
            f"({self.finish_reason}); first token after {self.first_token_s * 1000:.0f} ms{rate}"
        )


def read_text(read: Callable[[int], str]) -> str:
    """What `read` takes from standard input, of which it is asked for so many characters at most.

    Raises: InvalidParameter when it is not text, or too long.
    """
    try:
        text = read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"standard input is not valid {error.encoding} at byte {error.start}; convert it to UTF-8 first",
            parameter="prompt",
        ) from None
    if len(text) > MAX_CHARACTERS:
        raise InvalidParameter(
            f"standard input has more than {MAX_CHARACTERS} characters, the limit; give a shorter prompt",
            parameter="prompt",
        )
    return text


def read_line(interactive: bool) -> str | None:
    """The next line of standard input, None at its end.

    Raises: InvalidParameter when it is not text.
    """
    if interactive:
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        with interruptible():
            return read_text(sys.stdin.readline) or None
    except KeyboardInterrupt:
        return None


def write_plain(text: str) -> None:
    """Print a piece of an answer at once; into a file or a pipe as it is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def stream(
    engine: LLMEngine,
    request_id: str,
    prompt: PromptType,
    params: SamplingParams,
    *,
    echo: str = "",
    title: str = "",
    write: Write = write_plain,
    read: Read | None = None,
) -> Answer:
    """Run one request and `write` its text as it comes, after `echo`; Ctrl-C ends the answer, not the program.
    `title` goes to standard error once the request is accepted. `read` tells calls of tools from text.

    Raises: RequestError.
    """
    answer = Answer()
    started_at = time.perf_counter()
    engine.add_request(request_id, prompt, params)
    if title:
        say(title)
    write(echo)
    try:
        with interruptible():
            while engine.has_unfinished_requests():
                for output in engine.step():
                    _take(output, answer, started_at, write, read or _as_text)
    except KeyboardInterrupt:
        engine.abort_request(request_id)
        answer.finish_reason = "abort"
    answer.total_s = time.perf_counter() - started_at
    return answer


def _as_text(completion: CompletionOutput) -> list[Part]:
    return [Text(completion.text)]


def _take(output: RequestOutput, answer: Answer, started_at: float, write: Write, read: Read) -> None:
    """Print what is new in one output."""
    completion = output.outputs[0]
    answer.first_token_s = answer.first_token_s or time.perf_counter() - started_at
    answer.num_prompt_tokens = len(output.prompt_token_ids)
    answer.num_output_tokens += len(completion.token_ids)
    answer.finish_reason = completion.finish_reason
    for part in read(completion):
        match part:
            case Text():
                answer.text += part.text
                write(part.text)
            case CallStart():
                answer.tool_calls.append(ToolCall(part.id, part.name))
            case CallArguments():
                answer.tool_calls[part.index].arguments += part.text
    if output.finished and output.warnings:
        say(f"\nquire: {' '.join(output.warnings)}")
