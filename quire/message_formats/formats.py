"""The formats, under vLLM's names of its parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from re import compile as pattern
from typing import Any

from quire.message_formats.blocks import Blocks, Kind
from quire.message_formats.calls.function_gemma import GemmaCalls
from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.named_json import NamedJson
from quire.message_formats.calls.nested_tags import NestedTags
from quire.message_formats.calls.pythonic import PythonicCalls
from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.format import CallSyntax, Thinking
from quire.message_formats.harmony import Harmony
from quire.message_formats.typed_values import ANY
from quire.tokenizer.tokenizer import Tokenizer

_IN_TAGS: dict[str, Any] = {"before": "\n", "after": "\n"}
_ARRAY: dict[str, Any] = {"before": "[", "between": ", ", "after": "]"}
_ARRAY_OF_LINES: dict[str, Any] = {"before": "[\n    ", "between": ",\n    ", "after": "\n]"}


def _deepseek(words: str) -> str:
    """A marker of the family."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_HERMES = JsonCalls(begins=("<tool_call>",), ends=("</tool_call>",), **_IN_TAGS)
_LLAMA = JsonCalls(begins=("<|python_tag|>",), bare="{", arguments_key="parameters", separator=";", between="; ")
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
_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_V32 = TaggedCalls(
    begin=f"<{_DSML}function_calls>",
    end=f"</{_DSML}function_calls>",
    name=(f'<{_DSML}invoke name="', '">'),
    call_end=f"</{_DSML}invoke>",
    key=(f'<{_DSML}parameter name="', '" string="'),
    value=("", f"</{_DSML}parameter>"),
    kinds=(('true">', frozenset({"string"})), ('false">', ANY - {"string"})),
    inner=(_DSML,),
    is_section_shared=True,
)
_DSML_SPACED = f"{_DSML} "
_MIMO = replace(_QWEN3_XML, margin="")
_GLM: dict[str, Any] = {
    "begin": "<tool_call>",
    "end": "</tool_call>",
    "key": ("<arg_key>", "</arg_key>"),
    "value": ("<arg_value>", "</arg_value>"),
}

_GLM47 = TaggedCalls(**_GLM, line="")


def _hunyuan(tag: str, suffix: str) -> tuple[str, str]:
    """A pair of tags of Hunyuan 3 and 4. Each checkpoint writes a suffix of its own into all of them."""
    return f"<{tag}{suffix}>", f"</{tag}{suffix}>"


def _hunyuan_calls(suffix: str, *, version: int) -> TaggedCalls:
    begin, end = _hunyuan("tool_calls", suffix)
    call, call_end = _hunyuan("tool_call", suffix)
    return TaggedCalls(
        begin=begin,
        end=end,
        name=(call, _hunyuan("tool_sep", suffix)[0] if version == 3 else ""),
        call_end=call_end,
        key=_hunyuan("arg_key", suffix),
        value=_hunyuan("arg_value", suffix),
        line="\n" if version == 3 else "",
        is_section_shared=True,
    )


def _hunyuan_thinking(suffix: str) -> Thinking:
    begin, end = _hunyuan("think", suffix)
    return Thinking(begin=begin, end=end)


def _kimi(tag: str) -> tuple[str, str]:
    """A pair of tags of Kimi K3."""
    return f"<|open|>{tag}<|sep|>", f"<|close|>{tag}<|sep|>"


def _plamo(name: str) -> str:
    """A marker of PLaMo 3. Three tokens or more: the ends of all markers are tokens, the names are text."""
    return f"<|plamo:{name}:plamo|>"


_PLAMO_TOKENS = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")
_KIMI_TYPES = {
    "string": {"string"},
    "number": {"integer", "number"},
    "boolean": {"boolean"},
    "null": {"null"},
    "object": {"object"},
    "array": {"array"},
}
_MINIMAX_M2 = TaggedCalls(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    name=('<invoke name="', '">'),
    call_end="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    is_section_shared=True,
)

