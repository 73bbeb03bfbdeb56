"""Calls of a model in this process, read and held to their schemas as the server does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import UnsupportedFeature
from quire.inputs import TokensPrompt
from quire.message_formats.choice import choose
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS, THINKING
from quire.message_formats.marks import Marks
from quire.message_formats.thinking import in_thinking
from quire.sampling_params import SamplingParams
from quire.server.api.constraints import constrained
from quire.server.api.message_reader import MessageReader, Reading
from quire.server.api.tools import openai_tools
from quire.tokenizer.chat import load_chat_template

if TYPE_CHECKING:
    from quire.cli.terminal.answer import Read
    from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class Prepared:
    """How to generate an answer that may have calls, and how to read it."""

    params: SamplingParams
    read: Read


class Calls:
    """Tools that one model may call."""

    def __init__(self, llm: LLM, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises: UnsupportedFeature when it is not known how the model writes calls."""
        self._tokenizer = llm.get_tokenizer()
        template = load_chat_template(self._tokenizer, llm.engine.config.model_config.chat_template, with_tools=True)
        found = choose(template.source, self._tokenizer)
        if found.calls is None:
            raise UnsupportedFeature(f"tools: {found.why}", parameter="tools")
        thinking = None if found.thinking is None else THINKING[found.thinking]
        self._format = MessageFormat(calls=CALLS[found.calls], thinking=thinking)
        self._marks = Marks(self._format.markers, self._tokenizer)
        self._tools = openai_tools(tools, "auto", parallel=True)
        self._grammars = llm.engine.parts.input_processor.grammars

    def prepare(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> Prepared:
        """Raises: RequestError when the answer cannot be held to the tools."""
        reading = Reading(
            request_id=request_id,
            tokenizer=self._tokenizer,
            message_format=self._format,
            marks=self._marks,
            tools=self._tools,
            prompt_token_ids=prompt["prompt_token_ids"],
            params=params,
            in_thinking=in_thinking(self._format, self._marks, prompt["prompt_token_ids"], prompt.get("prompt", "")),
            calls_as_they_come=False,
        )
        found = constrained(params, reading, self._grammars)
        return Prepared(found.params, MessageReader(found.reading, 0).take)
