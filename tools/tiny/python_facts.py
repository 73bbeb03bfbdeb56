"""Questions whose answers are Python's own docstrings, and the one-line descriptions of manual pages."""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = ["os.path", "json", "math", "random", "re", "time", "shutil", "subprocess", "pathlib", "glob", "copy"]
"""Modules whose functions are asked about."""
NAMED_MODULES = [
    "argparse", "ast", "asyncio", "base64", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "io",
    "itertools", "json", "logging", "math", "multiprocessing", "operator", "os", "pathlib", "pickle", "queue", "random",
    "re", "secrets", "shutil", "signal", "socket", "sqlite3", "ssl", "statistics", "string", "struct", "subprocess",
    "sys", "tempfile", "textwrap", "threading", "time", "traceback", "types", "typing", "unittest", "urllib", "uuid",
    "venv", "warnings", "zipfile", "zlib",
]  # fmt: skip
"""Modules that are asked about themselves."""
TYPES = (str, list, dict, set)
ASKED = ["What does {} do?", "Explain {}.", "What is {} for?", "How does {} work?", "Tell me about {}.",
         "What is {}?", "Describe {}.", "How do I use {}?"]  # fmt: skip
RAISED = ["What is {}?", "What does {} mean?", "Explain {}.", "Why do I get {}?", "When is {} raised?",
          "What is the exception {}?", "{}?"]  # fmt: skip
MAX_SUMMARY = 150

NAME_LINE = re.compile(r"^NAME\n\s+\S[^\n]*? +[-\u2013\u2014]+ +([^\n]+(?:\n {3,}[^\n]+)?)", re.MULTILINE)

Question = tuple[list[str], str]

KEYWORDS = {
    "def": "`def` defines a function: def name(arguments): followed by an indented body.",
    "class": "`class` defines a class: class Name(Base): followed by an indented body.",
    "return": "`return` leaves a function and gives its caller a value.",
    "yield": "`yield` gives one value from a generator and pauses it until the next one is asked for.",
    "import": "`import` loads a module and binds its name.",
    "from": "`from module import name` binds a name of a module; `raise X from Y` chains exceptions.",
    "with": "`with` runs a block under a context manager, which cleans up at the end.",
    "try": "`try` runs a block whose exceptions are handled by except; finally always runs.",
    "except": "`except` handles an exception raised in the try block.",
    "finally": "`finally` marks a block that always runs, with or without an exception.",
    "raise": "`raise` raises an exception.",
    "assert": "`assert` raises AssertionError when its condition is false.",
    "lambda": "`lambda` makes a small function without a name: lambda x: x + 1.",
    "global": "`global` declares that names in a function belong to the module.",
    "nonlocal": "`nonlocal` declares that names belong to the enclosing function.",
    "pass": "`pass` does nothing; it stands where a statement is required.",
    "break": "`break` leaves the innermost loop.",
    "continue": "`continue` goes on with the next round of the loop.",
    "for": "`for` runs a block for each item of an iterable: for item in items:",
    "while": "`while` runs a block as long as its condition is true.",
    "if": "`if` runs a block when its condition is true; elif and else give alternatives.",
    "elif": "`elif` adds another condition to an if statement.",
    "else": "`else` runs when no condition was true, or when a loop ended without break.",
    "del": "`del` deletes a name, an item or an attribute.",
    "in": "`in` tests whether a value is contained in a container.",
    "is": "`is` tests whether two names refer to the same object.",
    "not": "`not` negates a truth value.",
    "and": "`and` is true when both operands are true; it stops at the first false one.",
    "or": "`or` is true when one operand is true; it stops at the first true one.",
    "async": "`async` marks a coroutine function, an asynchronous loop or context manager.",
    "await": "`await` waits for a coroutine or future and lets other tasks run.",
    "None": "`None` is the value that stands for nothing; compare with `is None`.",
    "True": "`True` is the true value of type bool.",
    "False": "`False` is the false value of type bool.",
    "as": "`as` gives a name to an import, a context manager's value or an exception.",
}


