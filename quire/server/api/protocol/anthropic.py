"""Anthropic's messages API."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.api.protocol.fields import Body, Each, Label, ResponseFormat, SamplingFields, of_kind
from quire.server.api.protocol.openai import Message

System = Annotated[str | Each[dict[str, Any]], of_kind("a string or an array of text blocks")]


class OutputConfig(Body):
    """How the answer is written."""

    format: ResponseFormat | None = None
    effort: Label | None = None


class ThinkingConfig(Body):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    type: Label
    budget_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 1})


class CountTokensRequest(SamplingFields):
    """POST /v1/messages/count_tokens."""

    messages: Each[Message]
    system: System | None = None
    tools: Each[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. Sampling fields that Anthropic does not have are understood as well."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: Each[str] | None = None
    stream: bool | None = None


class Block(TypedDict):
    """A piece of an answer: text, thinking, or a call for the client to run."""

    type: str
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    """Tokens of a request; the input that came from the prefix cache is counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(TypedDict):
    """A reply of /v1/messages."""

    id: str
    type: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: NotRequired[list[str]]


class TokenCount(TypedDict):
    """A reply of /v1/messages/count_tokens."""

    input_tokens: int
    warnings: NotRequired[list[str]]


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """The body of replies of these routes that are not 2xx."""

    type: str
    error: AnthropicErrorDetail
