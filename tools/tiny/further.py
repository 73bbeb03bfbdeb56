"""Trains an exported model further, so that it calls the demonstration's tools and fills in JSON.

A step learns from conversations after one offer of the tools, from JSON, and from rows of the first training, on which
the model is held to the words it began with (Li and Hoiem, Learning without forgetting, 2016). Every checkpoint says
how many calls in unseen phrasings are right, for several weighted means of the weights with those it began with.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import IGNORED, Mixture, ToolConversations
from model import MODELS, Past, TinyLlama, from_hf_state_dict, mixed_precision
from safetensors.torch import load_file
from tool_data import calculation, clock, filling
from torch import Tensor
from train import held_out_loss, load, make_optimizers, prepare, save, update

REPLAY_SHARES = {"py": 0.40, "doc": 0.14, "man": 0.03, "topic": 0.04, "chat": 0.33, "faq": 0.06}
REPLAY_WEIGHT = 4.0
FROZEN_LAYERS = 2
"""The first ones, which turn words into features, stay as they are, like the embedding."""
WARMUP_STEPS = 15
MEANS = (0.8, 1.0)
"""Shares of the further training in the means that are measured; the last is the model as it is."""


def call_loss(model: TinyLlama, ids: Tensor, labels: Tensor, past: Past | None) -> Tensor:
    """Cross-entropy of what the model says; other positions never reach the vocabulary."""
    with mixed_precision():
        hidden = model(ids, past)[labels != IGNORED]
        return F.cross_entropy(model.logits(hidden).float(), labels[labels != IGNORED])


def replay_loss(model: TinyLlama, teacher: TinyLlama, ids: Tensor, every: int = 2) -> Tensor:
    """How far the distribution over the next token is from the teacher's, at every second position."""
    with torch.no_grad(), mixed_precision():
        wanted = teacher.logits(teacher(ids)[:, ::every]).float().log_softmax(-1)
    with mixed_precision():
        got = model.logits(model(ids)[:, ::every]).float().log_softmax(-1)
    return F.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")


