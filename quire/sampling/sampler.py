"""`Sampler`: from the logits of a step to its tokens.

The order of things is vLLM's: log-probabilities come from the model's own logits; then allowed_token_ids, bad_words,
min_tokens, logit_bias, the penalties (repetition, frequency, presence), the grammar of structured_outputs, temperature,
min_p, top_k, top_p, and the draw.
A greedy row takes the most likely token after the penalties. No row's result depends on another row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch import Tensor

from quire.messages.output import Failure, PositionLogprobs
from quire.ops.contracts.operands import Largest
from quire.ops.contracts.ops import Ops
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.drawn import Candidates, DrawnTokens, SampledTokens, not_finite
from quire.sampling.logprobs import position_logprobs
from quire.sampling.processors import parameters_in_effect
from quire.sampling.torch_mode import torch_mode


class Sampler:
    """Chooses tokens for the rows of a batch."""

    def __init__(self, ops: Ops, vocab_size: int, max_num_rows: int) -> None:
        self._ops = ops
        self.vocab_size = vocab_size
        self._reported, self._drawn = (LogitsRoom(ops, vocab_size, max_num_rows) for _ in range(2))

    def sample(self, logits: Tensor, batch: SamplingBatch, num_draws: Sequence[int]) -> SampledTokens:
        """Draw `num_draws[i]` tokens for row i: 1, or n where a request forks into n branches.

        Draw j of a row belongs to branch `row.branch + j` and position `len(row.token_ids)`; its random number depends
        on nothing but these and the seed. A row without a usable distribution fails alone.
        Shapes: logits [R, V] float32; columns beyond the vocabulary, which pad the head, are not looked at.
        Mutates: logits.
        """
        with nullcontext() if batch.only_ops else torch_mode():
            logits = self._without_padding(logits)
            largest, greedy = self._ops.row_max(logits)
            errors = _fail(logits, largest, batch.rows, _not_finite)  # 1. what the model itself got wrong
            for index in errors:
                largest[index], greedy[index] = 0.0, 0
            reported = self._logits_to_report(logits, batch)  # 2. the logits to report, before they change
            for processor in batch.processors:  # 3. what the requests change
                processor.apply(logits)
            if batch.processors:
                largest, greedy = self._ops.row_max(logits)
            if batch.grammar_masks is not None:
                batch.grammar_masks.restrict(logits, largest, greedy)
            if batch.processors or batch.grammar_masks is not None:
                errors |= _fail(logits, largest, batch.rows, _nothing_left)
            token_ids = self._choose(logits, greedy, batch, num_draws)  # 4. choose
            for index in errors:
                token_ids[index] = []
            return SampledTokens(token_ids, self._logprobs(reported, token_ids, batch), errors)  # 5. report

    def take_largest(self, found: Largest, batch: SamplingBatch, num_draws: Sequence[int]) -> SampledTokens:
        """`sample` of a batch that needs nothing else of its logits (`batch.only_largest`)."""
        values, token_ids = found.values.tolist(), found.token_ids.tolist()
        errors = _errors(values, batch.rows, _not_finite)
        chosen = [[token] * count for token, count in zip(token_ids, num_draws, strict=True)]
        for index in errors:
            chosen[index] = []
        return SampledTokens(chosen, [None] * len(chosen), errors)

    @torch_mode()
    def leave_largest(self, found: Largest, batch: SamplingBatch) -> DrawnTokens:
        """`draw` of such a batch. The next step may write over what was found."""
        token_ids = found.token_ids.masked_fill(~found.values.isfinite(), 0)
        return DrawnTokens(token_ids, found.values.clone(), _positions(batch))

    @torch_mode()
    def draw(self, logits: Tensor, batch: SamplingBatch) -> DrawnTokens:
        """Draw a token for each row and leave it on the device: the tokens of `sample`, for a batch that allows it
        (`batch.leaves_tokens`). A row without a finite logit has token 0 until its failure is read.

        Shapes: logits [R, V] float32. Mutates: logits.
        """
        logits = self._without_padding(logits)
        largest, token_ids = self._ops.row_max_tensors(logits)
        is_finite = largest.isfinite()
        if batch.random_rows or batch.logprobs_rows:
            logits.masked_fill_(~is_finite[:, None], 0.0)
        if batch.random_rows:
            rows = logits if batch.all_random else self._drawn.copy(logits, batch.random_rows)
            drawn = _draw(self._ops, rows, batch, [1] * len(batch.random_rows))
            token_ids = token_ids.index_copy(0, self._ops.on_device(batch.random_indices), drawn[:, 0])
        token_ids = token_ids.masked_fill(~is_finite, 0)
        return DrawnTokens(token_ids, largest, _positions(batch), self._candidates(logits, token_ids, batch))

    def _candidates(self, logits: Tensor, token_ids: Tensor, batch: SamplingBatch) -> Candidates | None:
        """What is reported beside the tokens that stay on the device. Shapes: [R, V], [R] int64."""
        if not batch.logprobs_rows:
            return None
        chosen = token_ids.index_select(0, self._ops.on_device(torch.tensor(batch.logprobs_rows)))
        columns = self._ops.top_logprobs(self._logits_to_report(logits, batch), chosen, max(batch.logprobs_counts))
        return Candidates(columns=columns, rows=batch.logprobs_rows, widths=batch.logprobs_counts)

    def _without_padding(self, logits: Tensor) -> Tensor:
        return logits[:, : self.vocab_size].contiguous() if logits.shape[1] > self.vocab_size else logits

    def _logits_to_report(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The logits of the rows that report log-probabilities, safe from later changes."""
        if batch.logprobs_rows and (batch.processors or len(batch.logprobs_rows) < len(batch.rows)):
            return self._reported.copy(logits, batch.logprobs_rows)
        return logits

    def _choose(
        self, logits: Tensor, greedy: list[int], batch: SamplingBatch, num_draws: Sequence[int]
    ) -> list[list[int]]:
        """`greedy`: the most likely token of each row."""
        chosen = [[token] * count for token, count in zip(greedy, num_draws, strict=True)]
        random = batch.random_rows
        if random:
            rows = logits if batch.all_random else self._drawn.copy(logits, random)
            counts = [num_draws[index] for index in random]
            for index, tokens in zip(random, _draw(self._ops, rows, batch, counts).tolist(), strict=True):
                chosen[index] = tokens[: num_draws[index]]
        return chosen

    def _logprobs(
        self, reported: Tensor, token_ids: Sequence[Sequence[int]], batch: SamplingBatch
    ) -> list[list[PositionLogprobs] | None]:
        found: list[list[PositionLogprobs] | None] = [None] * len(batch.rows)
        counts = [len(token_ids[index]) for index in batch.logprobs_rows]
        if not any(counts):
            return found
        chosen = [token for index in batch.logprobs_rows for token in token_ids[index]]
        ks = [k for k, count in zip(batch.logprobs_counts, counts, strict=True) for _ in range(count)]
        if any(count != 1 for count in counts):
            rows = [row for row, count in enumerate(counts) for _ in range(count)]
            reported = self._drawn.copy(reported, rows)
        positions = iter(position_logprobs(self._ops, reported, chosen, ks))
        for index, count in zip(batch.logprobs_rows, counts, strict=True):
            found[index] = list(islice(positions, count))
        return found


