"""`Worker`: one device, its model and its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quire.config.engine import QuireConfig
from quire.loader.load import load_model
from quire.messages.kv_tiers import TierReport
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.ledger import Ledger
from quire.ops.backends import ON_CPU, ops_of
from quire.utils.math import cdiv
from quire.worker.break_even import load_seconds, step_seconds
from quire.worker.cache_engine import CacheEngine
from quire.worker.kv_file import FilePages
from quire.worker.kv_store import MemoryPages, Pages, PageStore
from quire.worker.model_runner import ModelRunner


class Worker:
    """Loads the model, allocates the cache, runs steps."""

    @torch.inference_mode(False)  # a caller's would make memory of it that nobody can write outside
    def __init__(self, config: QuireConfig, ledger: Ledger, progress: Callable[[int, int], None] | None = None) -> None:
        """`progress` hears (bytes read, bytes in all) while the weights load.

        Raises: CheckpointError and other ConfigErrors.
        """
        model_config, cache_config = config.model_config, config.cache_config
        self._config = config
        with ledger.stage("ops"):
            num_threads = config.device_config.num_threads
            device = config.device_config
            self.ops = ops_of(
                device.ops,
                num_threads=num_threads,
                device=device.torch_device,
                batch_invariant=device.batch_invariant,
            )
            self.ops.use_this_thread()
        with ledger.stage("weights"):
            self.model = load_model(
                model_config.path,
                model_config.arch,
                ops=self.ops,
                dtype=getattr(torch, model_config.dtype),
                max_model_len=model_config.max_model_len,
                load_format=config.load_config.load_format,
                seed=model_config.seed,
                quantization=config.quant_config.method,
                dequantize=config.quant_config.dequantize,
                kv_cache_dtype=cache_config.dtype,
                num_threads=num_threads,
                progress=progress,
            )
        with ledger.stage("kv cache"):
            steps_ahead = 2
            blocks_of_step = cdiv(config.scheduler_config.max_num_batched_tokens, cache_config.block_size)
            self.cache = CacheEngine(
                self.ops, config.kv_layout, cache_config.num_blocks, num_ahead=steps_ahead * blocks_of_step
            )
        with ledger.stage("trial step"):
            self.runner = ModelRunner(
                self.ops,
                self.model,
                self.cache,
                vocab_size=model_config.arch.vocab_size,
                max_num_seqs=config.scheduler_config.max_num_seqs,
                max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
                max_model_len=model_config.max_model_len,
                num_threads=num_threads,
                leaves_tokens=config.scheduler_config.max_steps_in_flight > 1 and self.ops.name not in ON_CPU,
                graph_sizes=config.compilation_config.graph_sizes,
            )
            self.grammars = self.runner.grammars
            if self.ops.name not in ON_CPU:
                self.runner.graphs.try_one_token()

    def open_kv_tiers(self, engine: bytes) -> TierReport:
        """Get the tiers below the KV cache ready; `engine` is the digest of the engine's identity.

        Raises: ConfigError when the file cannot be used.
        """
        cache, layout = self._config.cache_config, self._config.kv_layout
        tiers: list[Pages] = []
        if cache.num_ram_slots:
            tiers.append(MemoryPages(cache.num_ram_slots, layout.block_bytes))
        if cache.num_disk_slots:
            tiers.append(
                FilePages(
                    Path(cache.kv_disk),
                    cache.num_disk_slots,
                    page_bytes=layout.block_bytes,
                    block_size=cache.block_size,
                    engine=engine,
                )
            )
        self.cache.store = PageStore(tiers)
        self.ops.use_this_thread()
        most = min(self._config.scheduler_config.max_chunk_tokens, self._config.model_config.max_model_len)
        compute_s, step_s = step_seconds(self.runner, layout, cache.num_blocks, most)
        return TierReport(
            pages=self.cache.store.found(),
            load_token_s=load_seconds(self.cache) * len(layout.groups) / cache.block_size,
            compute_token_s=compute_s,
            step_s=step_s,
        )

    def clear_kv_tiers(self) -> None:
        """Forget all pages in the tiers, those of the file for good."""
        if self.cache.store is not None:
            self.cache.store.clear()

    def close(self) -> None:
        """Close the file, and end what loads from it, and all threads. Idempotent."""
        self.runner.close()
        self.cache.close()

    def capture_graph(self) -> bool:
        """See `Executor.capture_graph`."""
        self.ops.use_this_thread()
        return self.runner.graphs.capture_next()

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step."""
        self.ops.use_this_thread()
        return self.runner.execute(plan)

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """Begin one step; see `ModelRunner.submit`."""
        self.ops.use_this_thread()
        return self.runner.submit(plan)
