"""What a user may hand in as a prompt."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Requests share cached prefixes only with requests of the same salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text they came from, only echoed."""
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


class ChatMessage(TypedDict):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, str]] | None
