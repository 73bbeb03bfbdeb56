"""What a request for a response asks for: refused or warned of where it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import shown
from quire.server.api.output_form import Form, openai_form
from quire.server.api.params import ONE_ANSWER, REFUSED, Refusal, check_fields, other_name
from quire.server.api.protocol.responses import ResponsesRequest
from quire.server.api.tools import ToolUse, openai_tools
from quire.server.api.unknown_fields import unknown_in_form, warn_of
from quire.server.http.errors import ApiError, invalid
from quire.server.service import Service

NAMES = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
"""What the other APIs call a field -> what this one does."""
LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    **REFUSED,
    "background": Refusal("requests are answered while the client waits", (False,)),
    "conversation": Refusal("conversations are not stored; send previous_response_id, or the whole input"),
    "max_completion_tokens": other_name("max_output_tokens"),
    "max_tokens": other_name("max_output_tokens"),
    "n": ONE_ANSWER,
    "prompt": Refusal("prompt templates are not stored; send input and instructions"),
    "stop_sequences": other_name("stop"),
    "truncation": Refusal("an input that is too long is refused, never cut", ("disabled",)),
}
_IN_CLIENT = "offer a function that does it, which the client runs"
_NO_SCREEN = "this model takes text only, and no screenshots"
BUILT_IN: Mapping[str, str] = {
    "apply_patch": _IN_CLIENT,
    "code_interpreter": f"the server runs no code; {_IN_CLIENT}",
    "computer": _NO_SCREEN,
    "computer_use": _NO_SCREEN,
    "computer_use_preview": _NO_SCREEN,
    "custom": "tools without a schema are not supported; offer a function with one string",
    "file_search": f"the server stores no files; {_IN_CLIENT}",
    "image_generation": "this model writes text only",
    "local_shell": f"the server runs no commands; {_IN_CLIENT}",
    "mcp": "the server connects to no MCP servers; let the client connect to them, and offer their tools as functions",
    "namespace": "offer its functions themselves",
    "shell": f"the server runs no commands; {_IN_CLIENT}",
    "tool_search": "offer the functions themselves",
    "web_search": f"the server searches nothing; {_IN_CLIENT}",
    "web_search_preview": f"the server searches nothing; {_IN_CLIENT}",
}
"""Tools that OpenAI's servers run, and why they are refused."""


def check(body: ResponsesRequest, service: Service) -> list[str]:
    """Warnings about fields without effect.

    Raises: ApiError.
    """
    warnings = check_fields(body, service, refused=_REFUSED)
    include = body.include or ()
    warnings += [f"include {name[:64]!r} has no effect" for name in include if name != LOGPROBS]
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        warnings.append("reasoning.summary has no effect: the reasoning itself is in the reply, and no summary of it")
    if body.text is not None:
        warnings += warn_of(unknown_in_form(body.text.format, "text.format", is_flat=True), service)
    if body.text is not None and body.text.verbosity is not None:
        warnings.append("text.verbosity has no effect")
    if body.top_logprobs and LOGPROBS not in include:
        raise invalid("top_logprobs", f"top_logprobs requires {LOGPROBS!r} in include.")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise invalid("max_tool_calls", f"max_tool_calls must be at least 1, got {shown(body.max_tool_calls)}.")
    return warnings


def form_in(body: ResponsesRequest) -> Form | None:
    """The form that the output must have.

    Raises: ApiError.
    """
    if body.text is None or body.text.format is None:
        return None
    form = openai_form(body.text.format, "text.format", is_flat=True)
    if form is not None and body.structured_outputs is not None:
        raise invalid("text.format", "text.format and structured_outputs both say what the output is; send one.")
    return form


def tools_in(body: ResponsesRequest) -> ToolUse:
    """The functions that the model may call.

    Raises: ApiError.
    """
    for index, tool in enumerate(body.tools or ()):
        kind = tool.get("type")
        if isinstance(kind, str) and kind in BUILT_IN:
            place = f"tools[{index}].type"
            message = f"{place} {kind!r} is not supported: {BUILT_IN[kind]}."
            raise ApiError(400, "unsupported_parameter", message, param=place)
    return openai_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, is_flat=True)


def own_items(body: ResponsesRequest) -> Sequence[dict[str, Any]]:
    """The request's input as items.

    Raises: ApiError when it is empty.
    """
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if not body.input:
        raise invalid("input", "input must contain at least 1 item.")
    return body.input


def echoed(body: ResponsesRequest, tools: ToolUse) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": tools.is_parallel,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort_in(body), "summary": None},
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, **tool, "type": "function"} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }


def effort_in(body: ResponsesRequest) -> str | None:
    """How much the model is asked to think."""
    return None if body.reasoning is None else body.reasoning.effort
