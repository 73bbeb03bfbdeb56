"""Which formats a model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.message_formats.format import MessageFormat
from quire.message_formats.marks import Marks
from quire.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Choice:
    """The names of a model's formats; None: it has none that is known."""

    calls: str | None
    thinking: str | None
    why: str


def choose(template: str, tokenizer: Tokenizer) -> Choice:
    """The formats that a chat template speaks of."""
    calls = "hermes" if "<tool_call>" in template else None
    thinking = "qwen3" if "<think>" in template else None
    return Choice(calls, thinking, "markers of the chat template")


def in_thinking(message_format: MessageFormat, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool:
    """Whether a prompt ends inside the thinking."""
    thinking = message_format.thinking
    return thinking is not None and (thinking.is_implied or prompt_text.rstrip().endswith(thinking.begin))