_INKLING = Blocks(
    start="<|message_model|>",
    bodies={
        "<|content_thinking|>": Kind.THINKING,
        "<|content_text|>": Kind.TEXT,
        "<|content_invoke_tool_json|>": Kind.CALLS,
        "<|content_invoke_tool_text|>": Kind.TEXT,
        "<|content_tool_error|>": Kind.TEXT,
    },
    ends=("<|end_message|>", "<|content_model_end_sampling|>"),
    calls=JsonCalls(
        begins=("<|content_invoke_tool_json|>",), ends=("<|end_message|>",), arguments_key="args", is_compact=True
    ),
    answer="<|content_text|>",
)
_MUSE = Blocks(
    start="<|start|>",
    role="assistant",
    bodies={"<|message|>": Kind.TEXT},
    recipients={
        "self": Kind.THINKING,
        "user": Kind.TEXT,
        "commentary": Kind.TEXT,
        "developer": Kind.HIDDEN,
        "": Kind.THINKING,
    },
    ends=("<|eom|>", "<|eot|>"),
    calls=TaggedCalls(
        begin="<atem:function_calls>",
        end="</atem:function_calls>",
        name=('<atem:invoke name="', '">'),
        call_end="</atem:invoke>",
        key=('<atem:parameter name="', '">'),
        value=("", "</atem:parameter>"),
        is_section_shared=True,
        has_namespaces=True,
    ),
    answer="to=user<|message|>",
)
_MUSE_GLIMMER = replace(_MUSE, recipients={"self": Kind.THINKING, "user": Kind.TEXT, "": Kind.TEXT})
_MINIMAX_M3 = "]<]minimax[>["
"""One token, before all tags."""

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
    "cohere_command4": JsonCalls(
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        id_key="tool_call_id",
        name_key="tool_name",
        arguments_key="parameters",
        before="[\n\n    ",
        between=",\n\n    ",
        after="\n\n]",
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
    "deepseek_v32": _DEEPSEEK_V32,
    "deepseek_v4": replace(_DEEPSEEK_V32, begin=f"<{_DSML}tool_calls>", end=f"</{_DSML}tool_calls>"),
    "deepseek_v41": replace(
        _DEEPSEEK_V32,
        begin=f"<{_DSML_SPACED}calls>",
        end=f"</{_DSML_SPACED}calls>",
        name=(f'<{_DSML_SPACED}invoke name="', '">'),
        call_end=f"</{_DSML_SPACED}invoke>",
        key=(f'<{_DSML_SPACED}parameter name="', '" string="'),
        value=("", f"</{_DSML_SPACED}parameter>"),
    ),
    "dots": replace(_MINIMAX_M2, begin="<dots_function_call>", end="</dots_function_call>"),
    "ernie45": _HERMES,
    "functiongemma": GemmaCalls(begin="<start_function_call>", end="<end_function_call>", quote="<escape>"),
    "gemma4": GemmaCalls(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
    "gigachat3": JsonCalls(
        begins=("function call<|role_sep|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
        ends=("<|message_sep|>", "<|message_sep|>"),
        before="\n",
        apart="\n\n",
    ),
    "glm45": TaggedCalls(**_GLM),
    "glm47": _GLM47,
    "granite": JsonCalls(begins=("<|tool_call|>", "<tool_call>"), **_ARRAY),
    "granite-20b-fc": JsonCalls(begins=("<function_call>",), before=" "),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), **_ARRAY),
    "hy_v3": _hunyuan_calls(":opensource", version=3),
    "hy_v4": _hunyuan_calls("", version=4),
    "inkling": _INKLING,
    "internlm": JsonCalls(
        begins=("<|action_start|>",),
        prefix="<|plugin|>",
        ends=("<|action_end|>",),
        arguments_key="parameters",
        before="\n",
    ),
    "jamba": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), **_ARRAY_OF_LINES),
    "k2_horizon": TaggedCalls(
        begin="<ifm|tool_calls>",
        end="</ifm|tool_calls>",
        name=("<ifm|tool_call>", ""),
        call_end="</ifm|tool_call>",
        key=("<ifm|arg_key>", "</ifm|arg_key>"),
        type_of=("<ifm|arg_type>", "</ifm|arg_type>"),
        value=("<ifm|arg_value>", "</ifm|arg_value>"),
        objects=JsonCalls(),
        is_section_shared=True,
    ),
    "kimi_k2": NamedJson(
        begins=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        name_end="<|tool_call_argument_begin|>",
        is_numbered=True,
    ),
    "kimi_k3": TaggedCalls(
        begin=_kimi("tools")[0],
        end=_kimi("tools")[1],
        name=('<|open|>call tool="', '"<|sep|>'),
        index='" index="',
        call_end=_kimi("call")[1],
        key=('<|open|>argument key="', '" type="'),
        value=("", _kimi("argument")[1]),
        line="",
        kinds=tuple((f'{name}"<|sep|>', frozenset(types)) for name, types in _KIMI_TYPES.items()),
        inner=("<|open|>", "<|close|>", "<|sep|>"),
        is_section_shared=True,
    ),
    "lfm2": PythonicCalls(begins=("<|tool_call_start|>",), end="<|tool_call_end|>"),
    "ling3": _GLM47,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": PythonicCalls(begins=("<|python_start|>",), end="<|python_end|>", bare="["),
    "longcat": JsonCalls(begins=("<longcat_tool_call>",), ends=("</longcat_tool_call>",), **_IN_TAGS),
    "mimo": _MIMO,
    "minicpm5": TaggedCalls(
        begin="",
        end="",
        name=('<function name="', '">'),
        call_end="</function>",
        key=('<param name="', '">'),
        value=("", "</param>"),
        line="",
        between="\n",
        cdata=("<![CDATA[", "]]>"),
        inner=(' name="', "<![CDATA[", "]]>"),
        heads=("<function", "<param"),
        is_section_optional=True,
    ),
    "minimax": JsonCalls(begins=("<tool_calls>",), ends=("</tool_calls>",), between="\n", **_IN_TAGS),
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3": NestedTags(
        begin=f"{_MINIMAX_M3}<tool_call>",
        end=f"{_MINIMAX_M3}</tool_call>",
        name=(f'{_MINIMAX_M3}<invoke name="', '">'),
        call_end=f"{_MINIMAX_M3}</invoke>",
        space=_MINIMAX_M3,
    ),
    "mistral": NamedJson(
        begins=("[TOOL_CALLS]",),
        id_begin="[CALL_ID]",
        name_end="[ARGS]",
        objects=JsonCalls(begins=("[TOOL_CALLS]",), **{**_ARRAY, "before": " ["}),
    ),
    "muse": _MUSE,
    "muse_glimmer": _MUSE_GLIMMER,
    "musespark1x": _MUSE,
    "nemotron_json": JsonCalls(begins=("<TOOLCALL>",), ends=("</TOOLCALL>",), **_ARRAY),
    "olmo3": PythonicCalls(begins=("<function_calls>",), end="</function_calls>", is_list=False),
    "openai": _HARMONY,
    "phi4_mini_json": JsonCalls(begins=("<|tool_call|>", "functools"), ends=("<|/tool_call|>", ""), **_ARRAY),
    "plamo3": NamedJson(
        begins=(_plamo("begin_tool_requests"),),
        end=_plamo("end_tool_requests"),
        call_begin=_plamo("begin_tool_request") + _plamo("begin_tool_name"),
        name_end=_plamo("end_tool_name") + _plamo("begin_tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>",
        call_end=_plamo("end_tool_arguments") + _plamo("end_tool_request"),
        inner=_PLAMO_TOKENS,
    ),
    "poolside_v1": TaggedCalls(**_GLM, is_line_optional=True),
    "pythonic": PythonicCalls(bare="["),
    "qwen3_coder": _QWEN3_XML,
    "qwen3_json": _HERMES,
    "qwen3_xml": _QWEN3_XML,
    "seed_oss": TaggedCalls(
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        name=("<function=", ">"),
        call_end="</function>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
    ),
    "solar_open2": TaggedCalls(
        begin="<|tool_call:start|>",
        end="<|tool_call:end|>",
        key=("<|tool_arg:start|>", "<|tool_arg:value|>"),
        value=("", "<|tool_arg:end|>"),
    ),
    "step3": TaggedCalls(
        begin="<\uff5ctool_calls_begin\uff5c>",
        end="<\uff5ctool_calls_end\uff5c>",
        name=('<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c><steptml:invoke name="', '">'),
        call_end="</steptml:invoke><\uff5ctool_call_end\uff5c>",
        key=('<steptml:parameter name="', '">'),
        value=("", "</steptml:parameter>"),
        inner=tuple(f"<\uff5ctool_{word}\uff5c>" for word in ("call_begin", "sep", "call_end")),
        is_section_shared=True,
    ),
    "step3p5": _QWEN3_XML,
    "step5": _QWEN3_XML,
    "xlam": JsonCalls(bare="[", **_ARRAY),
}
"""--tool-call-parser."""

