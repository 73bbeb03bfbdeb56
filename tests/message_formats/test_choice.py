"""The automatic choice, by the lines of published templates that say how a family writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.message_formats.choice import choose
from quire.message_formats.formats import CALLS, THINKING

QWEN_CALL = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
XML_CALL = "<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' + name + '>\\n"
THINK_BY_SWITCH = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}"
DEEPSEEK = (
    "{{'<\uff5cAssistant\uff5c>'}}{{'<\uff5ctool\u2581calls\u2581begin\uff5c>'}}{{'<\uff5ctool\u2581sep\uff5c>'}}"
)
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "Qwen2.5": (QWEN_CALL, "hermes", None),
    "Qwen3": (QWEN_CALL + "{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n\\n</think>\\n\\n' }}", "hermes", "qwen3"),
    "Qwen3-Coder": (XML_CALL, "qwen3_coder", None),
    "Qwen3.5": (XML_CALL + THINK_BY_SWITCH, "qwen3_coder", "qwen3"),
    "Step 3.5": (XML_CALL + "{{- '<|im_start|>assistant\\n<think>\\n' }}", "qwen3_coder", "step3p5"),
    "Seed-OSS": ("<seed:tool_call>\\n<function=example>{{ '<seed:think>' }}", "seed_oss", "seed_oss"),
    "GLM-4.5": ("<tool_call>{f}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>{{ '</think>' }}", "glm45", "glm45"),
    "GLM-4.7": ("<tool_call>{f}<arg_key>k</arg_key><arg_value>v</arg_value>{{ '</think>' }}", "glm47", "glm45"),
    "Laguna": (
        "<available_tools>{{ '<assistant>' }}{{ '<tool_call>' }}<arg_key>{{ '<arg_value>' }}{{ '</think>' }}",
        "poolside_v1",
        "poolside_v1",
    ),
    "Solar Open 2": (
        "<|think:start|>{{ r }}<|think:end|><|tool_call:start|><|tool_arg:start|>k<|tool_arg:value|>v<|tool_arg:end|>",
        "solar_open2",
        "solar_open2",
    ),
    "PLaMo 3": (
        "<|plamo:begin_think:plamo|><|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>",
        "plamo3",
        "plamo3",
    ),
    "North Mini Code": ("<|START_THINKING|><|START_ACTION|>tool_call_id<|START_TEXT|>", *["cohere_command4"] * 2),
    "DeepSeek-V4.1": ("<\uff5cDSML\uff5c calls>", "deepseek_v41", None),
    "MiniMax-M2": ("{%- set begin = '<minimax:tool_call>' %}<invoke name='</think>'", "minimax_m2", "minimax_m2"),
    "MiniMax-M3": (
        "{%- set space = ']<]minimax[>[' -%}{%- set begin = space ~ '<tool_call>' -%}<invoke name='<mm:think>'",
        "minimax_m3",
        "minimax_m3",
    ),
    "K2 Horizon": ("<ifm|think_fast><ifm|tool_calls><ifm|tool_call>n<ifm|arg_key>k</ifm|arg_key>", *["k2_horizon"] * 2),
    "Inkling": ("<|message_model|><|content_thinking|><|content_invoke_tool_json|>", *["inkling"] * 2),
    "Muse Glimmer": ("<|start|>assistant to=self<|message|>to=self<atem:function_calls>", *["muse_glimmer"] * 2),
    "Muse Spark": ("to=self to=commentary<|message|><atem:function_calls>", *["muse"] * 2),
    "gpt-oss": ("<|channel|>analysis<|message|>{{ 'to=functions.' + name }}", "openai", "openai_gptoss"),
    "FunctionGemma": ("{{ '<start_function_call>call:' + name + '{' }}<escape>", "functiongemma", None),
    "Gemma 4": ("{{- '<|tool_call>call:' + name }}<|\"|>{{- '<|channel>thought\\n<channel|>' -}}", "gemma4", "gemma4"),
    "DeepSeek-R1": (
        DEEPSEEK + "```json{% set content = content.split('</think>')[-1] %}",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "DeepSeek-V3.1": (
        DEEPSEEK + "{%- if not thinking is defined -%}{{'</think>'}}",
        "deepseek_v31",
        "deepseek_v3",
    ),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2", None),
    "Kimi K2 Thinking": ("<|tool_calls_section_begin|><|tool_call_argument_begin|></think>", "kimi_k2", "kimi_k2"),
    "Llama 3.1": ("<|start_header_id|>{{- '\"parameters\": ' }}", "llama3_json", None),
    "Llama 3.2 in Python's form": ("[func_name1(params_name1=params_value1)]<|start_header_id|>", "pythonic", None),
    "Llama 4 in Python's form": ("<|header_start|>[func_name1(params_name1=v)]", "llama4_pythonic", None),
    "Mistral": ("{{- '[TOOL_CALLS]' }}", "mistral", None),
    "Magistral": ("{{- '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
    "OLMo 3": ("<functions>{{ tools }}</functions><function_calls>{{ '<think>' }}", "olmo3", "olmo3"),
    "LFM2": ("{{ 'List of tools: <|tool_list_start|>[' }}", "lfm2", None),
    "Granite 3.2": (
        "<|start_of_role|><|tool_call|>Here is my thought process: Here is my response:",
        "granite",
        "granite",
    ),
    "Granite 4": ('<|start_of_role|><tool_call>{"name": n, "arguments": a}', "granite4", None),
    "Phi-4-mini": ("<|tool|>{{ tools }}<|/tool|><|tool_call|>", "phi4_mini_json", None),
    "Command A Reasoning": ("<|START_THINKING|><|START_ACTION|>tool_call_id", "cohere_command3", "cohere_command3"),
    "Hunyuan A13B": ("<tool_calls>{{ c }}<answer></think>", "hunyuan_a13b", "hunyuan_a13b"),
    "ERNIE 4.5": ("<tool_call>{{ c }}<response>'</think>'", "ernie45", "ernie45"),
    "DeepSeek-V4": ("<\uff5cDSML\uff5ctool_calls>", "deepseek_v4", None),
    "Step 3": ("<\uff5ctool_calls_begin\uff5c><steptml:invoke name=</think>", "step3", "step3"),
    "Hunyuan 3": (
        "{%- set HYTK = ':opensource' %}'<think{}>'.format(HYTK)'<tool_sep{}>'.format(HYTK)'<arg_key{}>'.format(HYTK)",
        "hy_v3",
        "hy_v3",
    ),
    "Kimi K3": (
        "{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}open_tag('call', [])open_tag('argument', [])open_tag('think')",
        "kimi_k3",
        "kimi_k3",
    ),
    "MiniCPM5": (
        "{{- '<function name=\"' ~ name ~ '\">' }}{{- '<param name=\"' }}{{- '<think>\\n\\n</think>\\n\\n' }}",
        "minicpm5",
        "qwen3",
    ),
    "DeepSeek-V3.2": ("\uff5cDSML\uff5cfunction_calls>", "deepseek_v32", None),
    "Functionary": ("<|start_header_id|><function=example>{{ '\"parameters\": ' }}", None, None),
    "Zephyr": ("{{ '<|user|>\\n' + message['content'] + eos_token }}", None, None),
}
TOKENIZER: Any = SimpleNamespace(added_tokens={1: "<|channel|>", 2: "<|tool_call_start|>"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_what_the_model_writes(name: str) -> None:
    template, calls, thinking = TEMPLATES[name]
    choice = choose(template, TOKENIZER)
    assert (choice.calls, choice.thinking) == (calls, thinking)
    for chosen, table in ((calls, CALLS), (thinking, THINKING)):
        assert chosen is None or chosen in table
        assert chosen is None or f"{chosen}, since the chat template writes" in choice.why


def test_a_marker_that_has_to_be_a_token_is_one() -> None:
    without: Any = SimpleNamespace(added_tokens={})
    assert choose(TEMPLATES["gpt-oss"][0], without).calls is None
    assert choose(TEMPLATES["LFM2"][0], without).calls is None


def test_no_template_chooses_nothing() -> None:
    choice = choose("", TOKENIZER)
    assert (choice.calls, choice.thinking) == (None, None)
    assert choice.why.count("no form") == 2
