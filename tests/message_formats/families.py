"""How families write calls, by their published chat templates, and messages to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.named_json import NamedJson
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import CALLS
from quire.message_formats.marks import Marks
from quire.message_formats.parser import MessageParser
from quire.message_formats.parts import Message, Part
from quire.message_formats.tools import Tool

JSON_FORMATS = [name for name, calls in CALLS.items() if isinstance(calls, JsonCalls | NamedJson)]
Call = tuple[str, str]
"""A name, and arguments as JSON text."""
Mark = Callable[[str], str]
"""What stands for a marker."""
TOOLS = {name: Tool(name=name) for name in ("get_weather", "f", "führe_aus", "a-b_2")}


class Tokens:
    """A tokenizer to which the given markers are tokens."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.added_tokens = dict(enumerate(dict.fromkeys(markers), 256))


def marks_of(family: str, *, as_tokens: bool) -> Marks:
    markers = CALLS[family].markers
    return Marks(markers, Tokens(markers if as_tokens else ()))  # type: ignore[arg-type]


def parts(family: str, marks: Marks, pieces: Iterable[str], *, early: bool = False) -> list[Part]:
    """What is read of a message that comes in pieces."""
    parser = MessageParser(
        MessageFormat(calls=CALLS[family]),
        marks,
        tools=TOOLS,
        new_id=lambda index: f"call_{index}",
        calls_as_they_come=early,
    )
    found = [part for piece in pieces for part in parser.feed(piece)]
    return [*found, *parser.finish()]


def read(family: str, marks: Marks, pieces: Iterable[str], *, early: bool = False) -> Message:
    return Message.of(parts(family, marks, pieces, early=early))


