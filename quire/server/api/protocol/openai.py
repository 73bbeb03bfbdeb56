"""OpenAI's text API: completions, chat completions, models; and vLLM's tokenize."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from quire.messages.stats import StepStats
from quire.server.activity import KeyActivity
from quire.server.api.protocol.fields import Body, Each, GenerationFields, Label, TokenIds, of_kind
from quire.utils.cancellation import check_cancelled

Prompts = list[str | list[int]]
"""One or more prompts, all text or all token ids."""
PROMPT_KINDS = "a string, an array of strings, an array of token ids, or an array of arrays of token ids"


def _read_prompts(value: Any) -> Prompts:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(map(_is_token_ids, value)):
            return value
    raise PydanticCustomError("kind", "must be {words}", {"words": PROMPT_KINDS})


def _is_token_ids(value: object) -> bool:
    check_cancelled()
    return isinstance(value, list) and all(type(token) is int for token in value)


_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ]
}
_CONTENT_PART = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _CONTENT_PART}, {"type": "null"}]},
        "name": {"type": "string"},
    },
}

Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]
"""A message; what it must hold is checked where the chat template is rendered."""


ToolChoice = Annotated[str | dict[str, Any], of_kind("a string or an object")]
"""Whether tools are called, and which."""


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_read_prompts), WithJsonSchema(_PROMPT_SCHEMA)] | None = None
    logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 20})
    add_special_tokens: bool | None = None


class ConversationFields(Body):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Each[dict[str, Any]] | None = None
    reasoning_effort: Label | None = None


class ChatCompletionRequest(ConversationFields, GenerationFields):
    """POST /v1/chat/completions."""

    messages: Each[Message]
    max_completion_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 20})
    return_prompt_text: bool | None = None
    tools: Each[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(ConversationFields):
    """POST /tokenize: a prompt, or a conversation."""

    model: Label | None = None
    prompt: str | None = None
    messages: Each[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Label | None = None
    tokens: TokenIds


class PromptTokensDetails(TypedDict):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What output tokens were."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(TypedDict):
    """Logprobs as completions have them: one entry per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """A candidate of a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt position the candidates by token id; None for the first, which nothing predicts."""


class CompletionChoice(TypedDict):
    """One completion, or its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """A reply of /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    warnings: NotRequired[list[str]]
    receipt: NotRequired[dict[str, Any]]
    why: NotRequired[list[dict[str, Any]]]


class TokenLogprob(TypedDict):
    """A candidate token as chat completions show it."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob):
    """The token of a position, and the most likely ones there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Logprobs as chat completions have them."""

    content: list[ChatLogprob]


class FunctionCall(TypedDict):
    """A function, and its arguments as JSON in a string."""

    name: str
    arguments: str


class ToolCallItem(TypedDict):
    """A call for the client to run."""

    id: str
    type: str
    function: FunctionCall


class AssistantMessage(TypedDict):
    """What the model wrote. The thinking stands under both names that clients look for."""

    role: str
    content: str | None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    refusal: None
    tool_calls: NotRequired[list[ToolCallItem]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """A reply of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    warnings: NotRequired[list[str]]
    receipt: NotRequired[dict[str, Any]]
    why: NotRequired[list[dict[str, Any]]]


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """The body of every reply that is not 2xx."""

    error: ErrorDetail


class ModelCard(TypedDict):
    """A model that is served; the context length under each name clients look for."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    context_length: int
    context_window: int
    max_input_tokens: int
    permission: list[Any]


class ModelList(TypedDict):
    """A reply of /v1/models."""

    object: str
    data: list[ModelCard]


class FinishedItem(TypedDict):
    """A request that is no longer in the engine."""

    arrived_s: float
    """When it went to the engine, by the server's monotonic clock."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Of all its completions."""
    n: int
    """Completions that were generated."""
    outcome: str
    """finished, failed or aborted."""


class FinishedReport(TypedDict):
    """Requests that have finished since a cursor, at most 1,000, in the order in which they did."""

    cursor: str
    """For the next request."""
    now_s: float
    """By the clock of `arrived_s`."""
    num_missed: int | None
    """Requests since the cursor that are kept no more; null: the engine process was replaced, nobody knows."""
    requests: list[FinishedItem]


class EngineStatus(TypedDict):
    """A reply of /v1/stats."""

    state: str
    num_restarts: int
    num_requests: int
    num_queued: int
    num_sequences: int
    """Of requests in progress: prompts times n."""
    num_tasks: int
    """Of the process's event loop: more of them without requests than at first means that some are lost."""
    age_s: float | None
    stats: StepStats | None
    activity: NotRequired[KeyActivity | None]
    finished: NotRequired[FinishedReport]


class ChromeTrace(TypedDict):
    """A reply of /v1/trace, in the format of Chrome's traces."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, Any]


class Tokens(TypedDict):
    """A reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    warnings: NotRequired[list[str]]


class Text(TypedDict):
    """A reply of /detokenize."""

    prompt: str
    warnings: NotRequired[list[str]]
