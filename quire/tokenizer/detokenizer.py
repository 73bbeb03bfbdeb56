"""Token ids to text, as they come: the one path from tokens to text, streaming or not.

The concatenation of the increments is, character for character, the text that decoding all tokens at once gives in the
context of the prompt: `decode(prompt + output)` without the text of the prompt. When the prompt ends inside a
character, that character belongs to the output.

Owns the text of one output. Knows no requests and no finish reasons.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.tokenizer.stop_strings import StopMatcher
from quire.tokenizer.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """The text of one output, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_reason: str | None = None
        """The stop string that was found."""
        self.num_tokens_used = 0
        """Tokens read, up to and including the one that completed the stop string."""
        self._decoder = incremental_decoder(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=skip_special_tokens or spaces_between_special_tokens,
        )
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._emitted: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Read more tokens; returns the text that is certain now.

        Tokens after the one that completes a stop string are not read.
        """
        if self._matcher is None:
            self.num_tokens_used += len(token_ids)
            return self._emit(self._decoder.decode(token_ids))
        return "".join(self._append_one(token_id, self._matcher) for token_id in token_ids)

    def finish(self) -> str:
        """The text that was held back: unfinished characters as U+FFFD, and what might have become a stop string."""
        if self.stop_reason is not None:
            return ""
        text = self._decoder.finish()
        if self._matcher is None:
            return self._emit(text)
        emitted = self._search(text, self._matcher)
        if self.stop_reason is None:
            emitted += self._emit(self._held)
            self._held = ""
        return emitted

    def _append_one(self, token_id: int, matcher: StopMatcher) -> str:
        if self.stop_reason is not None:
            return ""
        self.num_tokens_used += 1
        return self._search(self._decoder.decode((token_id,)), matcher)

    def _search(self, text: str, matcher: StopMatcher) -> str:
        """Emit what of held and new text cannot be part of a stop string, or all up to the one that is complete."""
        if not text:
            return ""
        found = matcher.feed(text, may_stop=self.num_tokens_used > self._min_tokens)
        whole = self._held + text
        if found is None:
            cut = len(whole) - matcher.num_held
        else:
            self.stop_reason, end = found
            cut = len(self._held) + end - (0 if self._include_stop else len(self.stop_reason))
        self._held = whole[cut:] if found is None else ""
        return self._emit(whole[:cut])

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text


class IncrementalDecoder(Protocol):
    """Tokens to text without stop strings."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""

    def finish(self) -> str:
        """The text that was still open."""


def incremental_decoder(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool,
) -> IncrementalDecoder:
    """The decoder for a tokenizer: over bytes where tokens are bytes, over windows of tokens elsewhere."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return _ByteDecoder(tokenizer, prompt_token_ids, hidden)
    return _WindowDecoder(tokenizer, prompt_token_ids, hidden, spaces_between_special_tokens)


class _ByteDecoder:
    """For byte-level tokenizers: joins the tokens' bytes and reads them as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False
        """The bytes so far end inside a character."""
        self._read(_last_bytes(tokenizer, prompt_token_ids, hidden))

    def decode(self, token_ids: Sequence[int]) -> str:
        token_bytes, hidden = self._token_bytes, self._hidden
        data = b"".join([token_bytes(i) for i in token_ids if i not in hidden])
        return self._read(data) if self._is_inside or not data.isascii() else data.decode("ascii")

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _read(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text


def _last_bytes(tokenizer: Tokenizer, token_ids: Sequence[int], hidden: frozenset[int]) -> bytes:
    """Enough of the text's end to know whether it ends inside a character."""
    tail = b""
    for token_id in reversed(token_ids):
        if len(tail) >= MAX_CHARACTER_BYTES:
            break
        if token_id not in hidden:
            tail = tokenizer.token_bytes(token_id) + tail
    return tail


class _WindowDecoder:
    """For all other tokenizers: decodes new tokens behind the one before them, with the `tokenizers` package.

    The text of a token depends on whether something precedes it (leading spaces), so the last visible token stays as
    context. With byte fallback it depends on the whole run of byte tokens it stands in: a run is text only if all of it
    is UTF-8, so it is held back until it ends.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int], spaces: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._spaces = spaces
        self._context, self._pending = _split_prompt(tokenizer, prompt_token_ids, hidden)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._increments(token_ids))

    def finish(self) -> str:
        return self._flush()

    def _increments(self, token_ids: Sequence[int]) -> Iterator[str]:
        for token_id in token_ids:
            if token_id in self._hidden or not self._tokenizer.has_token(token_id):
                continue
            if self._is_unspaced(token_id):
                yield self._flush()
                yield self._tokenizer.token(token_id)
                self._context = [token_id]
                continue
            self._pending.append(token_id)
            if token_id not in self._tokenizer.byte_ids:
                yield self._flush()

    def _flush(self) -> str:
        """The text of the pending tokens; the last of them that has text becomes the context."""
        if not self._pending:
            return ""
        start = len(self._text(self._context))
        both = self._context + self._pending
        self._context = _from_last_visible(self._tokenizer, both)
        self._pending = []
        return self._text(both)[start:]

    def _is_unspaced(self, token_id: int) -> bool:
        """Whether a token goes out as it is spelled: an added token right after another one, without a space."""
        if self._spaces or token_id not in self._tokenizer.added_tokens:
            return False
        before = self._pending or self._context
        return bool(before) and before[-1] in self._tokenizer.added_tokens

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _from_last_visible(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """The end of `token_ids` from the last token on that is more than an empty string."""
    start = len(token_ids) - 1
    while start > 0 and not tokenizer.token(token_ids[start]):
        start -= 1
    return token_ids[start:]


def _split_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], hidden: frozenset[int]
) -> tuple[list[int], list[int]]:
    """(what the output's first token stands behind, byte tokens at the prompt's end that are an unfinished character).

    A finished run of byte tokens before the output is text of the prompt, whatever bytes follow it.
    """
    run: list[int] = []
    context: list[int] = []
    for token_id in reversed(token_ids):
        if token_id in hidden or not tokenizer.has_token(token_id):
            continue
        if token_id in tokenizer.byte_ids and not context:
            run.append(token_id)
            continue
        context.append(token_id)
        if tokenizer.token(token_id):
            break
    run.reverse()
    context.reverse()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(map(tokenizer.token_bytes, run)))
    num_done = len(run) - len(utf8.getstate()[0])
    return context or run[:num_done], run[num_done:]
