"""`resolve(args, arch, capabilities)`: the only place where an "auto" becomes a value, with its reason."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config.arch import ModelArch
from quire.config.engine import (
    CacheConfig,
    Capabilities,
    Choice,
    CompilationConfig,
    DecodingConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    QuireConfig,
    SchedulerConfig,
)
from quire.config.flags.args import DEFAULT_PRIORITY_AGEING_S, EMBEDDED, EngineArgs
from quire.config.generation_keys import OTHER_NAMES, SAMPLING_KEYS, sampling_defaults, without_effect
from quire.config.gguf.config_json import gguf_generation_config
from quire.config.gguf.files import is_gguf
from quire.config.graph_sizes import graph_sizes
from quire.config.json_file import read_json_object
from quire.config.memory.plan import (
    MemoryPlan,
    MemoryUse,
    check_longest_fits,
    check_memory,
    gib,
    host_bytes_per_block,
    plan_blocks,
    plan_memory,
    requests_bytes,
)
from quire.config.quantized.kv_cache import takes_scales
from quire.config.quantized.resolve import ROUNDING, resolve_quantization
from quire.errors import ConfigError, InvalidParameter, shown
from quire.log import get_logger
from quire.messages.kv import DTYPE_BYTES, KVLayout
from quire.messages.kv_tiers import ALIGNMENT, slot_bytes, slots_in
from quire.sampling_params import SamplingParams
from quire.utils.math import round_up

log = get_logger(__name__)
DEFAULT_KV_DISK_SIZE = 4 << 30
USUAL_STRIDE = 512
"""Tokens between cached states of recurrent layers, at least: steps of so many read the weights seldom enough."""
SMALL_CHUNK = 256
"""Prompts are computed so many tokens at a time, if need be, rather than that the context is shortened."""
DTYPE_ALIASES = {"float": "float32", "half": "float16"}
GPUS = ("cuda", "rocm")
_LIBRARIES = {"guidance": "llguidance"}
"""By vLLM's names of backends."""


@dataclass(slots=True)
class _Choices:
    """Collects each automatic value and its reason."""

    made: dict[str, Choice] = field(default_factory=dict)

    def pick(self, name: str, given: Any, default: Any, reason: str) -> Any:
        """The given value, or the default with its reason."""
        choice = Choice(given, "given") if given is not None else Choice(default, reason)
        self.made[name] = choice
        return choice.value


def resolve(
    args: EngineArgs,
    arch: ModelArch,
    capabilities: Capabilities,
    *,
    path: Path,
    tokenizer_path: Path,
    tokenizer_digest: str = "",
) -> QuireConfig:
    """The frozen configuration. Pure but for reading the model's small JSON files.

    Raises: ConfigError naming options, numbers and remedies.
    """
    choices = _Choices()
    dtype = _resolve_dtype(args, arch, choices)
    kv_cache_dtype = _resolve_kv_cache_dtype(args, arch, dtype, choices)
    scheduler = _resolve_scheduler(args, capabilities, choices)
    given = None if args.structured_outputs_backend == "auto" else args.structured_outputs_backend
    library = choices.pick("structured_outputs_backend", given, "guidance", "the only one")
    block_size = choices.pick("block_size", args.block_size, *_default_block_size(arch, capabilities))
    generation = _read_generation_config(args, path)
    eos_token_ids = _eos_token_ids(arch, {**generation, **args.override_generation_config})
    max_model_len = _resolve_max_model_len(args, arch, choices)
    device = _resolve_device(args, capabilities, choices)
    quant = resolve_quantization(args, arch, device.ops)
    sizes = _resolve_graphs(args, device, scheduler, choices)
    use = MemoryUse(
        dtype=dtype,
        quantization=quant.method,
        dequantize=quant.dequantize,
        ops=device.ops,
        isa=capabilities.ops_isa,
        num_threads=device.num_threads,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_logprobs=_max_logprobs(args, arch),
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        has_grammars=not args.skip_tokenizer_init and bool(eos_token_ids),
        graph_sizes=sizes,
    )
    use = _resolve_states(args, arch, use, choices)
    cache, scheduler, max_model_len, plan = _resolve_memory(args, arch, capabilities, choices, use, scheduler)
    return QuireConfig(
        model_config=ModelConfig(
            model=args.model or EMBEDDED,
            path=path,
            tokenizer_path=tokenizer_path,
            arch=arch,
            dtype=dtype,
            max_model_len=max_model_len,
            max_logprobs=_max_logprobs(args, arch),
            seed=args.seed or 0,
            seed_is_given=args.seed is not None,
            skip_tokenizer_init=args.skip_tokenizer_init,
            tokenizer_digest=tokenizer_digest,
            chat_template=args.chat_template,
            generation_defaults=_generation_defaults(args, generation, choices),
            eos_token_ids=eos_token_ids,
        ),
        cache_config=cache,
        scheduler_config=scheduler,
        device_config=device,
        quant_config=quant,
        load_config=LoadConfig(load_format=args.load_format, show_progress=args.use_tqdm_on_load),
        observability_config=ObservabilityConfig(
            log_stats=not args.disable_log_stats, log_stats_interval_s=args.log_stats_interval
        ),
        compilation_config=CompilationConfig(graph_sizes=sizes),
        decoding_config=DecodingConfig(backend=_LIBRARIES[library]),
        memory_plan=plan.as_dict(),
        choices=choices.made,
    )


