"""Finds `libquire_cpu`, checks its ABI, chooses instruction set and threads. The only home of `ctypes`; no torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final

from quire import envs
from quire.errors import ConfigError, EngineError
from quire.platforms.cores import memory_nodes, usable_cores

ABI_VERSION: Final = 23
FILE_NAME: Final = "libquire_cpu.so"
BUILT_FOR: Final = (("Linux", "x86_64"), ("Linux", "aarch64"))
"""System and processor, as `platform` and CMakeLists.txt name them."""
BUILD_COMMAND: Final = "cmake -S . -B build/native -G Ninja && cmake --build build/native"
X86_ISAS: Final = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
ARM_ISAS: Final = ("neon", "neon_dotprod", "neon_bf16")
ISA_NAMES: Final = ("none", *X86_ISAS, *ARM_ISAS)
"""By `qr_isa`."""
UNSUPPORTED: Final = -3
STATUS: Final = {
    -1: "an argument is out of range",
    -2: "scratch memory could not be allocated",
    -3: "this combination of dtypes is not supported",
    -4: "the library was not initialised",
}

PTR, I32, I64, F32, F64 = c_void_p, c_int32, c_int64, c_float, c_double
STATES: Final = (PTR, I64, I64, PTR, PTR, PTR, I64)
"""Where the states of a step's sequences lie."""
SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    # name: (result, arguments...); see csrc/include/quire_cpu/
    "qr_abi_version": (I32,),
    "qr_isas": (c_uint32,),
    "qr_init": (I32, I32, I32),
    "qr_isa_in_use": (I32,),
    "qr_num_threads": (I32,),
    "qr_set_num_threads": (I32, I32),
    "qr_interleave": (I32, PTR, I64, PTR, I64),
    "qr_parallel": (I32, I64, PTR, PTR),
    "qr_compute_in_bursts": (I32,),
    "qr_read_bandwidth": (I32, PTR, I64, ctypes.POINTER(c_uint64)),
    "qr_packed_bytes": (I64, I32, I64, I64),
    "qr_pack_linear": (I32, PTR, I32, I64, I64, PTR, I32, I64, I64, I64),
    "qr_packed_rows": (I32, PTR, PTR, I32, I64, I64, PTR, I64),
    "qr_linear": (I32, PTR, I32, PTR, I32, PTR, I32, I64, I64, I64, PTR, I32, PTR),
    "qr_reads_tiles": (I32, I32, I64, I64),
    "qr_gated_linear": (I32, PTR, I32, PTR, I32, PTR, I32, I64, I64, I64, PTR, I32),
    "qr_quantized_bytes": (I64, I32, I64, I64),
    "qr_pack_quantized": (I32, PTR, I32, I64, I64, PTR, I64, I64, I64),
    "qr_quantize_linear": (I32, PTR, PTR, I32, I64, I64, I64, PTR, I32, I64, I64, I64),
    "qr_linear_quantized": (I32, PTR, I32, PTR, I32, PTR, I64, I64, I64, I64, PTR, I32, PTR),
    "qr_linear_max": (I32, PTR, PTR, PTR, I32, PTR, I64, I64, I64, I64, PTR, F32),
    "qr_gated_linear_quantized": (I32, PTR, PTR, I32, PTR, I64, I64, I64, I64, PTR, I32),
    "qr_block_range": (I32, PTR, PTR, I32, PTR, I64, I64, I64),
    "qr_pack_blocks": (I32, PTR, PTR, PTR, F64, I32, I64, I64, PTR, I64, I64, I64),
    "qr_block_rows": (I32, PTR, I32, I32, PTR, I64, I64, I64, PTR, PTR, I64),
    "qr_route": (I32, *(PTR,) * 4, I64, I64, PTR),
    "qr_mixture_of_experts": (I32, PTR, PTR, PTR, I32, PTR, I32, PTR, I64, PTR, PTR, PTR),
    "qr_rms_norm": (I32, PTR, I32, PTR, I32, PTR, PTR, I64, I64, F32),
    "qr_layer_norm": (I32, PTR, I32, PTR, I32, PTR, PTR, I64, I64, F32),
    "qr_cache_page": (I64, I32, I64, I64),
    "qr_rope_and_cache": (I32, PTR, PTR, I32, *(PTR,) * 5, I32, *(I64,) * 4, PTR, *(I64,) * 5, I32, F32, PTR, PTR),
    "qr_causal_conv": (I32, *(PTR,) * 5, I32, I64, PTR, PTR, I32, *(I64,) * 4, *STATES),
    "qr_mamba_derived": (I32, PTR, I32, PTR, I64, I64, I64, PTR, PTR, PTR, I32, F32),
    "qr_mamba_scan": (I32, PTR, I32, PTR, PTR, PTR, I64, PTR, PTR, I64, PTR, PTR, *(I64,) * 4, *STATES),
    "qr_mamba2_scan": (I32, PTR, PTR, I32, I64, PTR, PTR, PTR, *(I64,) * 6, *STATES),
    "qr_gated_delta_scan": (I32, PTR, PTR, I64, PTR, I64, I32, I32, PTR, PTR, F32, F32, *(I64,) * 6, *STATES),
    "qr_lightning_scan": (I32, PTR, PTR, I32, I64, PTR, *(I64,) * 4, *STATES),
    "qr_rg_lru_scan": (I32, PTR, I32, *(PTR,) * 4, *(I64,) * 4, *STATES),
    "qr_gated_norm": (I32, PTR, I32, PTR, I64, PTR, I64, PTR, I32, I64, I64, I64, F32, I32, I32),
    "qr_paged_attention": (I32, *(PTR, I32) * 3, *(I64,) * 4, PTR, PTR, I64, PTR, *(I64,) * 4, F32, F32, I64, PTR, PTR),
    "qr_latent_qkv": (I32, *(PTR,) * 3, I32, PTR, F32, PTR, *(I64,) * 6, PTR, I64),
    "qr_latent_values": (I32, PTR, PTR, I32, PTR, *(I64,) * 6),
    "qr_select_tokens": (I32, PTR, I64, PTR, I32, PTR, I64, I64, PTR, I32, *(I64,) * 5, PTR, PTR, I64, PTR, I64),
    "qr_selected_attention": (
        *(I32, PTR, PTR, I32, PTR, I32, *(I64,) * 4),
        *(PTR, PTR, I64, PTR, I64, PTR, I64, I64, I64, F32, PTR),
    ),
    "qr_rotate_last": (I32, PTR, I32, PTR, PTR, *(I64,) * 5, I32),
    "qr_store_rows": (I32, PTR, I32, *(I64,) * 4, PTR, I64, PTR, I64),
    "qr_select_blocks": (I32, PTR, I64, PTR, I32, I64, I64, PTR, I32, *(I64,) * 4, PTR, I64, PTR, PTR, *(I64,) * 3),
    "qr_compress": (
        *(I32, PTR, I32, *(I64,) * 4, PTR, I64, I64, PTR, I32, *(I64,) * 4, PTR, I64, I64, PTR, PTR, I64),
        *(PTR, I64, I64, PTR, I64, PTR, I64, F32, PTR, I64, I64),
    ),
    "qr_select_entries": (
        *(I32, PTR, I64, PTR, I32, PTR, I64, I64, I64, PTR, I32, *(I64,) * 4),
        *(PTR, I64, I64, PTR, PTR, I64, I64),
    ),
    "qr_compressed_attention": (
        *(I32, PTR, PTR, I32, PTR, PTR, I32, *(I64,) * 4, PTR, I64, I64),
        *(PTR, *(I64,) * 4, PTR, I64, I64, PTR, PTR, I64, PTR, I64, I64, I64, F32, I64, I64),
    ),
    "qr_read_streams": (I32, PTR, PTR, PTR, I32, PTR, PTR, PTR, I64, I64, I64, *(F32,) * 4, I64),
    "qr_write_streams": (I32, PTR, PTR, I32, PTR, PTR, I64, I64, I64, I32),
    "qr_copy_blocks": (I32, PTR, I64, I64, I64, PTR, I64),
    "qr_touch": (I32, PTR, I64),
    "qr_row_max": (I32, PTR, PTR, PTR, I64, I64),
    "qr_allowed_max": (I32, PTR, PTR, PTR, I64, I64, PTR, PTR, I64),
    "qr_top_logprobs": (I32, *(PTR,) * 6, I64, I64, I64),
    "qr_apply_penalties": (I32, PTR, I64, I64, *(PTR,) * 4, I64, *(PTR,) * 3),
    "qr_sample": (I32, PTR, PTR, I64, I64, *(PTR,) * 5, I64, PTR, PTR, I64),
    "qr_embedding": (I32, PTR, PTR, I64, I64, PTR, I64),
    "qr_scale_add": (I32, PTR, PTR, PTR, I32, F32, I64),
    "qr_soft_cap": (I32, PTR, F32, I64),
    "qr_op_code": (I32, ctypes.c_char_p),
    "qr_replay": (I32, PTR, I64),
}


