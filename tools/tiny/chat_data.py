"""Writes the questions and answers: facts about quire, Python's own docstrings, command names, and what is unknown.

`chat.train.jsonl` has one fact a line with its phrasings; `chat.held_out.jsonl` has phrasings that training never
shows; `faq.txt` has the answers and small programs as plain text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from python_facts import exception_facts, function_facts, keyword_facts, manual_facts, module_facts
from tool_data import check_template

FACTS = Path(__file__).parent / "facts"
REPEATS = {"howto": 4, "code": 2, "flag": 3, "concept": 3, "name": 3, "python": 1, "manual": 1, "unknown": 1}
"""How often an epoch shows a fact."""

ABOUT = ["What is {}?", "What's {}?", "Explain {}.", "What does {} mean?", "Tell me about {}.", "Define {}.",
         "Can you explain {}?", "What is meant by {}?", "{}?", "What do you know about {}?",
         "Describe {}."]  # fmt: skip
NAMED = ["What does {} do?", "What is {}?", "What is {} for?", "Explain {}.", "Tell me about {}.", "How does {} work?",
         "How do I use {}?", "Describe {}.", "What is the purpose of {}?", "{}?"]  # fmt: skip
WRITE = ["Write {}.", "Write {} in Python.", "Show me {}.", "How do I write {}?", "Give me {} in Python.",
         "Python code for {}"]  # fmt: skip
FLAG_OF = ["Which flag sets {}?", "How do I change {}?", "How do I set {}?", "What option controls {}?",
           "How can I configure {}?", "Which option is for {}?", "What flag do I need for {}?"]  # fmt: skip
KIND = {"command": "the command {}", "route": "the route {}", "parameter": "the parameter {}", "class": "the class {}",
        "method": "the method {}", "metric": "the metric {}", "variable": "the environment variable {}",
        "file": "the file {}", "status": "status code {}", "finish": "finish_reason {}"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """An answer, the phrasings that ask for it, and the kind of fact."""

    kind: str
    answers: list[str]
    questions: list[str]


def table(name: str) -> Iterator[list[str]]:
    """Cells of the rows of a fact table."""
    for line in (FACTS / name).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            yield [cell.strip() for cell in line.split(" | ")]


def howto_facts() -> Iterator[Fact]:
    """The facts written by hand, each with its own phrasings."""
    for block in (FACTS / "howto.txt").read_text().split("\n\n"):
        lines = block.strip("\n").splitlines()
        questions = lines[0].removeprefix("? ").split(" / ")
        answer = "\n".join(line[2:] if line.startswith("! ") else "" for line in lines[1:])
        yield Fact(kind="howto", answers=[answer], questions=questions)


def flag_facts() -> Iterator[Fact]:
    """The flags, asked by name and by what they set."""
    for flag, purposes, answer in table("flags.txt"):
        questions = [q.format(p) for p in purposes.split("; ") for q in FLAG_OF]
        questions += [q.format(n) for n in (flag, f"`{flag}`", f"the flag {flag}", flag.lstrip("-")) for q in NAMED]
        yield Fact(kind="flag", answers=[answer], questions=questions)


def name_facts() -> Iterator[Fact]:
    """Commands, routes, parameters, classes, metrics, files and codes."""
    for kind, name, *aliases, answer in table("names.txt"):
        names = [name, f"`{name}`", KIND[kind].format(name), *"; ".join(aliases).split("; ")]
        names = [n for n in names if n]
        yield Fact(kind="name", answers=[answer], questions=[q.format(n) for n in names for q in NAMED])


def concept_facts() -> Iterator[Fact]:
    """Words of LLM serving and of Python."""
    for names, answer in table("concepts.txt"):
        yield Fact(kind="concept", answers=[answer], questions=[q.format(n) for n in names.split("; ") for q in ABOUT])


def snippets() -> Iterator[tuple[list[str], str, str]]:
    """Ways to ask for a small program, the program, and the same without annotations and docstrings."""
    source = (FACTS / "snippets.py").read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            asked = lines[node.lineno - 2].removeprefix("# ").split(" / ")
            yield asked, "\n".join(lines[node.lineno - 1 : node.end_lineno]), ast.unparse(plain(node))


def plain(tree: ast.AST) -> ast.AST:
    """The tree without annotations and docstrings; mutates it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return tree


def snippet_facts() -> Iterator[Fact]:
    """Requests for a small program."""
    for asked, code, _ in snippets():
        questions = [form.format(name) for name in asked for form in WRITE]
        yield Fact(kind="code", answers=[f"Like this:\n\n{code}"], questions=questions)


