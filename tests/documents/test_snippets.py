"""Every snippet of the README and the pages runs as it stands; every command, option and path they name exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:docs|benchmarks|tests|quire|deploy|csrc)/[\w./]*\w/?)`")
QUIRE = [sys.executable, "-m", "quire.cli.main"]


def snippets() -> list[Any]:
    """Each block of Python, named by its page and first line."""
    found = []
    for page in PAGES:
        for kind, code in BLOCK.findall(page.read_text()):
            if kind == "python":
                found.append(pytest.param(code, id=f"{page.name}: {code.partition(chr(10))[0]}"))
    return found


def commands() -> set[str]:
    """Every `quire ...` in a block of commands, or in the text."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        found |= set(re.findall(r"`(quire [a-z][^`\n]*)`", text))
        for kind, block in BLOCK.findall(text):
            if not kind:
                found |= {
                    line for line in block.replace("\\\n", "").splitlines() if re.match(r"quire [a-z-]+( |$)", line)
                }
    return found


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end within two minutes."""
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("code", snippets())
def test_python_snippets_run(code: str, server: Running) -> None:
    done = run([sys.executable, "-c", code.replace("http://localhost:8000", server.url)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_receipt_of_the_curl_snippet_replays(server: Running, tmp_path: Path) -> None:
    (block,) = [code for _, code in BLOCK.findall(PAGES[0].read_text()) if "quire replay" in code]
    fetch, replay = block.replace("\\\n", "").strip().splitlines()
    fetch = fetch.replace("localhost:8000", server.url.removeprefix("http://"))
    assert run(["sh", "-c", fetch], cwd=tmp_path).returncode == 0
    done = run([*QUIRE, *shlex.split(replay)[1:]], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_and_their_options_exist(command: str) -> None:
    words = shlex.split(command.partition("#")[0].partition("  ")[0])[1:]
    name = words[:2] if words[0] == "bench" and len(words) > 1 else words[:1]
    help_text = help_of(*(word.strip(",") for word in name))
    for option in (word for word in words if word.startswith("--")):
        assert option.partition("=")[0] in help_text


@cache
def help_of(*name: str) -> str:
    """What a command prints for --help."""
    done = run([*QUIRE, *name, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted({path for page in PAGES for path in PATH.findall(page.read_text())}))
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()
