"""`EngineArgs`: the flat knobs a user turns, and the command-line flags generated from them.

"auto" and None-means-default live only here; `resolve` turns them into values. A knob is written once: its field
carries type, default, help and choices, and the flag, its help text and the keyword of `LLM(...)` follow from it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.flags import foreign
from quire.config.flags.knobs import add_knob_flags, knob, knobs_from_namespace, read_knobs, short_repr, signature_of
from quire.config.quantized.config import METHODS
from quire.errors import ConfigError, shown
from quire.utils.lazy import nearest

EMBEDDED = "quire-tiny"
"""Name of the embedded model."""
DEFAULT_PRIORITY_AGEING_S = 60


_ROUNDED = (
    "such checkpoints are not read. Give the original model, and int8 or int4 to round its weights while they are read."
)
_NO_FP8 = "nothing is computed in 8-bit floats. Use bfloat16; --kv-cache-dtype fp8 where memory is short."
_ONE_LIBRARY = "llguidance keeps the form of outputs. Use guidance."
_NO_XGRAMMAR = (
    "it takes schemas that its outputs then break (allOf, ipv4, pattern with maxLength, enum with a type), has no "
    "grammar for calls between tokens, and needs torch in processes that have none. Use guidance."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineArgs:
    """What can be said about an engine. Names follow vLLM's where the idea is the same.

    Raises: ConfigError naming the option, the value and what is allowed.
    """

    model: str | None = knob(
        None,
        f"Directory, hub id (org/name) or short name (qwen3:0.6b) of the model; {EMBEDDED}, the embedded one, when "
        "left out.",
        short="-m",
    )
    tokenizer: str | None = knob(None, "Directory or hub id of the tokenizer; the model's own when left out.")
    revision: str | None = knob(None, "Branch, tag or commit of the hub repository.")
    dtype: str = knob(
        "auto",
        "Type of weights and activations; auto takes the checkpoint's.",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
        spellings={"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"},
        refusals=dict.fromkeys(("fp8", "float8", "fp8_e4m3", "fp8_e5m2"), _NO_FP8),
    )
    max_model_len: int | None = knob(
        None, "Longest context in tokens; as the model says when left out.", short="-c", least=2
    )
    quantization: str | None = knob(
        None,
        "Round plain weights to integers (int8, int4) while they are read, without calibration. A checkpoint that was "
        "quantised before says so itself; its method may be given, too.",
        choices=("int8", "int4", *METHODS),
        spellings={
            "gptq_marlin": "gptq",
            "auto_gptq": "gptq",
            "awq_marlin": "awq",
            "auto_awq": "awq",
            "auto_round": "auto-round",
            "bnb": "bitsandbytes",
            "gpt_oss_mxfp4": "mxfp4",
            **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
        },
        refusals={
            **dict.fromkeys(("marlin", "hqq", "aqlm", "quanto"), _ROUNDED),
            "nvfp4": _ROUNDED,
            **dict.fromkeys(("q4_0", "q4_k_m", "q8_0"), _ROUNDED),
        },
    )
    dequantize: bool = knob(
        False,
        "Make plain weights of the model's dtype of those that the checkpoint has quantised: as exact, but larger and "
        "slower.",
    )
    load_format: str = knob(
        "auto",
        "How weights are read; dummy makes random ones.",
        choices=("auto", "safetensors", "gguf", "dummy"),
        refusals={
            "pt": "pickled weights are never opened. Convert the model to safetensors.",
            **dict.fromkeys(
                (
                    "npcache",
                    "bitsandbytes",
                    "sharded_state",
                    "tensorizer",
                    "runai_streamer",
                    "mistral",
                    "fastsafetensors",
                ),
                "weights are read from *.safetensors files; leave the option out.",
            ),
        },
    )
    model_impl: str = knob(
        "auto",
        "Who builds the model: quire, transformers, or auto, which asks transformers for models that quire does not "
        "have.",
        choices=("auto", "quire", "transformers"),
        spellings={"vllm": "quire"},
        refusals={"terratorch": "it is not built; transformers runs models that quire does not have."},
    )
    hf_overrides: dict[str, Any] = knob({}, "Values that replace those of config.json.")
    seed: int | None = knob(
        None,
        "Base of the seeds drawn for requests without one. When left out, LLM draws the same ones in every run, and a "
        "server new ones.",
        least=0,
    )
    generation_config: str = knob(
        "auto", "Default sampling: auto reads generation_config.json, vllm or none ignores it, or a directory."
    )
    override_generation_config: dict[str, Any] = knob({}, "Values that replace those of generation_config.json.")
    max_logprobs: int = knob(20, "Most logprobs a request may ask for; -1 sets no limit.", least=-1)
    skip_tokenizer_init: bool = knob(False, "Take and give token ids only.")
    chat_template: str | None = knob(None, "File with the chat template, or the template itself.")
    enable_prefix_caching: bool | None = knob(None, "Reuse the KV cache of equal prefixes; on when left out.")
    state_checkpoint_stride: int | None = knob(
        None,
        "Tokens between the states of recurrent layers that are cached for equal prefixes, a multiple of the block "
        "size; when left out the fewest from 512 on.",
        least=1,
    )
    kv_cache_dtype: str = knob(
        "auto",
        "Type of cached keys and values; auto takes the model's, or that of the checkpoint's kv_cache_scheme. int8 and "
        "fp8 (e4m3) halve a 16-bit one and add a scale per token.",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
        spellings={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8"},
        refusals=dict.fromkeys(("fp8_e5m2", "fp8_inc"), "8-bit floats of the KV cache are e4m3. Use fp8."),
    )
    block_size: int | None = knob(None, "Tokens per KV block; what the ops prefer when left out (32 on CPUs).", least=1)
    gpu_memory_utilization: float | None = knob(
        None,
        "Share of the device's memory the engine may use.",
        placeholder="SHARE",
        aliases=("memory_fraction", "device_memory_utilization"),
    )
    kv_cache_memory_bytes: int | None = knob(None, "Bytes of KV cache, instead of a share of the memory.", least=1)
    num_gpu_blocks_override: int | None = knob(
        None, "Number of KV blocks, instead of share or bytes.", aliases=("num_blocks",), least=1
    )
    kv_ram: int | None = knob(
        None,
        "Bytes of memory for KV blocks that the cache evicts; they are loaded when they are wanted again.",
        placeholder="BYTES",
        least=0,
    )
    swap_space: float | None = knob(
        None, "--kv-ram in GiB, as vLLM spells it.", placeholder="GIB", least=0, most=1 << 30
    )
    kv_disk: str | None = knob(
        None,
        "Directory of a file for KV blocks that leave kv_ram, or the cache without one; a restart finds them again. "
        "One engine uses it at a time.",
        placeholder="DIR",
    )
    kv_disk_size: int | None = knob(
        None, "Size of the file of --kv-disk; 4 GiB when left out.", placeholder="BYTES", least=1
    )
    kv_load_min_tokens: int | None = knob(
        None,
        "Shortest prefix in tokens that is loaded from kv_ram or kv_disk; measured at the start when left out.",
        least=1,
    )
    max_num_seqs: int | None = knob(None, "Most sequences in one step; `quire env` shows the default.", least=1)
    max_num_batched_tokens: int | None = knob(None, "Most tokens in one step; `quire env` shows the default.", least=1)
    long_prefill_token_threshold: int = knob(0, "Most tokens of one prompt in one step; 0 sets no limit.", least=0)
    scheduling_policy: str = knob(
        "fcfs",
        "Who is served first: fcfs takes requests in order of arrival, priority those with a lower priority.",
        choices=("fcfs", "priority"),
    )
    priority_ageing: float | None = knob(
        None,
        "Seconds of waiting that count as much as a priority that is lower by one, with --scheduling-policy priority; "
        f"0: waiting does not count. {DEFAULT_PRIORITY_AGEING_S} when left out.",
        placeholder="SECONDS",
        least=0,
        most=10**9,
    )
    async_scheduling: bool | None = knob(
        None,
        "Decide the next step while one is computed; when left out, where a device computes beside the host.",
    )
    enforce_eager: bool = knob(
        False,
        "Run all steps of a GPU op by op; else those that compute one token of each sequence are replayed from CUDA "
        "graphs. Steps of a CPU stay as they are.",
    )
    batch_invariant: bool = knob(
        True,
        "Give a request the same tokens whatever else runs. Without it, products of many rows go to the GPU's library, "
        "which is a little faster and adds up by the size of the step. CPUs keep the promise always.",
    )
    structured_outputs_backend: str = knob(
        "auto",
        "Library that keeps the form of outputs; guidance, which is llguidance, is the only one.",
        choices=("auto", "guidance"),
        spellings={"llguidance": "guidance"},
        refusals={"xgrammar": _NO_XGRAMMAR, **dict.fromkeys(("outlines", "lm-format-enforcer"), _ONE_LIBRARY)},
    )
    device: str = knob(
        "auto",
        "Where the model runs: cpu, or cuda or rocm, which auto never takes yet, or a device of a plug-in.",
    )
    ops: str = knob("auto", "Implementation of the ops.", choices=("auto", "reference", "cpu", "triton"))
    num_threads: int | None = knob(None, "Threads that compute; one per physical core unless given.", least=1, most=512)
    use_tqdm_on_load: bool = knob(True, "Show a progress bar while weights are read.")
    disable_log_stats: bool = knob(False, "Keep no statistics about steps, and log no status line.")
    log_stats_interval: int = knob(
        5, "Seconds between the status lines of a server or an AsyncLLMEngine that has work; 0: none.", least=0
    )

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
        read_knobs(self)
        for names in CONTRADICTIONS:
            given = [name for name in names if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise ConfigError(f"options {' and '.join(given)} contradict each other; give one of them")
        if self.priority_ageing is not None and self.scheduling_policy != "priority":
            raise ConfigError(
                f"priority_ageing={self.priority_ageing:g} has no effect with scheduling_policy="
                f"{self.scheduling_policy!r}: set scheduling_policy to 'priority', or leave priority_ageing out"
            )

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        return short_repr(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Build from keywords; aliases are understood.

        Raises: ConfigError for an unknown keyword (with the nearest known one) or one quire does not have yet.
        """
        names = {alias: f.name for f in dataclasses.fields(cls) for alias in (f.name, *f.metadata["aliases"])}
        given: dict[str, Any] = {}
        for key, value in options.items():
            if key in foreign.ENGINE and foreign.ENGINE[key].takes(value):
                continue
            if key not in names:
                raise _unknown(key, value, list(names))
            if names[key] in given:
                raise ConfigError(f"option {names[key]!r} is given twice (once as {key!r})")
            given[names[key]] = value
        return cls(**given)


EngineArgs.__signature__ = signature_of(EngineArgs)  # type: ignore[attr-defined]

CONTRADICTIONS = (
    ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    ("kv_ram", "swap_space"),
    ("skip_tokenizer_init", "tokenizer"),
    ("skip_tokenizer_init", "chat_template"),
)
"""Of each group at most one option may be set; a second one would have no effect."""


def _unknown(key: str, value: object, known: list[str]) -> ConfigError:
    if key in foreign.ENGINE:
        return ConfigError(f"option {key}={shown(value)} {foreign.ENGINE[key].refusal}")
    return ConfigError(f"unknown option {shown(key)}{nearest(key, known)}")


def add_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """One flag per field of `EngineArgs`; absent flags leave no attribute, so that defaults stay in one place."""
    add_knob_flags(parser, EngineArgs, "engine", skip)
    foreign.add_foreign_flags(parser, foreign.ENGINE)


def from_namespace(namespace: argparse.Namespace) -> EngineArgs:
    """The `EngineArgs` of parsed flags; attributes that are not engine options are left alone."""
    return knobs_from_namespace(namespace, EngineArgs)
