"""Compile every Triton kernel for the GPUs that quire is meant for, without a GPU, and print what each one takes.

    python -m tools.compile_triton [--target sm_90] [--kernel attend_kernel] [--summary] > table.md

Modules of `quire.ops.triton` say in `VARIANTS` how their kernels are launched. The command fails if one of them does
not compile, or takes more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are decorated: an interpreted one cannot be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import quire.ops.triton
from quire.ops.triton.kernels.dependent import FLAG
from quire.ops.triton.variant import Variant

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}
"""Bytes that one program may have at most."""
WITH_COPIES = ("sm_90", "sm_80")
"""Targets that copy to shared memory beside computing; others are launched with two stages at most (`tiles.stages`)."""
WITH_DEPENDENT_LAUNCH = ("sm_90",)
"""Targets on which kernels are launched as `kernels/dependent.py` says."""
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one program of a compiled kernel takes."""

    registers: int
    """Of a thread; on AMD vector registers."""
    spilled: int
    """Bytes of a thread that do not fit into registers; on AMD vector registers spilled, times four."""
    shared: int
    """Bytes"""


def variants(kernel: str = "", *, only_first: bool = False) -> Iterator[Variant]:
    """Those of every module of the package whose kernels have such a name; or the first one of each kernel."""
    seen = set[str]()
    for info in pkgutil.walk_packages(quire.ops.triton.__path__, "quire.ops.triton."):
        module = importlib.import_module(info.name)
        for variant in vars(module).get("VARIANTS", ()):
            name = variant.kernel.__name__
            if kernel in name and not (only_first and name in seen):
                seen.add(name)
                yield variant


def compiled(variant: Variant, target: str) -> Any:
    """The kernel in the target's machine code."""
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages if target in WITH_COPIES else min(2, variant.num_stages),
        "enable_fp_fusion": variant.enable_fp_fusion,
    }
    is_dependent = target in WITH_DEPENDENT_LAUNCH and FLAG in variant.kernel.arg_names
    if is_dependent:
        options["launch_pdl"] = True
    return triton.compile(source_of(variant, is_dependent=is_dependent), target=TARGETS[target], options=options)


def source_of(variant: Variant, *, is_dependent: bool = False) -> ASTSource:
    """What Triton's compiler is given where the variant is launched, after another kernel if it is dependent."""
    names: Sequence[str] = variant.kernel.arg_names
    constants = {**variant.constants, **({FLAG: is_dependent} if FLAG in names else {})}
    pointers = {name for name, type_ in variant.signature.items() if type_.startswith("*")}
    aligned = pointers if variant.aligned is None else variant.aligned
    return ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in aligned},
    )


def usage(kernel: Any, target: str) -> Usage:
    """Read from what the assembler says."""
    return _of_cuda(kernel) if target.startswith("sm_") else _of_hip(kernel)


def _of_cuda(kernel: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = dict(re.findall(r"\b(REG|STACK):(\d+)", log))
    return Usage(registers=int(numbers["REG"]), spilled=int(numbers["STACK"]), shared=kernel.metadata.shared)


def _of_hip(kernel: Any) -> Usage:
    numbers = dict(re.findall(r"\.(\w+): +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
    return Usage(
        registers=int(numbers["vgpr_count"]),  # with accumulators
        spilled=4 * int(numbers["vgpr_spill_count"]),
        shared=kernel.metadata.shared,
    )


def described(variant: Variant) -> str:
    """What sets a variant apart from others of its kernel."""
    types = dict.fromkeys(type_ for type_ in variant.signature.values() if type_.startswith("*"))
    constants = [f"{name}={value}" for name, value in variant.constants.items() if value is not None]
    absent = [name for name, value in variant.constants.items() if value is None]
    return " ".join((*types, *constants, *(f"without {name}" for name in absent)))


HEAD = ("kernel", "target", "registers", "spilled bytes", "shared bytes", "warps", "stages", "variant")
SUMMARY_HEAD = ("kernel", "target", "variants", "that spill", "registers", "spilled bytes", "shared bytes")


def row_of(variant: Variant, target: str, used: Usage) -> tuple[object, ...]:
    """Cells under `HEAD`."""
    took = (used.registers, used.spilled, used.shared)
    return variant.kernel.__name__, target, *took, variant.num_warps, variant.num_stages, described(variant)


def summary(found: Mapping[tuple[str, str], Sequence[Usage]]) -> Iterator[tuple[object, ...]]:
    """Cells under `SUMMARY_HEAD`: the most that any variant of a kernel takes on a target."""
    for (kernel, target), uses in found.items():
        spilled = [used.spilled for used in uses]
        registers, shared = max(used.registers for used in uses), max(used.shared for used in uses)
        yield kernel, target, len(uses), sum(map(bool, spilled)), registers, max(spilled), shared


def print_row(cells: Sequence[object]) -> None:
    """Of a Markdown table."""
    print("|", *(f"{cell} |" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this target; may be repeated")
    parser.add_argument("--kernel", default="", help="only kernels whose names contain this")
    parser.add_argument("--first", action="store_true", help="only the first variant of each kernel")
    parser.add_argument("--summary", action="store_true", help="a row for each kernel instead of each variant")
    args = parser.parse_args()
    head = SUMMARY_HEAD if args.summary else HEAD
    print_row(head)
    print("|---" * len(head) + "|")
    found: dict[tuple[str, str], list[Usage]] = {}
    for variant in variants(args.kernel, only_first=args.first):
        for target in args.target or TARGETS:
            if variant.targets is not None and target not in variant.targets:
                continue
            used = usage(compiled(variant, target), target)
            found.setdefault((variant.kernel.__name__, target), []).append(used)
            if not args.summary:
                print_row(row_of(variant, target, used))
    if args.summary:
        for cells in summary(found):
            print_row(cells)
    return int(any(used.shared > SHARED_MEMORY[target] for (_, target), uses in found.items() for used in uses))


if __name__ == "__main__":
    sys.exit(main())