class LogitsRoom:
    """Memory for copies of a step's logits, the same from step to step.

    In the heap, copies of 20 MB whose sizes differ are often not found again for the next one, and the process grows.
    """

    def __init__(self, ops: Ops, vocab_size: int, max_num_rows: int) -> None:
        self._ops = ops
        # A host's memory is given by the system where it is first written.
        self._memory = torch.empty((max_num_rows, vocab_size), device=ops.device)

    def copy(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """These rows, in this order; valid until the next copy. Shapes: logits [R, V], rows [N] -> [N, V] float32."""
        return torch.index_select(logits, 0, self._ops.on_device(torch.tensor(rows)), out=self._memory[: len(rows)])


def _fail(
    logits: Tensor,
    largest: Sequence[float],
    rows: Sequence[SamplingRow],
    explain: Callable[[SamplingRow, float], Failure],
) -> dict[int, Failure]:
    """Errors of rows whose largest logit is NaN or infinite; their logits are set to 0 so that others can go on."""
    errors = _errors(largest, rows, explain)
    if errors:
        with torch_mode():
            logits[list(errors)] = 0.0
    return errors


def _errors(
    largest: Sequence[float], rows: Sequence[SamplingRow], explain: Callable[[SamplingRow, float], Failure]
) -> dict[int, Failure]:
    """Of rows whose largest logit is NaN or infinite."""
    return {index: explain(rows[index], value) for index, value in enumerate(largest) if not math.isfinite(value)}


def _positions(batch: SamplingBatch) -> list[int]:
    """Where the token that is drawn for each row stands in its sequence."""
    return [len(row.token_ids) for row in batch.rows]


def _not_finite(row: SamplingRow, largest: float) -> Failure:
    return not_finite(len(row.token_ids), largest)


def _nothing_left(row: SamplingRow, largest: float) -> Failure:
    if row.matcher is not None and row.matcher.error:
        return Failure(
            f"structured_outputs cannot be followed beyond output token {row.num_output_tokens}: "
            f"{row.matcher.error.splitlines()[0][:200]}; make it simpler",
            is_request_fault=True,
        )
    names = ", ".join(parameters_in_effect(row.request))
    if largest == -math.inf:
        return Failure(
            f"no token can be chosen as output token {row.num_output_tokens}: {names} together exclude every token "
            "of the vocabulary; loosen one of them",
            is_request_fault=True,
        )
    return Failure(
        f"the logits for output token {row.num_output_tokens} overflow (the largest is {largest}) under {names}; "
        "use values closer to their defaults",
        is_request_fault=True,
    )


def _draw(ops: Ops, logits: Tensor, batch: SamplingBatch, num_draws: Sequence[int]) -> Tensor:
    """As many draws for every random row as any of them needs. Shapes: -> [D, n] int64."""
    positions = [len(batch.rows[index].token_ids) for index in batch.random_rows]
    numbers = batch.uniforms.draw(positions, max(num_draws))
    masks = (None, None) if batch.grammar_masks is None else batch.grammar_masks.of(batch.random_indices)
    return ops.sample(
        logits,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        ops.on_device(torch.from_numpy(numbers)),
        *masks,
    )