def _resolve_device(args: EngineArgs, capabilities: Capabilities, choices: _Choices) -> DeviceConfig:
    given = None if args.ops == "auto" else args.ops
    ops = choices.pick("ops", given, capabilities.ops, capabilities.ops_reason)
    _check_ops(ops, capabilities)
    default, reason = capabilities.num_cores, "one per physical core"
    if args.quantization in ROUNDING and ops == "reference":
        raise ConfigError(
            f"quantization={args.quantization!r} needs the native kernels, and this engine runs the {ops} ops "
            f"({choices.made['ops'].reason}). Install a C++ compiler and quire again, or leave quantization out."
        )
    if ops == "reference":
        default, reason = (
            1,
            "the reference ops compute on one thread: a sum split between several would change its bits",
        )
        if args.num_threads is not None and args.num_threads != 1:
            raise ConfigError(f"num_threads={args.num_threads} with reference ops: {reason}. Leave num_threads out.")
    if not args.batch_invariant and capabilities.device_type not in GPUS:
        raise ConfigError("batch_invariant=False is for GPUs; the kernels of CPUs have nothing faster. Leave it out.")
    num_threads = choices.pick("num_threads", args.num_threads, default, reason)
    return DeviceConfig(
        device_type=capabilities.device_type,
        ops=ops,
        num_threads=num_threads,
        capabilities=capabilities,
        batch_invariant=args.batch_invariant,
    )


def _resolve_graphs(
    args: EngineArgs, device: DeviceConfig, scheduler: SchedulerConfig, choices: _Choices
) -> tuple[int, ...]:
    """How many sequences the steps have that are captured; none where nothing is."""
    if device.device_type not in GPUS:
        return ()
    reason = "steps that compute one token of each sequence are captured"
    is_eager = choices.pick("enforce_eager", args.enforce_eager or None, False, reason)
    return () if is_eager else graph_sizes(scheduler.max_num_seqs)


def _check_ops(ops: str, capabilities: Capabilities) -> None:
    """Raises: ConfigError where the ops do not compute on the device."""
    device = capabilities.device_type
    if device in GPUS and ops != "triton":
        raise ConfigError(
            f"ops={ops!r} compute on CPUs, and device={device!r} runs the Triton ones. Leave one of them out."
        )
    if device == "cpu" and ops == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "ops='triton' compute on GPUs, and this engine runs on the CPU. Leave ops out. (TRITON_INTERPRET=1 "
            "interprets them there, thousands of times slower, for tests.)"
        )


