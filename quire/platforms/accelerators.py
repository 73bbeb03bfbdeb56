"""What all GPUs have in common here."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from quire.config.engine import Capabilities
from quire.platforms.cores import usable_cores
from quire.platforms.cpu import memory

BLOCK_SIZE = 16
"""Tiles of keys are multiples of 16 tokens deep."""
UNSEEN = "its kernels have passed their tests in an interpreter, and have not run on such a device yet"
MEMORY_FRACTION = 0.9
CONTEXT_BYTES = 640 << 20
"""What a driver, torch and compiled kernels take on the device before anything is allocated; not measured yet."""


def why_no_kernels(library: str, install: str) -> str | None:
    """Why torch or Triton cannot compute there: torch was built without `library`, or Triton is missing."""
    if not (_torch_libraries() / library).exists():
        return f"this build of torch ({metadata.version('torch')}) has no support for it. {install}"
    if find_spec("triton") is None:
        return 'the package triton, which has the kernels\' compiler, is not installed: pip install "quire[cuda]"'
    return None


def accelerator(name: str, device_type: str, isa: str, *, total: int, available: int) -> Capabilities:
    """The facts of a GPU that the Triton kernels run on. Sizes in bytes."""
    host_total, host_available = memory()
    return Capabilities(
        name=name,
        device_type=device_type,
        num_cores=usable_cores(),
        total_memory=total,
        available_memory=max(0, available - CONTEXT_BYTES),
        host_memory=host_total,
        host_available_memory=host_available,
        block_size=BLOCK_SIZE,
        ops="triton",
        ops_reason=f"Triton kernels for {isa}",
        ops_isa=isa,
        ops_digest=metadata.version("triton"),
        torch=metadata.version("torch"),
        isa=(isa,),
        default_memory_fraction=MEMORY_FRACTION,
    )


@cache
def _torch_libraries() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"
