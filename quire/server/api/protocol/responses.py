"""OpenAI's responses API. The only tools are functions, which the client runs."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from quire.server.api.protocol.fields import Body, Each, Label, ResponseFormat, SamplingFields, of_kind
from quire.server.api.protocol.openai import ToolChoice

Input = Annotated[str | Each[dict[str, Any]], of_kind("a string or an array of input items")]


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Up to 16 labels, which come back with the reply."""


class Reasoning(Body):
    """How much the model thinks."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class TextSettings(Body):
    """How the answer is written."""

    format: ResponseFormat | None = None
    verbosity: Label | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses. vLLM's sampling fields are understood as well."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    top_logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 20})
    include: Annotated[list[Label], Field(max_length=64)] | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    tools: Each[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    previous_response_id: Label | None = None


class InputTokensDetails(TypedDict):
    """Where input tokens came from."""

    cached_tokens: int


class OutputTokensDetails(TypedDict):
    """What output tokens were."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(TypedDict):
    """A reply of /v1/responses."""

    id: str
    object: str
    created_at: int
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    warnings: NotRequired[list[str]]


class DeletedResponse(TypedDict):
    """A reply to DELETE /v1/responses/{id}."""

    id: str
    object: str
    deleted: bool


class InputItems(TypedDict):
    """A page of a stored response's input."""

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
