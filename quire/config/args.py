"""`EngineArgs`: the flat knobs a user turns, and the command-line flags generated from them.

"auto" and None-means-default live only here; `resolve` turns them into values. A knob is written once: its field
carries type, default, help and choices, and the flag, its help text and the keyword of `LLM(...)` follow from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.utils.lazy import nearest


def knob(
    default: Any, help: str, *, choices: tuple[str, ...] = (), aliases: tuple[str, ...] = (), least: float | None = None
) -> Any:
    """A field of `EngineArgs`. `least` is the smallest allowed number."""
    metadata = {"help": help, "choices": choices, "aliases": aliases, "least": least}
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
    kv_cache_memory_bytes: int | None = knob(None, "Bytes of KV cache; overrides the share.", least=1)
    num_gpu_blocks_override: int | None = knob(
        None, "Number of KV blocks; overrides share and bytes.", aliases=("num_blocks",), least=1
    )
    max_num_seqs: int | None = knob(None, "Most sequences in one step.", least=1)
    max_num_batched_tokens: int | None = knob(None, "Most tokens in one step.", least=1)
    long_prefill_token_threshold: int = knob(0, "Most tokens of one prompt in one step; 0 sets no limit.", least=0)
    ops: str = knob("auto", "Implementation of the ops.", choices=("auto", "reference", "cpu"))
    num_threads: int | None = knob(None, "Threads that compute; one per core when left out.", least=1)
    use_tqdm_on_load: bool = knob(True, "Show a progress bar while weights are read.")
    disable_log_stats: bool = knob(False, "Keep no statistics about steps.")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            _check(option, hints[option.name], getattr(self, option.name))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Build from keywords; aliases are understood.

        Raises: ConfigError for an unknown keyword (with the nearest known one) or one quire does not have yet.
        """
        names = {alias: f.name for f in dataclasses.fields(cls) for alias in (f.name, *f.metadata["aliases"])}
        given: dict[str, Any] = {}
        for key, value in options.items():
            if key in NOT_YET and value == NOT_YET[key]:
                continue
            if key in NOT_YET:
                raise ConfigError(
                    f"option {key}={value!r} is not supported yet: only {NOT_YET[key]!r} is. Leave it out."
                )
            if key not in names:
                raise ConfigError(f"unknown option {key!r}{nearest(key, list(names))}")
            if names[key] in given:
                raise ConfigError(f"option {names[key]!r} is given twice (once as {key!r})")
            given[names[key]] = value
        return cls(**given)


NOT_YET: dict[str, Any] = {
    "async_scheduling": False,
    "cpu_offload_gb": 0,
    "data_parallel_size": 1,
    "enable_chunked_prefill": True,
    "enable_lora": False,
    "enforce_eager": True,
    "kv_cache_dtype": "auto",
    "logits_processors": None,
    "pipeline_parallel_size": 1,
    "quantization": None,
    "runner": "generate",
    "scheduling_policy": "fcfs",
    "speculative_config": None,
    "structured_outputs_config": None,
    "swap_space": 0,
    "tensor_parallel_size": 1,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
}
"""Options of the field that quire knows but cannot vary yet, with the one value that describes what it does."""


def _check(option: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    is_bool = isinstance(value, bool)
    right = is_bool if kinds == (bool,) else isinstance(value, kinds) and not is_bool
    if not right and float in kinds and isinstance(value, int) and not is_bool:
        right = True
    if not right:
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"option {option.name} must be {names}, got {value!r} ({type(value).__name__})")
    choices = option.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(
            f"option {option.name} must be one of {', '.join(choices)}, got {value!r}{nearest(value, list(choices))}"
        )
    least = option.metadata["least"]
    if least is not None and value is not None and value < least:
        raise ConfigError(f"option {option.name} must be at least {least}, got {value}")
    if option.name == "gpu_memory_utilization" and value is not None and not 0 < value <= 1:
        raise ConfigError(f"option gpu_memory_utilization must be in (0, 1], got {value}")


def whole_number(text: str) -> int:
    """An integer flag: `4096`, `4k` (thousand), `4K` (1024), `25.6k`, `2GiB`, `1.5G` (2**30).

    Raises: argparse.ArgumentTypeError.
    """
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
    except ValueError as error:
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
