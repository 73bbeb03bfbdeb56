"""`QuireConfig`: the frozen sum of the parts, the only config object passed around.

Every value here is final: no "auto", no None that means "default". `choices` says of each automatic value why it is
what it is. Parts that describe features quire does not have yet exist with the one value that is true today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.arch import ModelArch
from quire.messages.kv import PAGES_PER_STATE, KVLayout


@dataclass(frozen=True, slots=True)
class Choice:
    """An automatic decision and its reason."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts a platform measured. Sizes in bytes."""

    name: str
    """Shown to people."""
    device_type: str
    num_cores: int
    """Physical cores this process may use: affinity and the control group's quota taken into account."""
    total_memory: int
    """Of the device, or of the control group if that is less."""
    available_memory: int
    host_memory: int = 0
    """Of the host, where the device has memory of its own; else 0."""
    host_available_memory: int = 0
    block_size: int
    """Preferred tokens per KV block."""
    ops: str
    """Best op implementation this machine can run."""
    ops_reason: str
    ops_isa: str = ""
    """Instruction set that `ops` uses; empty where it has none of its own."""
    ops_digest: str = ""
    """Digest of the library that has them, which tells one build from another; empty where there is none."""
    torch: str = ""
    """Version of torch."""
    isa: tuple[str, ...] = ()
    """Instruction sets of interest, as the processor reports them."""
    default_memory_fraction: float = 0.5
    """Share of the memory an engine takes unless told."""
    default_max_num_seqs: int = 256
    default_max_num_batched_tokens: int = 2048
    """Tokens of a step that keep the device busy, and others waiting no longer than they must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is run."""

    model: str
    """As the user named it."""
    path: Path
    tokenizer_path: Path
    arch: ModelArch
    dtype: str
    max_model_len: int
    """Prompt and output tokens of one sequence."""
    max_logprobs: int
    seed: int
    """Base of seeds and of dummy weights."""
    seed_is_given: bool = False
    """Else the requests of a server get their seeds from the system."""
    skip_tokenizer_init: bool
    tokenizer_digest: str = ""
    """Of the files and the chat template when the engine started; fronts check that they load the same."""
    chat_template: str | None
    generation_defaults: Mapping[str, Any]
    """SamplingParams fields that the model sets for requests which leave the choice to it."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    enable_prefix_caching: bool
    dtype: str
    num_groups: int
    """KV groups of the model whose blocks hold tokens: a token takes a slot in a block of each."""
    num_state_groups: int = 0
    """KV groups of recurrent layers: a sequence takes two pages in each, whatever its length."""
    state_checkpoint_stride: int = 0
    """Tokens between states that are cached; 0 where none are."""
    num_ram_slots: int = 0
    """Evicted pages that are kept in memory."""
    kv_disk: str = ""
    """Directory of the file with further ones; empty without one."""
    num_disk_slots: int = 0
    kv_load_min_tokens: int | None = None
    """Tokens of the shortest prefix that is loaded from there; None: as measured at the start."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one sequence that fit; None where layers keep states alone, whatever the number of tokens."""
        if not self.num_groups:
            return None
        num_blocks = self.num_blocks - PAGES_PER_STATE * self.num_state_groups
        return max(0, num_blocks) // self.num_groups * self.block_size

    @property
    def num_sequences(self) -> int | None:
        """Sequences whose states fit where layers keep states alone; None where they keep tokens."""
        return None if self.num_groups else self.num_blocks // (PAGES_PER_STATE * self.num_state_groups)

    @property
    def capacity(self) -> str:
        """What fits, for people."""
        if self.num_sequences is None:
            return f"{self.num_tokens:,} tokens"
        return f"states of {self.num_sequences:,} sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    """Tokens of one sequence in one step."""
    policy: str = "fcfs"
    priority_ageing_s: float = 0.0
    """Seconds of waiting that count as much as a priority lower by one; 0: none do."""
    max_request_bytes: int = 0
    """What all requests may take in the core, those that wait included, as the memory plan has it."""
    max_steps_in_flight: int = 1
    """Steps that are decided before the results of the first of them are known."""
    short_step_work: float | None = None
    """Of a step beside a long prompt, in tokens without context; None: as `core.order.budget` has it for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is spread."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    executor: str = "inproc"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where it runs."""

    device_type: str
    """As `--device` spells it."""
    ops: str
    num_threads: int
    capabilities: Capabilities
    batch_invariant: bool = True
    """Whether all ops are row-invariant, as they are on CPUs."""

    @property
    def torch_device(self) -> str:
        """As torch spells it, which says cuda for AMD's GPUs, too."""
        return "cuda" if self.device_type == "rocm" else self.device_type


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How weights are read."""

    load_format: str
    show_progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters: none yet."""

    enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Draft tokens: none yet."""

    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig:
    """Structured output."""

    backend: str = "llguidance"
    """The library that follows grammars; see `structured.backend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """What is counted."""

    log_stats: bool = True
    log_stats_interval_s: int = 0
    """Between two status lines; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """Weight format."""

    method: str | None = None
    """int8 or int4, made while the weights are read; None keeps what the checkpoint has."""
    stored: str | None = None
    """The method that the checkpoint was quantised with before; None where its weights are plain."""
    dequantize: bool = False
    """Weights that were quantised before become plain ones of the model's dtype."""

    @property
    def name(self) -> str | None:
        """For people and for identities."""
        return f"{self.stored}, dequantized" if self.dequantize else self.stored or self.method


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """What a device captures once and then replays. CPUs capture nothing: what they record takes no time."""

    graph_sizes: tuple[int, ...] = ()
    """Sequences of the steps that graphs are captured for; none: all steps run op by op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """Everything an engine is built from."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    load_config: LoadConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    lora_config: LoRAConfig = field(default_factory=LoRAConfig)
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    decoding_config: DecodingConfig = field(default_factory=DecodingConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    memory_plan: Mapping[str, int] = field(default_factory=dict)
    """Bytes by purpose."""
    choices: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def row_invariant(self) -> bool:
        """Whether a request's tokens depend on nothing that runs beside it: not where transformers builds the model."""
        return self.device_config.batch_invariant and self.model_config.arch.stored is None

    @property
    def kv_layout(self) -> KVLayout:
        """How the layers share the pages of the KV cache."""
        cache = self.cache_config
        return self.model_config.arch.kv_layout(cache.block_size, cache.dtype, ops=self.device_config.ops)
