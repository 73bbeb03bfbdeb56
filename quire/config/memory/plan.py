"""How many bytes an engine will use, from the configuration alone, before anything is loaded.

One implementation: `resolve` sizes the KV cache with it at every start, and `quire plan` prints it. Every part is the
most that requests can make of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from quire.config.arch import ModelArch
from quire.config.engine import Capabilities
from quire.config.memory.activations.scratch import (
    block_selection_bytes,
    compressed_bytes,
    experts_bytes,
    native_experts_bytes,
    recurrence_bytes,
    scan_scratch_bytes,
    selection_bytes,
)
from quire.config.memory.activations.step import activation_bytes, step_logits_bytes
from quire.config.memory.stored_plan import (
    stored_activation_bytes,
    stored_loading_bytes,
    stored_logits_bytes,
    stored_weight_bytes,
)
from quire.config.memory.weights.shapes import weight_shapes
from quire.config.memory.weights.sizes import loading_bytes, weight_bytes
from quire.errors import ConfigError, counted
from quire.messages.kv import DTYPE_BYTES, KVLayout
from quire.structured.grammar import (
    COMPILED_BYTES,
    COMPILED_BYTES_PER_CHARACTER,
    MAX_COMPILED,
    MAX_COMPILED_CHARACTERS,
)
from quire.utils.math import cdiv, round_up

GRAMMAR_PROCESS_BYTES = 36 << 20
"""The process that checks grammars, without a vocabulary, as measured."""
GRAMMAR_BYTES_PER_TOKEN = 870
"""Of the vocabulary, for grammars: 350 in the process that checks them, 410 in the core, 110 in the front, measured
with 152,000 tokens."""
PROCESS_BYTES = 240 << 20
"""The interpreter, torch and its libraries, as measured after import."""
TRANSFORMERS_BYTES = 112 << 20
"""The package transformers, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, at the worst moment of an engine."""

    weights: int
    """Parameters as the ops lay them out, and the rotary tables."""
    kv_cache: int
    kv_ram: int
    """Pages that left the KV cache and are kept in memory."""
    workspace: int
    """Activations of the largest step, what kernels work with, and the arrays that a step reads."""
    logits: int
    """Of every sequence of a step, in float32, and a copy of those that draw."""
    logprobs: int
    """What reporting takes: logits as they were, and the candidates of every position of a step."""
    graphs: int
    """What a GPU captures: the memory that all graphs compute in, their outputs, and what the driver keeps of each."""
    requests: int
    """Lists of requests, of those that run at their bounds, and what is kept of every block and its tokens."""
    grammars: int
    """Of structured outputs: the vocabulary as grammars need it, the process that checks them, compiled ones. 0 where
    no request can have a grammar."""
    loading: int
    """What reading the weights takes beyond everything above; 0 where that is more than the reading."""
    process: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.as_dict().values())

    @property
    def held(self) -> int:
        """All but pages of files being read, which the system takes back when it needs them."""
        return self.total - self.loading

    @property
    def held_by_host(self) -> int:
        """What of it is the host's where the device has memory of its own."""
        return self.kv_ram + self.requests + self.grammars + self.process

    def held_on(self, capabilities: Capabilities) -> int:
        """What of it is the device's."""
        return self.held - self.held_by_host if capabilities.host_memory else self.held

    def as_dict(self) -> dict[str, int]:
        """By name, in the order in which people read it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What the parts of a plan follow from, beside the model."""

    dtype: str
    quantization: str | None = None
    dequantize: bool = False
    """Weights that the checkpoint has quantised become plain."""
    ops: str = "cpu"
    isa: str = ""
    """Instruction set of the ops."""
    num_threads: int = 1
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_logprobs: int
    block_size: int
    kv_cache_dtype: str
    has_grammars: bool = True
    """Whether requests may have grammars. They need a tokenizer and a token that ends an output."""
    graph_sizes: tuple[int, ...] = ()
    """Sequences of the steps that are captured."""
    num_ram_slots: int = 0
    """Pages that are kept in memory beside the KV cache."""
    num_disk_slots: int = 0
    """Pages that are kept in a file."""


