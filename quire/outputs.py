"""What a user gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from quire.errors import counted
from quire.messages.output import Failure, PositionLogprobs
from quire.messages.stats import RequestEffort, RequestStats

MAX_SHOWN = 80
"""Characters of a text that a `repr` shows."""


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    """Natural logarithm of its probability, from the raw logits."""
    rank: int | None = None
    """1 is the most likely token."""
    decoded_token: str | None = None


class TokenLogprobs(Mapping[int, Logprob]):
    """The candidates of one position, by token id: the chosen token first, then the most likely ones in order.

    `Logprob` objects are made when they are first read: a request may ask for millions, and making them takes far
    longer than everything else about an output.
    """

    __slots__ = ("_by_id", "_entry", "_text_of")

    def __init__(self, entry: PositionLogprobs, text_of: Callable[[int], str | None]) -> None:
        """`text_of` gives a token's text; it is called from whichever thread reads."""
        self._entry = entry
        self._text_of = text_of
        self._by_id: dict[int, Logprob] | None = None

    @property
    def chosen(self) -> float:
        """The logprob of the token that stands at the position."""
        return self._entry.logprobs[0]

    def __getitem__(self, token_id: int) -> Logprob:
        return self._candidates()[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._candidates())

    def __len__(self) -> int:
        return len(self._candidates())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._candidates() == dict(other)

    def __repr__(self) -> str:
        return repr(self._candidates())

    def _candidates(self) -> dict[int, Logprob]:
        if self._by_id is None:
            self._by_id = self._made()
        return self._by_id

    def _made(self) -> dict[int, Logprob]:
        entry = self._entry
        chosen = entry.token_ids[0]
        made = {chosen: Logprob(entry.logprobs[0], entry.rank, self._text_of(chosen))}
        rank = 0
        for token_id, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True):
            rank += 1
            if rank == entry.rank:
                rank += 1  # the chosen token stands there
            made[token_id] = Logprob(logprob, rank, self._text_of(token_id))
        return made


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end of sequence and for other reasons."""

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_shortened(self.text)!r}, "
            f"{counted(len(self.token_ids), 'token')}, finish_reason={self.finish_reason!r})"
        )

    def _repr_html_(self) -> str:
        """Its text as a table, for notebooks."""
        return _html_table([self._row()])

    def _row(self) -> tuple[str, str, str]:
        ended = self.finish_reason or "running"
        return str(self.index), self.text, f"{counted(len(self.token_ids), 'token')}, {ended}"


@dataclass(slots=True, repr=False)
class RequestOutput:
    """The state of one request: its prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token; the first is None, since nothing predicts it. Of deltas only the first has them."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    seed: int | None = None
    """The seed in force: the one given, or the one drawn."""
    metrics: RequestStats | None = None
    """When what happened to it; with the last output."""
    effort: RequestEffort | None = None
    """What its prompt took, and why it waited; with the last output."""
    warnings: list[str] = field(default_factory=list)
    """What was adjusted or left out, in words."""
    failure: Failure | None = None
    """Of completions with the finish reason error: what happened, and whether the request itself is the cause."""

    def __repr__(self) -> str:
        prompt = None if self.prompt is None else _shortened(self.prompt)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt!r}, "
            f"{counted(len(self.prompt_token_ids), 'prompt token')}, outputs={self.outputs!r}, "
            f"finished={self.finished})"
        )

    def _repr_html_(self) -> str:
        """Prompt and completions as a table, for notebooks."""
        prompt = f"{len(self.prompt_token_ids)} token ids" if self.prompt is None else self.prompt
        rows = [("prompt", prompt, counted(len(self.prompt_token_ids), "token"))]
        rows += [completion._row() for completion in self.outputs]
        rows += [("warning", warning, "") for warning in self.warnings]
        return _html_table(rows)

    def merged(self, later: RequestOutput) -> RequestOutput:
        """Two deltas as one: texts, tokens and logprobs of each completion joined, everything else from the later.

        Mutates: later, which is returned.
        """
        earlier = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            before = earlier.get(completion.index)
            if before is not None:
                completion.text = before.text + completion.text
                completion.token_ids = before.token_ids + completion.token_ids
                if completion.logprobs is not None and before.logprobs is not None:
                    completion.logprobs = before.logprobs + completion.logprobs
            earlier[completion.index] = completion
        if later.prompt_logprobs is None:
            later.prompt_logprobs = self.prompt_logprobs
        later.outputs = [earlier[index] for index in sorted(earlier)]
        return later


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _html_table(rows: Sequence[tuple[str, str, str]]) -> str:
    return "<table>" + "".join(map(_html_row, rows)) + "</table>"


def _html_row(row: tuple[str, str, str]) -> str:
    name, text, note = map(escape, row)
    cell = f"<td style='text-align:left;white-space:pre-wrap'>{text}</td>"
    return f"<tr><th>{name}</th>{cell}<td><small>{note}</small></td></tr>"
