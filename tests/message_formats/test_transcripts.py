"""Each family's own transcripts, written as its published template writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.message_formats.reading import Reading, message_format, read_everyhow

CODE = 'if a < b:\n    print("</b> {1}")\n'
ARGUMENTS = {"city": "Sao Paulo", "days": 3, "exact": True, "tags": ["a", "b, c"], "options": {"x": None}}


@dataclass(frozen=True)
class Family:
    calls: str
    tokens: tuple[str, ...]
    two_calls: str
    """`weather` with ARGUMENTS, then `now` without any."""
    code: str
    """`weather` with CODE for a city."""
    thinking: str | None = None
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    malformed: tuple[str, ...] = field(default=())


def dsml(text: str) -> str:
    """Tags as DeepSeek writes them, the mark inside for an @."""
    return text.replace("@", "\uff5cDSML\uff5c")


def suffixed(text: str) -> str:
    """Tags as Hunyuan 3 writes them, an @ for their suffix."""
    return text.replace("@", ":opensource")


def opened(tag: str, **attributes: object) -> str:
    """A tag of Kimi K3."""
    return f"<|open|>{tag}" + "".join(f' {key}="{value}"' for key, value in attributes.items()) + "<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return opened("argument", key=key, type=kind) + value + closed("argument")


def ifm(text: str) -> str:
    """Tags as K2 Horizon writes them, an @ for what their names begin with."""
    return text.replace("@", "ifm|")


def spaced(text: str) -> str:
    """Tags as MiniMax M3 writes them, an @ for what stands before each."""
    return text.replace("@", "]<]minimax[>[")


STEP_BEGIN = '<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c><steptml:invoke name="'
STEP_END = "</steptml:invoke><\uff5ctool_call_end\uff5c>"
TOOL_CALL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FAMILIES = [
    Family(
        calls="qwen3_coder",
        tokens=TOOL_CALL,
        two_calls="<tool_call>\n<function=weather>\n<parameter=city>\nSao Paulo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n['a', 'b, c']\n</parameter>\n"
        '<parameter=options>\n{"x": null}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        code=f"<tool_call>\n<function=weather>\n<parameter=city>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
        thinking="qwen3",
        malformed=(
            "<tool_call>\n<function=weather>\n<parameter=city>\nx",
            "<tool_call>\nnothing of the kind\n</tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\nand so on",
            "<tool_call>\n<function=>\n</function>\n</tool_call>",
            "<function=weather",
        ),
    ),
    Family(
        calls="mimo",
        tokens=TOOL_CALL,
        two_calls="<tool_call>\n<function=weather>\n<parameter=city>Sao Paulo</parameter>\n"
        "<parameter=days>3</parameter>\n"
        '<parameter=exact>true</parameter>\n<parameter=tags>["a", "b, c"]</parameter>\n'
        '<parameter=options>{"x": null}</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        code=f"<tool_call>\n<function=weather>\n<parameter=city>{CODE}</parameter>\n</function>\n</tool_call>",
        thinking="qwen3",
        malformed=("<tool_call>\n<function=weather>\n<parameter=city>x</parameter>\nand so on",),
    ),
    Family(
        calls="seed_oss",
        tokens=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        two_calls="<seed:tool_call>\n<function=weather>\n<parameter=city>Sao Paulo</parameter>\n<parameter=days>3"
        '</parameter>\n<parameter=exact>true</parameter>\n<parameter=tags>["a", "b, c"]</parameter>\n'
        '<parameter=options>{"x": null}</parameter>\n</function>\n</seed:tool_call>'
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        code=f"<seed:tool_call>\n<function=weather>\n<parameter=city>{CODE}</parameter>\n</function>\n</seed:tool_call>",
        thinking="seed_oss",
        thought=("<seed:think>", "</seed:think>"),
        malformed=("<seed:tool_call><function=weather></seed:tool_call>",),
    ),
    Family(
        calls="glm45",
        tokens=(*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        two_calls="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Sao Paulo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a", "b, c"]</arg_value>\n<arg_key>options</arg_key>\n<arg_value>{"x": null}</arg_value>\n'
        "</tool_call><tool_call>now</tool_call>",
        code=f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CODE}</arg_value></tool_call>",
        thinking="glm45",
        malformed=(
            "<tool_call>nobody</tool_call>",
            "<tool_call>a few words</tool_call>",
            "<tool_call>weather<arg_key>city</arg_key>Paris</tool_call>",
            "<tool_call>weather<arg_key>\ncity</arg_key>",
        ),
    ),
    Family(
        calls="poolside_v1",
        tokens=(*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        two_calls="<tool_call>weather<arg_key>city</arg_key><arg_value>Sao Paulo</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["a", "b, c"]</arg_value><arg_key>options</arg_key><arg_value>{"x": null}</arg_value>'
        "</tool_call><tool_call>now</tool_call>",
        code=f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
        thinking="poolside_v1",
        thought=("<think>", "</think>"),
        malformed=("<tool_call>a few words</tool_call>", "<tool_call>weather<arg_key>city</arg_key>x</tool_call>"),
    ),
    Family(
        calls="solar_open2",
        tokens=(
            *(f"<|tool_call:{word}|>" for word in ("start", "end")),
            *(f"<|tool_arg:{word}|>" for word in ("start", "value", "end")),
            *(f"<|think:{word}|>" for word in ("start", "end")),
        ),
        two_calls="<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Sao Paulo<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n"
        "<|tool_arg:start|>exact<|tool_arg:value|>true<|tool_arg:end|>\n"
        '<|tool_arg:start|>tags<|tool_arg:value|>["a", "b, c"]<|tool_arg:end|>\n'
        '<|tool_arg:start|>options<|tool_arg:value|>{"x": null}<|tool_arg:end|>\n<|tool_call:end|>\n'
        "<|tool_call:start|>now\n<|tool_call:end|>",
        code=f"<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>{CODE}<|tool_arg:end|>\n"
        "<|tool_call:end|>",
        thinking="solar_open2",
        thought=("<|think:start|>", "<|think:end|>"),
        malformed=(
            "<|tool_call:start|>nobody\n<|tool_call:end|>",
            "<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:end|>\n<|tool_call:end|>",
        ),
    ),
    Family(
        calls="minimax_m2",
        tokens=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        two_calls='<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Sao Paulo</parameter>'
        '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
        '<parameter name="tags">["a", "b, c"]</parameter>\n<parameter name="options">{"x": null}</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        code=f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CODE}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        thinking="qwen3",  # minimax_m2 never writes the beginning
        malformed=("<minimax:tool_call>\n<invoke name=weather>\n</invoke>\n</minimax:tool_call>",),
    ),
    Family(
        calls="minimax_m3",
        tokens=("]<]minimax[>[", "<mm:think>", "</mm:think>"),
        two_calls=spaced(
            '@<tool_call>\n@<invoke name="weather">@<city>Sao Paulo@</city>@<days>3@</days>@<exact>true@</exact>'
            "@<tags>@<item>a@</item>@<item>b, c@</item>@</tags>@<options>@<x>null@</x>@</options>@</invoke>\n"
            '@<invoke name="now">@</invoke>\n@</tool_call>'
        ),
        code=spaced(f'@<tool_call>\n@<invoke name="weather">@<city>{CODE}@</city>@</invoke>\n@</tool_call>'),
        thinking="minimax_m3",
        thought=("<mm:think>", "</mm:think>"),
        malformed=(
            spaced('@<tool_call>\n@<invoke name="weather">@<city>x@</days>@</invoke>\n@</tool_call>'),
            spaced('@<tool_call>\n@<invoke name="weather">@<days>1@<x>2@</x>@</days>@</invoke>\n@</tool_call>'),
            spaced('@<tool_call>\n@<invoke name="weather">@<days>1@</days>@<days>1@</days>@</invoke>\n@</tool_call>'),
            spaced("@<tool_call>\nnothing\n@</tool_call>"),
            spaced('@<tool_call>\n@<invoke name="weather">@<>x@</>@</invoke>\n@</tool_call>'),
        ),
    ),
    Family(
        calls="dots",
        tokens=("<dots_function_call>", "</dots_function_call>"),
        two_calls='<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Sao Paulo</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
        '<parameter name="tags">["a", "b, c"]</parameter>\n<parameter name="options">{"x": null}</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
        code=f'<dots_function_call>\n<invoke name="weather">\n<parameter name="city">{CODE}</parameter>\n</invoke>\n'
        "</dots_function_call>",
        malformed=("<dots_function_call>\n<invoke>\n</invoke>\n</dots_function_call>",),
    ),
    Family(
        calls="deepseek_v32",
        tokens=("\uff5cDSML\uff5c", "<think>", "</think>"),
        two_calls=dsml(
            '<@function_calls>\n<@invoke name="weather">\n'
            '<@parameter name="city" string="true">Sao Paulo</@parameter>\n'
            '<@parameter name="days" string="false">3</@parameter>\n'
            '<@parameter name="exact" string="false">true</@parameter>\n'
            '<@parameter name="tags" string="false">["a", "b, c"]</@parameter>\n'
            '<@parameter name="options" string="false">{"x": null}</@parameter>\n</@invoke>\n'
            '<@invoke name="now">\n\n</@invoke>\n</@function_calls>'
        ),
        code=dsml(
            f'<@function_calls>\n<@invoke name="weather">\n<@parameter name="city" string="true">{CODE}</@parameter>\n'
            "</@invoke>\n</@function_calls>"
        ),
        thinking="deepseek_v3",
        malformed=(
            dsml('<@function_calls>\n<@invoke name="weather">\n<@parameter name="city">x</@parameter>'),
            dsml("<@function_calls>\nnothing\n</@function_calls>"),
        ),
    ),
    Family(
        calls="step3",
        tokens=tuple(
            f"<\uff5ctool_{word}\uff5c>" for word in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
        ),
        two_calls=f'<\uff5ctool_calls_begin\uff5c>\n{STEP_BEGIN}weather">\n'
        '<steptml:parameter name="city">Sao Paulo</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n'
        '<steptml:parameter name="exact">true</steptml:parameter>\n'
        '<steptml:parameter name="tags">["a", "b, c"]</steptml:parameter>\n'
        f'<steptml:parameter name="options">{{"x": null}}</steptml:parameter>\n{STEP_END}\n'
        f'{STEP_BEGIN}now">{STEP_END}\n<\uff5ctool_calls_end\uff5c>',
        code=f'<\uff5ctool_calls_begin\uff5c>\n{STEP_BEGIN}weather">\n'
        f'<steptml:parameter name="city">{CODE}</steptml:parameter>\n'
        f"{STEP_END}\n<\uff5ctool_calls_end\uff5c>",
        malformed=("<\uff5ctool_calls_begin\uff5c>\nweather(1)\n<\uff5ctool_calls_end\uff5c>",),
    ),
    Family(
        calls="hy_v3",
        tokens=tuple(
            f"<{slash}{tag}:opensource>"
            for tag in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "think")
            for slash in ("", "/")
        ),
        two_calls=suffixed(
            "<tool_calls@>\n<tool_call@>weather<tool_sep@>\n<arg_key@>city</arg_key@>\n"
            "<arg_value@>Sao Paulo</arg_value@>\n<arg_key@>days</arg_key@>\n<arg_value@>3</arg_value@>\n"
            "<arg_key@>exact</arg_key@>\n<arg_value@>true</arg_value@>\n<arg_key@>tags</arg_key@>\n"
            '<arg_value@>["a", "b, c"]</arg_value@>\n<arg_key@>options</arg_key@>\n'
            '<arg_value@>{"x": null}</arg_value@>\n</tool_call@>\n'
            "<tool_call@>now<tool_sep@>\n</tool_call@>\n</tool_calls@>"
        ),
        code=suffixed("<tool_calls@>\n<tool_call@>weather<tool_sep@>\n<arg_key@>city</arg_key@>\n")
        + suffixed(f"<arg_value@>{CODE}</arg_value@>\n</tool_call@>\n</tool_calls@>"),
        thinking="hy_v3",
        thought=("<think:opensource>", "</think:opensource>"),
        malformed=(
            suffixed("<tool_calls@>\nweather\n</tool_calls@>"),
            suffixed("<tool_calls@>\n<tool_call@>weather<arg_key@>city</arg_key@></tool_call@>"),
            suffixed("<tool_calls@>\n<tool_call@>weather<tool_sep@>\n<arg_key@>city</arg_key@>\nRome"),
        ),
    ),
    Family(
        calls="hy_v4",
        tokens=tuple(
            f"<{slash}{tag}>"
            for tag in ("tool_calls", "tool_call", "arg_key", "arg_value", "think")
            for slash in ("", "/")
        ),
        two_calls="<tool_calls><tool_call>weather<arg_key>city</arg_key><arg_value>Sao Paulo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["a", "b, c"]</arg_value><arg_key>options</arg_key>'
        '<arg_value>{"x": null}</arg_value></tool_call><tool_call>now</tool_call></tool_calls>',
        code="<tool_calls><tool_call>weather<arg_key>city</arg_key>"
        f"<arg_value>{CODE}</arg_value></tool_call></tool_calls>",
        thinking="hy_v4",
        thought=("<think>", "</think>"),
        malformed=(
            "<tool_calls>weather</tool_calls>",
            "<tool_calls><tool_call>weather<arg_key>city</arg_key></tool_call></tool_calls>",
        ),
    ),
    Family(
        calls="k2_horizon",
        tokens=tuple(
            f"<{slash}ifm|{tag}>"
            for tag in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value", "think")
            for slash in ("", "/")
        ),
        two_calls=ifm(
            "<@tool_calls>\n<@tool_call>weather\n<@arg_key>city</@arg_key>\n<@arg_value>Sao Paulo</@arg_value>\n"
            "<@arg_key>days</@arg_key>\n<@arg_type>integer</@arg_type>\n<@arg_value>3</@arg_value>\n"
            "<@arg_key>exact</@arg_key>\n<@arg_value>true</@arg_value>\n<@arg_key>tags</@arg_key>\n"
            '<@arg_type>array[string]</@arg_type>\n<@arg_value>["a", "b, c"]</@arg_value>\n'
            '<@arg_key>options</@arg_key>\n<@arg_value>{"x": null}</@arg_value>\n</@tool_call>\n'
            '<@tool_call>{"name": "now", "arguments": {}}</@tool_call>\n</@tool_calls>'
        ),
        code=ifm("<@tool_calls>\n<@tool_call>weather\n<@arg_key>city</@arg_key>\n<@arg_value>")
        + CODE
        + ifm("</@arg_value>\n</@tool_call>\n</@tool_calls>"),
        thinking="k2_horizon",
        thought=("<ifm|think>", "</ifm|think>"),
        malformed=(
            ifm("<@tool_calls>\nweather\n</@tool_calls>"),
            ifm("<@tool_calls>\n<@tool_call>weather\n<@arg_key>city</@arg_key>\n</@tool_call>\n</@tool_calls>"),
            ifm('<@tool_calls>\n<@tool_call>{"name": "now"</@tool_call>\n</@tool_calls>'),
        ),
    ),
    Family(
        calls="kimi_k3",
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        two_calls=opened("tools")
        + opened("call", tool="weather", index=1)
        + argument("city", "string", "Sao Paulo")
        + argument("days", "number", "3")
        + argument("exact", "boolean", "true")
        + argument("tags", "array", '["a", "b, c"]')
        + argument("options", "object", '{"x": null}')
        + closed("call")
        + opened("call", tool="now", index=2)
        + closed("call")
        + closed("tools"),
        code=opened("tools")
        + opened("call", tool="weather", index=1)
        + argument("city", "string", CODE)
        + closed("call")
        + closed("tools"),
        thinking="kimi_k3",
        thought=(opened("think"), closed("think")),
        malformed=(
            opened("tools") + "weather" + closed("tools"),
            opened("tools") + opened("call", tool="weather", index=1) + opened("argument", key="city") + "x",
            opened("tools") + opened("call", name="weather") + closed("call") + closed("tools"),
        ),
    ),
    Family(
        calls="minicpm5",
        tokens=("<function", "</function>", "<param", "</param>", "<think>", "</think>"),
        two_calls='<function name="weather"><param name="city">Sao Paulo</param><param name="days">3</param>'
        "<param name=\"exact\">True</param><param name=\"tags\">['a', 'b, c']</param>"
        '<param name="options">{\'x\': None}</param></function>\n<function name="now"></function>',
        code=f'<function name="weather"><param name="city"><![CDATA[{CODE}]]></param></function>',
        thinking="qwen3",
        malformed=(
            '<function name="weather"><param name="city">x',
            '<function name="weather"><param name="city"><![CDATA[x</param></function>',
            '<function name="weather"><param name="city"><![CDATA[x]]> y</param></function>',
            "<function name=weather></function>",
            '<function name=""></function>',
        ),
    ),
    Family(
        calls="llama4_pythonic",
        tokens=("<|python_start|>", "<|python_end|>"),
        two_calls="<|python_start|>[weather(city='Sao Paulo', days=3, exact=True, tags=['a', \"b, c\"], "
        "options={'x': None}), now()]<|python_end|>",
        code=f"<|python_start|>[weather(city={CODE!r})]<|python_end|>",
        malformed=(
            "<|python_start|>[weather(city=other())]<|python_end|>",
            "<|python_start|>[weather('Paris')]<|python_end|>",
            "<|python_start|>[weather(days=1 + 1)]<|python_end|>",
            "<|python_start|>[weather(days=nan)]",
            '<|python_start|>[weather(city=f"{1}")]',
            "<|python_start|>print(1)<|python_end|>",
            "<|python_start|>[weather(city='x",
        ),
    ),
    Family(
        calls="lfm2",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        two_calls='<|tool_call_start|>[weather(city="Sao Paulo", days=3, exact=True, tags=["a", "b, c"], '
        'options={"x": None}), now()]<|tool_call_end|>',
        code=f"<|tool_call_start|>[weather(city={json.dumps(CODE)})]<|tool_call_end|>",
        malformed=("<|tool_call_start|>[]<|tool_call_end|>",),
    ),
    Family(
        calls="olmo3",
        tokens=("<function_calls>", "</function_calls>"),
        two_calls='<function_calls>\nweather(city="Sao Paulo", days=3, exact=true, tags=["a", "b, c"], '
        'options={"x": null})\nnow()\n</function_calls>',
        code=f'<function_calls>\nweather(city="""{CODE}""")\n</function_calls>',
        thinking="olmo3",
        malformed=("<function_calls>\nsome words\n</function_calls>",),
    ),
    Family(
        calls="functiongemma",
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        two_calls="<start_function_call>call:weather{city:<escape>Sao Paulo<escape>,days:3,exact:true,"
        "tags:[<escape>a<escape>,<escape>b, c<escape>],options:{x:null}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        code=f"<start_function_call>call:weather{{city:<escape>{CODE}<escape>}}<end_function_call>",
        malformed=(
            "<start_function_call>call:weather{city:<escape>x<end_function_call>",
            "<start_function_call>weather{}<end_function_call>",
            "<start_function_call>call:weather{city}<end_function_call>",
            "<start_function_call>call:weather{days:}<end_function_call>",
            "<start_function_call>call:weather{days:1 exact:true}<end_function_call>",
        ),
    ),
    Family(
        calls="gemma4",
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        two_calls='<|tool_call>call:weather{city:<|"|>Sao Paulo<|"|>,days:3,exact:true,tags:'
        '[<|"|>a<|"|>,<|"|>b, c<|"|>],options:{x:None}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        code=f'<|tool_call>call:weather{{city:<|"|>{CODE}<|"|>}}<tool_call|>',
        thinking="gemma4",
        thought=("<|channel>thought\n", "<channel|>"),
        malformed=("<|tool_call>call:weather{",),
    ),
]
ids = [family.calls for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_calls_with_text_around_them_are_read(family: Family) -> None:
    message = read_everyhow(message_format(family.calls), f"Let me see.\n\n{family.two_calls}\n", tokens=family.tokens)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("call_0", "weather", ARGUMENTS),
        ("call_1", "now", {}),
    ]
    assert message.text == "Let me see."


@pytest.mark.slow
@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_every_way_to_split_gives_the_same_message(family: Family, as_tokens: bool) -> None:
    tokens = family.tokens if as_tokens else ()
    for text in (f"Let me see.\n\n{family.two_calls}\n{family.code}\nDone.", *family.malformed):
        for early in (False, True):
            reading = Reading(message_format(family.calls), text, tokens=tokens, calls_as_they_come=early)
            reading.message(num_random=2000, num_single=len(text))


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_a_text_argument_keeps_every_character(family: Family) -> None:
    message = read_everyhow(message_format(family.calls), family.code, tokens=family.tokens)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": CODE}]
    assert message.text == ""


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_calls_without_their_last_marker_are_read_when_the_output_ends(family: Family) -> None:
    text = family.code.removesuffix(next((t for t in family.tokens if family.code.endswith(t)), ""))
    if family.calls in ("glm45", "minicpm5", "poolside_v1", "solar_open2"):
        pytest.skip("the last marker is the only one that ends a call")
    message = read_everyhow(message_format(family.calls), text, tokens=family.tokens)
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": CODE}]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.thinking], ids=lambda one: one.calls)
def test_thinking_and_calls_in_turn_are_told_apart(family: Family) -> None:
    begin, end = family.thought
    text = f"{begin}What <b> now?{end}Yes. {family.code}\n{begin}And then?{end}{family.two_calls}\nDone."
    tokens = family.tokens
    message = Reading(message_format(family.calls, family.thinking), text, tokens=tokens).message()
    assert [call.name for call in message.tool_calls] == ["weather", "weather", "now"]
    if any(begin.strip().startswith(token) for token in tokens):
        assert message.reasoning == "What <b> now?And then?"
        assert message.text.split() == ["Yes.", "Done."]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.thinking], ids=lambda one: one.calls)
@pytest.mark.parametrize("num_kept", [0, 3])
def test_an_output_that_is_cut_inside_the_thinking_has_no_text(family: Family, num_kept: int) -> None:
    begin, end = family.thought
    written = message_format(family.calls, family.thinking)
    text = f"{begin}Hm {family.code}{end[:0]}"
    message = Reading(written, text, tokens=family.tokens).message()
    open_in_prompt = Reading(written, text.removeprefix(begin), tokens=family.tokens, in_thinking=True).message()
    assert message == open_in_prompt
    if family.thinking not in ("gemma4", "k2_horizon", "solar_open2"):  # a call ends their thinking
        assert (message.text, message.tool_calls) == ("", [])
        assert message.reasoning.split() == f"Hm {family.code}".split()


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_what_only_begins_like_a_call_stays_text(family: Family, has_tokens: bool) -> None:
    for malformed in family.malformed:
        tokens = family.tokens if has_tokens else ()
        message = Reading(message_format(family.calls), f"Look: {malformed} Yes.", tokens=tokens).message()
        assert "".join(message.text.split()) == "".join(f"Look: {malformed} Yes.".split())
        assert message.tool_calls == []


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_a_call_after_a_malformed_one_is_read(family: Family) -> None:
    for malformed in family.malformed:
        text = f"{malformed} {family.code}"
        message = Reading(message_format(family.calls), text, tokens=family.tokens).message()
        assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": CODE}], malformed
        assert "".join(message.text.split()) == "".join(malformed.split())


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_an_output_cut_anywhere_is_a_call_or_text_and_loses_nothing(family: Family) -> None:
    written = message_format(family.calls)
    for size in range(len(family.code)):
        reading = Reading(written, family.code, tokens=family.tokens)
        text = reading.text[:size]
        message = reading.parts([text])
        reading.calls_as_they_come = True
        early: Any = reading.parts(list(text))
        names = [part.name for part in early if hasattr(part, "name")]
        assert names in ([], ["weather"])
        if not any(hasattr(part, "name") for part in message):
            shown = "".join(part.text for part in message)  # type: ignore[union-attr]
            assert shown.split() == reading.marks.spell(text).split()
