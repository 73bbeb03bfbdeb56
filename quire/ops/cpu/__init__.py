"""The ops in C++ behind a C ABI (`csrc/`): what serves on a CPU where a compiler was there at install.

Build in a checkout: `cmake -S . -B build/native -G Ninja && cmake --build build/native`.

`OPS` is made on first use, so that asking `library` whether the kernels run here needs neither them nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from quire.errors import ConfigError
from quire.ops.cpu import library


def __getattr__(name: str) -> Any:
    """`OPS`, op names to callables. Raises: ConfigError where the kernels do not run."""
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = library.unavailable_reason()
    if reason is not None:
        raise ConfigError(f"{reason}; the reference ops run everywhere (QUIRE_OPS=reference)")
    return importlib.import_module("quire.ops.cpu.bindings").OPS


def compute_in_bursts() -> None:
    """See `library.compute_in_bursts`."""
    library.compute_in_bursts()


def set_num_threads(count: int) -> None:
    """Threads that kernels use which this thread calls, itself included."""
    library.set_num_threads(count)
