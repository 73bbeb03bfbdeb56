"""Trains a tiny model on the token streams: bfloat16 autocast, Muon and AdamW, a schedule driven by a time budget.

Resumable: the checkpoint holds model, optimiser, steps and seconds trained. `--teacher` distils another checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import IGNORED, Mixture, tokenize_corpus
from model import COMPUTE, MODELS, TinyLlama, mixed_precision
from tokenizers import Tokenizer
from torch import Tensor, nn

STABLE_SHARES = {"py": 0.40, "doc": 0.26, "man": 0.08, "topic": 0.05, "chat": 0.19, "faq": 0.02}
DECAY_SHARES = {"py": 0.34, "doc": 0.07, "man": 0.01, "topic": 0.05, "chat": 0.43, "faq": 0.10}
DECAY_FROM = 0.30
WARMUP_STEPS = 40
Z_LOSS = 1e-4


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al., 2024), for weight matrices."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix; matrices of one shape share their iterations."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, float]) -> None:
        directions = []
        for param in params:
            state = self.state[param]
            buffer = state.setdefault("momentum", torch.zeros_like(param))
            buffer.lerp_(param.grad, 1 - group["momentum"])
            directions.append(param.grad.lerp(buffer, group["momentum"]))
        updates = orthogonalise(torch.stack(directions))
        rows, columns = params[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for param, update in zip(params, updates, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to [N, R, C], approximately."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(COMPUTE)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def make_optimizers(model: TinyLlama) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.embed_tokens.weight], "lr": 3e-3, "weight_decay": 0.01},
        {"params": norms, "lr": 3e-3, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def loss_function(model: TinyLlama, teacher: TinyLlama | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy with z-loss, or with the teacher's distribution added; compiled."""

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        with mixed_precision():
            logits = model.logits(model(ids)).flatten(0, 1)
        logits = logits.float()
        flat = labels.flatten()
        kept = (flat != IGNORED).float()
        count = kept.sum().clamp(min=1)
        log_total = torch.logsumexp(logits, dim=-1)
        picked = logits.gather(1, flat.clamp(min=0).unsqueeze(1)).squeeze(1)
        hard = ((log_total - picked) * kept).sum() / count
        if teacher is None:
            return hard + Z_LOSS * (log_total.square() * kept).sum() / count
        with torch.no_grad(), mixed_precision():
            target = teacher.logits(teacher(ids)).flatten(0, 1).float().softmax(-1)
        soft = log_total - (target * logits).sum(-1)
        return 0.2 * hard + 0.8 * (soft * kept).sum() / count

    return torch.compile(loss, dynamic=False)


def schedule(progress: float, step: int) -> tuple[float, dict[str, float]]:
    """Learning-rate factor and shares of the sources at a point of the run."""
    if progress < DECAY_FROM:
        return min(1.0, (step + 1) / WARMUP_STEPS), STABLE_SHARES
    return max(0.0, (1 - progress) / (1 - DECAY_FROM)) * 0.98 + 0.02, DECAY_SHARES


@torch.no_grad()
def held_out_loss(model: TinyLlama, build: Path, length: int, num_rows: int = 24) -> dict[str, float]:
    """Mean loss per token over the first rows of each held-out stream."""
    losses = {}
    for stream in ("py", "doc"):
        tokens = torch.from_numpy(np.load(build / f"tokens.held_out.{stream}.npy").astype(np.int64))
        rows = tokens[: num_rows * length + 1]
        ids, labels = rows[:-1].view(-1, length), rows[1:].view(-1, length)
        with mixed_precision():
            logits = model.logits(model(ids))
        losses[stream] = round(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).item(), 4)
    return losses


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the run has come."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save(path: Path, model: TinyLlama, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write the checkpoint so that a crash leaves the old one."""
    partial = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save({**state, **asdict(progress)}, partial)
    os.replace(partial, path)


def load(path: Path, model: TinyLlama, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore a checkpoint if there is one."""
    if not path.exists():
        return Progress()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return Progress(step=saved["step"], tokens=saved["tokens"], seconds=saved["seconds"])


def parse_args() -> argparse.Namespace:
    """Command-line flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--model", choices=sorted(MODELS), default="main")
    parser.add_argument("--teacher", type=Path, help="checkpoint to distil from")
    parser.add_argument("--minutes", type=float, default=80.0, help="length of the schedule in minutes of training")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="length of the schedule in steps, if sooner")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=3, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> Tokenizer:
    """Set threads and seed, and tokenize the corpus if nobody has with this tokenizer; the tokenizer."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    path, tokens = args.build / "tokenizer.json", args.build / "tokens.train.py.npy"
    tokenizer = Tokenizer.from_file(str(path))
    if not tokens.exists() or tokens.stat().st_mtime < path.stat().st_mtime:
        tokenize_corpus(args.build, tokenizer, args.seed)
    return tokenizer


def update(model: TinyLlama, optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Change the weights by their gradients, and forget these. `factor`: of all learning rates."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Train until the budget of minutes or steps is spent."""
    args = parse_args()
    tokenizer = prepare(args)

    model = TinyLlama(MODELS[args.model])
    optimizers = make_optimizers(model)
    checkpoint = args.build / f"{args.model}.pt"
    done = load(checkpoint, model, optimizers)
    teacher = None
    if args.teacher:
        teacher = TinyLlama(MODELS["main"])
        teacher.load_state_dict(torch.load(args.teacher, weights_only=True)["model"])
    loss_of = loss_function(model, teacher)
    mixture = Mixture(args.build, tokenizer, args.length, args.seed + done.step)
    started, last_save, recent = time.monotonic() - done.seconds, time.monotonic(), []

    def checkpoint_now() -> None:
        save(checkpoint, model, optimizers, done)
        row = {**asdict(done), "held_out": held_out_loss(model, args.build, args.length)}
        with (args.build / f"{args.model}.log.jsonl").open("a") as log:
            print(json.dumps(row), file=log)

    while True:
        progress = max(done.seconds / (60 * args.minutes), done.step / args.max_steps)
        if progress >= 1:
            break
        factor, shares = schedule(progress, done.step)
        total = 0.0
        for _ in range(args.micro_batches):
            ids, labels = (torch.from_numpy(array) for array in mixture.batch(args.rows, shares))
            loss = loss_of(ids, labels) / args.micro_batches
            loss.backward()
            total += loss.item()
        update(model, optimizers, factor)
        done.step += 1
        done.tokens += args.micro_batches * args.rows * args.length
        done.seconds = time.monotonic() - started
        recent.append(total)
        if done.step % 25 == 0:
            row = {**asdict(done), "loss": round(sum(recent) / len(recent), 4), "lr": round(factor, 3)}
            print(json.dumps(row), flush=True)
            recent = []
        if time.monotonic() - last_save > 60 * args.checkpoint_minutes:
            checkpoint_now()
            last_save = time.monotonic()
    checkpoint_now()


if __name__ == "__main__":
    main()
