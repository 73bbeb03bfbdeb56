"""`Worker`: one device, its model and its cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.config.engine import QuireConfig
from quire.loader.load import load_model
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.ledger import Ledger
from quire.ops import table
from quire.ops.cpu import set_num_threads
from quire.utils.math import cdiv
from quire.worker.cache_engine import CacheEngine
from quire.worker.model_runner import ModelRunner


class Worker:
    """Loads the model, allocates the cache, runs steps."""

    def __init__(self, config: QuireConfig, ledger: Ledger, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress` hears (bytes read, bytes in all) while the weights load.

        Raises: CheckpointError and other ConfigErrors.
        """
        model_config, cache_config = config.model_config, config.cache_config
        self.ops = config.device_config.ops
        with ledger.stage("ops"):
            self._num_threads = config.device_config.num_threads
            self._use_ops()
        with ledger.stage("weights"):
            self.model = load_model(
                model_config.path,
                model_config.arch,
                dtype=getattr(torch, model_config.dtype),
                max_model_len=model_config.max_model_len,
                load_format=config.load_config.load_format,
                seed=model_config.seed,
                quantization=config.quant_config.method,
                progress=progress,
            )
        with ledger.stage("kv cache"):
            steps_ahead = 2
            blocks_of_step = cdiv(config.scheduler_config.max_num_batched_tokens, cache_config.block_size)
            self.cache = CacheEngine(config.kv_layout, cache_config.num_blocks, num_ahead=steps_ahead * blocks_of_step)
        with ledger.stage("trial step"):
            self.runner = ModelRunner(
                self.model,
                self.cache,
                vocab_size=model_config.arch.vocab_size,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
                max_model_len=model_config.max_model_len,
            )

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step."""
        self._use_ops()
        return self.runner.execute(plan)

    def _use_ops(self) -> None:
        """Have this thread compute as configured, whichever engine of this process computed on it before.

        (Two that step at the same time, in threads, must have the same ops; their numbers of threads may differ.)
        """
        if table.in_use() != self.ops:
            table.use(self.ops)
        if self.ops == "cpu":
            set_num_threads(self._num_threads)
