"""The op table: one callable per op, chosen once per process.

`use("reference")` or `use("cpu")` fills it; `quire.ops.functional` calls through it. Tests ask for implementations by
name with `implementation_of`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import NoReturn

from quire.errors import ConfigError

IMPLEMENTATIONS = MappingProxyType({"reference": "quire.ops.reference", "cpu": "quire.ops.cpu"})
"""name -> package whose `OPS` maps op names to callables; an op it lacks falls back to the reference."""

OPS = (
    "make_graphs",
    "pack_linear",
    "quantize_linear",
    "pack_quantized",
    "weights_together",
    "linear",
    "gated_linear",
    "mixture_of_experts",
    "expert_queries",
    "expert_outputs",
    "mamba",
    "mamba2",
    "short_conv",
    "gated_delta",
    "lightning_attention",
    "rg_lru",
    "embedding",
    "scale_add",
    "activate",
    "clip",
    "gate",
    "gated_activation",
    "join_columns",
    "scale_heads",
    "scale_tokens",
    "soft_cap",
    "rms_norm",
    "rms_norm_columns",
    "layer_norm",
    "layer_norm_heads",
    "rope_and_cache",
    "latent_qkv",
    "latent_values",
    "allocate_kv_cache",
    "allocate_states",
    "copy_blocks",
    "touch_blocks",
    "paged_attention",
    "chunked_attention",
    "row_max",
    "allowed_max",
    "top_logprobs",
    "apply_penalties",
    "sample",
)

Op = Callable[..., object]


def _unset(*_: object, **__: object) -> NoReturn:
    raise ConfigError("no op table is in use: call quire.ops.table.use(name) first")


_table: dict[str, Op] = dict.fromkeys(OPS, _unset)
_name = ""


def implementation_of(name: str) -> dict[str, Op]:
    """The complete table of one implementation, reference ops standing in for those it lacks.

    Raises: ConfigError for an unknown name or an implementation this machine cannot run.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"unknown ops {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    ops: dict[str, Op] = dict(importlib.import_module(IMPLEMENTATIONS["reference"]).OPS)
    if name != "reference":
        ops.update(importlib.import_module(IMPLEMENTATIONS[name]).OPS)
    return ops


def use(name: str) -> None:
    """Make `name` the implementation of this process."""
    global _name
    _table.update(implementation_of(name))
    _name = name


def in_use() -> str:
    """The name given to `use`, or an empty string."""
    return _name


def op(name: str) -> Op:
    """The callable behind an op name."""
    return _table[name]
