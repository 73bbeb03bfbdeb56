"""Implementations of the ops, by name, and the `Ops` that engines are given.

Tests ask for implementations by name with `implementation_of`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import NoReturn

from quire.errors import ConfigError
from quire.ops.contracts.ops import Ops

IMPLEMENTATIONS = MappingProxyType(
    {"reference": "quire.ops.reference", "cpu": "quire.ops.cpu", "triton": "quire.ops.triton"}
)
"""name -> package. Its `OPS` maps op names to callables. It may have `set_num_threads`, for kernels with threads of
their own, `compute_in_bursts`, for threads beside them, and `ops_on`, which gives the ops for a device."""
ON_CPU = ("reference", "cpu")
"""Those that compute on a CPU."""
REFUSED = MappingProxyType(
    {
        "reference": frozenset({"quantize_linear"}),
        "triton": frozenset(
            {
                "expert_queries",
                "expert_outputs",
                "bias_keys",
                "convolved_qkv",
                "scale_shift",
                "pair_values",
                "subtract_heads",
                "select_tokens",
                "select_blocks",
                "selected_attention",
                "rotate_last",
                "store_rows",
                "compress",
                "select_entries",
                "compressed_attention",
                "read_streams",
                "sum_streams",
                "write_streams",
                "tokens_of_entries",
                "open_streams",
                "stream_shares",
                "ngram_rows",
                "gate_values",
                "dilated_conv",
            }
        ),
    }
)
"""Ops that an implementation does not have yet. Nothing stands in for them: a model that needs one is refused."""
OPS = tuple(
    name
    for part in Ops.__mro__[:-1]
    for name, member in vars(part).items()
    if callable(member) and name[0] != "_" and name not in ("use_this_thread", "give_way", "on_device")
)
"""The name of each op."""

Op = Callable[..., object]


def implementation_of(name: str, device: str = "cpu", *, batch_invariant: bool = True) -> dict[str, Op]:
    """The table of one implementation, on a device as torch spells it. Those of CPUs are row-invariant always.

    Raises: ConfigError for an unknown name or an implementation this machine cannot run.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"unknown ops {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    package = importlib.import_module(IMPLEMENTATIONS[name])
    if not hasattr(package, "ops_on"):
        return dict(package.OPS)
    return dict(package.ops_on(device, batch_invariant=batch_invariant))


def _refuse(op: str, name: str, *_: object, **__: object) -> NoReturn:
    remedy = "; give device='cpu'" if name == "triton" else ""
    raise ConfigError(f"the model needs the op {op}, which the {name} ops do not have yet{remedy}")


def ops_of(name: str, *, num_threads: int | None = None, device: str = "cpu", batch_invariant: bool = True) -> Ops:
    """The ops of an engine whose kernels compute with so many threads (default: those of the process), on a device.

    `batch_invariant`: whether all are row-invariant where a GPU has faster ones that are not.

    Raises: ConfigError as `implementation_of` does.
    """
    missing = {op: partial(_refuse, op, name) for op in REFUSED.get(name, ())}
    table = implementation_of(name, device, batch_invariant=batch_invariant) | missing
    package = importlib.import_module(IMPLEMENTATIONS[name])
    set_num_threads = getattr(package, "set_num_threads", None)
    prepare = partial(set_num_threads, num_threads) if set_num_threads is not None and num_threads else None
    in_bursts = getattr(package, "compute_in_bursts", None)
    return Ops(name, table, device=device, prepare_thread=prepare, compute_in_bursts=in_bursts)