_THINK = Thinking(begin="<think>", end="</think>")
_ALWAYS_THINKS = Thinking(begin="<think>", end="</think>", is_implied=True)
_MUSE_THINKING = Thinking(begin="to=self<|message|>", end="<|eom|>", ends_before=("<|start|>",), layout=_MUSE)
THINKING: Mapping[str, Thinking] = {
    "cohere_command3": Thinking(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        ends_before=("<|START_ACTION|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "cohere_command4": Thinking(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        ends_before=("<|START_ACTION|>",),
        answer=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_r1": _ALWAYS_THINKS,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "deepseek_v41": _THINK,
    "ernie45": Thinking(begin="<think>", end="</think>", answer=("<response>", "</response>")),
    "gemma4": Thinking(begin="<|channel>", end="<channel|>", heading="thought\n", ends_before=("<|tool_call>",)),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": Thinking(begin="Here is my thought process:", end="Here is my response:"),
    "granite_thinking_parser": _THINK,
    "holo2": _THINK,
    "hunyuan_a13b": Thinking(begin="<think>", end="</think>", answer=("<answer>", "</answer>")),
    "hy_v3": _hunyuan_thinking(":opensource"),
    "hy_v4": _hunyuan_thinking(""),
    "inkling": Thinking(
        begin="<|content_thinking|>", end="<|end_message|>", ends_before=("<|message_model|>",), layout=_INKLING
    ),
    "k2_horizon": Thinking(
        begin="<ifm|think>",
        end="</ifm|think>",
        others=tuple((f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think_fast", "think_faster")),
        ends_before=("<ifm|tool_calls>",),
    ),
    "kimi_k2": Thinking(begin="<think>", end="</think>", ends_before=("<|tool_calls_section_begin|>",)),
    "kimi_k3": Thinking(
        begin=_kimi("think")[0],
        end=_kimi("think")[1],
        answer=_kimi("response"),
        closing=(_kimi("response")[1], _kimi("message")[1]),
    ),
    "ling3": Thinking(begin="<think>", end="</think>", ends_before=("<tool_call>",)),
    "mimo": _THINK,
    "minimax_m2": Thinking(begin="<think>", end="</think>", is_implied=True, ends_before=("<minimax:tool_call>",)),
    "minimax_m2_append_think": Thinking(begin="<think>", end="</think>", is_implied=True, is_shown=True),
    "minimax_m3": Thinking(begin="<mm:think>", end="</mm:think>", closing=("</mm:think>",)),
    "mistral": Thinking(begin="[THINK]", end="[/THINK]", ends_before=("[TOOL_CALLS]",)),
    "muse": _MUSE_THINKING,
    "muse_glimmer": replace(_MUSE_THINKING, layout=_MUSE_GLIMMER),
    "musespark1x": _MUSE_THINKING,
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "openai_gptoss": Thinking(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        ends_before=("<|start|>", "<|call|>", "<|return|>"),
        layout=_HARMONY,
    ),
    "plamo3": Thinking(begin=_plamo("begin_think"), end=_plamo("end_think")),
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "seed_oss": Thinking(begin="<seed:think>", end="</seed:think>"),
    "solar_open2": Thinking(begin="<|think:start|>", end="<|think:end|>", ends_before=("<|tool_call:start|>",)),
    "step3": _ALWAYS_THINKS,
    "step3p5": _ALWAYS_THINKS,
    "step5": _ALWAYS_THINKS,
}
"""--reasoning-parser."""
_SUFFIX = pattern(r"<tool_calls?(:[^\s>]+)?>")


def calls_of(name: str, tokenizer: Tokenizer) -> CallSyntax:
    """The format of calls of this name, with the tags that a tokenizer has."""
    suffix = _suffix(tokenizer) if name in ("hy_v3", "hy_v4") else None
    return CALLS[name] if suffix is None else _hunyuan_calls(suffix, version=int(name[-1]))


def thinking_of(name: str, tokenizer: Tokenizer) -> Thinking:
    """The format of thinking of this name, with the tags that a tokenizer has."""
    suffix = _suffix(tokenizer) if name in ("hy_v3", "hy_v4") else None
    return THINKING[name] if suffix is None else _hunyuan_thinking(suffix)


def _suffix(tokenizer: Tokenizer) -> str | None:
    """What a checkpoint of Hunyuan writes into its tags; None where it has no such tokens."""
    found = next(filter(None, map(_SUFFIX.fullmatch, tokenizer.added_tokens.values())), None)
    return None if found is None else found[1] or ""
