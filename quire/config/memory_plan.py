"""How many bytes an engine will use, from the configuration alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.arch import ModelArch
from quire.config.engine import Capabilities
from quire.errors import ConfigError, counted
from quire.messages.kv import DTYPE_BYTES, KVLayout

PROCESS_BYTES = 300 << 20
"""The interpreter, torch and its libraries, as measured after import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose."""

    weights: int
    workspace: int
    process: int
    kv_cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.workspace + self.process + self.kv_cache

    def as_dict(self) -> dict[str, int]:
        """By name, in the order in which people read it."""
        return {
            "weights": self.weights,
            "kv_cache": self.kv_cache,
            "workspace": self.workspace,
            "process": self.process,
        }


BYTES_PER_WEIGHT = {"int8": (1.0, 1.0), "int4": (0.5 + 2 / 128, 1.0)}
"""quantization -> bytes per parameter of layers and of the head, scales included."""


def weight_bytes(arch: ModelArch, dtype: str, quantization: str | None) -> int:
    """Bytes of all weights. Quantised, a tied table is held twice: rows in the model's dtype, the head in integers."""
    if quantization is None:
        return arch.num_parameters() * DTYPE_BYTES[dtype]
    table = arch.vocab_size * arch.hidden_size
    body, head = BYTES_PER_WEIGHT[quantization]
    num_body = arch.num_parameters() - table * (1 if arch.tie_word_embeddings else 2)
    return int(table * (DTYPE_BYTES[dtype] + head) + num_body * body)


def workspace_bytes(arch: ModelArch, dtype: str, *, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Activations of the widest layer for a full step, float32 logits with one working copy, and requests' lists."""
    widest = 2 * arch.intermediate_size + 4 * arch.hidden_size + arch.num_heads * arch.head_size * 3
    activations = max_num_batched_tokens * widest * DTYPE_BYTES[dtype]
    return activations + 2 * max_num_seqs * arch.vocab_size * 4 + max_num_seqs * controls_bytes(arch.vocab_size)


CONTROLS_BYTES = 640 << 10
"""What the core holds for one request whose stop ids, biases and bad words are at their bounds (0.54 MiB measured)."""


def controls_bytes(vocab_size: int) -> int:
    """The most that a running request's lists of tokens take: a bit and a byte for each token beside the rest."""
    return CONTROLS_BYTES + vocab_size + (vocab_size + 7) // 8


def plan_kv_bytes(
    capabilities: Capabilities, *, fraction: float, weights: int, workspace: int, most_useful: int
) -> int:
    """Bytes left for the KV cache: the allowed share of memory less everything else, and never more than can be used.

    Raises: ConfigError when nothing is left.
    """
    allowed = min(int(capabilities.total_memory * fraction), capabilities.available_memory)
    left = allowed - weights - workspace - PROCESS_BYTES
    if left <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {gib(allowed)} may be used ({fraction:.0%} of "
            f"{gib(capabilities.total_memory)}, {gib(capabilities.available_memory)} free now), but weights take "
            f"{gib(weights)}, workspace {gib(workspace)} and the process {gib(PROCESS_BYTES)}. Raise "
            "gpu_memory_utilization, lower max_num_batched_tokens, or use a smaller model or dtype."
        )
    return min(left, most_useful)


def check_memory(plan: MemoryPlan, capabilities: Capabilities) -> None:
    """A cache whose size was given must exist, too: what the device does not have cannot be allocated.

    Raises: ConfigError with the numbers.
    """
    if plan.total > capabilities.total_memory:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in plan.as_dict().items())
        raise ConfigError(
            f"the engine would take {gib(plan.total)} ({parts}), more than the {gib(capabilities.total_memory)} there "
            "are. Lower num_gpu_blocks_override, kv_cache_memory_bytes, max_num_seqs or max_num_batched_tokens, or use "
            "a smaller model or dtype."
        )


def check_longest_fits(layout: KVLayout, num_blocks: int, max_model_len: int, max_chunk_tokens: int) -> None:
    """A single sequence of the longest length must fit, in chunks of a block at most, or it could never finish.

    Raises: ConfigError with the numbers and both remedies.
    """
    block_size, num_groups = layout.page.block_size, len(layout.groups)
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
