"""What changes logits before a token is chosen: one class for each kind of request parameter.

A processor is built for the rows of a batch and applied at every step, in the order of `processors_for`; it touches
only the rows that asked for it, in place. Knows nothing of temperature or truncation: `functional.sample` does that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.messages.request import EngineCoreRequest
from quire.ops import functional as F
from quire.sampling.row import SamplingRow


class Processor(Protocol):
    """Changes the logits of the rows that ask for it."""

    is_needed: bool
    """Whether any row asks for it."""

    def apply(self, logits: Tensor) -> None:
        """Change what the next token may be. Shapes: logits [R, V] float32. Mutates: logits."""


def processors_for(rows: Sequence[SamplingRow], vocab_size: int) -> tuple[Processor, ...]:
    """The processors these rows need, in the order they apply: the same as vLLM's."""
    processors: tuple[Processor, ...] = (
        AllowedTokens(rows),
        BadWords(rows, vocab_size),
        MinTokens(rows, vocab_size),
        LogitBias(rows),
        Penalties(rows),
    )
    return tuple(processor for processor in processors if processor.is_needed)


def parameters_in_effect(request: EngineCoreRequest) -> list[str]:
    """Names of the request's parameters that change logits, for error messages."""
    params = request.sampling_params
    in_effect = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words_token_ids),
        "min_tokens": params.min_tokens > 0,
        "logit_bias": bool(params.logit_bias),
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
    }
    return [name for name, is_set in in_effect.items() if is_set]


def _exclude(logits: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Make tokens impossible, given as (row, token id)."""
    if pairs:
        rows, token_ids = torch.tensor(pairs).unbind(1)
        logits[rows, token_ids] = -math.inf


class AllowedTokens:
    """allowed_token_ids: nothing else may be produced."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        self._allowed = [
            (index, torch.tensor(row.request.sampling_params.allowed_token_ids))
            for index, row in enumerate(rows)
            if row.request.sampling_params.allowed_token_ids is not None
        ]
        self.is_needed = bool(self._allowed)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        for index, token_ids in self._allowed:
            kept = logits[index, token_ids]
            logits[index] = -math.inf
            logits[index, token_ids] = kept


class BadWords:
    """bad_words: the last token of a word is impossible where the output ends with the word's other tokens.

    Like vLLM, words that begin in the prompt are not seen.
    """

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        self._single: list[tuple[int, int]] = []
        self._longer: list[tuple[int, SamplingRow, dict[int, list[list[int]]]]] = []
        for index, row in enumerate(rows):
            # A tokenizer may know more tokens than the model can produce.
            words = [list(word) for word in row.request.bad_words_token_ids if word[-1] < vocab_size]
            self._single += [(index, word[0]) for word in words if len(word) == 1]
            by_last_seen: dict[int, list[list[int]]] = {}
            for word in words:
                if len(word) > 1:
                    by_last_seen.setdefault(word[-2], []).append(word)
            if by_last_seen:
                self._longer.append((index, row, by_last_seen))
        self.is_needed = bool(self._single or self._longer)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        pairs = list(self._single)
        for index, row, by_last_seen in self._longer:
            for word in by_last_seen.get(row.token_ids[-1], ()):
                num_seen = len(word) - 1
                if num_seen <= row.num_output_tokens and row.token_ids[-num_seen:] == word[:-1]:
                    pairs.append((index, word[-1]))
        _exclude(logits, pairs)


class MinTokens:
    """min_tokens: end-of-sequence and stop tokens are impossible before, with and without ignore_eos."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        self._stops: list[tuple[SamplingRow, list[tuple[int, int]]]] = []
        for index, row in enumerate(rows):
            params = row.request.sampling_params
            stops = {*row.request.eos_token_ids, *(params.stop_token_ids or ())}
            # A tokenizer's end-of-sequence token may lie beyond what the model can produce.
            pairs = [(index, token_id) for token_id in sorted(stops) if token_id < vocab_size]
            if pairs and row.num_output_tokens < params.min_tokens:
                self._stops.append((row, pairs))
        self.is_needed = bool(self._stops)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        _exclude(
            logits,
            [
                pair
                for row, pairs in self._stops
                if row.num_output_tokens < row.request.sampling_params.min_tokens
                for pair in pairs
            ],
        )


class LogitBias:
    """logit_bias: added to the logits of some tokens."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        biases = [
            (index, token_id, bias)
            for index, row in enumerate(rows)
            for token_id, bias in (row.request.sampling_params.logit_bias or {}).items()
        ]
        self.is_needed = bool(biases)
        self._rows = torch.tensor([index for index, _, _ in biases], dtype=torch.int64)
        self._token_ids = torch.tensor([token_id for _, token_id, _ in biases], dtype=torch.int64)
        self._biases = torch.tensor([bias for _, _, bias in biases], dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        logits[self._rows, self._token_ids] += self._biases


class Penalties:
    """repetition_penalty (prompt and output), frequency_penalty and presence_penalty (output)."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        params = [row.request.sampling_params for row in rows]
        self._counted = [(index, row.occurrences) for index, row in enumerate(rows) if row.occurrences is not None]
        self.is_needed = bool(self._counted)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32)
        self._presence = torch.tensor([p.presence_penalty for p in params], dtype=torch.float32)
        self._frequency = torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        """See `Processor`."""
        sizes = [len(counts.token_ids) for _, counts in self._counted]
        F.apply_penalties(
            logits,
            torch.from_numpy(np.repeat([index for index, _ in self._counted], sizes)),
            torch.from_numpy(np.concatenate([counts.token_ids for _, counts in self._counted])),
            torch.from_numpy(np.concatenate([counts.in_prompt for _, counts in self._counted])),
            torch.from_numpy(np.concatenate([counts.output_counts for _, counts in self._counted])),
            self._repetition,
            self._presence,
            self._frequency,
        )
