"""Write quire/quantize/calibration.txt: documents and sources of quire, prose and Python by turns.

Run by hand, seldom: another text gives other quantised checkpoints.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROSE = (
    "README.md",
    "docs/getting-started.md",
    "docs/architecture.md",
    "docs/serving.md",
    "docs/python.md",
    "docs/promises.md",
    "docs/performance.md",
    "docs/operations.md",
    "docs/glossary.md",
)
SOURCES = (
    "quire/sampling_params.py",
    "quire/core/scheduler.py",
    "quire/core/kv/block_pool.py",
    "quire/llm.py",
    "quire/sampling/sampler.py",
    "quire/models/decoder.py",
    "quire/loader/names.py",
    "quire/loader/safetensors_header.py",
    "quire/observability/progress.py",
)


def main() -> None:
    texts = (ROOT / name for pair in zip_longest(PROSE, SOURCES) for name in pair if name is not None)
    (ROOT / "quire/quantize/calibration.txt").write_text("\n\n".join(file.read_text() for file in texts))


if __name__ == "__main__":
    main()
