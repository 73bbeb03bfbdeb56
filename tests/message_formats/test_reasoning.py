"""Thinking: its families, and whether a prompt has begun it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.message_formats.formats import CALLS, THINKING, calls_of, thinking_of
from quire.message_formats.thinking import in_thinking, of_prompt
from tests.message_formats.reading import Reading, marks_of, message_format, read_everyhow

THINK = ("<think>", "</think>")
WRITTEN = {
    "cohere_command3": (
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "cohere_command4": (
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_r1": ("<think>\nHm.\n</think>\n\nYes.", THINK),
    "deepseek_v3": ("<think>Hm.</think>Yes.", THINK),
    "deepseek_v4": ("<think>Hm.</think>Yes.", THINK),
    "deepseek_v41": ("<think>Hm.</think>Yes.", THINK),
    "ernie45": ("<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n", THINK),
    "gemma4": ("<|channel>thought\nHm.<channel|>Yes.", ("<|channel>", "<channel|>")),
    "glm45": ("\n<think>Hm.</think>\nYes.", THINK),
    "glm47": ("<think>Hm.</think>Yes.", THINK),
    "granite": ("Here is my thought process: Hm. Here is my response: Yes.", ()),
    "granite_thinking_parser": ("<think>\nHm.\n</think>\nYes.", THINK),
    "holo2": ("<think>\nHm.\n</think>\n\nYes.", THINK),
    "hunyuan_a13b": ("<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", ()),
    "hy_v3": ("<think:opensource>Hm.</think:opensource>Yes.", ("<think:opensource>", "</think:opensource>")),
    "hy_v4": ("<think>Hm.</think>Yes.", THINK),
    "k2_horizon": ("<ifm|think>Hm.</ifm|think>\nYes.", ("<ifm|think>", "</ifm|think>")),
    "inkling": (
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"
        "<|content_model_end_sampling|>",
        ("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|end_message|>"),
    ),
    **dict.fromkeys(
        ("muse", "muse_glimmer", "musespark1x"),
        (
            " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
            ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        ),
    ),
    "kimi_k3": (
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "kimi_k2": ("<think>Hm.</think>Yes.", THINK),
    "ling3": ("<think>Hm.</think>Yes.", THINK),
    "mimo": ("<think>Hm.</think>Yes.", THINK),
    "minimax_m2": ("<think>\nHm.\n</think>\n\nYes.", THINK),
    "minimax_m3": ("<mm:think>Hm.</mm:think>Yes.", ("<mm:think>", "</mm:think>")),
    "mistral": ("[THINK]Hm.[/THINK]Yes.", ("[THINK]", "[/THINK]")),
    "nemotron_v3": ("<think>\nHm.\n</think>\nYes.", THINK),
    "olmo3": ("<think>Hm.</think>Yes.", ()),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
    ),
    "plamo3": (
        "<|plamo:begin_think:plamo|>Hm.<|plamo:end_think:plamo|>Yes.",
        ("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
    ),
    "poolside_v1": ("<think>Hm.</think>Yes.", THINK),
    "qwen3": ("<think>\nHm.\n</think>\n\nYes.", THINK),
    "seed_oss": ("<seed:think>Hm.</seed:think>Yes.", ("<seed:think>", "</seed:think>")),
    "solar_open2": ("<|think:start|>Hm.<|think:end|>Yes.", ("<|think:start|>", "<|think:end|>")),
    "step3": ("<think>\nHm.\n</think>\n\nYes.", THINK),
    "step3p5": ("<think>\nHm.\n</think>\nYes.", THINK),
    "step5": ("<think>\nHm.\n</think>\n\nYes.", THINK),
}


def test_every_family_is_tested() -> None:
    assert THINKING.keys() - WRITTEN.keys() == {"minimax_m2_append_think"}


def test_the_page_lists_every_family() -> None:
    root = Path(__file__).parents[2]
    rows = [line for line in (root / "docs" / "reasoning.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall("`([^`]*)`", row.split("|")[1])) == sorted(THINKING)
    assert "reasoning.md" in (root / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", WRITTEN)
def test_thinking_is_told_apart_from_the_answer(name: str) -> None:
    text, tokens = WRITTEN[name]
    message = read_everyhow(message_format(None, name), text, tokens=tokens)
    assert (message.reasoning, message.text) == ("Hm.", "Yes.")


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "openai_gptoss"])
def test_thinking_that_the_prompt_has_begun(name: str) -> None:
    text, tokens = WRITTEN[name]
    begin = THINKING[name].begin + THINKING[name].heading
    written = message_format(None, name)
    rest = text.strip().removeprefix(begin)
    message = read_everyhow(written, rest, tokens=tokens, in_thinking=True)
    assert (message.reasoning, message.text) == ("Hm.", "Yes.")
    cut = Reading(written, rest[:3], tokens=tokens, in_thinking=True).message()
    assert ("".join(cut.reasoning.split()), cut.text) == (rest[:3].strip(), "")


def test_an_answer_without_thinking_is_text() -> None:
    for name in THINKING:
        if name != "openai_gptoss":
            assert Reading(message_format(None, name), " Yes, <b>!</b> ").message().text == " Yes, <b>!</b> "
    assert Reading(message_format(None, "hunyuan_a13b"), "<answer>\nYes.\n</answer>").message().text == "Yes."


def test_a_marker_that_is_quoted_in_the_text_is_text() -> None:
    quoting = 'The tag "<think>" begins it and "</think>" ends it.'
    assert Reading(message_format(None, "olmo3"), quoting).message().text == quoting
    assert Reading(message_format(None, "qwen3"), quoting).message().text == quoting


def test_a_call_ends_the_thinking_where_the_family_does_so() -> None:
    text = "<think>Hm.<|tool_calls_section_begin|>"
    message = Reading(message_format(None, "kimi_k2"), text, tokens=THINK).message()
    assert (message.reasoning, message.text) == ("Hm.", "<|tool_calls_section_begin|>")


def test_thinking_may_be_shown_in_the_text() -> None:
    written = message_format("minimax_m2", "minimax_m2_append_think")
    call = '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    message = read_everyhow(written, f"Hm. {call}</think>\n\nYes.{call}", tokens=THINK, in_thinking=True)
    assert message.text == f"<think>Hm. {call}</think>\n\nYes."
    assert (message.reasoning, len(message.tool_calls)) == ("", 1)


BEGIN, END, TURN, SPACES = 1000, 1001, 1002, 1003


@pytest.mark.parametrize(
    ("name", "token_ids", "expected"),
    [
        ("qwen3", [TURN, 1, BEGIN, 2], True),
        ("qwen3", [TURN, 1, BEGIN, 2, SPACES], True),
        ("qwen3", [TURN, 1, BEGIN, 2, END, 2], False),
        ("qwen3", [BEGIN, 5, TURN, 1, 2], False),  # a user writes the marker
        ("qwen3", [TURN, 1, 2], False),
        ("qwen3", [], False),
        ("deepseek_r1", [TURN, 1, 2], True),
        ("deepseek_r1", [BEGIN, END, TURN, 1, 2], True),
        ("deepseek_r1", [TURN, BEGIN, 2, END, 2], False),  # the template has ended it
        ("deepseek_r1", [TURN, BEGIN], True),
    ],
)
def test_whether_a_prompt_has_begun_the_thinking_is_told_by_tokens(
    name: str, token_ids: list[int], expected: bool
) -> None:
    written = message_format(None, name)
    marks = marks_of(written, THINK, ["<|im_start|>", "    "])
    assert in_thinking(written, marks, token_ids, "") is expected


def test_of_several_markers_those_of_the_prompt_count() -> None:
    written = message_format(None, "k2_horizon")
    tokens = ("<ifm|think>", "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>")
    marks = marks_of(written, tokens)
    fast, end, none = marks.ids["<ifm|think_fast>"], marks.ids["</ifm|think_fast>"], 5
    for ids, text, begin, is_open in [
        ([none, fast], "<ifm|think_fast>", "<ifm|think_fast>", True),
        ([fast, end], "<ifm|think_fast></ifm|think_fast>", "<ifm|think_fast>", False),
        ([none], "<ifm|think_faster>\n", "<ifm|think_faster>", True),  # which is no token here
        ([none], "Hm", "<ifm|think>", False),
    ]:
        chosen = of_prompt(written, marks, ids, text)
        assert chosen.thinking is not None
        assert (chosen.thinking.begin, chosen.thinking.end) == (begin, begin.replace("<", "</"))
        assert in_thinking(chosen, marks, ids, text) is is_open
        reading = Reading(chosen, f"Hm.{chosen.thinking.end}Yes.", tokens=tokens, in_thinking=True)
        assert (reading.message().reasoning, reading.message().text) == ("Hm.", "Yes.")


def test_tags_of_hunyuan_have_the_suffix_that_the_tokenizer_has() -> None:
    found: Any = SimpleNamespace(added_tokens={1: "<tool_call:6124c78e>", 2: "</think:6124c78e>"})
    assert thinking_of("hy_v4", found).markers == ("<think:6124c78e>", "</think:6124c78e>")
    assert calls_of("hy_v3", found).begins == ("<tool_calls:6124c78e>",)
    plain: Any = SimpleNamespace(added_tokens={1: "<tool_call>"})
    assert calls_of("hy_v3", plain).begins == calls_of("hy_v4", plain).begins == ("<tool_calls>",)
    assert calls_of("hermes", plain) is CALLS["hermes"]
    other: Any = SimpleNamespace(added_tokens={})
    assert thinking_of("hy_v3", other) is THINKING["hy_v3"]


def test_or_by_the_end_of_its_text() -> None:
    written = message_format(None, "olmo3")
    marks = marks_of(written, ())
    assert in_thinking(written, marks, [1, 2], "<|im_start|>assistant\n<think>\n")
    assert not in_thinking(written, marks, [1, 2], "<think> is a tag<|im_end|><|im_start|>assistant\n")
    assert not in_thinking(written, marks, [1, 2], "<think></think>")
    always = message_format(None, "step3")
    assert in_thinking(always, marks_of(always, ()), [1], "assistant\n")
    assert not in_thinking(always, marks_of(always, ()), [1], "assistant\n<think>\n\n</think>\n\n")
    assert not in_thinking(message_format("glm45"), marks_of(message_format("glm45"), ()), [1], "<think>")


def test_long_prompts_are_cheap() -> None:
    written = message_format(None, "qwen3")
    marks = marks_of(written, THINK, ["<|im_start|>"])
    prompt = [1] * 1_000_000 + [TURN, 1, BEGIN]
    started = time.thread_time()
    assert in_thinking(written, marks, prompt, "x" * 1_000_000 + "<think>")
    assert time.thread_time() - started < 0.1
