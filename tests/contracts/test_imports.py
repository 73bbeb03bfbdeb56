"""What starts fast, and what must never need torch. Each check runs in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
HEAVY = ("torch", "numpy", "tokenizers", "jinja2", "transformers", "safetensors", "huggingface_hub", "rich", "msgspec")


def modules_after(code: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter after some code."""
    script = f"import sys\n{code}\nprint('|', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


def modules_of(*packages: str) -> list[str]:
    """Every module below some packages (or the modules themselves)."""
    names = []
    for package in packages:
        path = ROOT / package.replace(".", "/")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            parts = file.relative_to(ROOT.parent).with_suffix("").parts
            names.append(".".join(part for part in parts if part != "__init__"))
    return names


@pytest.mark.parametrize(
    "code",
    [
        "import quire",
        "import quire.cli.main",
        "import quire.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass",
        "import quire.cli.main as m\ntry: m.main(['run', '--help'])\nexcept SystemExit: pass",
        "import quire.cli.main as m\ntry: m.main(['serve', '--help'])\nexcept SystemExit: pass",
        "import quire.cli.main as m\ntry: m.main(['--version'])\nexcept SystemExit: pass",
        "from quire import SamplingParams, EngineArgs\nSamplingParams(), EngineArgs()",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    assert modules_after(code).isdisjoint(HEAVY)


def test_front_and_control_planes_import_no_torch() -> None:
    names = modules_of(
        "cli", "config", "core", "engine", "messages", "observability", "platforms", "tokenizer", "utils",
        "beam_search", "envs", "errors", "inputs", "llm", "log", "outputs", "sampling_params", "server", "simulation",
    )  # fmt: skip
    assert "quire.engine.async_llm_engine" in names
    assert "quire.core.scheduler" in names
    loaded = modules_after("".join(f"import {name}\n" for name in names))
    assert "quire" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "triton"})


def test_a_configuration_is_resolved_without_torch() -> None:
    code = (
        "from quire import EngineArgs\nfrom quire.engine.core_startup import create_config\n"
        "create_config(EngineArgs(max_num_seqs=2))"
    )
    assert modules_after(code).isdisjoint({"torch", "transformers"})
