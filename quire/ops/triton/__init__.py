"""Ops in Triton: NVIDIA GPUs, AMD GPUs, and Triton's interpreter for tests without either."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.ops.graphs import Graphs
from quire.ops.shared.streams import match_rms, mix_streams, multiply_columns, statistical_top_k
from quire.ops.triton.attention import chunked_attention, paged_attention
from quire.ops.triton.cache import allocate_kv_cache, copy_blocks, touch_blocks
from quire.ops.triton.elementwise import (
    activate,
    clip,
    gate,
    gated_activation,
    join_columns,
    scale_add,
    scale_heads,
    scale_tokens,
    soft_cap,
)
from quire.ops.triton.experts import mixture_of_experts
from quire.ops.triton.gemm import embedding, gated_linear, linear, linear_max, pack_linear
from quire.ops.triton.graphs import CapturedGraphs
from quire.ops.triton.latent import latent_qkv, latent_values
from quire.ops.triton.norm import layer_norm, layer_norm_heads, rms_norm, rms_norm_columns
from quire.ops.triton.quantized import pack_quantized, quantize_linear
from quire.ops.triton.recurrence import (
    allocate_states,
    gated_delta,
    lightning_attention,
    mamba,
    mamba2,
    rg_lru,
    short_conv,
)
from quire.ops.triton.rotary import rope_and_cache
from quire.ops.triton.sampling import allowed_max, apply_penalties, row_max, row_max_tensors, sample, top_logprobs

LIBRARY_ROWS = 65
"""Rows from which on torch's library is faster; up to there products are about as fast as their weights are read."""


def weights_together() -> AbstractContextManager[None]:
    """See `Ops.weights_together`. torch gives each tensor memory of its own."""
    return nullcontext()


OPS: MappingProxyType[str, Callable[..., object]] = MappingProxyType(
    {
        "make_graphs": Graphs,
        "weights_together": weights_together,
        "pack_linear": pack_linear,
        "quantize_linear": quantize_linear,
        "pack_quantized": pack_quantized,
        "linear": linear,
        "linear_max": linear_max,
        "gated_linear": gated_linear,
        "mixture_of_experts": mixture_of_experts,
        "mamba": mamba,
        "mamba2": mamba2,
        "short_conv": short_conv,
        "gated_delta": gated_delta,
        "lightning_attention": lightning_attention,
        "rg_lru": rg_lru,
        "embedding": embedding,
        "scale_add": scale_add,
        "activate": activate,
        "clip": clip,
        "gate": gate,
        "gated_activation": gated_activation,
        "join_columns": join_columns,
        "multiply_columns": multiply_columns,
        "match_rms": match_rms,
        "mix_streams": mix_streams,
        "statistical_top_k": statistical_top_k,
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
        "row_max": row_max,
        "row_max_tensors": row_max_tensors,
        "allowed_max": allowed_max,
        "top_logprobs": top_logprobs,
        "apply_penalties": apply_penalties,
        "sample": sample,
    }
)
"""Row-invariant, with weights packed where their parts are."""


def dense_ops(device: torch.device, *, library_rows: int | None = None) -> dict[str, Callable[..., object]]:
    """The ops of `OPS` that are bound to an engine: weights are packed on its device.

    library_rows: products of so many rows or more are computed by torch's library, which is faster and not row
    invariant; None for none of them.
    """
    packing, products = (pack_linear, quantize_linear, pack_quantized), (linear, linear_max, gated_linear)
    bound: dict[str, Callable[..., object]] = {op.__name__: partial(op, device=device) for op in packing}
    return bound | {op.__name__: partial(op, library_rows=library_rows) for op in products}


def ops_on(device: str, *, batch_invariant: bool = True) -> dict[str, Callable[..., object]]:
    """All ops of an engine on a device: weights and pages are there."""
    place = torch.device(device)

    def placed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(allocate)
        def allocate_there(**sizes: Any) -> Tensor:
            with place:
                return allocate(**sizes)

        return allocate_there

    allocations = {op.__name__: placed(op) for op in (allocate_kv_cache, allocate_states)}
    graphs = {} if place.type == "cpu" else {"make_graphs": partial(CapturedGraphs, place)}
    library_rows = None if batch_invariant else LIBRARY_ROWS
    return {**OPS, **dense_ops(place, library_rows=library_rows), **allocations, **graphs}
