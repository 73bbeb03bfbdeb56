"""The version: one source, git's tags, in whatever form the source comes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = ("pyproject.toml", ".git_archival.txt", ".gitattributes")

pytest.importorskip("vcs_versioning")
GIT_FILES = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".gitattributes").exists(), reason="not a clone, or no git"
)


def git(folder: Path, *arguments: str) -> None:
    """Run git there, with nobody's configuration."""
    identity = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    subprocess.run(command, env=os.environ | identity | nobody, check=True, capture_output=True)


def version_of(folder: Path) -> str:
    """What a build in this folder would call itself."""
    command = [sys.executable, "-m", "vcs_versioning"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what decides about the version."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def archive(clone: Path) -> Path:
    """What `git archive`, and so a download from GitHub, has of a clone."""
    folder = clone.parent / "archive"
    folder.mkdir()
    git(clone, "archive", "--output", "../archive.tar", "HEAD")
    shutil.unpack_archive(clone.parent / "archive.tar", folder)
    return folder


@GIT_FILES
def test_a_tag_is_the_version_and_commits_after_it_are_before_the_next(clone: Path) -> None:
    git(clone, "tag", "v0.4.0")
    assert version_of(clone) == "0.4.0"
    assert version_of(archive(clone)) == "0.4.0"
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert version_of(clone).startswith("0.4.1.dev1+g")


@GIT_FILES
def test_tags_for_other_things_do_not_count(clone: Path) -> None:
    for tag in ("backup-2026", "release-7", "draft-1.2", "v0.4.0"):
        git(clone, "tag", tag)
        git(clone, "commit", "--quiet", "--allow-empty", "--message", f"after {tag}")
    git(clone, "tag", "nightly-3.1")
    assert version_of(clone).startswith("0.4.1.dev1+g")
    assert version_of(archive(clone)).startswith("0.4.1.dev1+g")


@GIT_FILES
def test_a_release_candidate_is_one(clone: Path) -> None:
    git(clone, "tag", "v0.4.0rc1")
    assert version_of(clone) == version_of(archive(clone)) == "0.4.0rc1"


@GIT_FILES
def test_a_clone_without_tags_counts_commits(clone: Path) -> None:
    assert version_of(clone).startswith("0.1.dev1+g")


@GIT_FILES
def test_an_archive_without_tags_and_a_folder_without_git_have_the_fallback(clone: Path, tmp_path: Path) -> None:
    fallback = PYPROJECT["tool"]["vcs-versioning"]["fallback_version"]
    assert version_of(archive(clone)) == fallback
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert version_of(tmp_path) == fallback


def test_a_source_distribution_keeps_its_version(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: quire\nVersion: 0.7.2\n")
    assert version_of(tmp_path) == "0.7.2"


def test_a_tree_that_was_never_built_says_so(tmp_path: Path) -> None:
    (tmp_path / "quire").mkdir()
    shutil.copy(quire.__file__, tmp_path / "quire")
    code = "import quire; print(quire.__file__, quire.__version__)"
    command = [sys.executable, "-S", "-c", code]  # without packages, a development install among them
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        str(tmp_path / "quire/__init__.py"),
        PYPROJECT["tool"]["vcs-versioning"]["fallback_version"],
    ]


def test_what_the_build_wrote_is_the_version(tmp_path: Path) -> None:
    (generated,) = PYPROJECT["tool"]["scikit-build"]["generate"]
    (tmp_path / "quire").mkdir()
    shutil.copy(quire.__file__, tmp_path / "quire")
    (tmp_path / generated["path"]).write_text(generated["template"].replace("${version}", "1.2.3"))
    command = [sys.executable, "-S", "-c", "import quire; print(quire.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.2.3"


def test_the_command_says_it() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"quire {quire.__version__}"
