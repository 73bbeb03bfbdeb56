"""`EngineArgs`: the flat knobs a user turns, and the command-line flags generated from them.

"auto" and None-means-default live only here; `resolve` turns them into values. A knob is written once: its field
carries type, default, help and choices, and the flag, its help text and the keyword of `LLM(...)` follow from it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from quire.errors import ConfigError, shown
from quire.utils.lazy import nearest


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    least: int | None = None,
    most: int = 2**63 - 1,
) -> Any:
    """A field of `EngineArgs`. `least` and `most` bound integers."""
    metadata = {"help": help, "choices": choices, "aliases": aliases, "least": least, "most": most}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What can be said about an engine. Names follow vLLM's where the idea is the same.

    Raises: ConfigError naming the option, the value and what is allowed.
    """

    model: str | None = knob(None, "Directory or hub id (org/name) of the model; the embedded one when left out.")
    tokenizer: str | None = knob(None, "Directory or hub id of the tokenizer; the model's own when left out.")
    revision: str | None = knob(None, "Branch, tag or commit of the hub repository.")
    dtype: str = knob(
        "auto",
        "Type of weights and activations; auto takes the checkpoint's.",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )
    max_model_len: int | None = knob(None, "Longest context in tokens; as the model says when left out.", least=2)
    quantization: str | None = knob(
        None, "Round the weights to integers while they are read; no calibration.", choices=("int8", "int4")
    )
    load_format: str = knob(
        "auto", "How weights are read; dummy makes random ones.", choices=("auto", "safetensors", "dummy")
    )
    hf_overrides: dict[str, Any] = knob({}, "Values that replace those of config.json.")
    seed: int = knob(0, "Base of the seeds drawn for requests without one.", least=0)
    generation_config: str = knob(
        "auto", "Default sampling: auto reads generation_config.json, vllm or none ignores it, or a directory."
    )
    override_generation_config: dict[str, Any] = knob({}, "Values that replace those of generation_config.json.")
    max_logprobs: int = knob(20, "Most logprobs a request may ask for; -1 sets no limit.", least=-1)
    skip_tokenizer_init: bool = knob(False, "Take and give token ids only.")
    chat_template: str | None = knob(None, "File with the chat template, or the template itself.")
    enable_prefix_caching: bool = knob(True, "Reuse the KV cache of equal prefixes.")
    block_size: int | None = knob(None, "Tokens per KV block.", least=1)
    gpu_memory_utilization: float | None = knob(
        None,
        "Share of the device's memory the engine may use.",
        aliases=("memory_fraction", "device_memory_utilization"),
    )
    kv_cache_memory_bytes: int | None = knob(None, "Bytes of KV cache, instead of a share of the memory.", least=1)
    num_gpu_blocks_override: int | None = knob(
        None, "Number of KV blocks, instead of share or bytes.", aliases=("num_blocks",), least=1
    )
    max_num_seqs: int | None = knob(None, "Most sequences in one step.", least=1)
    max_num_batched_tokens: int | None = knob(None, "Most tokens in one step.", least=1)
    long_prefill_token_threshold: int = knob(0, "Most tokens of one prompt in one step; 0 sets no limit.", least=0)
    ops: str = knob("auto", "Implementation of the ops.", choices=("auto", "reference", "cpu"))
    num_threads: int | None = knob(None, "Threads that compute; one per core when left out.", least=1, most=1024)
    use_tqdm_on_load: bool = knob(True, "Show a progress bar while weights are read.")
    disable_log_stats: bool = knob(False, "Keep no statistics about steps.")

    def __new__(cls, *values: Any, **given: Any) -> EngineArgs:
        """Refuse what has no name or an unknown one before the generated `__init__` raises its TypeError."""
        if values:
            raise ConfigError(f"EngineArgs takes keywords only; got {shown(values[0])} without a name")
        names = [option.name for option in dataclasses.fields(cls)]
        for key, value in given.items():
            if key not in names:
                raise _unknown(key, value, names)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            value = _read(option, hints[option.name], getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        for names in CONTRADICTIONS:
            given = [name for name in names if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise ConfigError(f"options {' and '.join(given)} contradict each other; give one of them")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Build from keywords; aliases are understood.

        Raises: ConfigError for an unknown keyword (with the nearest known one) or one quire does not have yet.
        """
        names = {alias: f.name for f in dataclasses.fields(cls) for alias in (f.name, *f.metadata["aliases"])}
        given: dict[str, Any] = {}
        for key, value in options.items():
            if any(type(value) is type(allowed) and value == allowed for allowed in NOT_YET.get(key, ())):
                continue
            if key not in names:
                raise _unknown(key, value, list(names))
            if names[key] in given:
                raise ConfigError(f"option {names[key]!r} is given twice (once as {key!r})")
            given[names[key]] = value
        return cls(**given)


CONTRADICTIONS = (
    ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    ("skip_tokenizer_init", "tokenizer"),
    ("skip_tokenizer_init", "chat_template"),
)
"""Of each group at most one option may be set; a second one would have no effect."""

NOT_YET: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "async_scheduling": (False, None),
    "compilation_config": (None,),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (False, True),
    "distributed_executor_backend": (None,),
    "enable_chunked_prefill": (True, None),
    "enable_lora": (False, None),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "enforce_eager": (True, False),
    "hf_token": (None,),
    "kv_cache_dtype": ("auto",),
    "limit_mm_per_prompt": (None,),
    "logits_processors": (None,),
    "mm_processor_kwargs": (None,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "quantization_config": (None,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "speculative_config": (None,),
    "structured_outputs_config": (None,),
    "swap_space": (0,),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}
"""Options of the field that quire knows but cannot vary yet, with the values that describe what it does anyway."""


def why_not_yet(key: str) -> str:
    """The end of a sentence about an option of NOT_YET; empty for others."""
    if key not in NOT_YET:
        return ""
    return f"is not supported yet: only {' or '.join(map(repr, NOT_YET[key]))} is. Leave it out."


def _unknown(key: str, value: object, known: list[str]) -> ConfigError:
    why = why_not_yet(key)
    if why:
        return ConfigError(f"option {key}={shown(value)} {why}")
    return ConfigError(f"unknown option {shown(key)}{nearest(key, known)}")


def _read(option: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """The option as a plain value of its kind; paths and the numbers of numpy are understood.

    Raises: ConfigError naming the option, the value and what is allowed.
    """
    kinds = tuple(
        typing.get_origin(kind) or kind
        for kind in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
    )
    value = _plain(value, kinds)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"option {option.name} must be {names}, got {shown(value)} ({type(value).__name__})")
    choices = option.metadata["choices"]
    if choices and value is not None and value not in choices:
        raise ConfigError(
            f"option {option.name} must be one of {', '.join(choices)}, got {shown(value)}"
            f"{nearest(value, list(choices))}"
        )
    if isinstance(value, str) and not value:
        raise ConfigError(f"option {option.name} is an empty string; leave it out, or say what is meant")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise ConfigError(f"option {option.name} must have strings as keys, got {shown(list(value))}")
    _check_range(option, value)
    return value


def _plain(value: Any, kinds: tuple[Any, ...]) -> Any:
    if isinstance(value, bool):
        return value
    if int in kinds and isinstance(value, Integral):
        return int(value)
    if float in kinds and isinstance(value, Real):
        with contextlib.suppress(OverflowError):
            return float(value)
    if str in kinds and isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _check_range(option: dataclasses.Field[Any], value: object) -> None:
    least, most = option.metadata["least"], option.metadata["most"]
    if isinstance(value, int) and least is not None and value < least:
        raise ConfigError(f"option {option.name} must be at least {least}, got {shown(value)}")
    if isinstance(value, int) and value > most:
        raise ConfigError(f"option {option.name} must be at most {most}, got {shown(value)}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ConfigError(f"option {option.name} must be in (0, 1], got {value}")


def whole_number(text: str) -> int:
    """An integer flag: `4096`, `4k` (thousand), `4K` (1024), `25.6k`, `2GiB`, `1.5G` (2**30).

    Raises: argparse.ArgumentTypeError.
    """
    if text.lstrip("+-").isdecimal() and len(text) < 100:
        return int(text)  # a float would lose digits
    units = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
    number = text.removesuffix("iB").removesuffix("B") if text[-1:] == "B" else text
    unit = units.get(number[-1:], 1)
    try:
        value = float(number[:-1] if unit > 1 else number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4k, 4K or 2GiB") from None
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def add_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """One flag per field of `EngineArgs`; absent flags leave no attribute, so that defaults stay in one place."""
    hints = typing.get_type_hints(EngineArgs)
    group = parser.add_argument_group("engine")
    for option in dataclasses.fields(EngineArgs):
        if option.name in skip:
            continue
        flags = ["--" + name.replace("_", "-") for name in (option.name, *option.metadata["aliases"])]
        default = {} if option.default is dataclasses.MISSING else option.default
        help_text = option.metadata["help"] + ("" if default in (None, {}) else f" (default: {default})")
        kind = _parser_of(hints[option.name])
        if kind is bool:
            group.add_argument(
                *flags,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
            continue
        choices = option.metadata["choices"] or None
        metavar = None if choices else option.name.rpartition("_")[2].upper()
        group.add_argument(
            *flags,
            dest=option.name,
            type=kind,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=metavar,
            help=help_text,
        )


def _parser_of(hint: Any) -> Callable[[str], Any]:
    text = str(hint)
    if "dict" in text:
        return _json_object
    if hint is bool:
        return bool
    return whole_number if "int" in text else float if "float" in text else str


def from_namespace(namespace: argparse.Namespace) -> EngineArgs:
    """The `EngineArgs` of parsed flags; attributes that are not engine options are left alone."""
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    return EngineArgs(**{name: value for name, value in vars(namespace).items() if name in names})