class _Recording(threading.local):
    """Where this thread notes its ops, if it records."""

    note: Callable[[str, list[int]], None] | None = None
    note_call: Callable[[Callable[[], None], list[int]], None] | None = None


_recording = _Recording()


class Library:
    """The functions of `SIGNATURES`. Ops that a graph may hold are noted instead of run while their thread records."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        """Raises: AttributeError when the file lacks one."""
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for name in SIGNATURES:
            if self.qr_op_code(name.encode()) >= 0:
                setattr(self, name, _recordable(getattr(self, name), name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"libquire_cpu has no function {name}")


def _recordable(function: Callable[..., int], name: str) -> Callable[..., int]:
    def call(*arguments: float | None) -> int:
        note = _recording.note
        if note is None:
            return function(*arguments)
        note(name, [word(value) for value in arguments])
        return 0

    return call


def word(value: float | None) -> int:
    """A number as the library reads it from 8 bytes."""
    if isinstance(value, float):
        bits: int = struct.unpack("q", struct.pack("d", value))[0]
        return bits
    return value or 0


@contextmanager
def recording(
    note: Callable[[str, list[int]], None], note_call: Callable[[Callable[[], None], list[int]], None]
) -> Iterator[None]:
    """Let `note` have this thread's ops, name and arguments as `qr_replay` takes them, instead of running them.

    `note_call` has ops that are no single function of the library: what runs them, and the addresses of the tensors
    that they read and write.
    """
    _recording.note, _recording.note_call = note, note_call
    try:
        yield
    finally:
        _recording.note = _recording.note_call = None


def is_recording() -> bool:
    """Whether this thread's ops are noted instead of run."""
    return _recording.note is not None


