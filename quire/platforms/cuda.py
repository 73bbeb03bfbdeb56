"""What an NVIDIA GPU offers, as the driver's management library says; imports no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.config.engine import Capabilities
from quire.platforms.accelerators import accelerator, why_no_kernels
from quire.platforms.platform import Platform

DRIVER = Path("/proc/driver/nvidia")
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its matrix units."""
SEEN_MAJOR = 9
"""Hopper, on which the kernels have run."""
INSTALL = 'Install a build of torch with CUDA, and pip install "quire[cuda]".'


def why_not() -> str | None:
    """See `Platform`."""
    if find_spec("pynvml") is None:
        return f"the package nvidia-ml-py, which asks the driver, is not installed. {INSTALL}"
    nvml = _nvml()
    try:
        capability = _capability(nvml)
    except nvml.NVMLError as error:
        return f"no NVIDIA driver answers ({error})"
    if capability is None:
        return f"{VISIBLE} leaves no GPU" if os.environ.get(VISIBLE) is not None else "there is no NVIDIA GPU"
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {_dotted(capability)}; the kernels need 8.0 (Ampere) or newer"
    return why_no_kernels("libtorch_cuda.so", INSTALL)


def caveat() -> str:
    """See `Platform`."""
    capability = _capability(_nvml())
    assert capability is not None
    if capability[0] == SEEN_MAJOR:
        return ""
    return f"its kernels have run on Hopper GPUs, and not on one of compute capability {_dotted(capability)} yet"


def _capability(nvml: Any) -> tuple[int, int] | None:
    """Of the first GPU that is visible, if there is one. Raises: NVMLError."""
    with _driver(nvml):
        device = _first_visible(nvml)
        if device is None:
            return None
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        return major, minor


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def capabilities() -> Capabilities:
    """See `Platform`: of the first GPU that is visible."""
    nvml = _nvml()
    with _driver(nvml):
        device = _first_visible(nvml)
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        name = nvml.nvmlDeviceGetName(device)
    return accelerator(name, "cuda", f"sm_{major}{minor}", total=memory.total, available=memory.free)


def _nvml() -> Any:
    return importlib.import_module("pynvml")


@contextmanager
def _driver(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _first_visible(nvml: Any) -> Any:
    """The device that CUDA calls 0: the first of CUDA_VISIBLE_DEVICES, numbers or identifiers; None without one."""
    visible = os.environ.get(VISIBLE)
    first = "0" if visible is None else visible.partition(",")[0].strip()
    if not first.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(first) if first.startswith(("GPU-", "MIG-")) else None
    return nvml.nvmlDeviceGetHandleByIndex(int(first)) if int(first) < nvml.nvmlDeviceGetCount() else None


def is_present() -> bool:
    """See `Platform`: the driver lists its devices in a directory."""
    return any(DRIVER.glob("gpus/*"))


PLATFORM = Platform(why_not=why_not, capabilities=capabilities, caveat=caveat, is_present=is_present)
