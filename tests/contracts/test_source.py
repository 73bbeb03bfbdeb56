"""What must not stand anywhere in the package: code from data, code from text, errors that vanish."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
FORBIDDEN_MODULES = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib", "imp"}
FORBIDDEN_UNLESS_FALSE = {"shell", "allow_pickle", "trust_remote_code"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "compile"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("builtins", "eval"),
    ("builtins", "exec"),
}


def found_in(tree: ast.AST) -> Iterator[str]:
    """Each forbidden thing, as line and what it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{node.lineno}: bare except"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{node.lineno}: {node.func.id}()"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES:
                yield f"{node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in FORBIDDEN_MODULES:
                    yield f"{node.lineno}: import {name}"
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_UNLESS_FALSE:
            yield from () if ast.unparse(node.value) == "False" else (f"{node.value.lineno}: {node.arg}=",)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_source_has_nothing_forbidden(file: Path) -> None:
    assert list(found_in(ast.parse(file.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "try: pass\nexcept: pass",
        "eval('1')",
        "exec('1')",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "f(trust_remote_code=flag)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert len(list(found_in(ast.parse(source)))) == 1


def test_assertions_do_not_stand_for_checks_of_input_at_the_edges() -> None:
    for name in (
        "sampling_params.py",
        "config/flags/args.py",
        "config/resolve.py",
        "engine/front/input_processor.py",
        "inputs.py",
    ):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], name