def _resolve_dtype(args: EngineArgs, arch: ModelArch, choices: _Choices) -> str:
    given = None if args.dtype == "auto" else DTYPE_ALIASES.get(args.dtype, args.dtype)
    dtype: str = choices.pick("dtype", given, arch.dtype, "as the checkpoint says")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"the checkpoint's dtype {dtype!r} is not supported; pass dtype= one of {', '.join(DTYPE_BYTES)}"
        )
    return dtype


def _resolve_kv_cache_dtype(args: EngineArgs, arch: ModelArch, dtype: str, choices: _Choices) -> str:
    """auto is what the checkpoint was calibrated for (as with vLLM), or the model's dtype."""
    stored = arch.quantization.kv_cache if arch.quantization is not None else None
    if args.kv_cache_dtype != "auto":
        is_other = stored is not None and stored.has_scales and not takes_scales(stored, args.kv_cache_dtype)
        reason = "given; the checkpoint's scales, of another type, are not used" if is_other else "given"
        choices.made["kv_cache_dtype"] = Choice(args.kv_cache_dtype, reason)
        return args.kv_cache_dtype
    if stored is not None and stored.dtype is None:
        raise ConfigError(
            f"{arch.source}: kv_cache_scheme is {stored.scheme}; quire has symmetric schemes of 8 bits, int or float, "
            f"with a scale for each tensor or head. Pass --kv-cache-dtype {dtype}, or fp8, which scales each token."
        )
    default, reason = (
        (dtype, "the model's") if stored is None else (stored.dtype, "as kv_cache_scheme of config.json says")
    )
    return str(choices.pick("kv_cache_dtype", None, default, reason))


def _resolve_scheduler(args: EngineArgs, machine: Capabilities, choices: _Choices) -> SchedulerConfig:
    default = f"default on {'CPU' if machine.device_type == 'cpu' else machine.name}"
    max_num_seqs = choices.pick("max_num_seqs", args.max_num_seqs, machine.default_max_num_seqs, default)
    if args.max_num_seqs is None and args.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, args.max_num_batched_tokens)
        choices.made["max_num_seqs"] = Choice(max_num_seqs, f"{default}, at most max_num_batched_tokens")
    tokens = choices.pick(
        "max_num_batched_tokens",
        args.max_num_batched_tokens,
        max(machine.default_max_num_batched_tokens, max_num_seqs),
        f"{default}, at least max_num_seqs",
    )
    if tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({max_num_seqs}): a step could not give "
            f"every sequence its token. Raise the first to {max_num_seqs} or lower the second to {tokens}."
        )
    chunk = min(args.long_prefill_token_threshold or tokens, tokens)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_chunk_tokens=chunk,
        policy=args.scheduling_policy,
        priority_ageing_s=_resolve_ageing(args, choices),
        max_steps_in_flight=2 if _resolve_async(args, machine, choices) else 1,
    )


def _resolve_async(args: EngineArgs, machine: Capabilities, choices: _Choices) -> bool:
    """Whether a step is decided while another is computed."""
    has_host = machine.host_memory > 0
    reason = "the device computes beside the host" if has_host else "the model takes all cores"
    return bool(choices.pick("async_scheduling", args.async_scheduling, has_host, reason))


def _resolve_ageing(args: EngineArgs, choices: _Choices) -> float:
    """Seconds; the policy and they are shown among the choices."""
    if args.scheduling_policy == "fcfs":
        choices.made["scheduling_policy"] = Choice("fcfs", "requests are served in order of arrival")
        return 0.0
    choices.made["scheduling_policy"] = Choice(args.scheduling_policy, "given")
    default = DEFAULT_PRIORITY_AGEING_S
    return float(choices.pick("priority_ageing", args.priority_ageing, default, "seconds; default with priorities"))


