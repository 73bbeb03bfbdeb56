"""From the fields of a request to SamplingParams. What quire cannot honour is refused, unknown fields are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.generation_keys import over_defaults
from quire.errors import shown
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.server.api.output_form import Form, form_of
from quire.server.api.protocol.fields import MAX_LABEL, Body, GenerationFields, SamplingFields
from quire.server.http.errors import ApiError, invalid
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.structured.params import StructuredOutputsParams
from quire.tokenizer.unread_fields import MAX_HINTS, MAX_SHOWN, MAX_WARNINGS
from quire.utils.lazy import nearest

MAX_N = 128
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 4, 256
MAX_LOGIT_BIAS = 1024

_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
)
"""Fields that SamplingParams has under the same name and with the same meaning."""
_BRANCHING = ("n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping")
"""Such fields, of completions and chat completions alone."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that would change the answer if quire could honour it."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway; None always does."""


def _old_name(kind: str) -> Refusal:
    return Refusal(f"it is an old name; send structured_outputs with the field {kind}")


def other_name(name: str) -> Refusal:
    """The refusal of a field that this API has under another name."""
    return Refusal(f"its name in this API is {name}")


_NO_TOOLS = Refusal("tools are for conversations, and their field is tools: send them to /v1/chat/completions")
_NO_MEDIA = Refusal("this model takes text only")
_NO_BEAMS = Refusal("/v1/completions and /v1/chat/completions search with beams")
_NO_TRANSFER = Refusal("the KV cache is not shared between servers yet")

REFUSED: Mapping[str, Refusal] = {
    "audio": _NO_MEDIA,
    "beam_width": _NO_BEAMS,
    "best_of": Refusal("/v1/completions and /v1/chat/completions have it", (1,)),
    "early_stopping": Refusal(_NO_BEAMS.why, (False,)),
    "ec_transfer_params": _NO_TRANSFER,
    "function_call": Refusal(_NO_TOOLS.why, ("none",)),
    "functions": _NO_TOOLS,
    "guided_choice": _old_name("choice"),
    "guided_decoding_backend": Refusal("the server chooses it (--structured-outputs-backend)"),
    "guided_grammar": _old_name("grammar"),
    "guided_json": _old_name("json"),
    "guided_regex": _old_name("regex"),
    "guided_whitespace_pattern": _old_name("whitespace_pattern"),
    "include_reasoning": Refusal("/v1/chat/completions tells thinking from the answer", (True,)),
    "kv_transfer_params": _NO_TRANSFER,
    "length_penalty": Refusal(_NO_BEAMS.why, (1, 1.0)),
    "logprob_token_ids": Refusal("ask for logprobs instead"),
    "logits_processors": Refusal("plug-ins are not supported yet"),
    "media_io_kwargs": _NO_MEDIA,
    "mm_payload": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "modalities": Refusal(_NO_MEDIA.why, (["text"],)),
    "prompt_embeds": Refusal("send text or token ids"),
    "prompt_logprob_token_ids": Refusal("ask for prompt_logprobs instead"),
    "repetition_detection": Refusal("use repetition_penalty instead"),
    "response_format": Refusal("this API has another field for it; structured_outputs is known everywhere"),
    "return_token_offsets": Refusal("/v1/completions with logprobs has text_offset", (False,)),
    "routed_experts_prompt_start": Refusal("it is not supported", (0,)),
    "stream_interval": Refusal("every token is sent when it is there", (1,)),
    "suffix": Refusal("insertion is not supported; write the prompt in the model's own fill-in-the-middle form", ("",)),
    "tool_choice": Refusal(_NO_TOOLS.why, ("none",)),
    "tools": _NO_TOOLS,
    "use_beam_search": Refusal(_NO_BEAMS.why, (False,)),
    "vllm_xargs": Refusal("plug-ins are not supported yet", ({},)),
    "watermarking": Refusal("it is not supported"),
    "web_search_options": Refusal("the server searches nothing; offer a tool that does"),
}
ONE_ANSWER = Refusal("/v1/completions and /v1/chat/completions give several answers", (1,))
LABELS = {
    "include_obfuscation",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "user",
}
"""Fields that clients send as a matter of course and that cannot change the answer."""


def check_fields(
    body: Body, service: Service, *, refused: Mapping[str, Refusal] = REFUSED, place: str = ""
) -> list[str]:
    """Warnings that name the unknown fields of a body.

    Raises: ApiError for a field that is known but not supported, and with --strict-params for any unknown one.
    """
    warnings: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if name in refused:
            refusal = refused[name]
            if value is not None and value not in refusal.neutral:
                raise ApiError(
                    400, "unsupported_parameter", f"{name} is not supported: {refusal.why}.", param=f"{place}{name}"
                )
        elif name in LABELS:
            if isinstance(value, str) and len(value) > MAX_LABEL:
                raise invalid(name, f"{name} has {len(value)} characters; the limit is {MAX_LABEL}.")
        elif service.settings.strict_params:
            message = f"Unknown parameter: {shown(name)}{_hint(name, body)}."
            raise ApiError(400, "unsupported_parameter", message, param=f"{place}{name}"[:200])
        elif len(warnings) < MAX_WARNINGS:
            hint = _hint(name, body) if len(warnings) < MAX_HINTS else ""
            warnings.append(f"unknown parameter {shown(f'{place}{name}')} has no effect{hint}")
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, Body):
            warnings += check_fields(value, service, refused=refused, place=f"{place}{name}.")
    return warnings


def _hint(name: str, body: Body) -> str:
    return nearest(name[:MAX_SHOWN], list(type(body).model_fields))


def sampling_params(
    service: Service,
    body: SamplingFields,
    *,
    max_tokens: int | None,
    stream: bool,
    branching: Mapping[str, Any] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    form: Form | None = None,
) -> SamplingParams:
    """The request's own values over the model's defaults over SamplingParams'; `branching` are those of `branches`.

    `form` is what the output must be, if the API has a field of its own for that. A grammar may take a second to check.
    A beam search draws nothing, so the model's defaults, which are for drawing, have no part in it.

    Raises: ApiError; InvalidParameter from SamplingParams.
    """
    given = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    branching = branching or {}
    draws = not branching.get("use_beam_search")
    if body.stop is not None:
        _check_stop(body.stop)
    form = form or form_of(body.structured_outputs)
    own = {
        **given,
        **branching,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": _logit_bias(body.logit_bias),
        "detokenize": service.engine.tokenizer is not None,
        "output_kind": RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    }
    defaults = service.engine.config.model_config.generation_defaults if draws else {"temperature": 0.0}
    values = over_defaults(defaults, own)
    if form is None:
        return SamplingParams(**values)
    with form.named():
        params = SamplingParams(**values, structured_outputs=StructuredOutputsParams.of(form.fields))
        if params.structured_outputs is not None:
            service.engine.input_processor.grammars.check(params.structured_outputs)
    return params


def branches(body: GenerationFields) -> dict[str, Any]:
    """How many completions a request asks for, and how they are chosen.

    Raises: ApiError.
    """
    given = {name: value for name in _BRANCHING if (value := getattr(body, name)) is not None}
    for name in ("n", "best_of", "beam_width"):
        if not 1 <= given.get(name, 1) <= MAX_N:
            raise invalid(name, f"{name} must be an integer between 1 and {MAX_N}, got {shown(given[name])}.")
    return given


def check_stream(body: GenerationFields) -> None:
    """Fields that go with streams, or do not.

    Raises: ApiError.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options requires stream=true.")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not available with stream=true; leave one of them out.")


def usage_in_stream(body: GenerationFields, settings: ServerSettings) -> tuple[bool, bool]:
    """(whether a stream ends with its usage, whether each chunk has it so far)."""
    options = body.stream_options
    if options is None:
        return settings.enable_force_include_usage, False
    return options.include_usage or settings.enable_force_include_usage, options.continuous_usage_stats


def tokens_as_ids(body: GenerationFields, settings: ServerSettings) -> bool:
    """Whether tokens are written as token_id:N."""
    given = body.return_tokens_as_token_ids
    return settings.return_tokens_as_token_ids if given is None else given


def _check_stop(stop: str | list[str]) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in texts):
        longest = max(map(len, texts), default=0)
        raise invalid(
            "stop",
            f"stop accepts at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters; got "
            f"{len(texts)}, the longest with {longest}.",
        )


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"logit_bias has {len(given)} entries; the limit is {MAX_LOGIT_BIAS}.")
    wrong = next((key for key in given if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise invalid("logit_bias", f"logit_bias must have token ids as keys, got {shown(wrong)}.")
    return {int(key): bias for key, bias in given.items()}