def faq_pages(facts: list[Fact], rng: random.Random) -> list[str]:
    """Texts without a chat template: answers in a row, questions as headings, single ones, and the small programs."""
    answers = [fact.answers[0] for fact in facts]
    pages = ["\n\n".join(["# quire", *rng.sample(answers, len(answers))]) for _ in range(4)]
    for _ in range(4):
        entries = [f"## {rng.choice(fact.questions)}\n\n{fact.answers[0]}" for fact in rng.sample(facts, len(facts))]
        pages.append("\n\n".join(entries))
    for _ in range(3):
        pages += [f"{rng.choice(fact.questions)}\n{fact.answers[0]}\n" for fact in facts]
    pages += [f"{answer}\n" for answer in answers]
    for _, typed, untyped in snippets():
        pages += [f"{code}\n" for code in (typed, untyped) for _ in range(4)]
    rng.shuffle(pages)
    return pages


def unknown_facts(rng: random.Random) -> tuple[list[Fact], list[str]]:
    """Questions outside the domain with their answer, and unseen ones: other templates, and other words in them."""
    lines = (FACTS / "out_of_domain.txt").read_text().splitlines()
    answers = [line[2:] for line in lines if line.startswith("= ")]
    templates = [line[2:] for line in lines if line.startswith("~ ")]
    slots: dict[str, list[str]] = {}
    for line in (line[2:] for line in lines if line.startswith("@ ")):
        name, values = line.split(" | ")
        slots[name] = values.split("; ")
    facts, unseen = [], []
    for index, template in enumerate(templates):
        names = re.findall(r"\{(\w+)\}", template)
        combinations = list(itertools.product(*(slots[name] for name in names)))
        filled = [fill(template, values) for values in combinations]
        rng.shuffle(filled)
        cut = max(1, int(len(filled) * 0.8))
        if index % 8 == 3:
            unseen += filled[:4]
        else:
            unseen += filled[cut:][:2]
            facts += [Fact(kind="unknown", answers=answers, questions=filled[:cut])] * (3 if names else 1)
    return facts, unseen


def fill(template: str, values: tuple[str, ...]) -> str:
    """The template with its slots replaced from left to right."""
    for value in values:
        template = re.sub(r"\{\w+\}", value, template, count=1)
    return template


def split_phrasings(fact: Fact) -> tuple[list[str], str | None]:
    """Phrasings for training, and the one held out: chosen by its hash among the later ones, none if there are few."""
    if len(fact.questions) < 4:
        return fact.questions, None
    ranked = sorted(fact.questions[1:], key=lambda q: hashlib.sha256((q + fact.answers[0]).encode()).digest())
    if "{}" not in ranked[0] and len(ranked[0]) < 8:
        ranked = ranked[1:]
    return [q for q in fact.questions if q != ranked[0]], ranked[0]


def main() -> None:
    """Write the three files and print how many facts there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    check_template(random.Random(args.seed))

    facts = [*howto_facts(), *flag_facts(), *name_facts(), *concept_facts()]
    pages = faq_pages(facts, random.Random(args.seed))
    facts += snippet_facts()
    for maker in (function_facts(), module_facts(), exception_facts(), keyword_facts()):
        facts += [Fact(kind="python", answers=[answer], questions=questions) for questions, answer in maker]
    facts += [
        Fact(kind="manual", answers=[answer], questions=questions)
        for questions, answer in manual_facts(args.build / "corpus.jsonl")
    ]
    unknown, unseen = unknown_facts(rng)

    counts: dict[str, int] = {}
    with (args.build / "chat.train.jsonl").open("w") as train, (args.build / "chat.held_out.jsonl").open("w") as held:
        for fact in [*facts, *unknown]:
            counts[fact.kind] = counts.get(fact.kind, 0) + 1
            shown, kept_back = (fact.questions, None) if fact.kind == "unknown" else split_phrasings(fact)
            row = {"kind": fact.kind, "repeat": REPEATS[fact.kind], "questions": shown, "answers": fact.answers}
            print(json.dumps(row), file=train)
            if kept_back:
                row = {"kind": fact.kind, "question": kept_back, "seen": shown[0], "answer": fact.answers[0]}
                print(json.dumps(row), file=held)
        for question in unseen:
            row = {"kind": "unknown", "question": question, "seen": question, "answer": "I only know"}
            print(json.dumps(row), file=held)
    (args.build / "faq.txt").write_text("\f".join(pages))
    print(counts, len(unseen), "unseen questions")


if __name__ == "__main__":
    main()