def note_call(run: Callable[[], None], addresses: list[int]) -> None:
    """Note an op that is no single function of the library, while this thread records."""
    assert _recording.note_call is not None
    _recording.note_call(run, addresses)


def paths() -> list[Path]:
    """Where the library may lie: in the installed package, else in the build folder of a checkout."""
    package = Path(__file__).parent
    return [package / FILE_NAME, package.parents[2] / "build" / "native" / FILE_NAME]


@functools.cache
def _open() -> Library | str:
    """The library, checked and initialised; or the reason why there is none."""
    found = next((path for path in paths() if path.is_file()), None)
    if found is None:
        return _why_not_built(platform.system(), platform.machine())
    try:
        handle = ctypes.CDLL(str(found))
    except OSError as error:
        return f"the native kernels do not load: {error}"
    try:
        version = handle.qr_abi_version()
        if version != ABI_VERSION:
            return f"{found} has ABI {version}, this quire needs {ABI_VERSION}: build it again ({BUILD_COMMAND})"
        library = Library(handle)
    except AttributeError as error:
        return f"{found} is not the library of this quire: {error}; build it again ({BUILD_COMMAND})"
    runs = _names(library.qr_isas())
    if not runs:
        return "the native kernels need an x86 processor with AVX2 and FMA, or 64-bit ARM"
    isa = _wanted_isa(runs)
    if isinstance(isa, str):
        return isa
    library.qr_init(isa, usable_cores())
    return library


