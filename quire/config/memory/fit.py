"""What fits into the memory of a machine, and the cheapest change that makes a wish fit.

Asks `resolve` about every change, so that what is proposed here is what a start would decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.config.arch import ModelArch
from quire.config.engine import Capabilities, QuireConfig
from quire.config.flags.args import EngineArgs
from quire.config.memory.plan import allowed_bytes
from quire.config.resolve import resolve
from quire.errors import ConfigError
from quire.messages.kv import SCALED_DTYPES

UNLIMITED = 1 << 120
"""Bytes: more than the most blocks of the largest size take."""
LARGEST_SHARE = 0.95
"""Of the memory: more is not proposed, for the system needs some."""
FREE_MEMORY = "nothing but memory that is free now"
SMALL_STEP = 512
"""Tokens of a step below which prompts would be read much slower; fewer are not proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Sequences that shall run at once without one waiting for another's memory."""

    num_sequences: int
    num_tokens: int
    """Of each, prompt and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Options with which a wish fits."""

    options: dict[str, Any]
    cost: str
    """What the change gives up, for people."""

    @property
    def flags(self) -> str:
        """As written on a command line."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model beside the memory it may use: what does not change from question to question."""

    arch: ModelArch
    capabilities: Capabilities
    path: Path

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model was made for."""
        return self.arch.max_position_embeddings

    def resolve(self, args: EngineArgs) -> QuireConfig:
        """What a start with these options would decide.

        Raises: ConfigError.
        """
        return resolve(args, self.arch, self.capabilities, path=self.path, tokenizer_path=self.path)

    def allowed(self, args: EngineArgs) -> int:
        """Bytes that an engine with these options may take now."""
        machine = self.capabilities
        if args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None:
            return machine.available_memory
        return allowed_bytes(machine, args.gpu_memory_utilization or machine.default_memory_fraction)

    def unlimited(self, args: EngineArgs, wish: Wish) -> QuireConfig:
        """What the wish takes where memory has no end.

        Raises: ConfigError for what no memory can make possible.
        """
        huge = replace(self.capabilities, total_memory=UNLIMITED, available_memory=UNLIMITED)
        first = replace(_without_size(args), num_gpu_blocks_override=1 << 30)
        endless = resolve(first, self.arch, huge, path=self.path, tokenizer_path=self.path)
        num_blocks = wish.num_sequences * _most_blocks(endless, wish.num_tokens)
        sized = replace(first, num_gpu_blocks_override=num_blocks)
        return resolve(sized, self.arch, huge, path=self.path, tokenizer_path=self.path)


def _without_size(args: EngineArgs) -> EngineArgs:
    return replace(args, gpu_memory_utilization=None, kv_cache_memory_bytes=None, num_gpu_blocks_override=None)


def wished(machine: Machine, args: EngineArgs, wish: Wish) -> EngineArgs:
    """The options with seats and context for the wish: what they are given for, they must allow."""
    seats = machine.capabilities.default_max_num_seqs if args.max_num_seqs is None else args.max_num_seqs
    return replace(
        args,
        max_model_len=max(wish.num_tokens, args.max_model_len or 0),
        max_num_seqs=wish.num_sequences if seats < wish.num_sequences else args.max_num_seqs,
    )


def fits(config: QuireConfig, wish: Wish) -> bool:
    """Whether the wish runs with this configuration, and no sequence is preempted for want of memory."""
    cache = config.cache_config
    needed = wish.num_sequences * _most_blocks(config, wish.num_tokens)
    return (
        needed <= cache.num_blocks
        and wish.num_tokens <= config.model_config.max_model_len
        and wish.num_sequences <= config.scheduler_config.max_num_seqs
    )


def max_concurrency(config: QuireConfig, num_tokens: int) -> int:
    """Sequences of a length that run at once."""
    cache = config.cache_config
    return min(config.scheduler_config.max_num_seqs, cache.num_blocks // _most_blocks(config, num_tokens))


def _most_blocks(config: QuireConfig, num_tokens: int) -> int:
    """KV blocks that a sequence of a length holds at most."""
    return config.kv_layout.most_blocks(num_tokens, config.scheduler_config.max_chunk_tokens)


def max_context(machine: Machine, args: EngineArgs) -> int:
    """The longest context that one sequence can have: all that memory and the model allow.

    Raises: ConfigError when nothing fits.
    """
    return machine.resolve(replace(args, max_model_len=None)).model_config.max_model_len


def changes(machine: Machine, args: EngineArgs, wish: Wish) -> Iterator[Change]:
    """Changes with which the wish fits, the cheapest first. Each is enough by itself."""
    candidates = (
        *_of_size(machine, args, wish),
        *_of_tiers(args),
        *_of_step(args, wish),
        *_of_numbers(machine, args),
    )
    enough: list[Change] = []
    for change in candidates:
        is_more = any(other.options.items() <= change.options.items() for other in enough)
        if not is_more and _would_fit(machine, replace(args, **change.options), wish):
            enough.append(change)
    yield from enough or _together(machine, args, wish, candidates)
    yield from _of_wish(machine, args, wish)


def _together(machine: Machine, args: EngineArgs, wish: Wish, candidates: Sequence[Change]) -> Iterator[Change]:
    """The fewest of the cheapest changes that are enough together, where none is alone."""
    options: dict[str, Any] = {}
    taken: list[Change] = []
    for change in (*_of_most(machine, args), *candidates):
        options |= change.options
        taken.append(change)
        if _would_fit(machine, replace(args, **options), wish):
            break
    else:
        return
    for change in reversed(taken):  # what others made needless, the dearest first
        rest = [other for other in taken if other is not change]
        fewer: dict[str, Any] = {}
        for other in rest:
            fewer |= other.options
        if _would_fit(machine, replace(args, **fewer), wish):
            taken, options = rest, fewer
    yield Change(options=options, cost="; ".join(dict.fromkeys(change.cost for change in taken)))


def _would_fit(machine: Machine, args: EngineArgs, wish: Wish) -> bool:
    try:
        return fits(machine.resolve(args), wish)
    except ConfigError:
        return False


def _of_size(machine: Machine, args: EngineArgs, wish: Wish) -> Iterator[Change]:
    """More of the memory that is there."""
    needed, memory = machine.unlimited(args, wish), machine.capabilities
    cost = FREE_MEMORY
    if args.num_gpu_blocks_override is not None:
        yield Change(options={"num_gpu_blocks_override": needed.cache_config.num_blocks}, cost=cost)
    elif args.kv_cache_memory_bytes is not None:
        yield Change(options={"kv_cache_memory_bytes": needed.memory_plan["kv_cache"]}, cost=cost)
    else:
        total = sum(needed.memory_plan.values()) - needed.memory_plan["loading"]
        share = math.ceil(100 * total / memory.total_memory) / 100
        if share <= LARGEST_SHARE:
            yield Change(options={"gpu_memory_utilization": share}, cost=cost)


def _of_tiers(args: EngineArgs) -> Iterator[Change]:
    """The memory that is kept for evicted blocks."""
    for name in ("kv_ram", "swap_space"):
        if getattr(args, name):
            yield Change(options={name: 0}, cost="evicted blocks are computed again")


def _of_most(machine: Machine, args: EngineArgs) -> Iterator[Change]:
    """All the memory that may be given, where the size of the cache is left to quire."""
    if args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None:
        memory = machine.capabilities
        free = math.floor(100 * memory.available_memory / memory.total_memory) / 100
        share = min(LARGEST_SHARE, free)
        if share > (args.gpu_memory_utilization or memory.default_memory_fraction):
            yield Change(options={"gpu_memory_utilization": share}, cost=FREE_MEMORY)


def _of_step(args: EngineArgs, wish: Wish) -> Iterator[Change]:
    """Smaller steps, with less workspace."""
    if args.max_num_seqs is None or args.max_num_seqs > wish.num_sequences:
        seats = {"max_num_seqs": wish.num_sequences}
        yield Change(options=seats, cost="no seats for further sequences, which wait")
    tokens = max(SMALL_STEP, wish.num_sequences)
    if args.max_num_batched_tokens is None or args.max_num_batched_tokens > tokens:
        small = {"max_num_batched_tokens": tokens}
        if args.max_num_seqs is None or args.max_num_seqs > tokens:
            small["max_num_seqs"] = wish.num_sequences
        yield Change(options=small, cost="prompts are read in smaller steps, slower")


def _of_numbers(machine: Machine, args: EngineArgs) -> Iterator[Change]:
    """Fewer bits, at some loss."""
    dtype = args.dtype if args.dtype != "auto" else machine.arch.dtype
    half = {"dtype": "bfloat16"} if dtype in ("float32", "float") else {}
    sizes = {machine.arch.head_size, *(mixer.heads.head_size for mixer in machine.arch.plain_attentions)}
    rounds_cache = args.kv_cache_dtype not in SCALED_DTYPES and all(size > 0 and size % 4 == 0 for size in sizes)
    cache = {"kv_cache_dtype": "int8"} if rounds_cache and machine.arch.family.compressed is None else {}
    if half:
        yield Change(options=half, cost="weights and activations are rounded to 16 bits")
    if cache:
        yield Change(options=cache, cost="keys and values are rounded to 8 bits")
    for method in ("int8", "int4"):
        is_plain = machine.arch.quantization is None or args.dequantize
        if is_plain and args.quantization in (None, "int8") and args.quantization != method:
            rounded = {"quantization": method}
            cost = f"weights are rounded to {method[3:]} bits"
            yield Change(options=rounded, cost=cost)
            if cache:
                yield Change(options={**rounded, **cache}, cost=f"{cost}, keys and values to 8")


def _of_wish(machine: Machine, args: EngineArgs, wish: Wish) -> Iterator[Change]:
    """Less of what was wished: shorter sequences, fewer sequences."""
    try:
        config = machine.resolve(replace(args, max_model_len=None))
    except ConfigError:
        return
    cache = config.cache_config
    length = min(cache.num_blocks // wish.num_sequences * cache.block_size, machine.longest)
    if 1 < length < wish.num_tokens and _would_fit(
        machine, replace(args, max_model_len=length), replace(wish, num_tokens=length)
    ):
        yield Change(options={"max_model_len": length}, cost="shorter sequences than wished")
    count = max_concurrency(config, wish.num_tokens)
    if 0 < count < wish.num_sequences:
        yield Change(options={"max_num_seqs": count}, cost="fewer sequences at once than wished")
