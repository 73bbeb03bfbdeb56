"""What compiling large schemas costs a neighbour: the gaps between its tokens, with and without.

    python -m benchmarks.grammar_stalls [--model DIRECTORY] [--rounds 6] [--tokens 300]

Rounds with and without schemas are in turn. In the first, a new schema of 100 KB arrives every 0.4 s, is checked,
compiled and generates a token, while one request without a form generates beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from typing import Any

from quire import AsyncLLMEngine, EngineArgs, SamplingParams, StructuredOutputsParams

NUM_PROPERTIES = 900
PAUSE_S = 0.4
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


async def gaps(engine: AsyncLLMEngine, tokens: int) -> list[float]:
    """Milliseconds between the tokens of one request."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, detokenize=False)
    found, before = [], 0.0
    async for _ in engine.generate("Once", params, f"neighbour-{next(_numbers)}"):
        now = time.perf_counter()
        found.append(1e3 * (now - before))
        before = now
    return found[2:]


async def disturb(engine: AsyncLLMEngine, schemas: list[str]) -> None:
    while schemas:
        form = StructuredOutputsParams(json=schemas.pop())
        params = SamplingParams(max_tokens=1, structured_outputs=form)
        async for _ in engine.generate("{", params, f"large-{next(_numbers)}"):
            pass
        await asyncio.sleep(PAUSE_S)


async def measure(model: str | None, rounds: int, tokens: int) -> None:
    options = {} if model is None else {"model": model}
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**options, disable_log_stats=True))
    found: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    try:
        await gaps(engine, 20)
        for _ in range(rounds):
            found["alone"].append(await gaps(engine, tokens))
            schemas = [schema() for _ in range(50)]
            task = asyncio.create_task(disturb(engine, schemas))
            await asyncio.sleep(0.1)
            found["beside"].append(await gaps(engine, tokens))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        engine.close()
    for name, of_rounds in found.items():
        together = sorted(itertools.chain(*of_rounds))
        most = statistics.median(max(one) for one in of_rounds)
        p99 = together[int(0.99 * len(together))]
        print(
            f"{name}: median {statistics.median(together):.2f} ms, p99 {p99:.2f}, largest {together[-1]:.2f} "
            f"(median of rounds {most:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    asyncio.run(measure(args.model, args.rounds, args.tokens))


if __name__ == "__main__":
    main()
