"""What compiling large schemas costs a neighbour: the gaps between its tokens, with and without.

    python -m benchmarks.grammar_stalls [--model DIRECTORY] [--rounds 6] [--seconds 3] [--busy 0]

Rounds with and without schemas are in turn. In the latter, new schemas of 100 KB arrive one after the other, 0.4 s
apart, are checked, compiled and generate a token, while one request after the other without a form generates beside
them. `--busy`: so many other processes compute all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from quire import AsyncLLMEngine, EngineArgs, SamplingParams, StructuredOutputsParams

NUM_PROPERTIES = 900
PAUSE_S = 0.4
TOKENS = 800
"""Of a request of the neighbour."""
LATE_MS = 5.0
_numbers = itertools.count()


def schema() -> str:
    """One of 100 KB that was never seen before."""
    rng = random.Random(next(_numbers))
    properties: dict[str, Any] = {}
    for index in range(NUM_PROPERTIES):
        properties[f"field_{index:04d}_{rng.randrange(10**6)}"] = [
            {"type": "string", "maxLength": 40},
            {"type": "integer", "minimum": 0, "maximum": rng.randrange(10**6)},
            {"enum": [f"v{rng.randrange(10**6)}" for _ in range(8)]},
            {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,9}-[0-9]+$"}, "maxItems": 5},
            {"anyOf": [{"type": "null"}, {"type": "string", "format": "date-time"}]},
        ][index % 5]
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


async def gaps(engine: AsyncLLMEngine, seconds: float) -> list[float]:
    """Milliseconds between the tokens of requests, one after the other."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, detokenize=False)
    found, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        at = [time.perf_counter() async for _ in engine.generate("Once", params, f"neighbour-{next(_numbers)}")]
        found += [1e3 * (later - earlier) for earlier, later in itertools.pairwise(at)]
    return found


async def disturb(engine: AsyncLLMEngine, schemas: list[str], took: list[float]) -> None:
    """Have schemas compiled, and note the seconds that each took."""
    while schemas:
        started = time.perf_counter()
        form = StructuredOutputsParams(json=schemas.pop())
        params = SamplingParams(max_tokens=1, structured_outputs=form)
        async for _ in engine.generate("{", params, f"large-{next(_numbers)}"):
            pass
        took.append(time.perf_counter() - started)
        await asyncio.sleep(PAUSE_S)


async def measure(model: str | None, rounds: int, seconds: float) -> None:
    options = {} if model is None else {"model": model}
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**options, disable_log_stats=True))
    found: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    took: list[float] = []
    try:
        await gaps(engine, 0.1)
        await disturb(engine, [schema()], [])
        for _ in range(rounds):
            found["alone"].append(await gaps(engine, seconds))
            schemas = [schema() for _ in range(50)]
            task = asyncio.create_task(disturb(engine, schemas, took))
            found["beside"].append(await gaps(engine, seconds))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        engine.close()
    usual = statistics.median(itertools.chain(*found["alone"]))
    for name, of_rounds in found.items():
        print(f"{name}: {summary(of_rounds, usual)}")
    print(f"{len(took)} schemas, {statistics.median(took or [0]):.2f} s each (median)")


def summary(of_rounds: list[list[float]], usual: float) -> str:
    """What the gaps of some rounds come to."""
    together = sorted(itertools.chain(*of_rounds))
    median, p99, p999 = (together[int(share * len(together))] for share in (0.5, 0.99, 0.999))
    largest = statistics.median(max(one) for one in of_rounds)
    num_late = sum(gap > usual + LATE_MS for gap in together)
    return (
        f"median {median:.2f} ms, p99 {p99:.2f}, p99.9 {p999:.2f}, largest {together[-1]:.2f} (median of rounds "
        f"{largest:.2f}), {num_late} of {len(together)} tokens more than {LATE_MS:g} ms late"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        asyncio.run(measure(args.model, args.rounds, args.seconds))
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
