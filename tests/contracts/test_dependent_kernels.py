"""Kernels that are set up while the one before them runs: each waits before it does anything else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire

FOLDER = Path(quire.__file__).parent / "ops/triton"
KERNELS = [
    node
    for path in sorted(FOLDER.rglob("*.py"))
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and any("dependent" in ast.unparse(each) for each in node.decorator_list)
]


def test_there_are_kernels_of_the_kind() -> None:
    assert {"dense_kernel", "dense_tma_kernel", "attend_kernel", "rms_norm_kernel"} <= {each.name for each in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_dependent_kernel_waits_first(kernel: ast.FunctionDef) -> None:
    assert ast.unparse(kernel.args).endswith("PDL: tl.constexpr=False")
    assert ast.get_docstring(kernel)
    assert ast.unparse(kernel.body[1]) == "await_inputs(PDL)"