@torch.no_grad()
def share_right(model: TinyLlama, rows: ToolConversations, seed: int, count: int) -> dict[str, float]:
    """Share of greedy calls, and of JSON, in unseen phrasings that are right to the character: the greedy text is the
    wanted one exactly when each of its tokens is the likeliest after those before it."""
    rng = random.Random(seed)
    turns = {
        "calculate": [calculation(rng, unseen=True) for _ in range(count)],
        "get_time": [clock(rng, unseen=True) for _ in range(count // 2)],
        "fill": [filling(rng, unseen=True) for _ in range(count // 2)],
    }
    past, shares = model.remember(torch.tensor(rows.plain_offer)), {}
    for name, of_kind in turns.items():
        ids, labels = map(torch.from_numpy, rows.unseen(of_kind))
        with mixed_precision():
            likeliest = model.logits(model(ids, past if name != "fill" else None)).argmax(-1)
        right = ((likeliest == labels) | (labels == IGNORED)).all(-1)
        shares[name] = round(right.float().mean().item(), 3)
    return shares


def mean_of(began: TinyLlama, model: TinyLlama, share: float) -> TinyLlama:
    """The weighted mean of two models' weights."""
    mean = TinyLlama(model.config)
    first, last = began.state_dict(), model.state_dict()
    mean.load_state_dict({name: torch.lerp(first[name], last[name], share) for name in first})
    return mean


def take_tokenizer(init: Path, build: Path) -> None:
    """Use the tokenizer of the weights, not one that was trained on this build's corpus."""
    source, target = init / "tokenizer.json", build / "tokenizer.json"
    if not target.exists() or source.read_bytes() != target.read_bytes():
        shutil.copy(source, target)


def factor_at(progress: float, step: int, peak: float) -> float:
    """Learning-rate factor: a linear start, then half a cosine."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)))


def parse_args() -> argparse.Namespace:
    """Command-line flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--init", type=Path, required=True, help="exported directory whose weights are trained further")
    parser.add_argument("--minutes", type=float, default=40.0, help="length of the schedule, of processor time")
    parser.add_argument("--rows", type=int, default=16, help="conversations of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="those of calls in a step; half a one is JSON")
    parser.add_argument("--replay-rows", type=int, default=2, help="rows of the first training in a step")
    parser.add_argument("--replay-length", type=int, default=256, help="tokens of such a row")
    parser.add_argument("--peak", type=float, default=0.2, help="the highest factor of the learning rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-minutes", type=float, default=10.0)
    return parser.parse_args()


class Steps:
    """Makes the gradients of one step after another."""

    def __init__(self, args: argparse.Namespace, teacher: TinyLlama, rows: ToolConversations, mixture: Mixture) -> None:
        self.args = args
        self.teacher = teacher
        self.rows = rows
        self.mixture = mixture
        self.calls, self.fillings = rows.batches(args.rows), rows.fillings(args.rows // 2)

    def __call__(self, model: TinyLlama) -> tuple[float, float, int]:
        """The losses of calls and of replay, and the number of tokens."""
        past = model.remember(torch.tensor(self.rows.offer()))
        batches = [(*next(self.calls), past) for _ in range(self.args.micro_batches)]
        batches.append((*next(self.fillings), None))
        num_words = sum(int((labels != IGNORED).sum()) for _, labels, _ in batches)
        total, num_tokens = 0.0, 0
        for ids, labels, before in batches:
            share = int((labels != IGNORED).sum()) / num_words
            loss = call_loss(model, torch.from_numpy(ids), torch.from_numpy(labels), before) * share
            loss.backward()
            total += loss.item()
            num_tokens += ids.size
        replayed, _ = self.mixture.batch(self.args.replay_rows, REPLAY_SHARES)
        kept = replay_loss(model, self.teacher, torch.from_numpy(replayed))
        (REPLAY_WEIGHT * kept).backward()
        return total, kept.item(), num_tokens + replayed.size


def report(args: argparse.Namespace, began: TinyLlama, model: TinyLlama, rows: ToolConversations) -> dict[str, object]:
    """Held-out loss of the model; right calls, and loss on Python, of the means."""
    means: dict[str, dict[str, float]] = {}
    for share in MEANS:
        mean = mean_of(began, model, share)
        losses = held_out_loss(mean, args.build, args.replay_length * 2, num_rows=6)
        means[str(share)] = {**share_right(mean, rows, 7, 60), **losses}
    return {"held_out": losses, "means": means}


def main() -> None:
    """Train until the budget of minutes is spent."""
    args = parse_args()
    take_tokenizer(args.init, args.build)
    tokenizer = prepare(args)

    began, model = TinyLlama(MODELS["main"]), TinyLlama(MODELS["main"])
    for each in (began, model):
        each.load_state_dict(from_hf_state_dict(each.config, load_file(args.init / "model.safetensors")))
    model.embed_tokens.requires_grad_(False)
    model.layers[:FROZEN_LAYERS].requires_grad_(False)
    optimizers = make_optimizers(model)
    checkpoint = args.build / "further.pt"
    done = load(checkpoint, model, optimizers)
    rows = ToolConversations(args.build, tokenizer, args.seed + done.step)
    mixture = Mixture(args.build, tokenizer, args.replay_length, args.seed + done.step)
    make_gradients = Steps(args, began, rows, mixture)
    started, last_save = time.process_time() - done.seconds, time.monotonic()
    recent: list[tuple[float, float]] = []

    def checkpoint_now() -> None:
        save(checkpoint, model, optimizers, done)
        row = {**asdict(done), **report(args, began, model, rows)}
        with (args.build / "further.log.jsonl").open("a") as log:
            print(json.dumps(row), file=log)
        print(json.dumps(row), flush=True)

    if not done.step:
        print(json.dumps(held_out_loss(began, args.build, args.replay_length * 2, 6)), flush=True)
    while (progress := done.seconds / (60 * args.minutes)) < 1:
        factor = factor_at(progress, done.step, args.peak)
        learned, kept, num_tokens = make_gradients(model)
        recent.append((learned, kept))
        update(model, optimizers, factor)
        done.step += 1
        done.tokens += num_tokens
        done.seconds = time.process_time() - started
        if done.step % 10 == 0:
            losses = [round(value, 4) for value in np.mean(recent, axis=0)]
            print(json.dumps({**asdict(done), "losses": losses, "lr": round(factor, 4)}), flush=True)
            recent = []
        if time.monotonic() - last_save > 60 * args.checkpoint_minutes:
            checkpoint_now()
            last_save = time.monotonic()
    checkpoint_now()


if __name__ == "__main__":
    main()
