"""The kinds of fields requests are made of."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, ValidationError

from quire.messages.request import MAX_PRIORITY
from quire.sampling_params import RANGES

MAX_LABEL = 1024


class Body(BaseModel):
    """A JSON object: nothing is coerced, and what is not declared is kept, to be refused or named in warnings."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def of_kind(words: str) -> WrapValidator:
    """Says of a value that fits none of several kinds what it must be, once and not once per kind."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_input=False):
                if problem["type"] == "too_long":
                    raise PydanticCustomError("too_long", problem["msg"]) from None
            raise PydanticCustomError("kind", "must be {words}", {"words": words}) from None

    return WrapValidator(check)


def bounded(name: str) -> Any:
    """A field of SamplingParams that is None by default, its bounds documented; SamplingParams checks them."""
    allowed = RANGES[name]
    schema: dict[str, Any] = {"exclusiveMinimum" if allowed.open_low else "minimum": allowed.low}
    if allowed.high != math.inf:
        schema["maximum"] = allowed.high
    return Field(default=None, json_schema_extra=schema)


Label = Annotated[str, Field(max_length=MAX_LABEL)]
"""Text that names something and is not interpreted."""
T = TypeVar("T")


class _FirstOnly(FailFast):
    """FailFast that can stand in a union."""

    __hash__ = object.__hash__


MAX_ITEMS = 4096
"""Of a list, unless its field says otherwise."""
MAX_TOKEN_IDS = 1 << 18
Each = Annotated[list[T], _FirstOnly(), Field(max_length=MAX_ITEMS)]
"""A list whose first wrong item is the only one that is reported, and behind whose bound nothing is looked at."""
TokenIds = Annotated[list[int], _FirstOnly(), Field(max_length=MAX_TOKEN_IDS)]
Texts = Annotated[str | Each[str], of_kind("a string or an array of strings")]


class StreamOptions(Body):
    """What a stream carries beside its chunks."""

    include_usage: bool = False
    """A last chunk without choices tells the usage."""
    continuous_usage_stats: bool = False
    """Every chunk tells the usage so far."""


ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}, "json_schema": {}}}
    ),
]
"""The form that the output must have; `output_form` reads it."""


class SamplingFields(Body):
    """Fields that become SamplingParams, under the same names; None leaves the choice to the model. The last three say
    something about the request itself."""

    model: Label | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    min_p: float | None = bounded("min_p")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    repetition_penalty: float | None = bounded("repetition_penalty")
    seed: int | None = bounded("seed")
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = bounded("min_tokens")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Each[str] | None = None
    logit_bias: Annotated[dict[str, float], of_kind("an object of numbers by token id")] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = bounded("thinking_token_budget")
    cache_salt: str | None = None
    priority: int | None = Field(
        default=None, json_schema_extra={"minimum": -MAX_PRIORITY - 1, "maximum": MAX_PRIORITY}
    )
    request_id: Label | None = None


class GenerationFields(SamplingFields):
    """What completions and chat completions have in common."""

    n: int | None = Field(default=None, json_schema_extra={"minimum": 1, "maximum": 128})
    best_of: int | None = Field(default=None, json_schema_extra={"minimum": 1, "maximum": 128})
    use_beam_search: bool | None = None
    beam_width: int | None = Field(default=None, json_schema_extra={"minimum": 2, "maximum": 128})
    length_penalty: float | None = bounded("length_penalty")
    early_stopping: Annotated[bool | Literal["never"], of_kind('true, false or "never"')] | None = None
    max_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 0})
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = bounded("prompt_logprobs")
    truncate_prompt_tokens: int | None = Field(default=None, json_schema_extra={"minimum": -1})
    truncation_side: str | None = Field(default=None, json_schema_extra={"enum": ["left", "right", None]})
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
