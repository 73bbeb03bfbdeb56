"""Token streams for training: documents by source, questions by conversation, mixed by a share per source.

Knows no model. Rows have `length + 1` tokens: inputs and, shifted by one, labels; -100 marks labels without loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tool_data import Message, Turn, filling, informal, needs_tool, offer, offered

STREAM_OF = {"py": "py", "doc": "doc", "topic": "topic", "man": "man"}
TAG_OF = {"py": "<|py|>", "doc": "<|doc|>", "topic": "<|doc|>", "man": "<|man|>"}
TAGGED_SHARE = 0.2
"""Documents that begin with their source tag; the others begin with their text, as a user's prompt does."""
MAX_PLAIN_ANSWER = 100
"""Characters of an answer beside tools: longer ones make every row of a batch long."""
POOLED = 24
"""Batches whose rows are sorted by length together."""
IGNORED = -100
END_OF_TEXT = "<|endoftext|>"


def tokenize_corpus(build: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Write `tokens.<split>.<stream>.npy` (uint16), documents in random order, each ended by the end-of-text token."""
    rng = random.Random(seed)
    documents = [json.loads(line) for line in (build / "corpus.jsonl").open()]
    rng.shuffle(documents)
    end = tokenizer.token_to_id(END_OF_TEXT)
    for split in ("train", "held_out"):
        for stream in sorted(set(STREAM_OF.values())):
            chosen = [d for d in documents if d["split"] == split and STREAM_OF[d["source"]] == stream]
            texts = [(TAG_OF[d["source"]] if rng.random() < TAGGED_SHARE else "") + d["text"] for d in chosen]
            ids = [id_ for encoding in tokenizer.encode_batch(texts) for id_ in (*encoding.ids, end)]
            np.save(build / f"tokens.{split}.{stream}.npy", np.array(ids, dtype=np.uint16))
            print(f"{split:8} {stream:6} {len(chosen):6} documents {len(ids):9,} tokens")


def rows_of_stream(tokens: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless rows of a token stream: each epoch cuts it at another offset and visits the pieces in random order."""
    while True:
        shift = int(rng.integers(0, min(length, max(1, len(tokens) - length - 1))))
        starts = np.arange(shift, len(tokens) - length - 1, length)
        for start in rng.permutation(starts):
            yield tokens[start : start + length + 1].astype(np.int64)


class Conversations:
    """Questions and answers in ChatML; loss falls on the assistant's words only."""

    def __init__(self, path: Path, tokenizer: Tokenizer, seed: int) -> None:
        self.rows: list[dict[str, list[str]]] = []
        for row in map(json.loads, path.open()):
            self.rows += [row] * row["repeat"]
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.end = tokenizer.token_to_id(END_OF_TEXT)

    def encode(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Token ids and labels of one conversation, ended by the end-of-text token."""
        ids: list[int] = []
        labels: list[int] = []
        for message in messages:
            head = self.tokenizer.encode(f"<|im_start|>{message['role']}\n").ids
            body = self.tokenizer.encode(message["content"] + "<|im_end|>").ids
            tail = self.tokenizer.encode("\n").ids
            ids += head + body + tail
            spoken = message["role"] == "assistant"
            labels += [IGNORED] * len(head) + (body if spoken else [IGNORED] * len(body)) + [IGNORED] * len(tail)
        return [*ids, self.end], [*labels, self.end]

    def epoch(self) -> Iterator[tuple[list[int], list[int]]]:
        """Every fact as often as its weight says, in random order; some after another turn or a system prompt."""
        waiting = self.rng.sample(self.rows, len(self.rows))
        while waiting:
            messages: list[dict[str, str]] = []
            if self.rng.random() < 0.2:
                messages.append({"role": "system", "content": self.rng.choice(SYSTEM_PROMPTS)})
            num_turns = 1 + (self.rng.random() < 0.12) + (self.rng.random() < 0.04)
            for _ in range(min(num_turns, len(waiting))):
                messages += ask(waiting.pop(), self.rng)
            yield self.encode(messages)

    def plain_turn(self) -> list[dict[str, str]]:
        """A question that needs no tool, with its answer, which is short."""
        while True:
            messages = ask(self.rng.choice(self.rows), self.rng)
            if not needs_tool(messages[0]["content"]) and len(messages[1]["content"]) < MAX_PLAIN_ANSWER:
                return messages

    def packed(self, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless rows that begin at a conversation's first token and hold whole conversations."""
        ids: list[int] = []
        labels: list[int] = []
        while True:
            for new_ids, new_labels in self.epoch():
                if len(ids) + len(new_ids) > length + 1:
                    yield self.pad(ids, length), self.pad(labels, length, IGNORED)
                    ids, labels = [], []
                ids, labels = ids + new_ids[: length + 1], labels + new_labels[: length + 1]

    def pad(self, values: list[int], length: int, filler: int | None = None) -> np.ndarray:
        """Values extended to length + 1."""
        filler = self.end if filler is None else filler
        return np.array(values + [filler] * (length + 1 - len(values)), dtype=np.int64)


SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are quire's assistant.",
    "You are a helpful, honest assistant. Answer briefly.",
    "Answer the user's question.",
    "You are an assistant that answers questions about quire and Python.",
    "Be concise.",
]


def ask(row: dict[str, list[str]], rng: random.Random) -> list[dict[str, str]]:
    """A question and its answer, in one of the fact's phrasings."""
    question = informal(rng.choice(row["questions"]), rng)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": rng.choice(row["answers"])}]


class ToolConversations:
    """Conversations of one offer of the tools, each a row that goes on after that offer, and rows of JSON filled in."""

    def __init__(self, build: Path, tokenizer: Tokenizer, seed: int) -> None:
        self.plain = Conversations(build / "chat.train.jsonl", tokenizer, seed)
        self.rng = random.Random(seed)
        self.plain_offer = self.plain.encode([offer()])[0][:-1]

    def offer(self) -> list[int]:
        """Token ids of the system message that offers the tools, sometimes after a system prompt."""
        if self.rng.random() > 0.15:
            return self.plain_offer
        return self.plain.encode([offer(self.rng.choice(SYSTEM_PROMPTS))])[0][:-1]

    def batches(self, num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless inputs and labels of conversations after an offer, each [num_rows, T]."""
        return self.alike(lambda: offered(self.plain.plain_turn, self.rng), num_rows)

    def fillings(self, num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless inputs and labels of JSON from sentences, each [num_rows, T], without an offer."""
        return self.alike(lambda: filling(self.rng).messages, num_rows)

    def alike(self, make: Callable[[], list[Message]], num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of conversations; those of like length lie together, which leaves little padding."""
        while True:
            rows = sorted((self.plain.encode(make()) for _ in range(num_rows * POOLED)), key=lambda row: len(row[0]))
            batches = [self.padded(rows[start : start + num_rows]) for start in range(0, len(rows), num_rows)]
            yield from self.rng.sample(batches, POOLED)

    def unseen(self, turns: list[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of turns up to the call or the JSON."""
        return self.padded([self.plain.encode(turn.messages[:2]) for turn in turns])

    def padded(self, rows: list[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the longest one's length; the last label, the end of the text, counts for none."""
        length = max(len(ids) for ids, _ in rows) - 1
        inputs = [self.plain.pad(ids[:-1], length - 1) for ids, _ in rows]
        labels = [self.plain.pad(labels[1:-1], length - 1, IGNORED) for _, labels in rows]
        return np.stack(inputs), np.stack(labels)


class Mixture:
    """Draws rows from the streams by share; the shares may change between batches."""

    def __init__(self, build: Path, tokenizer: Tokenizer, length: int, seed: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(seed)
        tokens = {name: np.load(build / f"tokens.train.{name}.npy") for name in sorted(set(STREAM_OF.values()))}
        self.streams = {
            name: rows_of_stream(of_name, length, np.random.default_rng(seed + i))
            for i, (name, of_name) in enumerate(tokens.items())
            if len(of_name) > 2 * length  # a build without manual pages has none of theirs
        }
        pages = tokenizer.encode((build / "faq.txt").read_text().replace("\f", END_OF_TEXT)).ids
        self.streams["faq"] = rows_of_stream(np.array(pages, dtype=np.uint16), length, np.random.default_rng(seed))
        self.chat = Conversations(build / "chat.train.jsonl", tokenizer, seed).packed(length)

    def batch(self, num_rows: int, shares: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels, each [num_rows, length] int64."""
        names = [name for name in shares if name == "chat" or name in self.streams]
        weights = np.array([shares[name] for name in names])
        inputs, labels = [], []
        for choice in self.rng.choice(len(names), size=num_rows, p=weights / weights.sum()):
            if names[choice] == "chat":
                row, wanted = next(self.chat)
            else:
                row = wanted = next(self.streams[names[choice]])
            inputs.append(row[:-1])
            labels.append(wanted[1:])
        return np.stack(inputs), np.stack(labels)
