"""From what the engine gives out to the parts of a message: text, thinking, tool calls. The same for every API, and
for streams and whole replies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_core import from_json

from quire.errors import UnsupportedFeature
from quire.message_formats.format import MessageFormat
from quire.message_formats.marks import MarkedText, Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Part, Text, joined
from quire.message_formats.thinking import in_thinking, of_prompt
from quire.outputs import CompletionOutput
from quire.sampling_params import SamplingParams
from quire.server.api.tools import Choice, ToolUse
from quire.server.service import Service
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.json_text import is_json, loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers of one request are read."""

    request_id: str
    tokenizer: Tokenizer
    message_format: MessageFormat
    """Of which only what the request needs is left."""
    marks: Marks
    tools: ToolUse
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    in_thinking: bool
    """The prompt ends inside the thinking."""
    in_header: bool | None = False
    """The prompt ends where the header of a message is to follow. None: in a layout of messages, but elsewhere."""
    calls_as_they_come: bool
    """A grammar keeps calls well-formed, so they need not be whole to be told."""

    def call_id(self, branch: int, index: int) -> str:
        """The id of a call, which nobody else's has."""
        digest = hashlib.sha256(f"{self.request_id}/{branch}/{index}".encode()).hexdigest()
        return f"call_{digest[:24]}"


class MessageReader:
    """Reads one answer."""

    def __init__(self, reading: Reading | None, branch: int) -> None:
        """`branch` is the answer's index. Without a reading all is text."""
        self.num_reasoning_tokens = 0
        self.num_calls = 0
        self.is_last_call_cut = False
        """As a stop string leaves it, or max_tokens."""
        self._reading = reading
        if reading is None:
            return
        params = reading.params
        self._parser = MessageParser(
            reading.message_format,
            reading.marks,
            tools=reading.tools.tools,
            new_id=lambda index: reading.call_id(branch, index),
            in_thinking=reading.in_thinking,
            calls_as_they_come=reading.calls_as_they_come,
            must_call=reading.calls_as_they_come and reading.tools.choice is Choice.REQUIRED,
        )
        self._text = MarkedText(
            reading.tokenizer,
            reading.marks,
            reading.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def take(self, completion: CompletionOutput) -> list[Part]:
        """The parts that an answer, or the next piece of one, brings."""
        return joined(part for _, parts in self.pieces(completion) for part in parts)

    def pieces(self, completion: CompletionOutput) -> Iterator[tuple[int, list[Part]]]:
        """The same in the steps in which it is read: the number of tokens of a step, and the parts that it brings."""
        if self._reading is None:
            yield len(completion.token_ids), [Text(completion.text)] if completion.text else []
            return
        for piece in self._text.take(completion.token_ids, completion.text):
            yield self._feed(*piece)
        if completion.finish_reason is not None:
            for piece in self._text.finish():
                yield self._feed(*piece)
            is_cut = completion.finish_reason == "length" or completion.stop_reason is not None
            yield 0, self._parser.finish(is_cut=is_cut)
        self.num_calls = self._parser.num_calls
        self.is_last_call_cut = self._parser.is_last_call_cut

    def _feed(self, text: str, num_tokens: int) -> tuple[int, list[Part]]:
        if self._parser.is_thinking:
            self.num_reasoning_tokens += num_tokens
        return num_tokens, self._parser.feed(text)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """The engine's, or tool_calls when the answer ended by itself and has calls, all of them whole."""
        reason = completion.finish_reason
        return "tool_calls" if reason == "stop" and self.num_calls and not self.is_last_call_cut else reason


def reading_of(
    service: Service,
    request_id: str,
    tools: ToolUse,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    prompt_text: str,
) -> Reading | None:
    """How to read the answers to a prompt; None where all is text.

    Raises: UnsupportedFeature for tools whose calls nobody could read.
    """
    known = of_prompt(service.message_format, service.marks, prompt_token_ids, prompt_text)
    if tools.may_call and known.calls is None:
        raise UnsupportedFeature(
            "tools: it is not known how this model writes calls. Start with --tool-call-parser and the name of its "
            "format.",
            parameter="tools",
        )
    wanted = MessageFormat(thinking=known.thinking, calls=known.calls if tools.may_call else None)
    if wanted.thinking is None and wanted.calls is None:
        return None
    layout = wanted.layout
    return Reading(
        request_id=request_id,
        tokenizer=service.tokenizer,
        message_format=wanted,
        marks=service.marks,
        tools=tools,
        prompt_token_ids=prompt_token_ids,
        params=params,
        in_thinking=in_thinking(wanted, service.marks, prompt_token_ids, prompt_text),
        in_header=layout is not None and layout.ends_in_header(service.marks, prompt_token_ids, prompt_text),
        calls_as_they_come=False,
    )


def is_whole(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object."""
    try:
        return isinstance(loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def input_of(arguments: str) -> Any:
    """The arguments of a call as part of a reply, to the letter: also numbers that no float holds, and escapes of
    characters that there are not. Those that were cut are data, as far as they go."""
    if is_json(arguments):
        return msgspec.Raw(arguments.replace("\r", " ").replace("\n", " ").encode())  # it may stand in a line
    try:
        return from_json(arguments, allow_partial="trailing-strings")
    except ValueError:  # there is nothing yet, or a number is beyond what is read
        return {}


def check_thinks(service: Service, place: str) -> None:
    """Refuse thinking where it could not be told from the answer.

    Raises: UnsupportedFeature.
    """
    if service.message_format.thinking is None:
        raise UnsupportedFeature(
            f"{place}: this model's thinking cannot be told from its answer. Use a model that thinks, or start with "
            "--reasoning-parser and the name of its format.",
            parameter=place,
        )


def thinking_kwargs(service: Service, thinks: bool | None) -> dict[str, Any]:
    """Variables of the chat template that turn thinking on or off, those that it reads."""
    names = ("enable_thinking", "thinking")
    return {} if thinks is None else {name: thinks for name in names if name in service.chat_template.names}


def thinks_anyway(service: Service, thinks: bool | str | None, place: str) -> list[str]:
    """A warning where a model that thinks is asked not to, and cannot be told."""
    if thinks is not False or service.message_format.thinking is None or thinking_kwargs(service, False):
        return []
    return [
        f"{place} leaves the thinking out of the reply, and cannot turn it off: this model's chat template has no "
        "variable for it"
    ]
