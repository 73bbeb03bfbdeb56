"""What changes logits before a token is chosen: one class for each kind of request parameter.

A processor is built for the rows of a batch and applied at every step, in the order of `processors_for`; it touches
only the rows that asked for it, in place. Knows nothing of temperature or truncation: `Ops.sample` does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.messages.request import EngineCoreRequest
from quire.ops.contracts.ops import Ops
from quire.sampling.row import SamplingRow


class Processor(Protocol):
    """Changes the logits of the rows that ask for it."""

    is_needed: bool
    """Whether any row asks for it."""

    def apply(self, logits: Tensor) -> None:
        """Change what the next token may be. Shapes: logits [R, V] float32. Mutates: logits."""


def processors_for(rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> tuple[Processor, ...]:
    """The processors these rows need, in the order they apply, which is vLLM's. Grammars come after them."""
    processors: tuple[Processor, ...] = (
        AllowedTokens(rows, vocab_size, ops),
        BadWords(rows, vocab_size, ops),
        MinTokens(rows, vocab_size, ops),
        LogitBias(rows, vocab_size, ops),
        Penalties(rows, ops),
    )
    return tuple(processor for processor in processors if processor.is_needed)


def parameters_in_effect(request: EngineCoreRequest) -> list[str]:
    """Names of the request's parameters that change logits, for error messages."""
    params = request.sampling_params
    in_effect = {
        "allowed_token_ids": request.allowed_tokens is not None,
        "bad_words": bool(request.bad_words_token_ids),
        "min_tokens": params.min_tokens > 0,
        "logit_bias": bool(params.logit_bias),
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "structured_outputs": request.grammar is not None and bool(request.grammar.text),
        "thinking_token_budget": _has_budget(request),
    }
    return [name for name, is_set in in_effect.items() if is_set]


def _has_budget(request: EngineCoreRequest) -> bool:
    gate = None if request.grammar is None else request.grammar.gate
    return gate is not None and gate.thinking is not None and gate.thinking.budget is not None


class _Places:
    """(row, token id) pairs of several rows, as one index into logits."""

    def __init__(self, entries: Iterable[tuple[int, NDArray[np.int64]]], vocab_size: int, ops: Ops) -> None:
        # A tokenizer may know more tokens than the model can produce.
        pairs = [(index, token_ids[token_ids < vocab_size]) for index, token_ids in entries]
        rows, sizes = [index for index, _ in pairs], [len(token_ids) for _, token_ids in pairs]
        self.rows = ops.on_device(torch.from_numpy(np.repeat(np.array(rows, np.int64), sizes)))
        joined = np.concatenate([token_ids for _, token_ids in pairs] or [NO_IDS])
        self.token_ids = ops.on_device(torch.from_numpy(joined))

    def __len__(self) -> int:
        return len(self.rows)

    def exclude(self, logits: Tensor) -> None:
        """Make these tokens impossible. Mutates: logits."""
        if len(self):
            logits[self.rows, self.token_ids] = -math.inf


NO_IDS = np.empty(0, np.int64)


class AllowedTokens:
    """allowed_token_ids: nothing else may be produced."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        self._excluded: list[tuple[int, int, Tensor]] = []
        """Rows [begin, end) that follow each other and share a request, and what they may not produce."""
        begin = 0
        for _, branches in groupby(rows, key=lambda row: id(row.controls)):
            first, *others = branches
            end = begin + 1 + len(others)
            if first.controls.has_allowed:
                self._excluded.append((begin, end, ops.on_device(first.controls.excluded(vocab_size))))
            begin = end
        self.is_needed = bool(self._excluded)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        for begin, end, excluded in self._excluded:
            logits[begin:end].masked_fill_(excluded, -math.inf)


class BadWords:
    """bad_words: the last token of a word is impossible where the output ends with the word's other tokens.

    Like vLLM, words that begin in the prompt are not seen.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        self._ops, self._vocab_size = ops, vocab_size
        self._single = _Places(((index, row.controls.banned) for index, row in enumerate(rows)), vocab_size, ops)
        self._longer = [(index, row) for index, row in enumerate(rows) if row.controls.phrases is not None]
        self.is_needed = bool(self._longer) or len(self._single) > 0

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        self._single.exclude(logits)
        begun = [
            (index, np.fromiter(row.controls.bans_after(row.bad_word_state), np.int64))
            for index, row in self._longer
            if row.bad_word_state
        ]
        if begun:
            _Places(begun, self._vocab_size, self._ops).exclude(logits)


class MinTokens:
    """min_tokens: end-of-sequence and stop tokens are impossible before, with and without ignore_eos."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        self._ops, self._vocab_size = ops, vocab_size
        self._waiting = [(index, row) for index, row in enumerate(rows) if len(row.controls.stops) and _waits(row)]
        self._places = self._of_waiting()
        self.is_needed = len(self._places) > 0

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        waiting = [(index, row) for index, row in self._waiting if _waits(row)]
        if len(waiting) < len(self._waiting):
            self._waiting = waiting
            self._places = self._of_waiting()
        self._places.exclude(logits)

    def _of_waiting(self) -> _Places:
        return _Places(((index, row.controls.stops) for index, row in self._waiting), self._vocab_size, self._ops)


def _waits(row: SamplingRow) -> bool:
    return row.num_output_tokens < row.request.sampling_params.min_tokens


class LogitBias:
    """logit_bias: added to the logits of some tokens."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        biased = [(index, row.controls) for index, row in enumerate(rows) if len(row.controls.biased)]
        self._places = _Places(((index, controls.biased) for index, controls in biased), vocab_size, ops)
        kept = [controls.biases[controls.biased < vocab_size] for _, controls in biased]
        self._biases = ops.on_device(torch.from_numpy(np.concatenate(kept)) if kept else torch.empty(0))
        self.is_needed = len(self._places) > 0

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        logits[self._places.rows, self._places.token_ids] += self._biases


class Penalties:
    """repetition_penalty (prompt and output), frequency_penalty and presence_penalty (output)."""

    def __init__(self, rows: Sequence[SamplingRow], ops: Ops) -> None:
        self._ops = ops
        params = [row.request.sampling_params for row in rows]
        self._counted = [(index, row.occurrences) for index, row in enumerate(rows) if row.occurrences is not None]
        self.is_needed = bool(self._counted)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32, device=ops.device)
        self._presence = torch.tensor([p.presence_penalty for p in params], dtype=torch.float32, device=ops.device)
        self._frequency = torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32, device=ops.device)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        sizes, put = [len(counts.token_ids) for _, counts in self._counted], self._ops.on_device
        self._ops.apply_penalties(
            logits,
            put(torch.from_numpy(np.repeat([index for index, _ in self._counted], sizes))),
            put(torch.from_numpy(np.concatenate([counts.token_ids for _, counts in self._counted]))),
            put(torch.from_numpy(np.concatenate([counts.in_prompt for _, counts in self._counted]))),
            put(torch.from_numpy(np.concatenate([counts.output_counts for _, counts in self._counted]))),
            self._repetition,
            self._presence,
            self._frequency,
        )
