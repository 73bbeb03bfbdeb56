"""Cost models from data sheets, for machines that nobody has at hand: a roofline of compute and memory bandwidth.

Sources, all for dense 16-bit floats:

- A100: NVIDIA A100 Tensor Core GPU data sheet (2021): 312 Tflop/s; 1,555 GB/s with 40 GB, 2,039 GB/s with 80 GB (SXM).
- H100 SXM: NVIDIA H100 Tensor Core GPU data sheet (2023): 989.4 Tflop/s, 3,350 GB/s, 80 GB.
- H200: NVIDIA H200 Tensor Core GPU data sheet (2024): 989.4 Tflop/s, 4,800 GB/s, 141 GB.
- L4: NVIDIA L4 Tensor Core GPU data sheet (2023): 121 Tflop/s, 300 GB/s, 24 GB.
- L40S: NVIDIA L40S data sheet (2023): 362 Tflop/s, 864 GB/s, 48 GB.

Memory is what the driver reports. What software reaches of a peak is assumed: `COMPUTE_SHARE`, `BANDWIDTH_SHARE`. The
CPU's entry is the roughest: so many operations a cycle for each core, and a share of a server's memory bandwidth.
`quire bench steps` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.engine import Capabilities, QuireConfig
from quire.config.memory.weights.shapes import query_sizes, weight_shapes
from quire.errors import ConfigError
from quire.messages.kv import DTYPE_BYTES, StateSpec
from quire.simulation.cost_model import CostModel
from quire.utils.lazy import nearest

COMPUTE_SHARE = 0.5
"""Of the peak that matrix products of a step reach."""
BANDWIDTH_SHARE = 0.8
"""Of the peak that reading weights, keys and values reaches."""
GPU_OVERHEAD_S = 2e-3
"""Of a step: deciding, launching, sampling, learning."""
CPU_OVERHEAD_S = 0.5e-3
GPU_MEMORY_FRACTION = 0.9
CPU_HERTZ = 2.5e9
CPU_BANDWIDTH = 10e9
"""Bytes a second for each core."""
FLOPS_PER_CYCLE = {"amx_bf16": 1024, "avx512_bf16": 128, "avx512f": 64, "avx2": 32, "bf16": 64, "asimd": 16}
"""Of a core, for the best instruction set that it has: half of the peak of the tiles, the peak of two vector units. The
last two are of ARM."""
PLAIN_FLOPS_PER_CYCLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device can do at its peak."""

    title: str
    flops: float
    """A second."""
    bandwidth: float
    """Bytes a second."""
    memory: int
    overhead_s: float = GPU_OVERHEAD_S
    """Of a step."""


MIB = 1 << 20
GPUS = {
    "a100-40gb": Device(title="NVIDIA A100 40 GB", flops=312e12, bandwidth=1555e9, memory=40536 * MIB),
    "a100-80gb": Device(title="NVIDIA A100 80 GB SXM", flops=312e12, bandwidth=2039e9, memory=81920 * MIB),
    "h100": Device(title="NVIDIA H100 80 GB SXM", flops=989.4e12, bandwidth=3350e9, memory=81559 * MIB),
    "h200": Device(title="NVIDIA H200 141 GB", flops=989.4e12, bandwidth=4800e9, memory=143771 * MIB),
    "l4": Device(title="NVIDIA L4", flops=121e12, bandwidth=300e9, memory=23034 * MIB),
    "l40s": Device(title="NVIDIA L40S", flops=362e12, bandwidth=864e9, memory=46068 * MIB),
}
HERE = "cpu"
"""Name of this machine."""
NAMES = (HERE, *GPUS)


def hardware_named(name: str, here: Capabilities) -> Device:
    """A device of the table, or an estimate of this machine.

    Raises: ConfigError.
    """
    if name == HERE:
        per_cycle = next((FLOPS_PER_CYCLE[isa] for isa in FLOPS_PER_CYCLE if isa in here.isa), PLAIN_FLOPS_PER_CYCLE)
        return Device(
            title=f"this machine, estimated: {here.name}",
            flops=here.num_cores * per_cycle * CPU_HERTZ,
            bandwidth=here.num_cores * CPU_BANDWIDTH,
            memory=here.total_memory,
            overhead_s=CPU_OVERHEAD_S,
        )
    if name not in GPUS:
        raise ConfigError(f"--hardware {name} is none of {', '.join(NAMES)}{nearest(name, list(NAMES))}")
    return GPUS[name]


def capabilities_of(name: str, here: Capabilities) -> Capabilities:
    """What a platform would report on a device: from it follow the KV cache and defaults.

    Raises: ConfigError.
    """
    device = hardware_named(name, here)
    if name == HERE:
        return here
    return replace(
        here,
        name=device.title,
        total_memory=device.memory,
        available_memory=device.memory,
        block_size=16,
        ops="reference",
        ops_reason="the layout of weights and KV cache without padding",
        ops_isa="",
        default_memory_fraction=GPU_MEMORY_FRACTION,
    )


def cost_on(device: Device, config: QuireConfig) -> CostModel:
    """The cost model of an engine on a device.

    Windows are not counted: every layer reads the whole context. Of experts, a token computes those it is sent to, and
    a step reads all of them, as large ones do.
    """
    arch, dtype = config.model_config.arch, config.model_config.dtype
    flops, bandwidth = COMPUTE_SHARE * device.flops, BANDWIDTH_SHARE * device.bandwidth
    shapes = weight_shapes(arch)
    body = sum(shape.num_active for shape in shapes.body)
    table = 0 if shapes.is_tied else shapes.table * DTYPE_BYTES[dtype]  # of which a step reads some rows
    reading_s = (config.memory_plan["weights"] - table) / bandwidth
    token_s = 2 * body / flops
    return CostModel(
        fixed_s=device.overhead_s + reading_s,
        token_s=token_s,
        free_tokens=reading_s / token_s,
        context_token_s=kv_bytes_per_token(config) / bandwidth,
        pair_s=4 * sum(query_sizes(arch)) / flops,
        draw_s=2 * shapes.head.num_weights / flops,
        source=f"data sheet: {device.title}",
    )


def kv_bytes_per_token(config: QuireConfig) -> float:
    """Bytes of keys and values of one token in all layers that have attention."""
    num_bytes = sum(
        spec.page.num_bytes
        for spec in config.model_config.arch.kv_cache_specs(
            config.cache_config.block_size, config.cache_config.dtype, ops=config.device_config.ops
        )
        if not isinstance(spec, StateSpec)
    )
    return num_bytes / config.cache_config.block_size