def objects(calls: Iterable[Call], arguments: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{arguments}": {text}}}' for name, text in calls]


def each(begin: str, end: str = "", arguments: str = "arguments") -> Callable[[list[Call], Mark], str]:
    """Every call between markers, on lines of its own."""
    return lambda calls, mark: "\n".join(
        f"{mark(begin)}\n{call}\n{mark(end)}" if end else f"{mark(begin)} {call}" for call in objects(calls, arguments)
    )


def array(begin: str, end: str = "", inside: str = "{}") -> Callable[[list[Call], Mark], str]:
    separator = ",\n    " if "\n" in inside else ", "
    return lambda calls, mark: (
        mark(begin) + "[" + inside.format(separator.join(objects(calls))) + "]" + (mark(end) if end else "")
    )


def cohere(calls: list[Call], mark: Mark) -> str:
    lines = [
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return mark("<|START_ACTION|>") + "[\n" + ",\n".join(lines) + "\n]" + mark("<|END_ACTION|>")


def cohere_spaced(calls: list[Call], mark: Mark) -> str:
    lines = [
        f'\n    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return mark("<|START_ACTION|>") + "[\n" + ",\n".join(lines) + "\n\n]" + mark("<|END_ACTION|>")


def plamo(calls: list[Call], mark: Mark) -> str:
    def marked(*names: str, tail: str = "") -> str:
        return mark("".join(f"<|plamo:{name}:plamo|>" for name in names) + tail)

    head = marked("begin_tool_request", "begin_tool_name")
    middle = marked("end_tool_name", "begin_tool_arguments", tail="<|plamo:constrain|>json<|plamo:msg|>")
    end = marked("end_tool_arguments", "end_tool_request")
    written = "".join(f"{head}{name}{middle}{arguments}{end}" for name, arguments in calls)
    return marked("begin_tool_requests") + written + marked("end_tool_requests")


def deepseek_v3(calls: list[Call], mark: Mark) -> str:
    begin, middle, end = mark("<｜tool▁call▁begin｜>"), mark("<｜tool▁sep｜>"), mark("<｜tool▁call▁end｜>")  # noqa: RUF001
    written = [f"{begin}function{middle}{name}\n```json\n{arguments}\n```{end}" for name, arguments in calls]
    return mark("<｜tool▁calls▁begin｜>") + "\n".join(written) + mark("<｜tool▁calls▁end｜>")  # noqa: RUF001


def deepseek_v31(calls: list[Call], mark: Mark) -> str:
    begin, middle, end = mark("<｜tool▁call▁begin｜>"), mark("<｜tool▁sep｜>"), mark("<｜tool▁call▁end｜>")  # noqa: RUF001
    written = "".join(f"{begin}{name}{middle}{arguments}{end}" for name, arguments in calls)
    return mark("<｜tool▁calls▁begin｜>") + written + mark("<｜tool▁calls▁end｜>")  # noqa: RUF001


def kimi_k2(calls: list[Call], mark: Mark) -> str:
    begin, middle, end = map(mark, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"))
    written = (
        f"{begin}functions.{name}:{index}{middle}{arguments}{end}" for index, (name, arguments) in enumerate(calls)
    )
    return mark("<|tool_calls_section_begin|>") + "".join(written) + mark("<|tool_calls_section_end|>")


def gigachat3(calls: list[Call], mark: Mark) -> str:
    begin, end = mark("function call<|role_sep|>"), mark("<|message_sep|>")
    return "\n\n".join(f"{begin}\n{call}{end}" for call in objects(calls))


def mistral(calls: list[Call], mark: Mark) -> str:
    return "".join(f"{mark('[TOOL_CALLS]')}{name}{mark('[ARGS]')}{arguments}" for name, arguments in calls)


def mistral_v11(calls: list[Call], mark: Mark) -> str:
    return "".join(
        f"{mark('[TOOL_CALLS]')}{name}{mark('[CALL_ID]')}abcdef{index:03}{mark('[ARGS]')}{arguments}"
        for index, (name, arguments) in enumerate(calls)
    )


def internlm(calls: list[Call], mark: Mark) -> str:
    return "\n".join(
        f"{mark('<|action_start|>')}{mark('<|plugin|>')}\n{call}{mark('<|action_end|>')}"
        for call in objects(calls, "parameters")
    )


def minimax(calls: list[Call], mark: Mark) -> str:
    return mark("<tool_calls>") + "\n" + "".join(f"{call}\n" for call in objects(calls)) + mark("</tool_calls>")


def apertus(calls: list[Call], mark: Mark) -> str:
    written = ", ".join(f'{{"{name}": {arguments}}}' for name, arguments in calls)
    return mark("<|tools_prefix|>") + f"[{written}]" + mark("<|tools_suffix|>")


def llama(calls: list[Call], mark: Mark) -> str:
    return "; ".join(objects(calls, "parameters"))


def llama_in_python_tag(calls: list[Call], mark: Mark) -> str:
    return mark("<|python_tag|>") + llama(calls, mark)


@dataclass(frozen=True)
class Family:
    """How a family writes calls."""

    format: str
    write: Callable[[list[Call], Mark], str]
    has_text_before: bool = True
    ids: Callable[[str, int], str] = lambda name, index: f"call_{index}"
    is_for_grammar: bool = True
    """Grammars follow this spelling, for tokenizers to which the markers are tokens."""


FAMILIES = {
    "Apertus": Family("apertus", apertus),
    "Command A": Family("cohere_command3", cohere),
    "Command A+": Family("cohere_command4", cohere_spaced),
    "DeepSeek V3": Family("deepseek_v3", deepseek_v3),
    "DeepSeek V3.1": Family("deepseek_v31", deepseek_v31),
    "ERNIE 4.5": Family("ernie45", each("<tool_call>", "</tool_call>")),
    "GigaChat 3": Family("gigachat3", gigachat3),
    "Granite 20B function calling": Family("granite-20b-fc", each("<function_call>")),
    "Granite 3": Family("granite", array("<|tool_call|>")),
    "Granite 3, in text": Family("granite", array("<tool_call>"), is_for_grammar=False),
    "Granite 4": Family("granite4", each("<tool_call>", "</tool_call>")),
    "Hunyuan A13B": Family("hunyuan_a13b", array("<tool_calls>", "</tool_calls>")),
    "InternLM 2.5": Family("internlm", internlm),
    "Jamba": Family("jamba", array("<tool_calls>", "</tool_calls>", "\n    {}\n")),
    "Kimi K2": Family("kimi_k2", kimi_k2, ids=lambda name, index: f"functions.{name}:{index}"),
    "Llama 3": Family("llama3_json", llama, has_text_before=False),
    "Llama 3, code interpreter": Family("llama3_json", llama_in_python_tag, is_for_grammar=False),
    "Llama 4": Family("llama4_json", llama, has_text_before=False),
    "LongCat": Family("longcat", each("<longcat_tool_call>", "</longcat_tool_call>")),
    "MiniMax M1": Family("minimax", minimax),
    "Mistral v3": Family(
        "mistral", lambda calls, mark: f"{mark('[TOOL_CALLS]')} [{', '.join(objects(calls))}]", is_for_grammar=False
    ),
    "Mistral v11": Family("mistral", mistral_v11, ids=lambda name, index: f"abcdef{index:03}", is_for_grammar=False),
    "Mistral v13": Family("mistral", mistral),
    "Mistral without separator": Family(
        "mistral",
        lambda calls, mark: "".join(mark("[TOOL_CALLS]") + name + arguments for name, arguments in calls),
        is_for_grammar=False,
    ),
    "Nemotron Nano 2": Family("nemotron_json", array("<TOOLCALL>", "</TOOLCALL>")),
    "PLaMo 3": Family("plamo3", plamo),
    "Phi-4-mini": Family("phi4_mini_json", array("<|tool_call|>", "<|/tool_call|>")),
    "Phi-4-mini, functools": Family("phi4_mini_json", array("functools"), is_for_grammar=False),
    "Qwen 2.5 and 3": Family("hermes", each("<tool_call>", "</tool_call>")),
    "Qwen 3": Family("qwen3_json", each("<tool_call>", "</tool_call>")),
    "xLAM 2": Family("xlam", lambda calls, mark: f"[{', '.join(objects(calls))}]", has_text_before=False),
}
CALLS_OF = {
    "one": [("get_weather", '{"city": "Paris", "days": 3}')],
    "three": [("f", '{"a": 1}'), ("get_weather", '{"city": "Rome"}'), ("f", '{"a": 2}')],
    "no arguments": [("f", "{}"), ("get_weather", "{ }")],
    "nested": [("f", '{"a": {"b": {"c": [1, [2, {"d": {}}], []]}}, "e": [{"f": null}, true, -1.5e+3]}')],
    "ends in many braces": [("f", '{"a": {"b": {"c": {"d": {"e": {}}}}}}')],
    "braces in strings": [("f", '{"code": "if (x) { y[0] } } ]} {{", "n": 1}'), ("f", '{"a": "]"}')],
    "escapes": [("f", '{"a": "say \\"hi\\" \\\\", "b": "\\\\\\\\\\"}", "c": "\\u00e9\\n\\ud83d\\ude00"}')],
    "markers in strings": [
        (
            "f",
            '{"a": "</tool_call> <tool_call> [ARGS] [TOOL_CALLS] </tool_calls> <|tool_call_end|> ``` <|/tool_call|>"}',
        )
    ],
    "unicode": [("führe_aus", '{"ort": "São Paulo 東京 😀", "ключ": "значение"}')],
    "lines": [("a-b_2", '{\n  "a": [\n    1,\n    2\n  ]\n}')],
    "string with another call": [("f", '{"a": "{\\"name\\": \\"g\\", \\"arguments\\": {}}"}')],
}
