"""`ModelRunner`: one step on one device: update rows, build arrays, forward, sample; nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from quire.messages.output import PositionLogprobs
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.models.interfaces import Model
from quire.ops.contracts.operands import Largest
from quire.ops.contracts.ops import Ops
from quire.platforms.cores import allowed_cpus
from quire.sampling.batch import SamplingBatch
from quire.sampling.drawn import DrawnTokens
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.row import ON_DEVICE
from quire.sampling.sampler import Sampler
from quire.sampling.torch_mode import torch_mode
from quire.worker.cache_engine import CacheEngine
from quire.worker.device_link import Link, link_to
from quire.worker.grammars import Grammars
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions scored at a time: their float32 logits over a vocabulary of 150k are 38 MB."""


class ModelRunner:
    """Runs a model over a cache, remembering the sequences between steps."""

    def __init__(
        self,
        ops: Ops,
        model: Model,
        cache: CacheEngine,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_threads: int = 1,
        leaves_tokens: bool = False,
        link: Link | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """`num_threads` compute a step. `leaves_tokens`: tokens stay on the device until they are read, where nothing
        but the next step needs them. `link`: to the device; None for the one that its kind has.
        `graph_sizes`: see `GraphRunner`."""
        self.ops = ops
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.leaves_tokens = leaves_tokens
        layout = cache.layout
        has_free_core = num_threads < len(allowed_cpus())
        self.grammars = Grammars(1 if has_free_core else num_threads, ops.give_way)
        self._masking = ThreadPoolExecutor(1, "quire-masks") if has_free_core else None
        """Computes masks beside the model. Where it would take a core from the model, which waits for the slowest of
        its threads, masks come after it."""
        self.batch = InputBatch(
            max_num_seqs, layout.num_entries(max_model_len), len(layout.groups), self.grammars.matcher
        )
        self.inputs = InputBuilder(
            ops,
            cache.caches,
            self.batch,
            layout=layout,
            max_num_tokens=max_num_batched_tokens,
            link=link_to(ops.device) if link is None else link,
            graph_sizes=graph_sizes,
        )
        self.graphs = GraphRunner(ops, model, self.inputs)
        self.sampler = Sampler(ops, vocab_size, max_num_seqs)
        self._sampled: tuple[list[int], SamplingBatch] | None = None

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Apply the instruction and run the model. On an exception nothing was drawn: the step can be run again."""
        self._apply(plan)
        return self._run(plan)

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """Begin a step; what this gives waits for its result. The next step may begin before.

        Whatever `execute` raises is raised here. Reading the result raises only where the device is lost.
        """
        self._apply(plan)
        if self.leaves_tokens and not self._is_awaited(plan):
            return self._begin(plan)
        result = self._run(plan)
        return lambda: result

    def _apply(self, plan: SchedulerOutputs) -> None:
        self.batch.apply(plan)  # 1. rows
        if plan.removed_seq_ids or plan.new_sequences:
            self._sampled = None
        self.cache.apply(plan)  # 2. blocks

    def _run(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        try:
            result = self._compute(plan) if plan.seq_ids else ModelRunnerOutput()
        finally:
            failed_loads = self.cache.end_loads()
        result.failed_loads = failed_loads
        return result

    def _compute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self._begin_masks(plan)
        hidden, logits = self._forward(plan)  # 3. model
        prompt_logprobs = self._score_prompts(plan, hidden) if self.batch.to_score else {}
        if logits is None:
            return ModelRunnerOutput(token_ids=[[] for _ in plan.seq_ids], prompt_logprobs=prompt_logprobs)
        result = self._sample(plan, logits)  # 4. tokens
        result.prompt_logprobs = prompt_logprobs
        return result

    def _forward(self, plan: SchedulerOutputs, *, keeps_tokens: bool = False) -> tuple[Tensor, Tensor | Largest | None]:
        """Hidden states, and of the logits of the rows that draw what these need. See `GraphRunner.run`."""
        shape, seq_ids = self.inputs.build(plan, keeps_tokens=keeps_tokens), _drawing(plan)
        only_largest = bool(seq_ids) and self._batch_of(seq_ids).only_largest
        only_sampled = 0 < shape.num_sampled < shape.num_tokens and not self.batch.to_score
        return self.graphs.run(shape._replace(only_largest=only_largest, only_sampled=only_sampled))

    def _is_awaited(self, plan: SchedulerOutputs) -> bool:
        """Whether the host needs the result before the next step: for pages, scores, forks, or what tokens change."""
        if not plan.seq_ids or plan.blocks_to_swap_in or self.batch.to_score or max(plan.num_draws) > 1:
            return True
        seq_ids = _drawing(plan)
        return not seq_ids or not self._batch_of(seq_ids).leaves_tokens

    def _begin(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        _, logits = self._forward(plan, keeps_tokens=True)
        assert logits is not None
        batch = self._batch_of(_drawing(plan))
        if isinstance(logits, Largest):
            drawn = self.sampler.leave_largest(logits, batch)
        else:
            drawn = self.sampler.draw(logits, batch)
        self.inputs.keep(drawn.token_ids)
        for row in batch.rows:
            row.drawn = ON_DEVICE
        return partial(_read, plan, drawn)

    def _begin_masks(self, plan: SchedulerOutputs) -> None:
        """Compute what grammars allow, beside the model if there is a core for it."""
        if self.batch.num_matchers and (seq_ids := _drawing(plan)):
            masks = self._batch_of(seq_ids).grammar_masks
            if masks is not None:
                assert self.grammars.backend is not None
                masks.begin(self.grammars.backend, self._masking)

    def _sample(self, plan: SchedulerOutputs, logits: Tensor | Largest) -> ModelRunnerOutput:
        counts = [count for count in plan.num_draws if count]
        seq_ids = _drawing(plan)
        batch = self._batch_of(seq_ids)
        if isinstance(logits, Largest):
            drawn = self.sampler.take_largest(logits, batch, counts)
        else:
            drawn = self.sampler.sample(logits, batch, counts)
        for row, token_ids in zip(batch.rows, drawn.token_ids, strict=True):
            row.drawn = token_ids[0] if token_ids else 0  # of a row that has failed nobody will see more
        tokens = iter(drawn.token_ids)
        by_seq = [next(tokens) if count else [] for count in plan.num_draws]
        forks = {}
        if len(counts) < sum(counts):  # hardly ever
            forks = {seq_id: found for seq_id, found in zip(plan.seq_ids, by_seq, strict=True) if len(found) > 1}
            by_seq = [[] if len(found) > 1 else found for found in by_seq]
        return ModelRunnerOutput(
            token_ids=by_seq,
            forks=forks,
            logprobs={seq_ids[k]: found for k in batch.logprobs_rows if (found := drawn.logprobs[k])},
            errors={seq_ids[k]: error for k, error in drawn.errors.items()},
        )

    @torch_mode()
    def _score_prompts(self, plan: SchedulerOutputs, hidden: Tensor) -> dict[int, list[PositionLogprobs]]:
        """Prompt logprobs of the sequences that asked: position p scores the prompt's token p + 1."""
        found: dict[int, list[PositionLogprobs]] = {}
        start = 0
        for seq_id, first, num_tokens in zip(
            plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            row, (first_scored, k) = self.batch.rows[seq_id], self.batch.to_score.get(seq_id, (0, None))
            begin, end = max(first, first_scored), min(first + num_tokens, row.num_prompt_tokens - 1)
            if k is not None and begin < end:
                found[seq_id] = []
                for low in range(begin, end, PROMPT_LOGPROB_ROWS):
                    high = min(end, low + PROMPT_LOGPROB_ROWS)
                    rows = hidden[start + low - first : start + high - first]
                    found[seq_id] += self._score(rows, row.token_ids[low + 1 : high + 1], k)
            start += num_tokens
        return found

    def _score(self, hidden: Tensor, token_ids: list[int], k: int) -> list[PositionLogprobs]:
        """By itself, so that these logits are gone before the next rows have theirs."""
        return prompt_logprobs(self.ops, self.model.compute_logits(hidden), token_ids, k)

    def _batch_of(self, seq_ids: list[int]) -> SamplingBatch:
        """The sampling parameters of these rows, built again only when the rows change."""
        if self._sampled is None or self._sampled[0] != seq_ids:
            self._sampled = seq_ids, SamplingBatch([self.batch.rows[i] for i in seq_ids], self.vocab_size, self.ops)
        return self._sampled[1]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._masking is not None:
            self._masking.shutdown()
        self.grammars.close()


def _read(plan: SchedulerOutputs, drawn: DrawnTokens) -> ModelRunnerOutput:
    """The result of a step whose tokens were left on the device."""
    found, seq_ids = drawn.read(), _drawing(plan)
    tokens = iter(found.token_ids)
    return ModelRunnerOutput(
        token_ids=[next(tokens) if count else [] for count in plan.num_draws],
        logprobs={seq_ids[row]: positions for row, positions in enumerate(found.logprobs) if positions},
        errors={seq_ids[row]: error for row, error in found.errors.items()},
    )


def _drawing(plan: SchedulerOutputs) -> list[int]:
    """The sequences of a step that tokens are drawn for."""
    return [seq_id for seq_id, count in zip(plan.seq_ids, plan.num_draws, strict=True) if count]
