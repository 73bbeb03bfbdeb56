"""Measures an exported model: held-out bits per byte, recall of trained questions, code that parses, loops, leaks.

Prints one JSON object; `--out` also writes it to a file, from which the model card is made.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import lzma
import math
import random
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tool_data import DEFINITIONS, Turn, calculation, clock, filling, needs_tool, structured
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

PERSONAL = re.compile(
    r"[\w.+-]{2,}@[\w-]+\.[a-z]{2,}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{30,}|sk-\w{32,}|hf_\w{30,}|-----BEGIN [A-Z ]*PRIVATE"
)
UNSEEN_CODE = ("huggingface_hub", "anyio", "click", "jinja2", "rich", "pytest")
"""Packages whose code, unlike their docstrings, is not in the corpus."""
PROSE_PROMPTS = [
    "The", "To start the server,", "If the file does not exist,", "This function returns", "The following options",
    "When a request arrives,", "NAME\n", "Raises ValueError if", "The KV cache", "A sequence is",
]  # fmt: skip
CODE_PROMPTS = [
    "def main():\n", "import os\n", "class Node:\n", "for line in lines:\n", "def read_file(path):\n    ",
    "try:\n", "from collections import",
    "async def fetch(", "if __name__ == '__main__':\n", "    def __repr__(self):\n",
]  # fmt: skip
CHAT_PROMPTS = [
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "What is quire?",
        "How do I start the server?",
        "What is a KV cache?",
        "What does os.path.join do?",
    )
]


class Subject:
    """The model under test with its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def complete(self, prompts: list[str], max_new_tokens: int, **sampling: object) -> list[str]:
        """The continuation of each prompt, greedy unless sampling parameters are given."""
        sampling = sampling or {"do_sample": False, "temperature": None, "top_p": None, "repetition_penalty": 1.0}
        texts = []
        for start in range(0, len(prompts), 50):
            batch = self.tokenizer(prompts[start : start + 50], return_tensors="pt", padding=True)
            out = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
                **sampling,
            )
            texts += self.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    def answer(self, questions: list[str], *, with_tools: bool = False, **sampling: object) -> list[str]:
        """The reply to each question in the chat template."""
        return self.go_on([[{"role": "user", "content": q}] for q in questions], with_tools=with_tools, **sampling)

    def go_on(self, conversations: list[list[dict]], *, with_tools: bool, **sampling: object) -> list[str]:
        """The next message of each conversation."""
        tools = DEFINITIONS if with_tools else None
        prompts = [
            self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            for messages in conversations
        ]
        return self.complete(prompts, 96, **sampling)

    @torch.no_grad()
    def bits(self, text: str, length: int = 512) -> float:
        """Bits the model needs for a text, in windows of `length` tokens of which the second half counts."""
        ids = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"])
        total, half, counted = 0.0, length // 2, 1
        for start in range(0, max(1, len(ids) - half), half):
            window = ids[start : start + length + 1]
            if len(window) < 2:
                break
            logits = self.model(window[None, :-1]).logits[0].float()
            first = max(counted - start - 1, 0)
            total += F.cross_entropy(logits[first:], window[1:][first:], reduction="sum").item()
            counted = start + len(window)
        return total / math.log(2)


def held_out_documents(build: Path, sources: set[str]) -> list[str]:
    """Texts that training never saw."""
    documents = map(json.loads, (build / "corpus.jsonl").open())
    return [d["text"] for d in documents if d["split"] == "held_out" and d["source"] in sources]


def bits_per_byte(subject: Subject, texts: list[str], limit: int) -> dict[str, float]:
    """The model's bits per byte over the texts, and those of `xz -6` on all of them together."""
    texts = [text[:20_000] for text in texts]
    while sum(map(len, texts)) > limit:
        texts.pop()
    size = sum(len(text.encode()) for text in texts)
    packed = lzma.compress("".join(texts).encode(), preset=6)
    bits = sum(subject.bits(text) for text in texts)
    return {"model": round(bits / size, 3), "xz": round(8 * len(packed) / size, 3), "bytes": size}