def plan_memory(arch: ModelArch, use: MemoryUse, num_blocks: int) -> MemoryPlan:
    """The plan of an engine with so many KV blocks."""
    weights, loading = _model_bytes(arch, use)
    layout = arch.kv_layout(use.block_size, use.kv_cache_dtype, ops=use.ops)
    kv_cache = num_blocks * layout.block_bytes
    workspace, logits, logprobs = (
        workspace_bytes(arch, use, layout),
        logits_bytes(arch, use),
        logprobs_bytes(arch, use),
    )
    kv_ram = use.num_ram_slots * layout.block_bytes
    num_pages = num_blocks + use.num_ram_slots + use.num_disk_slots
    requests = requests_bytes(arch.vocab_size, use) + num_pages * host_bytes_per_block(use.block_size)
    return MemoryPlan(
        weights=weights,
        kv_cache=kv_cache,
        kv_ram=kv_ram,
        workspace=workspace,
        logits=logits,
        logprobs=logprobs,
        graphs=graphs_bytes(arch, use),
        requests=requests,
        grammars=grammar_bytes(arch.vocab_size) if use.has_grammars else 0,
        loading=max(0, loading - kv_cache - kv_ram - workspace - logits - logprobs - requests),
        process=PROCESS_BYTES + (0 if arch.stored is None else TRANSFORMERS_BYTES),
    )


def _model_bytes(arch: ModelArch, use: MemoryUse) -> tuple[int, int]:
    """Of the weights with the rotary tables, and of what reading them takes beyond that."""
    if arch.stored is not None:
        return stored_weight_bytes(arch.stored, use.dtype), stored_loading_bytes(arch, arch.stored, use.dtype)
    arch = replace(arch, quantized=()) if use.dequantize else arch
    weights = weight_bytes(arch, use.dtype, use.quantization, ops=use.ops, isa=use.isa)
    numbers = sum(rope.rotary_dim for rope in arch.ropes) + len(arch.position_scales)
    return weights + 4 * use.max_model_len * numbers, loading_bytes(
        arch, use.dtype, use.quantization, ops=use.ops, isa=use.isa
    )


def grammar_bytes(vocab_size: int) -> int:
    """What structured outputs take once they are used, with as many grammars as a core keeps compiled."""
    compiled = MAX_COMPILED * COMPILED_BYTES + MAX_COMPILED_CHARACTERS * COMPILED_BYTES_PER_CHARACTER
    return GRAMMAR_PROCESS_BYTES + vocab_size * GRAMMAR_BYTES_PER_TOKEN + compiled


# -- KV cache -------------------------------------------------------------------------------------------------


HOST_BYTES_OF_BLOCK = 480
"""What the block pool keeps of a cached block: the block, its hash, its places in index and free list."""
HOST_BYTES_OF_TOKEN = 72
"""A token's number, and its places in the block's content and in the lists of the sequences that hold it."""


def host_bytes_per_block(block_size: int) -> int:
    """What the scheduler keeps of a block, beside its keys and values."""
    return HOST_BYTES_OF_BLOCK + block_size * HOST_BYTES_OF_TOKEN


# -- steps ----------------------------------------------------------------------------------------------------

SCRATCH = 2 << 20
"""What a kernel works with in one thread, in whole huge pages, where it follows from no size below."""


def workspace_bytes(arch: ModelArch, use: MemoryUse, layout: KVLayout) -> int:
    """Activations of a full step, scratch of the kernels, and the tables that a step reads."""
    num_groups = len(layout.groups)
    activations = _step_bytes(arch, use)
    activations += recurrence_bytes(arch, use.max_num_batched_tokens, use.max_num_seqs, ops=use.ops)
    activations += compressed_bytes(arch, use.max_num_batched_tokens, use.max_model_len)
    activations += block_selection_bytes(
        arch, use.dtype, use.max_num_batched_tokens, use.max_model_len, layout.block_size
    )
    block_tables = num_groups * use.max_num_seqs * layout.num_entries(use.max_model_len) * 4
    arrays = use.max_num_batched_tokens * (16 + 8 * num_groups) + use.max_num_seqs * 16
    arrays += 16 * num_groups * use.max_num_seqs
    return activations + _scratch_bytes(arch, use, layout) + block_tables + arrays


def _step_bytes(arch: ModelArch, use: MemoryUse) -> int:
    """Activations of a full step."""
    if arch.stored is not None:
        return stored_activation_bytes(arch, arch.stored, use.dtype, use.max_num_batched_tokens)
    activations = activation_bytes(arch, use.dtype, use.max_num_batched_tokens, ops=use.ops)
    experts = native_experts_bytes if use.ops == "cpu" else experts_bytes
    return activations + experts(arch, use.dtype, use.max_num_batched_tokens)


