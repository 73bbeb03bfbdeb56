"""The formats, under vLLM's names of its parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.named_json import NamedJson
from quire.message_formats.format import CallSyntax, Thinking

_IN_TAGS: dict[str, Any] = {"before": "\n", "after": "\n"}
_ARRAY: dict[str, Any] = {"before": "[", "between": ", ", "after": "]"}
_ARRAY_OF_LINES: dict[str, Any] = {"before": "[\n    ", "between": ",\n    ", "after": "\n]"}


def _deepseek(words: str) -> str:
    """A marker of the family."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_HERMES = JsonCalls(begins=("<tool_call>",), ends=("</tool_call>",), **_IN_TAGS)
_LLAMA = JsonCalls(begins=("<|python_tag|>",), bare="{", arguments_key="parameters", separator=";", between="; ")

CALLS: Mapping[str, CallSyntax] = {
    "apertus": JsonCalls(begins=("<|tools_prefix|>",), ends=("<|tools_suffix|>",), name_key="", **_ARRAY),
    "cohere_command3": JsonCalls(
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        id_key="tool_call_id",
        name_key="tool_name",
        arguments_key="parameters",
        **_ARRAY_OF_LINES,
    ),
    "deepseek_v3": NamedJson(
        begins=(_deepseek("tool calls begin"),),
        end=_deepseek("tool calls end"),
        call_begin=_deepseek("tool call begin"),
        call_end=_deepseek("tool call end"),
        kind="function",
        kind_end=_deepseek("tool sep"),
        is_fenced=True,
        between="\n",
    ),
    "deepseek_v31": NamedJson(
        begins=(_deepseek("tool calls begin"),),
        end=_deepseek("tool calls end"),
        call_begin=_deepseek("tool call begin"),
        call_end=_deepseek("tool call end"),
        name_end=_deepseek("tool sep"),
    ),
    "ernie45": _HERMES,
    "granite": JsonCalls(begins=("<|tool_call|>", "<tool_call>"), **_ARRAY),
    "granite-20b-fc": JsonCalls(begins=("<function_call>",), before=" "),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), **_ARRAY),
    "internlm": JsonCalls(
        begins=("<|action_start|>",),
        prefix="<|plugin|>",
        ends=("<|action_end|>",),
        arguments_key="parameters",
        before="\n",
    ),
    "jamba": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), **_ARRAY_OF_LINES),
    "kimi_k2": NamedJson(
        begins=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        name_end="<|tool_call_argument_begin|>",
        is_numbered=True,
    ),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "longcat": JsonCalls(begins=("<longcat_tool_call>",), ends=("</longcat_tool_call>",), **_IN_TAGS),
    "minimax": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), between="\n", **_IN_TAGS),
    "mistral": NamedJson(
        begins=("[TOOL_CALLS]",),
        id_begin="[CALL_ID]",
        name_end="[ARGS]",
        objects=JsonCalls(begins=("[TOOL_CALLS]",), **{**_ARRAY, "before": " ["}),
    ),
    "nemotron_json": JsonCalls(begins=("<TOOLCALL>",), ends=("</TOOLCALL>",), **_ARRAY),
    "phi4_mini_json": JsonCalls(begins=("<|tool_call|>", "functools"), ends=("<|/tool_call|>", ""), **_ARRAY),
    "qwen3_json": _HERMES,
    "xlam": JsonCalls(bare="[", **_ARRAY),
}
"""--tool-call-parser."""
THINKING: Mapping[str, Thinking] = {
    "deepseek_r1": Thinking(begin="<think>", end="</think>", is_implied=True),
    "qwen3": Thinking(begin="<think>", end="</think>"),
}
"""--reasoning-parser."""