def recall(subject: Subject, build: Path, rng: random.Random, most: int) -> dict[str, dict[str, float]]:
    """Share of questions answered with the exact trained answer, in phrasings not trained, by kind of fact."""
    rows: dict[str, list[dict[str, str]]] = {}
    for row in map(json.loads, (build / "chat.held_out.jsonl").open()):
        rows.setdefault(row["kind"], []).append(row)
    shares = {}
    for kind, all_of_kind in rows.items():
        chosen = rng.sample(all_of_kind, min(most, len(all_of_kind)))
        replies = subject.answer([row["question"] for row in chosen])
        sampled = subject.answer([row["question"] for row in chosen], do_sample=True)
        exact = [reply.startswith(row["answer"]) for reply, row in zip(replies, chosen, strict=True)]
        by_chance = [reply.startswith(row["answer"]) for reply, row in zip(sampled, chosen, strict=True)]
        shares[kind] = {
            "questions": len(chosen),
            "greedy": round(sum(exact) / len(chosen), 3),
            "sampled": round(sum(by_chance) / len(chosen), 3),
        }
    return shares


def tool_figures(subject: Subject, build: Path, seed: int, most: int) -> dict[str, dict[str, float]]:
    """Shares of right replies, greedy, where tools are offered and in the filling of JSON: calls with the right tool
    and arguments for questions in phrasings not trained, answers that hold the result, plain answers to others."""
    rng = random.Random(seed)
    turns = {
        "calculate": [calculation(rng, unseen=True) for _ in range(most)],
        "get_time": [clock(rng, unseen=True) for _ in range(most // 2)],
        "fill": [filling(rng, unseen=True) for _ in range(most // 2)],
    }
    called = turns["calculate"] + turns["get_time"]
    rows = [row for row in map(json.loads, (build / "chat.held_out.jsonl").open()) if not needs_tool(row["question"])]
    rows = rng.sample(rows, most)
    plain = subject.answer([row["question"] for row in rows], with_tools=True)
    told = subject.go_on([structured(turn)[:3] for turn in called], with_tools=True)
    right = {kind: [turn.messages[1]["content"] for turn in ofkind] for kind, ofkind in turns.items()}
    replies = {kind: first_replies(subject, ofkind, with_tools=kind != "fill") for kind, ofkind in turns.items()}
    shares = {kind: [r.strip() == w for r, w in zip(replies[kind], right[kind], strict=True)] for kind in turns}
    shares["answer_from_result"] = [turn.messages[3]["content"] == r for turn, r in zip(called, told, strict=True)]
    shares["no_call_where_none_is_needed"] = ["<tool_call>" not in reply for reply in plain]
    shares["plain_answers_beside_tools"] = [r.startswith(row["answer"]) for r, row in zip(plain, rows, strict=True)]
    return {name: {"questions": len(of), "greedy": round(sum(of) / len(of), 3)} for name, of in shares.items()}


def first_replies(subject: Subject, turns: list[Turn], *, with_tools: bool) -> list[str]:
    """The replies to the questions of turns."""
    return subject.answer([turn.messages[0]["content"] for turn in turns], with_tools=with_tools)


def functions_of(package: str) -> Iterator[str]:
    """Signature and docstring of the package's functions, each with the few lines above it."""
    spec = importlib.util.find_spec(package)
    for path in sorted(Path(spec.origin).parent.glob("*.py")) if spec and spec.origin else ():
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 2 and ast.get_docstring(node):
                end = node.body[0].end_lineno or node.lineno
                if end - node.lineno < 12:
                    yield textwrap.dedent("".join(lines[node.lineno - 1 : end]))


def parses(code: str) -> bool:
    """Whether code is Python, where a last line that opens a block may lack its body."""
    body = textwrap.indent("pass", " " * (len(code.splitlines()[-1]) - len(code.splitlines()[-1].lstrip()) + 4))
    for candidate in (code, f"{code}\n{body}"):
        try:
            ast.parse(candidate)
        except SyntaxError:
            continue
        return True
    return False


def parse_rate(subject: Subject, rng: random.Random, count: int) -> float:
    """Share of functions of unseen code whose next five generated lines parse."""
    prompts = [prompt for package in UNSEEN_CODE for prompt in functions_of(package)]
    prompts = rng.sample(prompts, min(count, len(prompts)))
    good = 0
    for prompt, text in zip(prompts, subject.complete(prompts, 120), strict=True):
        lines = [line for line in text.splitlines() if line.strip()][:5]
        own = [line for line in lines if line.startswith(" ")]
        good += bool(own) and parses(prompt + "\n".join(own))
    return round(good / len(prompts), 3)


def samples(subject: Subject, rng: random.Random, count: int) -> list[str]:
    """Continuations of 128 tokens with the model's default sampling parameters."""
    prompts = [rng.choice(PROSE_PROMPTS if i % 2 else CODE_PROMPTS) for i in range(count)]
    return subject.complete(prompts, 128, do_sample=True)


def loops(subject: Subject, texts: list[str]) -> float:
    """Share of the texts in which one run of four tokens occurs more than six times."""
    looping = 0
    for text in texts:
        ids = subject.tokenizer(text)["input_ids"]
        grams = Counter(tuple(ids[i : i + 4]) for i in range(len(ids) - 3))
        looping += bool(grams) and max(grams.values()) > 6
    return round(looping / len(texts), 3)


def leaks(subject: Subject, build: Path, texts: list[str]) -> dict[str, int]:
    """Texts with a mail address or a key, and texts with 50 tokens in a row that stand in the corpus."""
    streams = [np.load(path).tobytes() for path in sorted(build.glob("tokens.train.*.npy"))]
    verbatim = 0
    for text in texts:
        ids = np.array(subject.tokenizer(text)["input_ids"], dtype=np.uint16)
        windows = [ids[i : i + 50].tobytes() for i in range(0, max(0, len(ids) - 49), 10)]
        verbatim += any(window in stream for window in windows for stream in streams)
    return {"personal": sum(bool(PERSONAL.search(text)) for text in texts), "verbatim_50_tokens": verbatim}


@torch.no_grad()
def draft_acceptance(subject: Subject, draft: Path, prompts: list[str]) -> float:
    """Share of the model's greedy tokens that the draft model, given the same text, would have proposed."""
    proposer = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    agreed = counted = 0
    for prompt in prompts:
        start = len(subject.tokenizer(prompt)["input_ids"])
        ids = torch.tensor([subject.tokenizer(prompt + subject.complete([prompt], 64)[0])["input_ids"]])
        proposed = proposer(ids).logits[0, start - 1 : -1].argmax(-1)
        agreed += int((proposed == ids[0, start:]).sum())
        counted += len(ids[0]) - start
    return round(agreed / counted, 3)


def main() -> None:
    """Run every check and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--model", type=Path, default=Path("quire/tiny"), help="exported directory")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--count", type=int, default=200, help="samples of each check")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    subject = Subject(args.model)

    texts = samples(subject, rng, args.count)
    figures = {
        "samples": args.count,
        "bits_per_byte": {
            "python": bits_per_byte(subject, held_out_documents(args.build, {"py"}), 150_000),
            "prose": bits_per_byte(subject, held_out_documents(args.build, {"doc", "man", "topic"}), 150_000),
        },
        "recall": recall(subject, args.build, rng, args.count),
        "tools": tool_figures(subject, args.build, args.seed, args.count),
        "next_five_lines_parse": parse_rate(subject, rng, args.count),
        "loop_rate": loops(subject, texts),
        "leaks": leaks(subject, args.build, texts),
        "draft_acceptance": draft_acceptance(
            subject, args.model / "draft", CODE_PROMPTS + PROSE_PROMPTS + CHAT_PROMPTS
        ),
    }
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