def _scratch_bytes(arch: ModelArch, use: MemoryUse, layout: KVLayout) -> int:
    """What the native kernels work with: inputs of products as they read them, and for each thread its own part."""
    if use.ops != "cpu":
        return 0
    sampling = 2 * round_up(max(SCRATCH, 8 * arch.vocab_size), SCRATCH)
    if arch.stored is not None:  # attention and sampling alone are native
        return use.num_threads * sampling
    widest = arch.widest_mlp
    both = 0 if widest % 32 == 0 else 8 * use.max_num_batched_tokens * widest
    of_thread = sampling + scan_scratch_bytes(arch)
    page = layout.page
    selection = selection_bytes(arch, use.max_num_batched_tokens, use.max_model_len, page.num_bytes, page.block_size)
    return _prepared_bytes(arch, use) + both + selection + use.num_threads * of_thread


def _prepared_bytes(arch: ModelArch, use: MemoryUse) -> int:
    """A copy of the largest input of a product, where the kernel reads another form (`prepared_bytes` in csrc)."""
    depth = max(shape.in_features for shape in weight_shapes(arch).body)
    if use.quantization is not None or (arch.quantized and not use.dequantize):
        item, depth = 1, round_up(depth, 64) + 8 * cdiv(depth, 128)
    elif use.dtype == "float32":
        item = 0
    elif use.dtype == "bfloat16" and use.isa in ("amx", "avx512_bf16", "neon_bf16"):
        item, depth = 2 if use.isa != "avx512_bf16" or depth % 2 else 0, round_up(depth, 32)
    else:
        item = 4
    return round_up(use.max_num_batched_tokens, 32) * depth * item


def logits_bytes(arch: ModelArch, use: MemoryUse) -> int:
    """Two copies of the logits of a full step: as the head gives them, and of the rows that draw where not all do."""
    rows = use.max_num_seqs
    if arch.stored is not None:
        return stored_logits_bytes(arch, use.dtype, rows) + rows * arch.vocab_size * 4
    logits = step_logits_bytes(arch, use.dtype, use.max_num_batched_tokens, rows, ops=use.ops)
    return logits + rows * arch.vocab_size * 4


LAUNCHES_OF_LAYER = 24
"""The most that the layers of today's families have, experts' included; a plain decoder's have 9."""
BYTES_OF_LAUNCH = 8 << 10
"""What the driver keeps of a captured launch: an estimate, twice the most that its arguments take. Not measured yet."""
SPLITS_BYTES = 64 << 20
"""Partial results of attention, at most (`ops.triton.attention.SCRATCH_BYTES`)."""


def graphs_bytes(arch: ModelArch, use: MemoryUse) -> int:
    """What captured steps take: the activations, states and logits of the largest, in memory that all of them share,
    its outputs once more outside of that, and the launches of each."""
    if not use.graph_sizes:
        return 0
    rows = use.graph_sizes[-1]
    largest = replace(use, max_num_batched_tokens=rows, max_num_seqs=rows)
    logits = step_logits_bytes(arch, use.dtype, rows, rows, ops=use.ops)
    shared = _step_bytes(arch, largest) + recurrence_bytes(arch, rows, rows, ops=use.ops) + logits + SPLITS_BYTES
    outputs = rows * (arch.hidden_size * DTYPE_BYTES[use.dtype] + arch.vocab_size * 4)
    launches = len(use.graph_sizes) * arch.num_layers * LAUNCHES_OF_LAYER
    return shared + outputs + launches * BYTES_OF_LAUNCH


CANDIDATE_BYTES = 84
"""A candidate while it is reported: its id and its log-probability in tensors and in Python's lists."""
POSITION_BYTES = 320
"""A reported position, without its candidates."""


def logprobs_bytes(arch: ModelArch, use: MemoryUse) -> int:
    """All rows of a full step report their candidates, and all of its prompts' tokens theirs."""
    candidates = min(use.max_logprobs, arch.vocab_size) + 1
    positions = use.max_num_seqs + use.max_num_batched_tokens
    kept = max(use.max_num_seqs, PROMPT_LOGPROB_ROWS) * arch.vocab_size * 4
    return kept + positions * (POSITION_BYTES + candidates * CANDIDATE_BYTES)


PROMPT_LOGPROB_ROWS = 64
"""Prompt positions that are scored at a time."""
CONTROLS_BYTES = 640 << 10
"""What the core holds for one request whose stop ids, biases and bad words are at their bounds (0.54 MiB measured)."""


