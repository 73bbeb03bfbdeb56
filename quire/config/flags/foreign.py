"""Options of vLLM's that quire knows and does not vary: the values that say what it does anyway, and why no others.

Whoever comes with a command line of vLLM's learns of each flag what it would mean here, instead of "unknown".
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.errors import UnsupportedFeature, shown
from quire.utils.lazy import nearest


@dataclass(frozen=True, slots=True)
class Foreign:
    """One such option."""

    why: str
    """What quire does, or what to use instead."""
    accepts: tuple[Any, ...] = ()
    """Values that describe what quire does anyway."""
    short: str | None = None
    """Another spelling of the flag."""
    never: bool = False
    """Whether quire is not meant to have it either."""

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return any(isinstance(value, bool) for value in self.accepts)

    @property
    def refusal(self) -> str:
        """The end of a sentence that begins with the option."""
        allowed = [repr(value) for value in self.accepts if value is not None]
        only = f" only {' or '.join(allowed)} is;" if allowed else ""
        return f"is not supported{'' if self.never else ' yet'}:{only} {self.why}"

    def takes(self, value: object) -> bool:
        """Whether a value of a keyword changes nothing."""
        return any(type(value) is type(allowed) and value == allowed for allowed in self.accepts)

    def takes_words(self, words: Sequence[str]) -> bool:
        """Whether the words after a flag change nothing."""
        return list(words) in ([str(value)] for value in self.accepts if value is not None)


_DEVICES = "quire runs on one device and uses its cores (--num-threads)."
_LORA = "there are no adapters; merge them into the checkpoint."
_MEDIA = "models take text only."
_TOOL_SERVER = "tools are run by the client that offers them."
_COMPILER = "nothing is compiled; leave it out."
_OFFLOAD = "weights stay in memory; --quantization makes them smaller."
_POOLING = "quire generates text; embeddings, scores and classes are not built yet."
_CODE = "quire never runs code from a model repository, nor code that is named in an option."
_CONNECTOR = "there is no transfer of KV caches between servers."
_DRAFTS = "there is no speculative decoding."

ENGINE: Mapping[str, Foreign] = {
    "additional_config": Foreign("there are no platform plugins."),
    "allowed_local_media_path": Foreign(_MEDIA, ("",)),
    "allowed_media_domains": Foreign(_MEDIA, (None,)),
    "attention_backend": Foreign("--ops chooses the implementation of all ops."),
    "attention_config": Foreign("--ops chooses the implementation of all ops."),
    "code_revision": Foreign(_CODE, (None,), never=True),
    "compilation_config": Foreign(_COMPILER, (None,), "-cc"),
    "convert": Foreign(_POOLING, ("auto", "none")),
    "cpu_offload_gb": Foreign(_OFFLOAD, (0,)),
    "data_parallel_size": Foreign("start several servers behind a balancer.", (1,), "-dp"),
    "disable_custom_all_reduce": Foreign(_DEVICES, (False, True)),
    "distributed_executor_backend": Foreign(_DEVICES, (None, "uni")),
    "download_dir": Foreign("HF_HOME says where the hub's files are kept.", (None,)),
    "enable_chunked_prefill": Foreign("prompts are always computed in chunks; --max-num-batched-tokens.", (True, None)),
    "enable_expert_parallel": Foreign(_DEVICES, (False,), "-ep"),
    "enable_lora": Foreign(_LORA, (False, None)),
    "enable_prompt_embeds": Foreign("prompts are text or token ids.", (False,)),
    "enable_sleep_mode": Foreign("stop the server instead: it is ready again within seconds.", (False,)),
    "hf_config_path": Foreign("config.json is read from the model's directory; --hf-overrides changes its values."),
    "hf_token": Foreign("set HF_TOKEN: a command line can be read by others.", (None,)),
    "kv_cache_metrics": Foreign("/metrics and /v1/stats tell about the KV cache.", (False,)),
    "kv_events_config": Foreign(_CONNECTOR, (None,)),
    "kv_offloading_size": Foreign("--kv-ram keeps KV blocks that the cache evicts.", (None,)),
    "kv_transfer_config": Foreign(_CONNECTOR, (None,)),
    "limit_mm_per_prompt": Foreign(_MEDIA, (None,)),
    "logits_processors": Foreign(_CODE, (None,), never=True),
    "logprobs_mode": Foreign("logprobs are those of the model, before any sampling parameter.", ("raw_logprobs",)),
    "max_cpu_loras": Foreign(_LORA, (None,)),
    "max_lora_rank": Foreign(_LORA),
    "max_loras": Foreign(_LORA),
    "mm_processor_cache_gb": Foreign(_MEDIA),
    "mm_processor_kwargs": Foreign(_MEDIA, (None,)),
    "nnodes": Foreign(_DEVICES, (1,), "-n"),
    "optimization_level": Foreign(_COMPILER),
    "performance_mode": Foreign(_COMPILER, ("balanced",)),
    "pipeline_parallel_size": Foreign(_DEVICES, (1,), "-pp"),
    "pooler_config": Foreign(_POOLING, (None,)),
    "prefix_caching_hash_algo": Foreign("what is found in the prefix cache is compared token by token; leave it out."),
    "profiler_config": Foreign("x-quire-why: 1 tells where the time of a request went.", (None,)),
    "quantization_config": Foreign("--quantization rounds a checkpoint while it is read.", (None,)),
    "runner": Foreign(_POOLING, ("auto", "generate")),
    "safetensors_load_strategy": Foreign("weights are read from mapped files.", ("lazy",)),
    "spec_method": Foreign(_DRAFTS, (None,)),
    "spec_model": Foreign(_DRAFTS, (None,)),
    "speculative_config": Foreign(_DRAFTS, (None,), "-sc"),
    "structured_outputs_config": Foreign("give --structured-outputs-backend; requests say the rest.", (None,)),
    "task": Foreign(_POOLING, ("auto", "generate")),
    "tensor_parallel_size": Foreign(_DEVICES, (1,), "-tp"),
    "tokenizer_mode": Foreign("tokenizer.json or tokenizer.model is read, whichever there is.", ("auto",)),
    "tokenizer_revision": Foreign("--revision holds for model and tokenizer.", (None,)),
    "trust_remote_code": Foreign(_CODE, (False,), never=True),
}
"""By keyword of `LLM(...)`; flags of every command that loads a model."""

SERVER: Mapping[str, Foreign] = {
    "chat_template_content_format": Foreign("a template is given what it asks for.", ("auto",)),
    "disable_access_log_for_endpoints": Foreign("there is no access log; --enable-log-requests logs requests."),
    "disable_log_requests": Foreign("--enable-log-requests logs them.", (True, False)),
    "disable_uvicorn_access_log": Foreign("--enable-log-requests logs requests when they end.", (True,)),
    "enable_auto_tool_choice": Foreign("the model decides whenever a request offers tools.", (True,)),
    "enable_log_outputs": Foreign("neither prompts nor answers are ever logged.", (False,)),
    "enable_per_request_metrics": Foreign("a request with the header x-quire-why: 1 gets them.", (False,)),
    "enable_prompt_tokens_details": Foreign("usage always has cached_tokens.", (True,)),
    "enable_request_id_headers": Foreign("every reply has X-Request-Id.", (True,)),
    "enable_server_load_tracking": Foreign("/load always answers.", (True,)),
    "enable_ssl_refresh": Foreign("restart the server, or let a proxy do TLS.", (False,)),
    "fingerprint_mode": Foreign("system_fingerprint is a hash of version, model and how it is computed.", ("hash",)),
    "headless": Foreign(_DEVICES, (False,)),
    "logging_config": Foreign("--log-level and --log-format say what is logged and how."),
    "lora_modules": Foreign(_LORA, (None,)),
    "max_log_len": Foreign("neither prompts nor answers are ever logged; leave it out."),
    "middleware": Foreign(_CODE, never=True),
    "ssl_cert_reqs": Foreign("--ssl-ca-certs requires certificates of clients."),
    "ssl_ciphers": Foreign("Python's choice holds; a proxy may do TLS with others."),
    "stream_interval": Foreign("tokens are sent as they come, merged for slow readers.", (1,)),
    "tool_parser_plugin": Foreign(_CODE, never=True),
    "tool_server": Foreign(_TOOL_SERVER),
    "uvicorn_log_level": Foreign("--log-level holds for everything that is logged."),
}
"""Flags of `quire serve` alone."""


CALL: Mapping[str, Foreign] = {
    "lora_request": Foreign(_LORA, (None,)),
    "mm_processor_kwargs": Foreign(_MEDIA, (None,)),
    "concurrency_limit": Foreign("max_num_seqs says how many sequences run at once.", (None,)),
    "chat_template_content_format": Foreign("a template is given what it asks for.", ("auto",)),
    "tokenization_kwargs": Foreign("give token ids as the prompt to tokenise in another way.", (None,)),
    "arrival_time": Foreign("a request arrives when it is added.", (None,)),
    "trace_headers": Foreign("a server traces requests: --otlp-traces-endpoint.", (None,)),
    "data_parallel_rank": Foreign("there is one engine; start several servers behind a balancer.", (None, 0)),
}
"""Keywords of `generate`, `chat`, `beam_search` and `add_request`."""

_CLOSE = "close() frees the memory; an engine starts again within seconds."
_NO_SLEEP = "there is no sleep; an engine starts within seconds."
_KEPT_WEIGHTS = "weights are those of the checkpoint, as long as the engine lives. Start another engine with others."
_NO_PAUSE = "keep requests back in your program; drain() takes no new ones."
_STATISTICS = "last_stats has the numbers of the last step; a server has them at /metrics and /v1/stats."
_ALL_ENGINES = {
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _POOLING),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    **dict.fromkeys(("reset_encoder_cache", "reset_mm_cache"), _MEDIA),
    "apply_model": _CODE,
    "collective_rpc": _DEVICES,
    "is_sleeping": _NO_SLEEP,
    "release_kv_cache_memory": _CLOSE,
    "sleep": _CLOSE,
    "start_profile": "receipts and x-quire-why of a server tell where time went; py-spy profiles a process.",
    "stop_profile": "nothing is profiled.",
    "wake_up": _NO_SLEEP,
}
METHODS: Mapping[str, str] = {
    **_ALL_ENGINES,
    **dict.fromkeys(("enqueue", "enqueue_chat"), "LLMEngine.add_request queues a request, and step() runs it."),
    "get_metrics": "a server has them at /metrics and /v1/stats.",
    "get_world_size": "quire runs on one device.",
    "llm_engine": "the engine is the attribute `engine`.",
    "set_tokenizer": "give LLM(tokenizer=...) a directory or a hub id.",
    "wait_for_completion": "generate() returns when all is finished; LLMEngine.step() runs one step.",
}
"""Methods of vLLM's `LLM` that quire does not have, and what to do instead."""

