"""Two API keys on one `quire serve`: what a key that asks for everything it may does to the other's first token.

    python -m benchmarks.fairness [--seconds 40] [--repo DIRECTORY] [--model MODEL] [SERVE_FLAG ...]

The greedy key keeps `--greedy` HTTP requests in progress, half of them many long prompts with short outputs, half short
prompts with long outputs and `n`; refused ones are sent again after a second. The modest key sends one request after
the other, a short prompt and one of `--long` tokens in turn, first alone, then beside the greedy key. `--repo` measures
the quire of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter

from benchmarks.serving import running
from quire.cli.bench.load import Record, run_loop
from quire.cli.client.http_client import EventReader, HttpClient
from quire.config.flags.args import EMBEDDED
from quire.utils.math import percentile

GREEDY, MODEST = "greedy-key", "modest-key"
PAUSE_S = 0.05
PATIENCE_S = 30.0
"""A request without a token by then counts as one that took so long."""
SHORT = 4


def random_ids(count: int) -> list[int]:
    """A prompt that nobody else has."""
    return [random.randrange(300, 4000) for _ in range(count)]


def greedy_bodies(num_sequences: int, context: int) -> list[bytes]:
    """The largest requests: prompts that nearly fill the context, and outputs that do, `n` times each."""
    long_prompts = [random_ids(context - 40) for _ in range(num_sequences)]
    short_prompts = [random_ids(20) for _ in range(max(1, num_sequences // 32))]
    fixed = {"temperature": 1, "ignore_eos": True}
    return [
        json.dumps({"prompt": long_prompts, "max_tokens": 32, **fixed}).encode(),
        json.dumps({"prompt": short_prompts, "n": 32, "max_tokens": context - 40, **fixed}).encode(),
    ]


async def ask_for_everything(url: str, num_requests: int, num_sequences: int, context: int) -> None:
    """Keep requests of the greedy key in progress until this process is ended."""
    bodies = greedy_bodies(num_sequences, context)
    statuses: Counter[int] = Counter()

    async def keep_asking(index: int) -> None:
        while True:
            reply = await client.post_encoded("/v1/completions", bodies[index % 2])
            statuses[reply.status] += 1
            if statuses[reply.status] == 1:
                print(f"greedy: {reply.error[:300] if reply.status != 200 else reply.status}", file=sys.stderr)
            if reply.status != 200:
                await asyncio.sleep(1)

    async with HttpClient(url, headers={"Authorization": f"Bearer {GREEDY}"}) as client:
        await asyncio.gather(*(keep_asking(index) for index in range(num_requests)))


async def ask(client: HttpClient, num_tokens: int) -> float:
    """Seconds to the first token of one request."""
    body = {"prompt": random_ids(num_tokens), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    record = Record(sent_at=time.perf_counter())
    try:
        reply = await asyncio.wait_for(client.post("/v1/completions", body, EventReader(record.on_data)), PATIENCE_S)
    except TimeoutError:
        return record.ttft if record.piece_times else PATIENCE_S
    if reply.status != 200 or record.error:
        raise RuntimeError(record.error or reply.error)
    return record.ttft


async def ask_modestly(client: HttpClient, lengths: tuple[int, ...], seconds: float) -> dict[int, list[float]]:
    """Times to the first token by prompt length, as many as come in `seconds`; at least one of each."""
    found: dict[int, list[float]] = {length: [] for length in lengths}
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at or not all(found.values()):
        for length in lengths:
            found[length].append(await ask(client, length))
            await asyncio.sleep(PAUSE_S)
    return found


async def generated(client: HttpClient) -> tuple[float, int, int]:
    """(now, prompt and output tokens computed, running sequences), of the whole server."""
    stats = (await client.get("/v1/stats")).json()["stats"] or {}
    return time.perf_counter(), stats.get("num_computed_tokens", 0), stats.get("num_running", 0)


async def measure(url: str, args: argparse.Namespace) -> None:
    """Print the table."""
    lengths = (SHORT, args.long)
    async with HttpClient(url, headers={"Authorization": f"Bearer {MODEST}"}) as client:
        await ask_modestly(client, lengths, 1)
        alone = await ask_modestly(client, lengths, args.seconds / 4)
        command = [sys.executable, "-m", "benchmarks.fairness", "--attack", url]
        sizes = ["--greedy", str(args.greedy), "--sequences", str(args.sequences), "--context", str(args.context)]
        attacker = subprocess.Popen([*command, *sizes])
        try:
            await asyncio.sleep(args.settle)
            before = await generated(client)
            await asyncio.sleep(3)
            between = await generated(client)
            beside = await ask_modestly(client, lengths, args.seconds)
            after = await generated(client)
        finally:
            attacker.kill()
            attacker.wait()
    print("| prompt | alone, p50 and p90 | beside the greedy key, p50 and p90 | ratio of p50 and p90 | requests |")
    print("|---|---|---|---|---|")
    for length in lengths:
        cells = [[1e3 * percentile(times[length], p) for p in (50, 90)] for times in (alone, beside)]
        ratios = [after / before for before, after in zip(*cells, strict=True)]
        shown = [f"{p50:.1f} and {p90:.1f} ms" for p50, p90 in cells]
        compared = f"{ratios[0]:.2f} and {ratios[1]:.2f}"
        print(f"| {length} tokens | {shown[0]} | {shown[1]} | {compared} | {len(beside[length])} |")
    for name, (start, end) in {"greedy alone": (before, between), "both": (between, after)}.items():
        rate = (end[1] - start[1]) / (end[0] - start[0])
        print(f"{name}: {rate:,.0f} tokens computed a second, {end[2]} sequences running at the end")


def main() -> None:
    """Start a server, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--settle", type=float, default=5)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--long", type=int, default=400)
    parser.add_argument("--greedy", type=int, default=8, help="HTTP requests that the greedy key keeps in progress")
    parser.add_argument("--sequences", type=int, default=1024, help="sequences of each of them")
    parser.add_argument("--repo", help="a checkout whose server is measured")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.attack:
        run_loop(ask_for_everything(args.attack, args.greedy, args.sequences, args.context))
        return
    command = [sys.executable, "-m", "quire.cli.main", "serve", args.model, "--api-key", GREEDY, MODEST, *flags]
    env = {"PYTHONPATH": os.path.abspath(args.repo), "PYTHONSAFEPATH": "1"} if args.repo else None
    with running(command, "/ready", env) as server:
        run_loop(measure(server.url, args))


if __name__ == "__main__":
    main()
