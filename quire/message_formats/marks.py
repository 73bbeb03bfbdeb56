"""`Marks` and `MarkedText`: an output's text in which tokens that structure a message cannot be mistaken for text.

Where a marker such as `<tool_call>` is one token of the tokenizer, only that token counts: the same characters, written
by other tokens, are text that the model quotes. In marked text such a token is one lone surrogate, which decoded text
never holds. Markers that are no single token stand as they are spelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quire.structured.grammar import Marker
from quire.tokenizer.detokenizer import incremental_decoder
from quire.tokenizer.tokenizer import Tokenizer

_FIRST = 0xDC80
MAX_MARKS = 128


class Marks:
    """The markers of a format, and which of them are tokens."""

    def __init__(self, markers: Iterable[str], tokenizer: Tokenizer) -> None:
        markers = list(markers)
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        found = [marker for marker in dict.fromkeys(markers) if marker in ids]
        assert len(found) <= MAX_MARKS
        self.ids: dict[str, int] = {marker: ids[marker] for marker in found}
        """Token ids of the markers that are tokens."""
        self.spelled: dict[int, str] = {ids[marker]: marker for marker in found}
        self.added_tokens = tokenizer.added_tokens
        self._characters = {marker: chr(_FIRST + index) for index, marker in enumerate(found)}
        self._composed = {marker: self._with_characters(marker) for marker in markers if marker not in self.ids}
        """Of markers that are no token, those with tokens inside."""
        self._texts = {ord(character): marker for marker, character in self._characters.items()}

    def __call__(self, marker: str) -> str:
        """What stands for a marker in marked text."""
        return self._characters.get(marker) or self._composed.get(marker) or self._with_characters(marker)

    def holds_token(self, marker: str) -> bool:
        """Whether a marker is a token, or has one inside: no text reads like it then."""
        return any(map(is_mark, self(marker)))

    def pieces(self, marker: str) -> list[str | int]:
        """A marker as texts and token ids."""
        parts = re.split(f"([{chr(_FIRST)}-{chr(_FIRST + MAX_MARKS)}])", self(marker))
        return [self.ids[self._texts[ord(part)]] if is_mark(part[0]) else part for part in parts if part]

    def _with_characters(self, marker: str) -> str:
        for token, character in self._characters.items():
            marker = marker.replace(token, character)
        return marker

    def tokens(self, markers: Iterable[str]) -> tuple[str, ...]:
        """What stands in marked text for those markers that are tokens."""
        return tuple(self._characters[marker] for marker in markers if marker in self._characters)

    def marker(self, text: str) -> Marker:
        """A marker as grammars know it."""
        return Marker(text=text, token_id=self.ids.get(text))

    def spell(self, text: str) -> str:
        """Marked text as it reads."""
        return text if text.isascii() else text.translate(self._texts)


def is_mark(character: str) -> bool:
    """Whether a character of marked text stands for a token."""
    return _FIRST <= ord(character) < _FIRST + MAX_MARKS


class MarkedText:
    """The marked text of one output, token by token.

    Decodes as the engine does, and gives out what the engine has given out: that may be less, since stop strings and
    the token that ended the output are not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Marks,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._marks = marks
        self._decoder = incremental_decoder(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=skip_special_tokens or spaces_between_special_tokens,
        )
        self._waiting: list[tuple[str, int, int]] = []
        """Texts, in order; how many of their characters the engine shows; how many tokens they come from. A mark is a
        text of its own."""
        self._num_shown = 0
        """Characters that the engine has shown and that were not given out yet."""
        self._num_textless = 0
        """Tokens that have given no text yet."""

    def take(self, token_ids: Sequence[int], text: str) -> list[tuple[str, int]]:
        """Marked text of the engine's news, tokens and what text it shows now: pieces, and of how many tokens each."""
        for token_id in token_ids:
            self._decode(token_id)
        return self._release(len(text))

    def finish(self) -> list[tuple[str, int]]:
        """The rest, when the last news was taken."""
        self._put(self._decoder.finish())
        return self._release(0)

    def _decode(self, token_id: int) -> None:
        self._num_textless += 1
        text = self._decoder.decode((token_id,))
        marker = self._marks.spelled.get(token_id)
        if marker is None:
            self._put(text)
            return
        is_shown = text.endswith(marker)
        self._put(text.removesuffix(marker), num_tokens=0)
        self._put(self._marks(marker), len(marker) if is_shown else 0)

    def _put(self, text: str, length: int | None = None, num_tokens: int | None = None) -> None:
        if not text:
            return
        if num_tokens is None:
            num_tokens, self._num_textless = self._num_textless, 0
        self._waiting.append((text, len(text) if length is None else length, num_tokens))

    def _release(self, num_more: int) -> list[tuple[str, int]]:
        self._num_shown += num_more
        released = []
        while self._waiting:
            text, length, num_tokens = self._waiting[0]
            if length > self._num_shown:
                if self._num_shown and not is_mark(text[0]):  # a stop string was found, or begins, inside the token
                    released.append((text[: self._num_shown], num_tokens))
                    self._waiting[0] = text[self._num_shown :], length - self._num_shown, 0
                    self._num_shown = 0
                break
            del self._waiting[0]
            self._num_shown -= length
            released.append((text, num_tokens))
        return released
