"""The ops in plain torch: the executable specification, and what serves where nothing was compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from quire.ops.graphs import Graphs
from quire.ops.reference.attention import chunked_attention, paged_attention
from quire.ops.reference.attention_experts import expert_outputs, expert_queries
from quire.ops.reference.cache import allocate_kv_cache, copy_blocks, touch_blocks
from quire.ops.reference.convolved_qkv import convolved_qkv
from quire.ops.reference.elementwise import (
    bias_keys,
    gated_activation,
    join_columns,
    pair_values,
    scale_add,
    soft_cap,
    subtract_heads,
)
from quire.ops.reference.experts import mixture_of_experts
from quire.ops.reference.gated_recurrence import gated_delta, lightning_attention, rg_lru
from quire.ops.reference.gemm import embedding, gated_linear, linear, linear_max, pack_linear, weights_together
from quire.ops.reference.latent import latent_qkv, latent_values
from quire.ops.reference.norm import layer_norm, layer_norm_heads, rms_norm, rms_norm_columns
from quire.ops.reference.quantized import pack_quantized
from quire.ops.reference.rotary import rope_and_cache
from quire.ops.reference.sampling import allowed_max, apply_penalties, row_max, row_max_tensors, sample, top_logprobs
from quire.ops.reference.selection import select_blocks, select_tokens, selected_attention
from quire.ops.reference.states import allocate_states, mamba, mamba2, short_conv
from quire.ops.shared.compressed import (
    compress,
    compressed_attention,
    rotate_last,
    select_entries,
    store_rows,
    tokens_of_entries,
)
from quire.ops.shared.elementwise import activate, clip, gate, scale_heads, scale_shift, scale_tokens
from quire.ops.shared.gated_streams import dilated_conv, gate_values, ngram_rows, open_streams, stream_shares
from quire.ops.shared.hyper import read_streams, sum_streams, write_streams
from quire.ops.shared.streams import match_rms, mix_streams, multiply_columns, statistical_top_k

OPS: MappingProxyType[str, Callable[..., object]] = MappingProxyType(
    {
        "make_graphs": Graphs,
        "pack_linear": pack_linear,
        "pack_quantized": pack_quantized,
        "weights_together": weights_together,
        "linear": linear,
        "linear_max": linear_max,
        "gated_linear": gated_linear,
        "mixture_of_experts": mixture_of_experts,
        "expert_queries": expert_queries,
        "expert_outputs": expert_outputs,
        "mamba": mamba,
        "mamba2": mamba2,
        "short_conv": short_conv,
        "gated_delta": gated_delta,
        "lightning_attention": lightning_attention,
        "rg_lru": rg_lru,
        "convolved_qkv": convolved_qkv,
        "embedding": embedding,
        "scale_add": scale_add,
        "activate": activate,
        "clip": clip,
        "gate": gate,
        "gated_activation": gated_activation,
        "join_columns": join_columns,
        "bias_keys": bias_keys,
        "pair_values": pair_values,
        "subtract_heads": subtract_heads,
        "multiply_columns": multiply_columns,
        "match_rms": match_rms,
        "mix_streams": mix_streams,
        "statistical_top_k": statistical_top_k,
        "scale_shift": scale_shift,
        "scale_heads": scale_heads,
        "scale_tokens": scale_tokens,
        "soft_cap": soft_cap,
        "rms_norm": rms_norm,
        "rms_norm_columns": rms_norm_columns,
        "layer_norm": layer_norm,
        "layer_norm_heads": layer_norm_heads,
        "rope_and_cache": rope_and_cache,
        "latent_qkv": latent_qkv,
        "latent_values": latent_values,
        "allocate_kv_cache": allocate_kv_cache,
        "allocate_states": allocate_states,
        "copy_blocks": copy_blocks,
        "touch_blocks": touch_blocks,
        "paged_attention": paged_attention,
        "chunked_attention": chunked_attention,
        "select_tokens": select_tokens,
        "select_blocks": select_blocks,
        "selected_attention": selected_attention,
        "rotate_last": rotate_last,
        "store_rows": store_rows,
        "compress": compress,
        "select_entries": select_entries,
        "tokens_of_entries": tokens_of_entries,
        "compressed_attention": compressed_attention,
        "read_streams": read_streams,
        "sum_streams": sum_streams,
        "write_streams": write_streams,
        "open_streams": open_streams,
        "stream_shares": stream_shares,
        "ngram_rows": ngram_rows,
        "gate_values": gate_values,
        "dilated_conv": dilated_conv,
        "row_max": row_max,
        "row_max_tensors": row_max_tensors,
        "allowed_max": allowed_max,
        "top_logprobs": top_logprobs,
        "apply_penalties": apply_penalties,
        "sample": sample,
    }
)