ENGINE_METHODS: Mapping[str, str] = {
    **_ALL_ENGINES,
    **dict.fromkeys(("do_log_stats", "get_metrics"), _STATISTICS),
    **dict.fromkeys(("get_supported_tasks", "supported_tasks"), _POOLING),
    **dict.fromkeys(("get_vllm_config", "model_config", "vllm_config"), "the configuration is the attribute `config`."),
    **dict.fromkeys(("get_weight_version", "set_weight_version"), _KEPT_WEIGHTS),
    "from_vllm_config": "use from_engine_args(EngineArgs(...)).",
    "get_tokenizer": "the tokenizer is the attribute `tokenizer`.",
    "shutdown": "use close().",
}
"""Methods and attributes of vLLM's `LLMEngine` that quire does not have, and what to do instead."""

ASYNC_ENGINE_METHODS: Mapping[str, str] = {
    **ENGINE_METHODS,
    **dict.fromkeys(("is_running", "is_stopped"), "use state, errored and why_dead."),
    **dict.fromkeys(("is_paused", "pause_generation", "resume_generation"), _NO_PAUSE),
    **dict.fromkeys(("checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums"), _KEPT_WEIGHTS),
    "add_request": "generate() adds a request and streams its outputs.",
    "check_admission": "check_room() refuses what may not wait.",
    "check_health": "use state, errored and why_dead; wait_ready() raises what kept the engine from starting.",
    "dead_error": "use why_dead.",
    "from_vllm_config": "use from_engine_args(EngineArgs(...)), or launch() for a core in a process of its own.",
    "get_model_config": "the configuration is the attribute `config`.",
    "get_num_queued_tokens": "num_queued and num_unfinished count requests.",
    "handle_fault": "launch() replaces a core that ends.",
    "is_tracing_enabled": "a server traces requests: --otlp-traces-endpoint.",
    "log_stats": _STATISTICS,
    "scale_elastic_ep": _DEVICES,
    "wait_for_requests_to_drain": "drain() takes no new requests; num_unfinished counts those that are left.",
}
"""Methods and attributes of vLLM's `AsyncLLM` that quire does not have, and what to do instead."""