def _resolve_max_model_len(args: EngineArgs, arch: ModelArch, choices: _Choices) -> int:
    limit = arch.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={args.max_model_len} exceeds the {limit} positions the model was made for "
            "(max_position_embeddings in config.json). Lower it; if the model really supports more, say so with "
            f'hf_overrides={{"max_position_embeddings": {args.max_model_len}}}.'
        )
    length: int = choices.pick("max_model_len", args.max_model_len, limit, "max_position_embeddings of the model")
    return length


def _default_block_size(arch: ModelArch, capabilities: Capabilities) -> tuple[int, str]:
    """Tokens, and why: as the platform prefers, or the most below that which are whole parts of `whole_blocks`."""
    preferred, whole = capabilities.block_size, math.gcd(*arch.whole_blocks)
    size = next(size for size in range(preferred, 0, -1) if whole % size == 0)
    if size == preferred:
        return size, f"preferred on {capabilities.name}"
    return size, f"at most {preferred}, and a divisor of the {whole} tokens that attention takes at a time"


def _max_logprobs(args: EngineArgs, arch: ModelArch) -> int:
    return arch.vocab_size if args.max_logprobs == -1 else args.max_logprobs


def _resolve_states(args: EngineArgs, arch: ModelArch, use: MemoryUse, choices: _Choices) -> MemoryUse:
    """What recurrent layers and compressed attention change: the size of blocks.

    Raises: ConfigError for options that such a model has no use for.
    """
    if not arch.recurrences and arch.family.compressed is None:
        return use
    if not arch.attentions:
        for name, value in (("block_size", args.block_size), ("kv_cache_dtype", args.kv_cache_dtype)):
            if value not in (None, "auto"):
                raise ConfigError(
                    f"{name}={value!r} has no effect: no layer of {arch.source} keeps keys and values, and states are "
                    "float32. Leave it out."
                )
    block_size = arch.kv_layout(use.block_size, use.kv_cache_dtype, ops=use.ops).block_size
    if block_size != use.block_size:
        fitting = f"the fewest times {use.block_size} tokens that take the bytes of a recurrent state"
        if arch.family.compressed is not None:
            fitting = f"the fewest tokens, {use.block_size} or more, that are whole entries of all layers"
        choices.made["block_size"] = Choice(block_size, fitting)
    return replace(use, block_size=block_size)


def _resolve_stride(args: EngineArgs, layout: KVLayout, max_model_len: int, choices: _Choices) -> int:
    """Tokens between the states that are cached; 0 where none are."""
    stride, size = args.state_checkpoint_stride, layout.block_size
    if stride is not None:
        _check_stride(stride, args, layout, max_model_len)
    if not layout.state_groups or args.enable_prefix_caching is False:
        return 0
    usual = round_up(USUAL_STRIDE, size)
    chosen: int = choices.pick("state_checkpoint_stride", stride, usual, f"whole blocks of {size} tokens")
    return chosen


def _check_stride(stride: int, args: EngineArgs, layout: KVLayout, max_model_len: int) -> None:
    size, wrong = layout.block_size, ""
    if not layout.state_groups:
        wrong = "has no effect: the model has no recurrent layers. Leave it out"
    elif args.enable_prefix_caching is False:
        wrong = "has no effect: prefix caching is off. Leave enable_prefix_caching on, or leave it out"
    elif stride % size:
        wrong = f"is no multiple of the block size of {size} tokens. Take {round_up(stride, size)}, or leave it out"
    elif stride >= max_model_len:
        wrong = f"would cache no state: sequences have {max_model_len} tokens at most. Lower it, or leave it out"
    if wrong:
        raise ConfigError(f"state_checkpoint_stride={stride} {wrong}.")


