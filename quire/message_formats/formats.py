"""The formats, under vLLM's names of its parsers."""

from __future__ import annotations

from collections.abc import Mapping

from quire.message_formats.calls.function_gemma import GemmaCalls
from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.pythonic import PythonicCalls
from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.format import CallSyntax, Thinking
from quire.message_formats.harmony import Harmony

_HARMONY = Harmony()
_QWEN3_XML = TaggedCalls(
    begin="<tool_call>",
    end="</tool_call>",
    name=("<function=", ">"),
    call_end="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    margin="\n",
    is_section_optional=True,
)
_GLM = TaggedCalls(
    begin="<tool_call>", end="</tool_call>", key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")
)
CALLS: Mapping[str, CallSyntax] = {
    "functiongemma": GemmaCalls(begin="<start_function_call>", end="<end_function_call>", quote="<escape>"),
    "gemma4": GemmaCalls(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
    "glm45": _GLM,
    "glm47": _GLM,
    "hermes": JsonCalls(begins=("<tool_call>",), end="</tool_call>"),
    "lfm2": PythonicCalls(begins=("<|tool_call_start|>",), end="<|tool_call_end|>"),
    "llama4_pythonic": PythonicCalls(begins=("<|python_start|>",), end="<|python_end|>", bare="["),
    "minimax_m2": TaggedCalls(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        call_end="</invoke>",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
    ),
    "olmo3": PythonicCalls(begins=("<function_calls>",), end="</function_calls>", is_list=False),
    "openai": _HARMONY,
    "pythonic": PythonicCalls(bare="["),
    "qwen3_coder": _QWEN3_XML,
    "qwen3_xml": _QWEN3_XML,
    "seed_oss": TaggedCalls(
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        name=("<function=", ">"),
        call_end="</function>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
    ),
    "step3p5": _QWEN3_XML,
}
"""--tool-call-parser."""

_THINK = Thinking(begin="<think>", end="</think>")
_ALWAYS_THINKS = Thinking(begin="<think>", end="</think>", is_implied=True)
THINKING: Mapping[str, Thinking] = {
    "cohere_command3": Thinking(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        ends_before=("<|START_ACTION|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "deepseek_r1": _ALWAYS_THINKS,
    "deepseek_v3": _THINK,
    "ernie45": Thinking(begin="<think>", end="</think>", answer=("<response>", "</response>")),
    "gemma4": Thinking(begin="<|channel>", end="<channel|>", heading="thought\n", ends_before=("<|tool_call>",)),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": Thinking(begin="Here is my thought process:", end="Here is my response:"),
    "hunyuan_a13b": Thinking(begin="<think>", end="</think>", answer=("<answer>", "</answer>")),
    "kimi_k2": Thinking(begin="<think>", end="</think>", ends_before=("<|tool_calls_section_begin|>",)),
    "minimax_m2": Thinking(begin="<think>", end="</think>", is_implied=True, ends_before=("<minimax:tool_call>",)),
    "minimax_m2_append_think": Thinking(begin="<think>", end="</think>", is_implied=True, is_shown=True),
    "mistral": Thinking(begin="[THINK]", end="[/THINK]", ends_before=("[TOOL_CALLS]",)),
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "openai_gptoss": Thinking(begin="<|channel|>analysis<|message|>", end="<|end|>", layout=_HARMONY),
    "qwen3": _THINK,
    "seed_oss": Thinking(begin="<seed:think>", end="</seed:think>"),
    "step3": _ALWAYS_THINKS,
    "step3p5": _ALWAYS_THINKS,
}
"""--reasoning-parser."""
