"""From the prompts and conversations of a request to token ids. Runs in a thread: tokenising takes time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.front.input_processor import CHARS_PER_TOKEN
from quire.errors import InvalidParameter, PromptTooLong, UnsupportedFeature, shown
from quire.inputs import TokensPrompt
from quire.sampling_params import SamplingParams
from quire.server.api.protocol.fields import GenerationFields
from quire.server.api.protocol.openai import ConversationFields, Prompts
from quire.server.api.tools import NO_TOOLS, ToolUse
from quire.server.api.unknown_fields import warn_of
from quire.server.http.errors import invalid
from quire.server.service import Context, Service
from quire.tokenizer.chat import ChatTemplate, checked_template_kwargs, encode_chat
from quire.tokenizer.template_doctor import parts_of
from quire.tokenizer.tokenizer import without_marks
from quire.tokenizer.unread_fields import unknown_in_messages
from quire.utils.cancellation import check_cancelled

MAX_PROMPTS = 1024
MAX_CACHE_SALT = 128
MAX_REPEATED = 1 << 20
"""Characters, tokens and candidates of the prompts that a reply holds, once for each of `n`: what it repeats of the
request is bounded, though the answers are as long as they are."""


def completion_prompts(
    service: Service,
    prompts: Prompts | None,
    params: SamplingParams,
    *,
    fields: GenerationFields,
    salt: str | None,
    add_special_tokens: bool = True,
) -> list[TokensPrompt]:
    """Every prompt of a completion request, tokenised and checked.

    Raises: ApiError; RequestErrors naming the prompt.
    """
    if not prompts or not all(prompts):
        raise invalid("prompt", "prompt must be provided and non-empty: it needs at least one token to start from.")
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"The request has {len(prompts)} prompts; the limit is {MAX_PROMPTS}.")
    ready = []
    for index, prompt in enumerate(prompts):
        check_cancelled()
        try:
            text = prompt if isinstance(prompt, str) else None
            ids = (
                service.engine.input_processor.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
            ready.append(finish_prompt(service, text, ids, params, fields=fields, salt=salt))
        except (InvalidParameter, PromptTooLong) as error:
            raise error.within(f"prompt {index}") if len(prompts) > 1 else error from None
    return ready


def finish_prompt(
    service: Service,
    text: str | None,
    ids: list[int],
    params: SamplingParams,
    *,
    fields: GenerationFields | None = None,
    salt: str | None = None,
) -> TokensPrompt:
    """A tokenised prompt, cut if that was asked for, and checked against the model.

    Raises: ApiError; RequestErrors.
    """
    limit = service.engine.config.model_config.max_model_len
    if fields is not None and fields.truncation_side not in (None, "left", "right"):
        raise invalid("truncation_side", f"truncation_side must be left or right, got {shown(fields.truncation_side)}.")
    if fields is not None and fields.truncate_prompt_tokens is not None:
        room = limit - (params.max_tokens or 1)
        kept = _truncated(ids, fields.truncate_prompt_tokens, fields.truncation_side, room)
        if len(kept) < len(ids):
            ids, text = kept, None
    service.engine.input_processor.check(ids, params)
    prompt: TokensPrompt = {"prompt_token_ids": ids}
    if text is not None:
        prompt["prompt"] = text
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def _truncated(ids: list[int], count: int, side: str | None, room: int) -> list[int]:
    if count < -1 or count == 0:
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or at least 1, got {shown(count)}.")
    if count == -1 and room < 1:
        raise invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens=-1 keeps as much of the prompt as max_tokens leaves of the context, and max_tokens "
            "takes all of it. Lower max_tokens, or say how many tokens of the prompt to keep.",
        )
    count = room if count == -1 else count
    return ids[:count] if side == "right" else ids[max(len(ids) - count, 0) :]


def check_repeated(count: int, fields: str) -> None:
    """Refuse a request whose reply would mostly repeat it.

    Raises: ApiError.
    """
    if count > MAX_REPEATED:
        raise invalid(
            fields.partition(",")[0],
            f"The reply would repeat {count} characters, tokens and candidates of the prompts; the limit is "
            f"{MAX_REPEATED}. Lower n or the number of logprobs, send fewer prompts, or leave out {fields}.",
        )


def check_characters(service: Service, messages: Sequence[dict[str, Any]]) -> None:
    """Refuse a conversation that is too long to be worth rendering.

    Raises: PromptTooLong.
    """
    limit = service.engine.config.model_config.max_model_len
    count = num_characters(messages)
    if count > limit * CHARS_PER_TOKEN:
        raise PromptTooLong(
            f"This model's maximum context length is {limit} tokens; the messages have {count} characters, more than "
            f"{CHARS_PER_TOKEN} per token. Shorten the conversation.",
            num_tokens=count // CHARS_PER_TOKEN,
            limit=limit,
        )


def num_characters(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    check_cancelled()
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, value.values()))
    return sum(map(num_characters, value)) if isinstance(value, list) else 0


def chat_text(
    service: Service,
    messages: Sequence[dict[str, Any]],
    fields: ConversationFields,
    tools: ToolUse = NO_TOOLS,
    *,
    place_of: Callable[[str], str] | None = None,
) -> tuple[str, list[int], list[str]]:
    """(text, token ids, warnings) of a conversation, with the tools that it may use.

    `place_of` makes a path in these messages one in the request, for warnings.

    Raises: ApiError; RequestErrors naming the message.
    """
    check_characters(service, messages)
    template = _template(service, fields, with_tools=bool(tools.shown))
    if tools.shown and "tools" not in template.names:
        raise UnsupportedFeature(
            "tools: the chat template of this model does not read them, so the model would never see them. Use a model "
            "made for tools, or start with a --chat-template that reads them.",
            parameter="tools",
        )
    asked = checked_template_kwargs(fields.chat_template_kwargs)
    if fields.reasoning_effort is not None:
        effort = fields.reasoning_effort
        asked = {"reasoning_effort": effort, "enable_thinking": effort != "none", **asked}
    unknown = warn_of(unknown_in_messages(messages, template), service, place_of=place_of)
    warnings = [*unknown, *_dropped(service, messages, fields, tools)]
    if fields.reasoning_effort is not None and not {"reasoning_effort", "enable_thinking"} & template.names:
        warnings.append("reasoning_effort has no effect: this model's chat template does not read it")
    if fields.documents and "documents" not in template.names:
        warnings.append("documents has no effect: this model's chat template does not read it")
    for name in (fields.chat_template_kwargs or {}).keys() - template.names:
        warnings.append(f"chat_template_kwargs.{name[:64]!r} has no effect: the chat template does not read it")
    continues = bool(fields.continue_final_message)
    starts = fields.add_generation_prompt
    rendered = template.render(
        messages,
        add_generation_prompt=not continues if starts is None else starts,
        continue_final_message=continues,
        documents=fields.documents,
        tools=tools.shown or None,
        protect=service.tokenizer.special_tokens,
        **{**service.settings.default_chat_template_kwargs, **asked},
    )
    service.engine.input_processor.check_characters(rendered)
    return without_marks(rendered), encode_chat(service.tokenizer, rendered), warnings


def _dropped(
    service: Service, messages: Sequence[dict[str, Any]], fields: ConversationFields, tools: ToolUse
) -> list[str]:
    """A warning for each part of the conversation that the server's chat template leaves out."""
    if fields.chat_template is not None or not service.dropped_parts:
        return []
    lost = service.dropped_parts & parts_of(messages, has_tools=bool(tools.shown))
    return [
        f"messages: this model's chat template leaves out {part}, so the model never sees them" for part in sorted(lost)
    ]


def _template(service: Service, fields: ConversationFields, *, with_tools: bool) -> ChatTemplate:
    if fields.chat_template is None:
        return service.tool_template if with_tools else service.chat_template
    if not service.settings.trust_request_chat_template:
        raise invalid("chat_template", "chat_template in the request is disabled (--trust-request-chat-template).")
    return ChatTemplate(fields.chat_template, special_tokens=service.tokenizer.named_tokens)


def cache_salt(context: Context, given: str | None) -> str | None:
    """What sets this request's cached prefixes apart: its own salt, within those of its API key.

    Raises: ApiError.
    """
    if given is not None and not 0 < len(given) <= MAX_CACHE_SALT:
        raise invalid("cache_salt", f"cache_salt must be a non-empty string of at most {MAX_CACHE_SALT} characters.")
    if context.tenant is None or given is None:
        return given or context.tenant
    return hashlib.sha256(f"{context.tenant}/{given}".encode("utf-8", "surrogatepass")).hexdigest()