def summary(doc: str | None) -> str:
    """The first sentence of a docstring without its signature line; "" when there is none worth telling."""
    text = inspect.cleandoc(doc or "")
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    if paragraphs and re.match(r"[\w.]+\(.*\) *(?:->.*)?$", paragraphs[0]) and len(paragraphs) > 1:
        paragraphs = paragraphs[1:]
    first = re.sub(r"^[\w.]+\([^()]*\) -> [^.]*?(?=[A-Z])", "", paragraphs[0] if paragraphs else "")
    sentence = re.split(r"(?<=[a-z)'\"])\. |: *$", first)[0].rstrip(".") + "."
    plain = sentence.isascii() and "_" not in sentence[:3]
    return sentence if plain and 15 < len(sentence) <= MAX_SUMMARY and sentence[0].isupper() else ""


def signature(value: object) -> str:
    """Argument names with defaults, short; "" when Python does not know them."""
    try:
        text = re.sub(r" *->.*$", "", str(inspect.signature(value)))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return ""
    text = re.sub(r"\(self, /?,? ?|\(self\b,? ?", "(", text).replace("/, ", "").replace(", /", "").replace("(/)", "()")
    return text if len(text) <= 60 and "<" not in text and ":" not in text else "(...)"


def asked_about(name: str, value: object, called: bool) -> Iterator[Question]:
    """The question about one object, if it has a summary."""
    if told := summary(inspect.getdoc(value)):
        head = f"`{name}{signature(value) if called else ''}`"
        names = (name, f"`{name}`", f"{name}()" if called else name)
        yield [q.format(n) for n in names for q in ASKED], f"{head}: {told}"


def function_facts() -> Iterator[Question]:
    """Builtin functions, methods of the basic types, and the functions and classes of well-known modules."""
    for name, value in sorted(vars(builtins).items()):
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if callable(value) and not name.startswith("_") and not is_exception:
            yield from asked_about(name, value, called=not isinstance(value, type))
    for kind in TYPES:
        for name, value in sorted(vars(kind).items()):
            if not name.startswith("_") and callable(value):
                yield from asked_about(f"{kind.__name__}.{name}", value, called=True)
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [n for n in sorted(vars(module)) if not n.startswith("_")]
        for name in names:
            value = getattr(module, name, None)
            home = getattr(value, "__module__", None) or module_name
            homes = {module_name.split(".")[0], "posix", "builtins", "posixpath"}
            if callable(value) and home.lstrip("_").split(".")[0] in homes:
                yield from asked_about(f"{module_name}.{name}", value, called=not isinstance(value, type))


def module_facts() -> Iterator[Question]:
    """What the modules of the standard library are for."""
    for name in NAMED_MODULES:
        told = summary(importlib.import_module(name).__doc__)
        if told:
            names = (f"the module {name}", f"the {name} module", f"Python's {name} module", f"`import {name}`")
            yield [q.format(n) for n in names for q in ASKED], f"The module `{name}`: {told}"


def exception_facts() -> Iterator[Question]:
    """What the builtin exceptions mean."""
    for name, value in sorted(vars(builtins).items()):
        is_error = isinstance(value, type) and issubclass(value, BaseException) and not issubclass(value, Warning)
        if is_error and (told := summary(value.__doc__)):
            yield [q.format(name) for q in RAISED], f"`{name}`: {told}"


def keyword_facts() -> Iterator[Question]:
    """What the keywords of Python do."""
    for word in keyword.kwlist:
        names = (f"the keyword {word}", f"`{word}` in Python", f"{word} in Python", f"Python's {word}")
        yield [q.format(n) for n in names for q in ASKED], KEYWORDS[word]


def manual_facts(corpus: Path) -> Iterator[Question]:
    """What the commands of section 1 do, from the NAME lines of their manual pages."""
    for document in map(json.loads, corpus.open()):
        name = Path(document["path"]).name
        if document["source"] != "man" or not name.endswith(".1") or document["split"] != "train":
            continue
        match = NAME_LINE.search(document["text"])
        told = " ".join(match.group(1).split()) if match else ""
        command = name.removesuffix(".1")
        if told and len(told) < 110 and told.isascii():
            questions = [q.format(n) for n in (command, f"the command {command}", f"`{command}`") for q in ASKED]
            yield questions, f"`{command}`: {told.rstrip('.')}."