def _why_not_built(system: str, machine: str) -> str:
    if (system, machine) not in BUILT_FOR:
        platforms = " and ".join(" on ".join(platform) for platform in BUILT_FOR)
        return f"native kernels exist for {platforms} only; this is {system} on {machine}"
    return f"the native kernels were not built (no compiler at install; in a checkout: {BUILD_COMMAND})"


def _wanted_isa(runs: tuple[str, ...]) -> int | str:
    wanted = envs.get("QUIRE_CPU_ISA")
    if wanted == "auto":
        return ISA_NAMES.index(runs[-1])
    if wanted not in runs:
        return f"QUIRE_CPU_ISA={wanted} is not among what this machine runs: {', '.join(runs)}"
    return ISA_NAMES.index(wanted)


def _names(isas: int) -> tuple[str, ...]:
    return tuple(name for index, name in enumerate(ISA_NAMES) if isas >> index & 1)


def unavailable_reason() -> str | None:
    """Why the native kernels cannot run here; None when they can."""
    library = _open()
    return library if isinstance(library, str) else None


def available() -> bool:
    """Whether the native kernels run here."""
    return unavailable_reason() is None


def load() -> Library:
    """The library, initialised.

    Raises: ConfigError where it cannot run.
    """
    library = _open()
    if isinstance(library, str):
        raise ConfigError(library)
    return library


def isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs, from the lowest to the best."""
    return _names(load().qr_isas())


def isa() -> str:
    """The instruction set in use."""
    return ISA_NAMES[load().qr_isa_in_use()]


def digest() -> str:
    """Of the library's file, which tells one build from another."""
    load()
    found = next(path for path in paths() if path.is_file())
    return hashlib.sha256(found.read_bytes()).hexdigest()


def num_threads() -> int:
    """Threads that kernels use which this thread calls, itself included."""
    return int(load().qr_num_threads())


def set_num_threads(count: int) -> None:
    """Change it for this thread alone: other engines of the process keep theirs."""
    check(load().qr_set_num_threads(count))


def interleave(address: int, num_bytes: int) -> None:
    """Have pages that nobody has touched yet come from all NUMA nodes in turn whose cores compute, where there are
    several: else all would be the first one's, whose bandwidth the others' threads would share. See `qr_interleave`.
    """
    nodes = _nodes_in_words()
    if nodes is not None:
        load().qr_interleave(address, num_bytes, nodes, len(nodes))  # where the system refuses, memory serves as it is


@functools.cache
def _nodes_in_words() -> ctypes.Array[c_uint64] | None:
    """A bit for each of several NUMA nodes; None for one."""
    nodes = memory_nodes()
    if len(nodes) < 2:
        return None
    words = (c_uint64 * (nodes[-1] // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    return words


def compute_in_bursts() -> None:
    """Have this thread leave its core for a moment in each millisecond until it ends, so that nobody who waits for the
    core waits longer. Without the kernels, or elsewhere than on Linux, it does nothing.
    """
    library = _open()
    if not isinstance(library, str):
        library.qr_compute_in_bursts()


def check(status: int) -> None:
    """Raise what a kernel's status says."""
    if status != 0:
        raise EngineError(f"a native kernel failed: {STATUS.get(status, f'status {status}')}")


def pointers(addresses: Iterable[int]) -> ctypes.Array[c_void_p]:
    """An array of pointers, for kernels that take one for each layer."""
    values = list(addresses)
    return (c_void_p * len(values))(*values)


def function_type() -> Any:
    """The ctypes type of `qr_parallel`'s callback, for tests of the pool."""
    return ctypes.CFUNCTYPE(None, c_void_p, c_int64)
