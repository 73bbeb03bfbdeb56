"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from quire.errors import counted
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


TokenLogprobs = dict[int, Logprob]
"""The candidates of one position, by token id: the chosen token first, then the most likely ones in order."""


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
        for completion in self.outputs:
            ended = completion.finish_reason or "running"
            rows.append(
                (str(completion.index), completion.text, f"{counted(len(completion.token_ids), 'token')}, {ended}")
            )
        rows += [("warning", warning, "") for warning in self.warnings]
        return "<table>" + "".join(map(_html_row, rows)) + "</table>"

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


def _html_row(row: tuple[str, str, str]) -> str:
    name, text, note = map(escape, row)
    cell = f"<td style='text-align:left;white-space:pre-wrap'>{text}</td>"
    return f"<tr><th>{name}</th>{cell}<td><small>{note}</small></td></tr>"
