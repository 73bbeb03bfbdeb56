"""`ModelRunner`: one step on one device: update rows, build arrays, forward, sample; nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.messages.output import PositionLogprobs
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.models.interfaces import Model
from quire.sampling.batch import SamplingBatch
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import Sampler
from quire.utils.math import cdiv
from quire.worker.cache_engine import CacheEngine
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder, StepInputs

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions scored at a time: their float32 logits over a vocabulary of 150k are 38 MB."""


class ModelRunner:
    """Runs a model over a cache, remembering the sequences between steps."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        *,
        vocab_size: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        max_num_blocks = cdiv(max_model_len, block_size)
        self.batch = InputBatch(max_num_seqs, max_num_blocks)
        self.inputs = InputBuilder(
            cache.caches,
            block_size=block_size,
            max_num_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_num_blocks=max_num_blocks,
        )
        self.graphs = GraphRunner(model, self.inputs)
        self.sampler = Sampler(vocab_size)
        self._sampled: tuple[list[int], SamplingBatch] | None = None

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Apply the instruction and run the model. On an exception nothing was drawn: the step can be run again."""
        self.batch.apply(plan)  # 1. rows
        if plan.removed_seq_ids or plan.new_sequences:
            self._sampled = None
        self.cache.copy(plan.blocks_to_copy)  # 2. blocks
        if not plan.seq_ids:
            return ModelRunnerOutput()
        inputs = self.inputs.build(plan, self.batch)
        hidden, logits = self.graphs.run(inputs)  # 3. model
        result = ModelRunnerOutput(token_ids=[[] for _ in plan.seq_ids])
        self._score_prompts(plan, inputs, hidden, result)
        if logits is not None:
            self._sample(plan, logits, result)  # 4. tokens
        return result

    def _sample(self, plan: SchedulerOutputs, logits: Tensor, result: ModelRunnerOutput) -> None:
        chosen = [i for i, samples in enumerate(plan.samples) if samples]
        seq_ids = [plan.seq_ids[i] for i in chosen]
        batch = self._batch_of(seq_ids)
        drawn = self.sampler.sample(logits, batch, [self.batch.to_fork.get(seq_id, 1) for seq_id in seq_ids])
        for k, (i, seq_id) in enumerate(zip(chosen, seq_ids, strict=True)):
            if k in drawn.errors:
                result.errors[seq_id] = drawn.errors[k]
                continue
            result.token_ids[i] = drawn.token_ids[k]
            self.batch.to_fork.pop(seq_id, None)
            self.batch.rows[seq_id].append(drawn.token_ids[k][0])
            logprobs = drawn.logprobs[k]
            if logprobs is not None:
                result.logprobs[seq_id] = logprobs

    def _score_prompts(
        self, plan: SchedulerOutputs, inputs: StepInputs, hidden: Tensor, result: ModelRunnerOutput
    ) -> None:
        """Prompt logprobs of the sequences that asked: position p scores the prompt's token p + 1."""
        for i, seq_id in enumerate(plan.seq_ids):
            row = self.batch.rows[seq_id]
            k = row.request.sampling_params.prompt_logprobs
            first = plan.num_computed_tokens[i]
            count = min(plan.num_scheduled_tokens[i], row.num_prompt_tokens - 1 - first)
            if k is None or count <= 0:
                continue
            start = inputs.last_rows[i] + 1 - plan.num_scheduled_tokens[i]
            scored: list[PositionLogprobs] = []
            for low in range(0, count, PROMPT_LOGPROB_ROWS):
                high = min(count, low + PROMPT_LOGPROB_ROWS)
                logits = self.model.compute_logits(hidden[start + low : start + high])
                scored += prompt_logprobs(logits, row.token_ids[first + low + 1 : first + high + 1], k)
            result.prompt_logprobs[seq_id] = scored

    def _batch_of(self, seq_ids: list[int]) -> SamplingBatch:
        """The sampling parameters of these rows, built again only when the rows change."""
        if self._sampled is None or self._sampled[0] != seq_ids:
            self._sampled = seq_ids, SamplingBatch([self.batch.rows[i] for i in seq_ids], self.vocab_size)
        return self._sampled[1]
