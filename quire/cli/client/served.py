"""Streaming an answer from a server to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.cli.client.credentials import authorization
from quire.cli.client.http_client import EventReader, HttpClient, first_model, message_of
from quire.cli.output import say
from quire.cli.sampling_flags import sampling_fields
from quire.cli.signals import interruptible
from quire.cli.terminal.answer import Answer, Write, write_plain
from quire.errors import ConfigError, InvalidParameter
from quire.message_formats.parts import ToolCall

MAX_CALLS = 128
"""Of one message; what comes behind them is not taken."""


class Served:
    """A model behind a URL."""

    def __init__(self, args: argparse.Namespace, model: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are offered in every conversation."""
        url = str(args.url).rstrip("/").removesuffix("/v1")
        self._url = url
        self._headers = authorization(url, args.api_key)
        self._client()  # a URL that is none is said now
        self._fields = sampling_fields(args)
        self._tools = list(tools)
        self.model = asyncio.run(self._first_model()) if model is None else model

    def _client(self) -> HttpClient:
        return HttpClient(self._url, headers=self._headers)

    async def _first_model(self) -> str:
        async with self._client() as client:
            return await first_model(client)

    def complete(self, prompt: str, echo: str = "") -> Answer:
        """Continue a text and print it as it comes, after `echo`; Ctrl-C ends the answer, not the program.

        Raises: InvalidParameter when the server refuses it; ConfigError when it cannot be reached.
        """
        return self._stream("/v1/completions", {"prompt": prompt}, echo)

    def chat(self, messages: list[Any], settings: Mapping[str, Any], write: Write, may_call: bool) -> Answer:
        """Answer a conversation; as `complete`. `settings` are fields of the request; without `may_call` the tools are
        shown and not to be called."""
        body: dict[str, Any] = {"messages": messages}
        if self._tools:
            body |= {"tools": self._tools, "tool_choice": "auto" if may_call else "none"}
        return self._stream("/v1/chat/completions", body, settings=settings, write=write)

    def _stream(
        self,
        path: str,
        body: dict[str, Any],
        echo: str = "",
        settings: Mapping[str, Any] | None = None,
        write: Write = write_plain,
    ) -> Answer:
        answer = Answer()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        fields = {"model": self.model, **body, **self._fields, **(settings or {}), **options}
        write(echo)
        started_at = time.perf_counter()
        try:
            with interruptible():
                asyncio.run(self._send(path, fields, answer, started_at, write))
        except KeyboardInterrupt:
            answer.finish_reason = "abort"
        except ConnectionError as error:
            raise ConfigError(str(error)) from None
        answer.total_s = time.perf_counter() - started_at
        return answer

    async def _send(self, path: str, body: dict[str, Any], answer: Answer, started_at: float, write: Write) -> None:
        def on_data(data: bytes) -> None:
            if data != b"[DONE]":
                answer.first_token_s = answer.first_token_s or time.perf_counter() - started_at
                _take(msgspec.json.decode(data), answer, write)

        async with self._client() as client:
            reply = await client.post(path, body, EventReader(on_data))
        if reply.status != 200:
            raise InvalidParameter(f"{self._url} answered {reply.error}", parameter="request")
        if answer.finish_reason is None:
            raise ConnectionError("the server ended the stream before the answer")


def _take(chunk: dict[str, Any], answer: Answer, write: Write) -> None:
    """Print what is new in one event of a stream."""
    if "error" in chunk:
        answer.finish_reason = "error"
        say(f"\nquire: {message_of(chunk)}")
    usage = chunk.get("usage")
    if usage is not None:
        answer.num_prompt_tokens, answer.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for warning in chunk.get("warnings") or ():
        say(f"quire: {warning}")
    for choice in chunk.get("choices") or ():
        text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
        answer.text += text
        for piece in choice.get("delta", {}).get("tool_calls") or ():
            _take_call(piece, answer.tool_calls)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        write(text)


def _take_call(piece: dict[str, Any], calls: list[ToolCall]) -> None:
    """Add a piece of a call. The first one of a call has its id and name."""
    index = piece.get("index", len(calls))
    function = piece.get("function") or {}
    if index == len(calls) < MAX_CALLS:
        calls.append(ToolCall(piece.get("id") or f"call_{index}", function.get("name") or ""))
    if index < len(calls):
        calls[index].arguments += function.get("arguments") or ""
