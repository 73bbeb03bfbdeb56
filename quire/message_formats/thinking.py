"""Whether a prompt ends inside the thinking: its template has begun it, or the client goes on with a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.message_formats.format import MessageFormat
from quire.message_formats.marks import Marks
from quire.message_formats.reader import SPACE
from quire.structured.grammar import Thinking
from quire.tokenizer.tokenizer import Tokenizer


def in_thinking(message_format: MessageFormat, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool:
    """Whether the output of a prompt begins inside the thinking.

    Where the markers are tokens, the last of them counts, unless another token that structures the prompt follows: the
    markers of older messages and of what users write do not count. Else the prompt's text has to end with the marker;
    it may be empty where there is none.
    """
    thinking = message_format.thinking
    if message_format.layout is not None:
        return message_format.layout.ends_in_thinking(marks, prompt_token_ids, prompt_text)
    if thinking is None:
        return False
    last = _last_marker(marks, prompt_token_ids)
    text = prompt_text[-_TAIL:].rstrip(SPACE)
    if last == thinking.end or (thinking.end not in marks.ids and text.endswith(thinking.end)):
        return False
    is_begun = last == thinking.begin if thinking.begin in marks.ids else text.endswith(thinking.begin)
    return is_begun or thinking.is_implied


def of_prompt(known: MessageFormat, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> MessageFormat:
    """The format of a prompt's answer: of several pairs of markers around thinking, those that the prompt has."""
    thinking = known.thinking
    if thinking is None or not thinking.others:
        return known
    last, text = _last_marker(marks, prompt_token_ids), prompt_text[-_TAIL:].rstrip(SPACE)
    for begin, end in thinking.others:
        if last in (begin, end) or (begin not in marks.ids and text.endswith((begin, end))):
            return replace(known, thinking=replace(thinking, begin=begin, end=end))
    return known


def marked_thinking(message_format: MessageFormat, marks: Marks, tokenizer: Tokenizer) -> Thinking | None:
    """The marks around the thinking as grammars know them, and what ends it; None where there is none."""
    known = message_format.thinking
    if known is None:
        return None
    end = marks.marker(known.end)
    forced = tokenizer.encode(known.end, add_special_tokens=False) if end.token_id is None else [end.token_id]
    return Thinking(
        begin=marks.marker(known.begin),
        end=end,
        is_open=known.is_implied,
        forced=tuple(forced),
        before=tuple(marks.ids[marker] for marker in known.ends_before if marker in marks.ids),
    )


_TAIL = 4096
"""Characters of a prompt that are looked at."""


def _last_marker(marks: Marks, token_ids: Sequence[int]) -> str:
    """The last marker that is a token, with nothing but plain tokens behind it; empty where there is none."""
    for token_id in reversed(token_ids):
        if token_id in marks.spelled:
            return marks.spelled[token_id]
        if marks.added_tokens.get(token_id, "").strip():
            return ""
    return ""