def _resolve_memory(
    args: EngineArgs,
    arch: ModelArch,
    capabilities: Capabilities,
    choices: _Choices,
    use: MemoryUse,
    scheduler: SchedulerConfig,
) -> tuple[CacheConfig, SchedulerConfig, int, MemoryPlan]:
    """Blocks of the KV cache; the limits of a step and the context length, if memory had to lower them."""
    block_size, max_model_len = use.block_size, use.max_model_len
    layout = arch.kv_layout(block_size, use.kv_cache_dtype, ops=use.ops)
    block_bytes = layout.block_bytes
    ram_slots, disk_slots = _resolve_tiers(args, layout)
    use = replace(use, num_ram_slots=ram_slots, num_disk_slots=disk_slots)
    if args.num_gpu_blocks_override is not None:
        num_blocks, reason = args.num_gpu_blocks_override, "given"
    elif args.kv_cache_memory_bytes is not None:
        num_blocks, reason = args.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    else:
        fraction = args.gpu_memory_utilization or capabilities.default_memory_fraction
        most_useful = use.max_num_seqs * layout.most_blocks(max_model_len, scheduler.max_chunk_tokens)
        num_blocks = plan_blocks(
            capabilities,
            plan_memory(arch, use, 0),
            fraction=fraction,
            block_bytes=block_bytes + (0 if capabilities.host_memory else host_bytes_per_block(block_size)),
            most=most_useful,
        )
        reason = (
            "max_num_seqs full sequences" if num_blocks == most_useful else f"{fraction:.0%} of memory, less the rest"
        )
    choices.made["num_blocks"] = Choice(num_blocks, f"{reason}: {gib(num_blocks * block_bytes)}")
    longest = layout.longest(num_blocks, min(SMALL_CHUNK, scheduler.max_chunk_tokens), max_model_len)
    if args.max_model_len is None and 0 < longest < max_model_len:
        max_model_len = longest
        choices.made["max_model_len"] = Choice(max_model_len, "all that the KV cache holds")
    use = replace(use, max_model_len=max_model_len)
    plan = plan_memory(arch, use, num_blocks)
    check_memory(plan, capabilities)
    check_longest_fits(layout, num_blocks, max_model_len, scheduler.max_chunk_tokens)
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=args.enable_prefix_caching is not False,
        dtype=use.kv_cache_dtype,
        num_groups=len(layout.groups) - len(layout.state_groups),
        num_state_groups=len(layout.state_groups),
        state_checkpoint_stride=_resolve_stride(args, layout, max_model_len, choices),
        num_ram_slots=use.num_ram_slots,
        kv_disk="" if args.kv_disk is None else str(Path(args.kv_disk).expanduser().absolute()),
        num_disk_slots=use.num_disk_slots,
        kv_load_min_tokens=args.kv_load_min_tokens,
    )
    scheduler = replace(scheduler, max_request_bytes=requests_bytes(arch.vocab_size, use))
    return cache, _fit_chunks(layout, num_blocks, scheduler, max_model_len, choices), max_model_len, plan