class NotBuilt(UnsupportedFeature, AttributeError):
    """A method or attribute of vLLM's that quire does not have; `hasattr` says no."""


def raise_no_attribute(owner: object, name: str, not_built: Mapping[str, str]) -> NoReturn:
    """Answer for an attribute that an object does not have.

    Raises: NotBuilt for one of vLLM's; AttributeError with the nearest name for any other.
    """
    kind = type(owner)
    if name in not_built:
        raise NotBuilt(f"{kind.__name__}.{name} is not built: {not_built[name]}", parameter=name)
    known = [each for each in dir(kind) if not each.startswith("_")]
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{nearest(name, known)}")


SHORT_MEANINGS = {
    "-n": " Here -n is vLLM's --nnodes. The length of an answer is set by --max-tokens (-n) of `quire run`, or by each "
    "request to a server."
}
"""What is added about short flags that mean something else in llama.cpp."""


def refuse_foreign(options: Mapping[str, object]) -> None:
    """Check keywords of `CALL`.

    Raises: UnsupportedFeature for a value that would change something.
    """
    for name, value in options.items():
        if not CALL[name].takes(value):
            raise UnsupportedFeature(f"{name}={shown(value)} {CALL[name].refusal}", parameter=name)


class _Noted(argparse.Action):
    """A flag that changes nothing, or is refused."""

    def __init__(self, option: Foreign, **given: Any) -> None:
        # What is refused in any case may stand before any number of words.
        given["nargs"] = 0 if option.is_switch else 1 if option.accepts else "*"
        super().__init__(**{**given, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS})
        self.option = option

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        option, name = self.option, flag or ""
        taken = option.takes(not name.startswith("--no-")) if option.is_switch else option.takes_words(values)
        if not taken:
            words = "" if option.is_switch else "".join(f" {word[:100]}" for word in values[:1])
            meaning = SHORT_MEANINGS.get(name, "")
            parser.error(f"{name}{words} {option.refusal}{meaning}")


def add_foreign_flags(parser: argparse.ArgumentParser, options: Mapping[str, Foreign]) -> None:
    """One flag for each; none is shown in --help."""
    for name, option in options.items():
        flag = name.replace("_", "-")
        flags = [f"--{flag}"]
        if option.is_switch:
            flags.append(f"--no-{flag}")
        if option.short is not None and option.short not in parser._option_string_actions:
            flags.append(option.short)
        parser.add_argument(*flags, action=_Noted, option=option)
