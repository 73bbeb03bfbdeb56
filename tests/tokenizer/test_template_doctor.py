"""What chat templates leave out is found by trying them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quire
from quire.tokenizer.chat import ChatTemplate
from quire.tokenizer.template_doctor import (
    EARLIER_REASONING,
    LATEST_REASONING,
    PROBES,
    REASONING_PARTS,
    dropped_parts,
    parts_of,
)

CALLS = "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
ALL = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}"
WITH_TOOLS = "{{ (tools or []) | tojson }}" + ALL


def dropped(source: str) -> set[str]:
    return set(dropped_parts(ChatTemplate(source))) - REASONING_PARTS


def test_a_template_that_writes_all_drops_nothing() -> None:
    assert dropped(WITH_TOOLS) == set()


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (ALL, {"tools"}),
        (WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}"), {"system messages"}),
        (WITH_TOOLS.replace("m.tool_calls or []", "[]"), {"earlier tool calls"}),
        (WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), {"results of tools"}),
        (WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"), {"earlier answers"}),
        (
            "{{ messages[-1].content }}",
            {probe.part for probe in PROBES} - {"results of tools"} - REASONING_PARTS,
        ),
    ],
)
def test_each_part_that_is_dropped_is_found(source: str, parts: set[str]) -> None:
    assert dropped(source) == parts


THOUGHTS = "{{ m.reasoning_content or '' }}"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (ALL, {EARLIER_REASONING, LATEST_REASONING}),
        (ALL.replace("{{ m.content }}", THOUGHTS), set()),
        (ALL.replace("{{ m.content }}", "{{ m.thinking }}"), set()),
        (ALL.replace("{{ m.content }}", f"{{% if m.tool_calls %}}{THOUGHTS}{{% endif %}}"), {EARLIER_REASONING}),
    ],
)
def test_thoughts_that_are_dropped_are_found(source: str, parts: set[str]) -> None:
    assert dropped_parts(ChatTemplate(source)) & REASONING_PARTS == parts


def test_what_a_template_refuses_is_not_dropped() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + WITH_TOOLS
    assert dropped(source) == set()


def test_the_embedded_model_drops_nothing() -> None:
    source = (Path(quire.__file__).parent / "tiny" / "chat_template.jinja").read_text(encoding="utf-8")
    assert dropped(source) == set()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.part)
def test_a_conversation_has_the_parts_that_its_probe_is_about(probe: Any) -> None:
    assert probe.part in parts_of(probe.messages, has_tools=probe.tools is not None)
