"""Every kernel compiles for every target without a GPU, and once for all steps of a layer.

In processes of their own: in this one, kernels are made for the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

TARGETS = ["sm_90", "sm_80", "gfx942"]
STEPS = """
import torch
from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.triton.attention import SCRATCH_BYTES, AttentionWork, View, launches

def launched(tokens, sequences, blocks, scratch):
    with torch.device("meta"):
        metadata = AttentionMetadata(
            query_start=torch.empty(sequences + 1, dtype=torch.int32),
            seq_lens=torch.empty(sequences, dtype=torch.int32),
            block_tables=torch.empty(sequences, blocks, dtype=torch.int32),
            block_size=16,
        )
        query = torch.empty(tokens, 8, 64, dtype=torch.bfloat16)
        cache = torch.empty(2, 90, 2, 16, 64, dtype=torch.bfloat16)
        work = AttentionWork(query, cache, metadata, View(scale=0.1, sliding_window=4096))
        return [launch.variant() for launch in launches(work, torch.empty_like(query), work.tiling(), scratch)]

for scratch in (0, SCRATCH_BYTES):
    first = launched(1, 1, 33, scratch)
    assert len(first) == (2 if scratch else 1)
    for shape in ((16, 16, 64), (100, 7, 33), (1, 1, 1600)):
        assert launched(*shape, scratch) == first, shape
print("one kernel for all steps")
"""


def run(*command: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_kernel_of_each_kind_compiles_for_every_target(tmp_path: Path) -> None:
    made = rows(run("-m", "tools.compile_triton", "--first", "--kernel", "merge_kernel", cache=tmp_path))
    made += rows(run("-m", "tools.compile_triton", "--first", "--kernel", "rope_and_cache", cache=tmp_path))
    assert [row[:2] for row in made] == [
        [kernel, target] for kernel in ("merge_kernel", "rope_and_cache_kernel") for target in TARGETS
    ]
    for _, _, registers, spilled, *_ in made:
        assert int(registers) > 0
        assert int(spilled) == 0


def test_a_summary_has_the_most_of_all_variants_of_a_kernel(tmp_path: Path) -> None:
    command = ("-m", "tools.compile_triton", "--kernel", "scale_add_kernel", "--target", "sm_90")
    each, (whole,) = rows(run(*command, cache=tmp_path)), rows(run(*command, "--summary", cache=tmp_path))
    registers, spilled = (max(int(row[column]) for row in each) for column in (2, 3))
    assert whole[:6] == ["scale_add_kernel", "sm_90", str(len(each)), "0", str(registers), str(spilled)]


def test_attention_compiles_for_tensor_cores(tmp_path: Path) -> None:
    command = ("-m", "tools.compile_triton", "--first", "--kernel", "attend_kernel", "--target", "sm_90")
    (row,) = rows(run(*command, cache=tmp_path))
    assert int(row[3]) == 0, "spilled bytes"
    (artefact,) = tmp_path.rglob("attend_kernel.ptx")
    assert "wgmma.mma_async" in artefact.read_text()


def test_steps_of_any_shape_share_compiled_kernels(tmp_path: Path) -> None:
    assert run("-c", STEPS, cache=tmp_path) == "one kernel for all steps\n"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(tmp_path: Path, target: str) -> None:
    made = rows(run("-m", "tools.compile_triton", "--target", target, cache=tmp_path))
    families = {"attend_kernel", "dense_kernel", "grouped_quantized_kernel", "mamba2_kernel", "head_products_kernel"}
    assert families <= {row[0] for row in made}
