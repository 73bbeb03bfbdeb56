"""The keywords of `LLM(...)` for type checkers and editors: the fields of `EngineArgs`, and their other names.

A test compares them with `EngineArgs`, which is where a field is added.
"""

from __future__ import annotations

from typing import Any, TypedDict


class EngineOptions(TypedDict, total=False):
    """Options of an engine, without its model."""

    tokenizer: str | None
    """Directory or hub id of the tokenizer; the model's own when left out."""
    revision: str | None
    """Branch, tag or commit of the hub repository."""
    dtype: str
    """Type of weights and activations; auto takes the checkpoint's."""
    max_model_len: int | None
    """Longest context in tokens; as the model says when left out."""
    quantization: str | None
    """Round plain weights to integers (int8, int4) while they are read, or the method of a quantised checkpoint."""
    dequantize: bool
    """Make plain weights of those that the checkpoint has quantised."""
    load_format: str
    """How weights are read; dummy makes random ones."""
    model_impl: str
    """Who computes the model: quire, the package transformers, or auto, which takes quire where it has the family."""
    hf_overrides: dict[str, Any]
    """Values that replace those of config.json."""
    seed: int | None
    """Base of the seeds drawn for requests without one."""
    generation_config: str
    """Default sampling: auto reads generation_config.json, vllm or none ignores it, or a directory."""
    override_generation_config: dict[str, Any]
    """Values that replace those of generation_config.json."""
    max_logprobs: int
    """Most logprobs a request may ask for; -1 sets no limit."""
    skip_tokenizer_init: bool
    """Take and give token ids only."""
    chat_template: str | None
    """File with the chat template, or the template itself."""
    enable_prefix_caching: bool | None
    """Reuse the KV cache of equal prefixes; on when left out."""
    state_checkpoint_stride: int | None
    """Tokens between the states of recurrent layers that are cached for equal prefixes."""
    kv_cache_dtype: str
    """Type of cached keys and values; auto takes the model's, or that of the checkpoint's kv_cache_scheme. int8 and fp8
    (e4m3) halve a 16-bit one and add a scale per token."""
    block_size: int | None
    """Tokens per KV block."""
    gpu_memory_utilization: float | None
    """Share of the device's memory the engine may use."""
    memory_fraction: float | None
    """Another name of gpu_memory_utilization."""
    device_memory_utilization: float | None
    """Another name of gpu_memory_utilization."""
    kv_cache_memory_bytes: int | None
    """Bytes of KV cache, instead of a share of the memory."""
    num_gpu_blocks_override: int | None
    """Number of KV blocks, instead of share or bytes."""
    num_blocks: int | None
    """Another name of num_gpu_blocks_override."""
    kv_ram: int | None
    """Bytes of memory for KV blocks that the cache evicts; they are loaded when they are wanted again."""
    swap_space: float | None
    """The same in GiB, as vLLM spells it."""
    kv_disk: str | None
    """Directory of a file for KV blocks that leave kv_ram, or the cache without one; a restart finds them again. One
    engine uses it at a time."""
    kv_disk_size: int | None
    """Bytes of that file; 4 GiB when left out."""
    kv_load_min_tokens: int | None
    """Shortest prefix in tokens that is loaded from kv_ram or kv_disk; measured at the start when left out."""
    max_num_seqs: int | None
    """Most sequences in one step."""
    max_num_batched_tokens: int | None
    """Most tokens in one step."""
    long_prefill_token_threshold: int
    """Most tokens of one prompt in one step; 0 sets no limit."""
    scheduling_policy: str
    """Who is served first: fcfs takes requests in order of arrival, priority those with a lower priority."""
    priority_ageing: float | None
    """Seconds of waiting that count as much as a priority that is lower by one; 0: waiting does not count."""
    async_scheduling: bool | None
    """Decide the next step while one is computed; when left out, where a device computes beside the host."""
    enforce_eager: bool
    """Run all steps of a GPU op by op instead of from CUDA graphs."""
    batch_invariant: bool
    """Give a request the same tokens whatever else runs; without it, a GPU's library computes products of many rows."""
    structured_outputs_backend: str
    """Library that keeps the form of outputs: guidance, the only one."""
    device: str
    ops: str
    """Implementation of the ops."""
    num_threads: int | None
    """Threads that compute; one per core when left out."""
    use_tqdm_on_load: bool
    """Show a progress bar while weights are read."""
    disable_log_stats: bool
    """Keep no statistics about steps, and log no status line."""
    log_stats_interval: int
    """Seconds between the status lines of a server or an AsyncLLMEngine that has work; 0: none."""
