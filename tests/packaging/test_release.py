"""What builds a release fits together: build requirements, cibuildwheel's configuration, the workflows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("cp311", "cp312", "cp313", "cp314")


def test_a_development_install_is_built_with_what_a_wheel_is_built_with() -> None:
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "scikit-build-core" in line)
    for requirement in PYPROJECT["build-system"]["requires"]:
        assert f'"{requirement}"' in line


def identifiers(platform: str, arch: str) -> list[str]:
    """The builds that cibuildwheel would do; it reads and checks the whole configuration first."""
    pytest.importorskip("cibuildwheel")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"]
    command += ["--platform", platform, "--archs", arch]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_wheels_for_linux(arch: str) -> None:
    assert identifiers("linux", arch) == [f"{python}-manylinux_{arch}" for python in PYTHONS]


def test_wheels_for_macos() -> None:
    assert identifiers("macos", "arm64") == [f"{python}-macosx_arm64" for python in PYTHONS]
    assert PYPROJECT["tool"]["cibuildwheel"]["macos"]["archs"] == ["arm64"]


def test_the_oldest_python_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    assert PYPROJECT["project"]["requires-python"] == f">=3.{PYTHONS[0][3:]}"


def workflow(name: str) -> dict[Any, Any]:
    """One of GitHub's workflows; the key `on` is true in YAML."""
    loaded = yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


needs_workflows = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not in a source distribution")


@needs_workflows
def test_only_a_tag_is_published_and_only_after_every_wheel_was_tested() -> None:
    jobs = workflow("release")["jobs"]
    assert workflow("release")[True]["push"] == {"tags": ["v*"]}
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert jobs["publish"]["needs"] == ["sdist", "wheels"]
    assert jobs["wheels"]["needs"] == "sdist"


@needs_workflows
def test_only_the_job_that_publishes_may_do_more_than_read() -> None:
    for name in ("ci", "release"):
        assert workflow(name)["permissions"] == {"contents": "read"}
        may = {job: what["permissions"] for job, what in workflow(name)["jobs"].items() if "permissions" in what}
        assert may == ({"publish": {"id-token": "write"}} if name == "release" else {})


def steps() -> list[dict[str, Any]]:
    """Every step of every workflow."""
    return [step for name in ("ci", "release") for job in workflow(name)["jobs"].values() for step in job["steps"]]


@needs_workflows
def test_versions_need_tags_wherever_something_is_built() -> None:
    checkouts = [step for step in steps() if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["fetch-depth"] == 0 for step in checkouts)


@needs_workflows
def test_actions_of_others_are_pinned_to_a_commit() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


@needs_workflows
def test_files_that_they_run_exist() -> None:
    texts = [file.read_text() for file in (ROOT / ".github/workflows").iterdir()]
    texts += map(str, [PYPROJECT["tool"]["cibuildwheel"]["test-command"]])
    named = {path for text in texts for path in re.findall(r"(?:tools|\.ci|docs)/\w+(?:\.\w+)?", text)}
    assert {".ci/run", "tools/changelog.py", "tools/check_install.py"} <= named
    assert all((ROOT / path).exists() for path in named)
