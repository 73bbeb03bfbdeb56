"""Turns a Python file into its signatures and docstrings; the code itself is not kept."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator

DOC_CALLS = {"add_docstr", "add_newdoc", "_add_docstr", "add_newdoc_for_scalar_type"}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`name(arguments) -> returns` of a function."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def described(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of each documented class and public function under a node, in source order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            if doc := ast.get_docstring(node):
                yield f"class {prefix}{node.name}", doc
            yield from described(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 40:
                yield prefix + signature(node), doc
        elif isinstance(node, ast.If | ast.Try):
            yield from described(node, prefix)


def registered(tree: ast.AST) -> Iterator[str]:
    """Docstrings that are attached by a call, as torch and numpy do for their compiled functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in DOC_CALLS:
            for text in ast.walk(node):
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value) > 120:
                    yield inspect.cleandoc(text.value)


def indented(text: str) -> str:
    """Text moved right by four columns."""
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


def docstring_document(source: str, module: str) -> str:
    """All documentation of one Python file as text; "" when it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return ""
    parts = []
    if doc := ast.get_docstring(tree):
        parts.append(f"{module}\n\n{doc}")
    parts += [f"{head}\n{indented(doc)}" for head, doc in described(tree, "") if len(head) < 300]
    parts += registered(tree)
    return "\n\n".join(parts) + "\n" if parts else ""