def controls_bytes(vocab_size: int) -> int:
    """The most that a running request's lists of tokens take: a bit and a byte for each token beside the rest."""
    return CONTROLS_BYTES + vocab_size + (vocab_size + 7) // 8


WAITING_BYTES = 16 << 20
WAITING_TOKEN_BYTES = 52
"""A prompt token of a request that waits (`engine.request_memory`)."""


def requests_bytes(vocab_size: int, use: MemoryUse) -> int:
    """What all requests together may take, those that wait included; beyond it a server refuses them.

    One for each seat with its lists at their bounds, and room for others, four of the longest prompts at least.
    """
    waiting = max(WAITING_BYTES, 4 * use.max_model_len * WAITING_TOKEN_BYTES)
    return use.max_num_seqs * controls_bytes(vocab_size) + waiting


# -- what fits ------------------------------------------------------------------------------------------------


def allowed_bytes(capabilities: Capabilities, fraction: float) -> int:
    """Bytes that an engine may take now."""
    return min(int(capabilities.total_memory * fraction), capabilities.available_memory)


def plan_blocks(capabilities: Capabilities, bare: MemoryPlan, *, fraction: float, block_bytes: int, most: int) -> int:
    """KV blocks that the allowed share of memory holds beside everything else (`bare`), at most as many as are useful.

    `block_bytes` is what a block takes there. Raises: ConfigError when nothing is left.
    """
    allowed = allowed_bytes(capabilities, fraction)
    left = allowed - bare.held_on(capabilities)
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {gib(allowed)} may be used ({fraction:.0%} of "
            f"{gib(capabilities.total_memory)}, {gib(capabilities.available_memory)} free now), but {parts_text(bare)} "
            "are needed. Raise gpu_memory_utilization, lower max_num_batched_tokens, max_num_seqs, max_logprobs "
            "or kv_ram, or use a smaller model or dtype. `quire plan` shows what would fit."
        )
    return min(left // block_bytes, most)


def check_memory(plan: MemoryPlan, capabilities: Capabilities) -> None:
    """A cache whose size was given must exist, too: what the device does not have cannot be allocated.

    Raises: ConfigError with the numbers.
    """
    if capabilities.host_memory and plan.held_by_host > capabilities.host_memory:
        raise ConfigError(
            f"the engine would take {gib(plan.held_by_host)} of the host's memory (kv_ram, requests, grammars and "
            f"process of {parts_text(plan)}), more than the {gib(capabilities.host_memory)} there are. Lower kv_ram or "
            "max_num_seqs."
        )
    held = plan.held_on(capabilities)
    if held > capabilities.total_memory:
        raise ConfigError(
            f"the engine would take {gib(held)} ({parts_text(plan)}), more than the "
            f"{gib(capabilities.total_memory)} there are. Lower num_gpu_blocks_override, kv_cache_memory_bytes, "
            "kv_ram, max_num_seqs or max_num_batched_tokens, or use a smaller model or dtype."
        )


def parts_text(plan: MemoryPlan) -> str:
    """The parts that are not empty, for people."""
    return ", ".join(f"{name} {gib(size)}" for name, size in plan.as_dict().items() if size)


def check_longest_fits(layout: KVLayout, num_blocks: int, max_model_len: int, max_chunk_tokens: int) -> None:
    """A single sequence of the longest length must fit, in chunks of a block at most, or it could never finish.

    Raises: ConfigError with the numbers and both remedies.
    """
    block_size, num_groups = layout.block_size, len(layout.groups)
    chunk = min(block_size, max_chunk_tokens)
    longest = layout.longest(num_blocks, chunk, max_model_len)
    if longest == 0:
        each = "" if num_groups == 1 else f" in each of {num_groups} groups of layers"
        raise ConfigError(
            f"the KV cache has no room for a single block of {counted(block_size, 'token')}{each}, which takes "
            f"{gib(num_groups * layout.block_bytes)}. "
            "Lower block_size, or give the cache more (kv_cache_memory_bytes, gpu_memory_utilization)."
        )
    if longest < max_model_len:
        needed = layout.most_blocks(max_model_len, chunk) * layout.block_bytes
        raise ConfigError(
            f"the KV cache holds {counted(longest, 'token')} of a sequence ({counted(num_blocks, 'block')} of "
            f"{block_size}), less than one sequence of max_model_len={max_model_len}. Lower max_model_len to "
            f"{longest}, or give the cache {gib(needed)} (kv_cache_memory_bytes={needed})."
        )


def gib(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