def _resolve_tiers(args: EngineArgs, layout: KVLayout) -> tuple[int, int]:
    """How many evicted pages are kept in memory, and how many in a file."""
    num_bytes = args.kv_ram if args.swap_space is None else int(args.swap_space * 2**30)
    if args.kv_disk is None and args.kv_disk_size is not None:
        raise ConfigError("kv_disk_size has no effect without kv_disk; give a directory, or leave it out")
    if not num_bytes and args.kv_disk is None:
        if args.kv_load_min_tokens is not None:
            raise ConfigError("kv_load_min_tokens has no effect without kv_ram or kv_disk; give one, or leave it out")
        return 0, 0
    if args.enable_prefix_caching is False:
        raise ConfigError(
            "kv_ram, swap_space and kv_disk keep blocks that are found by their content, and prefix caching is off. "
            "Leave enable_prefix_caching on, or leave them out."
        )
    page, size = layout.block_bytes, layout.block_size
    in_memory = in_file = 0
    if num_bytes:
        name = "kv_ram" if args.swap_space is None else "swap_space"
        in_memory = _slots(name, num_bytes, num_bytes // page, page)
    if args.kv_disk is not None:
        file = args.kv_disk_size or DEFAULT_KV_DISK_SIZE
        least = slot_bytes(page, size) + ALIGNMENT
        in_file = _slots("kv_disk_size", file, slots_in(file, page, size), least)
    return in_memory, in_file


def _slots(name: str, num_bytes: int, num_slots: int, least: int) -> int:
    if num_slots == 0:
        raise ConfigError(f"{name} of {num_bytes} bytes has no room for a single KV block, which takes {least}")
    return num_slots


def _fit_chunks(
    layout: KVLayout, num_blocks: int, scheduler: SchedulerConfig, max_model_len: int, choices: _Choices
) -> SchedulerConfig:
    """Chunks of a size with which the longest sequence fits: what a window holds grows with them."""
    chunk = layout.largest_chunk(num_blocks, max_model_len, scheduler.max_chunk_tokens)
    if chunk == scheduler.max_chunk_tokens:
        return scheduler
    reason = f"with larger ones {num_blocks} blocks would not hold a sequence of {max_model_len} tokens"
    choices.made["max_chunk_tokens"] = Choice(chunk, reason)
    return replace(scheduler, max_chunk_tokens=chunk)


def _read_generation_config(args: EngineArgs, path: Path) -> Mapping[str, Any]:
    """generation_config.json; its end-of-sequence ids count even where its sampling values are ignored."""
    given = args.generation_config
    if is_gguf(path) and given in ("auto", "vllm", "none"):
        return gguf_generation_config(path)
    file = (path if given in ("auto", "vllm", "none") else Path(given)) / "generation_config.json"
    values = read_json_object(file, "Mend or remove it.")
    if values is None and given not in ("auto", "vllm", "none"):
        raise ConfigError(
            f"generation_config={given!r}: no file {file}. Give a directory that has one, or auto, vllm or none."
        )
    return values or {}


def _generation_defaults(args: EngineArgs, generation: Mapping[str, Any], choices: _Choices) -> dict[str, Any]:
    """SamplingParams fields set by the model; checked once, here."""
    ignored = args.generation_config in ("vllm", "none")
    known = (*SAMPLING_KEYS, *OTHER_NAMES, "eos_token_id")
    unknown = set(args.override_generation_config).difference(known)
    if unknown:
        raise ConfigError(
            f"override_generation_config: {', '.join(sorted(map(str, unknown)))} would have no effect; known are "
            f"{', '.join(known)}"
        )
    defaults = _checked_defaults({**({} if ignored else generation), **args.override_generation_config})
    silent = [] if ignored else without_effect(generation)
    if args.skip_tokenizer_init and defaults.pop("stop", None):
        silent.append("stop_strings (without a tokenizer)")
    if silent:
        log.warning("generation_config.json sets what has no effect: %s", ", ".join(silent))
    source = "override_generation_config" if ignored else "generation_config.json"
    if defaults:
        choices.made["default sampling"] = Choice(defaults, source)
    return defaults


def _checked_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: ConfigError for what SamplingParams refuse."""
    defaults = sampling_defaults(generation)
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        key = next((f"{key}: " for key, field in OTHER_NAMES.items() if field == error.parameter), "")
        raise ConfigError(
            f"generation_config.json or override_generation_config: {key}{error} Correct it, "
            "or pass generation_config='none'."
        ) from None
    return defaults


def _eos_token_ids(arch: ModelArch, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The config's ids first, then those that generation_config.json adds."""
    extra = generation.get("eos_token_id")
    more = extra if isinstance(extra, list) else [] if extra is None else [extra]
    for token_id in more:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < arch.vocab_size:
            raise ConfigError(
                f"generation_config.json or override_generation_config: eos_token_id {shown(token_id)} is not a token "
                f"id below {arch.vocab_size}; correct it"
            )
    return tuple(dict.fromkeys([*arch.eos_token_ids, *more]))
