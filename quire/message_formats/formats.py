"""The formats, under vLLM's names of its parsers."""

from __future__ import annotations

from collections.abc import Mapping

from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.format import CallSyntax, Thinking

CALLS: Mapping[str, CallSyntax] = {
    "hermes": JsonCalls(begins=("<tool_call>",), end="</tool_call>"),
}
"""--tool-call-parser."""
THINKING: Mapping[str, Thinking] = {
    "deepseek_r1": Thinking(begin="<think>", end="</think>", is_implied=True),
    "qwen3": Thinking(begin="<think>", end="</think>"),
}
"""--reasoning-parser."""
