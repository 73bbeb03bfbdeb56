"""A source distribution holds what git tracks, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = {".git_archival.txt", ".gitattributes", ".gitignore"}
MAX_BYTES = 20 << 20

pytest.importorskip("vcs_versioning")
pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a clone, or no git"
)


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def sdist(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One built from a copy of those files, beside what lies about in a checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("weights.safetensors", ".venv/pyvenv.cfg", "build/a.o", "quire/libquire_cpu.so", "notes.txt", ".env",
                 "quire/__pycache__/a.cpython-311.pyc", "dist/old.whl", "tests/__pycache__/b.pyc"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("foreign")
    code = "from scikit_build_core.build import build_sdist; print(build_sdist('out'))"
    environment = os.environ | {"VCS_VERSIONING_PRETEND_VERSION_FOR_QUIRE": "0.3.0"}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "out/quire-0.3.0.tar.gz"


def test_it_holds_what_git_tracks(sdist: Path, tracked: set[str]) -> None:
    with tarfile.open(sdist) as tar:
        names = {member.name.removeprefix("quire-0.3.0/") for member in tar}
        assert all(member.isfile() for member in tar)
    foreign = {name for name in tracked if name in LEFT_OUT or name.startswith(".github/")}
    assert names == tracked - foreign | {"PKG-INFO"}


def test_it_is_small(sdist: Path) -> None:
    assert sdist.stat().st_size < MAX_BYTES
