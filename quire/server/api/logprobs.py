"""Logprobs in the forms of the two APIs. Minus infinity, which JSON lacks, is written as -9999."""

from __future__ import annotations

from collections.abc import Sequence

from quire.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from quire.server.api.protocol.openai import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from quire.tokenizer.detokenizer import incremental_decoder
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.cancellation import check_cancelled

LEAST = -9999.0


def finite(logprob: float) -> float:
    """A logprob that JSON can carry."""
    return max(logprob, LEAST)


def best(entry: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely candidates of a position, in order; all for -1."""
    ranked = [item for item in entry.items() if count == -1 or (item[1].rank or 0) <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def spelled(token_id: int, text: str | None, *, as_ids: bool) -> str:
    """A token as replies show it."""
    return f"token_id:{token_id}" if as_ids or text is None else text


def prompt_logprobs(entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """Per prompt position the candidates by token id."""
    return [None if entry is None else _prompt_position(entry) for entry in entries]


def _prompt_position(entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    check_cancelled()
    return {
        str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in entry.items()
    }


def num_numbers(outputs: Sequence[RequestOutput]) -> int:
    """How many tokens and candidates outputs have, about: what it costs to write them down."""
    count = 0
    for output in outputs:
        scored = _width(output.prompt_logprobs) * len(output.prompt_token_ids)
        count += len(output.prompt_token_ids) + sum(scored + num_new(one) for one in output.outputs)
    return count


def num_new(piece: CompletionOutput) -> int:
    """The same of a completion alone, or of its next piece."""
    return len(piece.token_ids) * (1 + _width(piece.logprobs))


def _width(entries: Sequence[TokenLogprobs | None] | None) -> int:
    """Candidates of a position."""
    last = entries[-1] if entries else None
    return 0 if last is None else len(last)


class ChatLogprobsWriter:
    """Logprobs as chat completions have them."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Those of some tokens."""
        return {"content": [self._position(*pair) for pair in zip(token_ids, entries, strict=True)]}

    def _position(self, token_id: int, entry: TokenLogprobs) -> ChatLogprob:
        check_cancelled()
        top = [self._token(*item) for item in best(entry, self._num_top)] if self._num_top else []
        return {**self._token(token_id, entry[token_id]), "top_logprobs": top}

    def _token(self, token_id: int, one: Logprob) -> TokenLogprob:
        return {
            "token": spelled(token_id, one.decoded_token, as_ids=self._as_ids),
            "logprob": finite(one.logprob),
            "bytes": None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionLogprobsWriter:
    """Logprobs as completions have them; remembers where in the text the next token begins."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        context: Sequence[int],
        num_top: int,
        *,
        skip_special_tokens: bool,
        as_ids: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0
        self._decoder = (
            None
            if tokenizer is None
            else incremental_decoder(
                tokenizer, context, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=True
            )
        )

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Those of the next tokens; None stands for a token that nothing predicts."""
        result: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            check_cancelled()
            result["text_offset"].append(self._offset)
            result["tokens"].append(spelled(token_id, self._text_of(token_id), as_ids=self._as_ids))
            result["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            result["top_logprobs"].append(None if entry is None else self._top(token_id, entry))
            if self._decoder is not None:
                self._offset += len(self._decoder.decode((token_id,)))
        return result

    def _text_of(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """Best first, and the token itself; of two candidates with the same text the likelier one."""
        top: dict[str, float] = {}
        for candidate, one in [*best(entry, self._num_top), (token_id, entry[token_id])]:
            top.setdefault(spelled(candidate, one.decoded_token, as_ids=self._as_ids), finite(one.logprob))
        return top
