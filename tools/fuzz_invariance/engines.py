"""Engines of tiny random models, cheap to make: weights, tokenizers and configurations are kept between them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from quire import EngineArgs
from quire.config.engine import QuireConfig
from quire.engine.core_startup import create_config, read_arch
from quire.engine.engine_core import EngineCore
from quire.engine.front.input_processor import InputProcessor
from quire.errors import ConfigError
from quire.executor.inproc import InprocExecutor
from quire.messages.kv import KVLayout
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.models.interfaces import Model
from quire.observability.ledger import Ledger
from quire.ops import backends
from quire.sampling.row import ON_DEVICE
from quire.structured.checker import GrammarChecker
from quire.structured.grammar import Grammar
from quire.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quire.worker import model_runner, worker
from tests import family_configs
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import make_quantized_checkpoint
from tests.worker.links import CopyLink
from tools.fuzz_invariance.cases import MAX_MODEL_LEN, EngineChoice
from tools.fuzz_invariance.patches import replaced

COMPRESSED_LAYERS = ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"num_hidden_layers": 2}),
    "learned positions": ("gpt2", {"n_layer": 2}),
    "window": ("mistral", {"num_hidden_layers": 2, "sliding_window": 14}),
    "full and window": ("gemma2", {"num_hidden_layers": 2, "sliding_window": 18}),
    "one full, three of windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "num_hidden_layers": 4, "max_window_layers": 1},
    ),
    "experts": (
        "qwen2_moe",
        {"num_hidden_layers": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "mamba": ("mamba", {}),
    "mamba with norms": ("falcon_mamba", {}),
    "mamba 2": ("mamba2", {}),
    "mamba and attention": ("jamba", {}),
    "mamba 2 and attention": ("bamba", {}),
    "mamba 2, attention and experts": ("granitemoehybrid", {}),
    "convolutions and attention": ("lfm2", {}),
    "quantised, with an order of inputs": ("llama", {"format": "gptq-desc-act-asymmetric"}),
    "quantised, with zero points": ("qwen2", {"format": "awq"}),
    "quantised to 8-bit floats": ("llama", {"format": "fp8-blocks"}),
    "quantised to codes": ("llama", {"format": "ct-nvfp4"}),
    "ternary": ("bitnet", {"format": "bitnet-autobitlinear"}),
    "compressed": ("deepseek_v4", {"num_hidden_layers": 3, "layer_types": COMPRESSED_LAYERS, "mlp_layer_types": None}),
    "chosen blocks": ("minimax_m3_vl_text", {"mlp_layer_types": ["dense"] * 4, "dense_intermediate_size": 32}),
    "means and n-grams": (
        "qwen4_exp_text",
        {"num_hidden_layers": 2, "full_attention_interval": 2, "ple_layer_ids": [1]},
    ),
}
"""name -> family and overrides for `make_checkpoint`, or the format of a quantised checkpoint. Their KV groups: one,
one, one, two, four, one; of those with recurrent layers one, and four where there is attention, too, else one; of the
last three four, one, and five."""
COMPRESSED, CHOSEN_BLOCKS, MEANS = "compressed", "chosen blocks", "means and n-grams"
"""The models with compressed attention, with indexers of blocks of 16 tokens, and with indexers of means beside states,
which are drawn apart from the others."""
ATTENTION_FREE = frozenset(name for name, (family, _) in MODELS.items() if family in family_configs.ATTENTION_FREE)
RECURRENT = frozenset(name for name, (family, _) in MODELS.items() if family in family_configs.RECURRENT)
DELAYS_S = (0.0, 0.0, 0.0005, 0.002)
"""Of steps of a device that computes beside the core: some have ended when the next is decided, some have not begun."""
STATE_BLOCK_SIZE = 32
"""Tokens per block where no layer keeps keys and values: what CPUs prefer."""
Clock = Callable[[], float]
Result = TypeVar("Result")


class Engines:
    """Makes cores of tiny models."""

    def __init__(self, directory: Path) -> None:
        """Checkpoints are written to a directory, or found there if somebody has written them."""
        self.directory = directory
        self.config_of = cache(self._config_of)
        self.tokenizer_of = cache(self._tokenizer_of)
        self._grammars: dict[tuple[int, tuple[int, ...]], GrammarChecker] = {}
        self._weights: dict[tuple[object, ...], Model] = {}
        self._load = worker.load_model

    def write_all(self) -> None:
        """Make all checkpoints now."""
        for model in MODELS:
            self.checkpoint(model)

    def checkpoint(self, model: str) -> Path:
        """The directory of a model."""
        path = self.directory / model.replace(" ", "-")
        if not (path / "config.json").exists():
            family, overrides = MODELS[model]
            if "format" in overrides:
                quantized, _ = make_quantized_checkpoint(
                    overrides["format"], path.with_name(f"{path.name}-made"), family
                )
                quantized.rename(path)
            else:
                make_checkpoint(family, path, **overrides)
        return path

    def core(self, engine: EngineChoice, clock: Clock, executor: Callable[[QuireConfig], InprocExecutor]) -> EngineCore:
        """A core with an empty cache; `executor` makes it from the configuration.

        With several steps in flight, arrays of a step are sent to memory that only ops read, as to a device.
        """
        config = self.config_of(engine)
        is_asynchronous = config.scheduler_config.max_steps_in_flight > 1
        link_to = (lambda device: CopyLink()) if is_asynchronous else model_runner.link_to
        with replaced(worker, "load_model", self._kept_weights), replaced(model_runner, "link_to", link_to):
            return EngineCore(config, executor(config), clock)

    def grammars_of(self, inputs: InputProcessor) -> GrammarChecker:
        """One for all fronts whose models have the same tokens: each has a process of its own."""
        model = inputs.config.model_config
        key = model.arch.vocab_size, tuple(model.eos_token_ids)
        return self._grammars.setdefault(key, inputs.grammars)

    def close(self) -> None:
        """End the processes that check grammars. Idempotent."""
        for checker in self._grammars.values():
            checker.close()

    def _config_of(self, engine: EngineChoice) -> QuireConfig:
        path = self.checkpoint(engine.model)
        ops = engine.ops if engine.ops in available_ops() else "reference"
        args = EngineArgs(
            model=str(path),
            dtype=engine.dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            ops=ops,
            block_size=None if engine.model in ATTENTION_FREE else engine.block_size,
            num_threads=engine.num_threads if ops == "cpu" else 1,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            enable_prefix_caching=engine.enable_prefix_caching,
            use_tqdm_on_load=False,
        )
        chunk = min(engine.long_prefill_token_threshold or MAX_MODEL_LEN, engine.max_num_batched_tokens)
        layout = self._layout_of(args, engine, ops)
        num_blocks = layout.most_blocks(MAX_MODEL_LEN, chunk) + engine.num_spare_blocks
        args = replace(args, num_gpu_blocks_override=num_blocks)
        if engine.model in RECURRENT and engine.enable_prefix_caching:
            most = (MAX_MODEL_LEN - 1) // layout.block_size
            stride = min(engine.blocks_per_state, most) * layout.block_size
            args = replace(args, state_checkpoint_stride=stride or None)
        if engine.num_ram_pages:
            args = replace(args, kv_ram=engine.num_ram_pages * layout.block_bytes, kv_load_min_tokens=1)
        config = create_config(args)
        scheduler = replace(
            config.scheduler_config,
            policy=engine.policy,
            priority_ageing_s=engine.priority_ageing_s,
            max_steps_in_flight=engine.max_steps_in_flight,
        )
        return replace(config, scheduler_config=scheduler)

    def _layout_of(self, args: EngineArgs, engine: EngineChoice, ops: str) -> KVLayout:
        kv_dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
        block_size = STATE_BLOCK_SIZE if engine.model in ATTENTION_FREE else engine.block_size
        return read_arch(args, self.checkpoint(engine.model)).kv_layout(block_size, kv_dtype, ops=ops)

    def _tokenizer_of(self, model: str) -> Tokenizer:
        return load_tokenizer(self.checkpoint(model))

    def _kept_weights(self, path: Path, arch: object, **options: Any) -> Model:
        """What `load_model` gives, read once for each way of computing."""
        options.pop("progress", None)
        others = sorted((name, str(value)) for name, value in options.items() if name != "ops")
        key = (path, options["ops"].name, *others)
        if key not in self._weights:
            self._weights[key] = self._load(path, arch, **options)  # type: ignore[arg-type]
        return self._weights[key]


class DisturbedExecutor(InprocExecutor):
    """A worker whose steps fail when a case says so."""

    def __init__(self, config: QuireConfig, poisoned: dict[str, bool], grammar_steps: int) -> None:
        """`poisoned`: requests that make a step raise, and whether only after it was computed. `grammar_steps`: calls
        of `end_preparations` until a grammar is there."""
        super().__init__(config, Ledger())
        self.poisoned = poisoned
        self._grammar_steps = grammar_steps
        self._preparing: list[Future[None] | None] = [None] * grammar_steps
        """Grammars that requests wait for, those that came last at the end; None for each call between them."""
        self.loses_next = False
        """The result of the next step is lost."""
        self.num_copies = 0
        self._delays = random.Random(0)
        self._is_asynchronous = config.scheduler_config.max_steps_in_flight > 1
        self.num_taken = 0
        """Tokens that a step took from the device, which the host had not seen."""
        self._running().runner.leaves_tokens = self._is_asynchronous
        self._request_of: dict[int, str] = {}

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step, or raise."""
        return self._disturbed(plan, super().execute)

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """Begin one step, or raise; its result comes later. The host reads no token before."""
        read = self._disturbed(plan, super().submit)
        rows, delay_s = self._running().runner.batch.rows, self._delays.choice(DELAYS_S)
        self.num_taken += sum(rows[i].token_ids[position] == ON_DEVICE for i, position in plan.pending_tokens.items())

        def late() -> ModelRunnerOutput:
            time.sleep(delay_s)
            return read()

        return late

    def _disturbed(self, plan: SchedulerOutputs, run: Callable[[SchedulerOutputs], Result]) -> Result:
        self._request_of |= {new.seq_id: new.request_id for new in plan.new_sequences}
        guilty = [self.poisoned[name] for i in plan.seq_ids if (name := self._request_of[i]) in self.poisoned]
        if guilty and not all(guilty):
            raise Poisoned("before the step")
        self.num_copies += len(plan.blocks_to_copy)
        if self._is_asynchronous:
            time.sleep(self._delays.choice(DELAYS_S))
        result = run(plan)
        if guilty:
            raise Poisoned("after the step")
        if self.loses_next:
            self.loses_next = False
            raise Lost
        return result

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar at once, and say so some steps later: equal seeds give equal steps."""
        super().prepare_grammar(grammar).result()
        ready: Future[None] = Future()
        if self._grammar_steps:
            self._preparing.append(ready)
        else:
            ready.set_result(None)
        return ready

    def end_preparations(self) -> None:
        """Let those start who have waited long enough."""
        self._preparing.append(None)
        while self._preparing.count(None) > self._grammar_steps:
            ready = self._preparing.pop(0)
            if ready is not None:
                ready.set_result(None)


class Poisoned(Exception):
    """A request is not good for the engine."""


class Lost(BaseException):
    """As a KeyboardInterrupt, which nothing in the engine catches."""


def ticking_clock() -> Clock:
    """A clock that goes on by a millisecond whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) / 1000


@cache
def available_ops() -> tuple[str, ...]:
    """Implementations that run here."""
    found = []
    for name in backends.ON_CPU:
        try:
            backends.implementation_of(name)
        except ConfigError:
            continue
        found.append(name)
    return tuple(found)
