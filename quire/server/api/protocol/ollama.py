"""Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from typing_extensions import TypedDict

from quire.server.api.protocol.fields import Body, Each, Label, Texts, bounded, of_kind
from quire.server.api.protocol.openai import ChatLogprob, Message

KeepAlive = Annotated[float | Label, of_kind("a number of seconds, or a duration such as 5m")]
Format = Annotated[str | dict[str, Any], of_kind('"json" or a JSON Schema')]
Think = Annotated[bool | Label, of_kind("true, false or a level")]


class Options(Body):
    """The object `options` of a request; what is left out has the model's own default."""

    temperature: float | None = bounded("temperature")
    top_k: int | None = bounded("top_k")
    top_p: float | None = bounded("top_p")
    min_p: float | None = bounded("min_p")
    repeat_penalty: float | None = bounded("repetition_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    seed: int | None = bounded("seed")
    stop: Texts | None = None
    num_predict: int | None = None
    """The most tokens to write; -1 and -2: as many as the context holds."""
    num_ctx: int | None = None
    """The context that the client needs, in tokens."""


class ModelRequest(Body):
    """A request that names a model and nothing else."""

    model: Label | None = None


class AnswerRequest(ModelRequest):
    """What /api/chat and /api/generate have in common."""

    stream: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class ChatRequest(AnswerRequest):
    """POST /api/chat."""

    messages: Each[Message] | None = None
    tools: Each[dict[str, Any]] | None = None


class GenerateRequest(AnswerRequest):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None


class ShowRequest(ModelRequest):
    """POST /api/show. Older clients send `name`."""

    name: Label | None = None
    verbose: bool | None = None


class Ended(TypedDict):
    """What only the last object of a reply has. Durations are nanoseconds."""

    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class Piece(Ended):
    """What the objects of both kinds of replies have in common."""

    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[ChatLogprob]]
    warnings: NotRequired[list[str]]
    receipt: NotRequired[dict[str, Any]]
    why: NotRequired[list[dict[str, Any]]]


class OllamaFunction(TypedDict):
    """A function, and its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A call for the client to run."""

    function: OllamaFunction


class OllamaMessage(TypedDict):
    """What the model wrote."""

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class ChatReply(Piece):
    """A reply of /api/chat, or a line of it."""

    message: OllamaMessage


class GenerateReply(Piece):
    """A reply of /api/generate, or a line of it."""

    response: str
    thinking: NotRequired[str]


class Details(TypedDict):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(TypedDict):
    """A model that is served; of /api/ps also where it is and for how long."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    modified_at: NotRequired[str]
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class Models(TypedDict):
    """A reply of /api/tags and /api/ps."""

    models: list[Model]


class Shown(TypedDict):
    """A reply of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    warnings: NotRequired[list[str]]


class ApiVersion(TypedDict):
    """A reply of /api/version."""

    version: str
    quire: str


class OllamaError(TypedDict):
    """The body of replies of these routes that are not 2xx."""

    error: str
