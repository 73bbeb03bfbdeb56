"""What the native kernels do on each instruction set, for people: `quire env` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FORMATS = ("bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class KernelSet:
    """How products with each format of weights are computed, and how near one row of them comes to memory's speed."""

    products: tuple[str, str, str]
    """By FORMATS."""
    shares: tuple[float | None, float | None, float | None] = (None, None, None)
    """Of the read bandwidth, as benchmarks/cpu.md has them; None where nobody measured them."""

    def lines(self) -> dict[str, str]:
        """One line for each format of weights."""
        return {f"{name} weights": self._line(index) for index, name in enumerate(FORMATS)}

    def _line(self, index: int) -> str:
        share = self.shares[index]
        if share is None:
            return f"{self.products[index]}; how near they come to memory's speed was never measured"
        return f"{self.products[index]}; one sequence should read them at {share:.0%} of the bandwidth"


KERNEL_SETS: Mapping[str, KernelSet] = MappingProxyType(
    {
        "avx2": KernelSet(("widened to float32, FMA", "vpmaddubsw", "vpmaddubsw"), (0.81, 0.86, 0.73)),
        "avx_vnni": KernelSet(("widened to float32, FMA", "vpdpbusd", "vpdpbusd"), (0.81, None, None)),
        "avx512": KernelSet(("widened to float32, FMA", "vpmaddubsw", "vpmaddubsw"), (0.95, None, None)),
        "avx512_vnni": KernelSet(("widened to float32, FMA", "vpdpbusd", "vpdpbusd"), (0.95, None, None)),
        "avx512_bf16": KernelSet(("vdpbf16ps, weights in 12 bits", "vpdpbusd", "vpdpbusd"), (0.95, 0.8, 0.8)),
        "amx": KernelSet(("tiles (tdpbf16ps), weights in 12 bits", "vpdpbusd", "vpdpbusd"), (0.88, 0.87, 0.79)),
        "neon": KernelSet(("widened to float32, FMA", "widened to 16 bits", "widened to 16 bits")),
        "neon_dotprod": KernelSet(("widened to float32, FMA", "sdot", "sdot")),
        "neon_bf16": KernelSet(("bfmmla, bfdot", "smmla, sdot", "smmla, sdot")),
    }
)
"""By the library's name of the instruction set. `quire bench machine` measures the shares of this machine."""
