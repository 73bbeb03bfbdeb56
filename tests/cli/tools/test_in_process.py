"""Calls of a model in this process are told from its text, and held to the tools' schemas."""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.cli.tools.demo import TOOLS
from quire.cli.tools.in_process import Calls
from quire.message_formats.parts import Message, Part, ToolCall
from quire.outputs import CompletionOutput

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 * 7"}}\n</tool_call>'


def test_calls_are_told_from_text_token_by_token(tiny_llm: LLM) -> None:
    tools = [tool.definition() for tool in TOOLS.values()]
    prompt = tiny_llm.chat_prompt([{"role": "user", "content": "What is 12 times 7?"}], tools=tools)
    found = Calls(tiny_llm, tools).prepare("one", prompt, SamplingParams(temperature=0))
    tokenizer = tiny_llm.get_tokenizer()
    ids = tokenizer.encode(f"Let me see.{CALL}", add_special_tokens=False)
    parts: list[Part] = []
    for index, token_id in enumerate(ids):
        reason = "stop" if index == len(ids) - 1 else None
        text = tokenizer.decode([token_id])
        parts += found.read(CompletionOutput(index=0, text=text, token_ids=[token_id], finish_reason=reason))
    message = Message.of(parts)
    assert message.text == "Let me see."
    assert message.tool_calls == [ToolCall(message.tool_calls[0].id, "calculate", '{"expression": "12 * 7"}')]


def test_the_arguments_of_calls_follow_their_schemas(tiny_llm: LLM) -> None:
    tools = [tool.definition() for tool in TOOLS.values()]
    prompt = tiny_llm.chat_prompt([{"role": "user", "content": "What is 12 times 7?"}], tools=tools)
    found = Calls(tiny_llm, tools).prepare("two", prompt, SamplingParams(temperature=0))
    assert found.params.gate is not None
    assert [trigger.text for trigger in found.params.gate.triggers] == ["<tool_call>"]
    assert found.params.structured_outputs is not None
    assert '"additionalProperties": false' in str(found.params.structured_outputs.grammar)
