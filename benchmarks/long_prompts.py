"""Short requests beside a few of 50,000 tokens, on a small real model: `simulation_fairness` with real steps.

    python -m benchmarks.long_prompts [--requests 60] [--loads 0.02 0.05] [--long 50000] [--threads N]

A random Llama with 2 layers and a context of 65,536 tokens, its core in a process of its own. One in twenty requests is
long; arrivals are a Poisson process; the load is the share of the time that the requests take one after the other.
Unloaded is what a request takes alone: the median of short ones that come after a pause, as those of a trace do, and
one long one. Prints a line for each load, and one for the short requests that came while a long prompt was computed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import write_family
from benchmarks.simulation_fairness import EVERY, LONG, SHORT, trace
from quire import EngineArgs, SamplingParams
from quire.cli.bench.load import run_loop
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.sampling_params import RequestOutputKind
from quire.simulation.trace import TraceRequest
from quire.utils.math import percentile

CONTEXT, VOCABULARY = 65_536, 4096
PAUSE_S = 0.3
"""Before a short request that is alone. Cores sleep and caches are used by others meanwhile, so it takes longer."""
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds since it was due."""

    due_at: float
    first_token_s: float
    last_token_s: float


class Bench:
    """An engine, and requests for it."""

    def __init__(self, engine: AsyncLLMEngine, num_output: int) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self._params = SamplingParams(
            temperature=0.0,
            max_tokens=num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def ask(self, num_tokens: int, due_at: float | None = None) -> Times:
        """Send a prompt that nobody else has when it is due, or now."""
        began_at = time.perf_counter() if due_at is None else due_at
        prompt = [self._rng.randrange(VOCABULARY) for _ in range(num_tokens)]
        await asyncio.sleep(max(0.0, began_at - time.perf_counter()))
        first_token_s = 0.0
        async for output in self._engine.generate({"prompt_token_ids": prompt}, self._params):
            if output.outputs[0].token_ids and not first_token_s:
                first_token_s = time.perf_counter() - began_at
        return Times(began_at, first_token_s, time.perf_counter() - began_at)

    async def alone(self, pause_s: float) -> Times:
        """What a short request takes alone, after a pause."""
        short = []
        for _ in range(16):
            await asyncio.sleep(pause_s)
            short.append(await self.ask(SHORT))
        # the first one has pages to touch
        return Times(*(statistics.median(getattr(one, name) for one in short[1:]) for name in Times.__slots__))

    async def serve(self, requests: list[TraceRequest], long: int) -> tuple[list[Times], list[Times]]:
        """Times of the short and of the long requests of a trace."""
        began_at = time.perf_counter() + 0.1
        kinds = [long if one.prompt_tokens == LONG else SHORT for one in requests]
        due = [began_at + one.arrival_s for one in requests]
        found = await asyncio.gather(*(self.ask(kind, at) for kind, at in zip(kinds, due, strict=True)))
        pairs = list(zip(kinds, found, strict=True))
        return [one for kind, one in pairs if kind == SHORT], [one for kind, one in pairs if kind == long]


async def measure(directory: Path, args: argparse.Namespace) -> None:
    """Print a line for each load."""
    engine_args = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        num_threads=args.threads,
        use_tqdm_on_load=False,
    )
    with AsyncLLMEngine.launch(engine_args) as engine:
        await engine.wait_ready()
        bench = Bench(engine, args.output_len)
        at_once, short_alone, long_alone = (
            await bench.alone(0.0),
            await bench.alone(PAUSE_S),
            await bench.ask(args.long),
        )
        print(
            f"alone: a short one's first token {1e3 * short_alone.first_token_s:.1f} ms, without a pause before it "
            f"{1e3 * at_once.first_token_s:.1f} ms, a long one's first token {long_alone.first_token_s:.1f} s, "
            f"its last {long_alone.last_token_s:.1f} s",
            flush=True,
        )
        mean_s = at_once.last_token_s * (1 - 1 / EVERY) + long_alone.last_token_s / EVERY
        for load in args.loads:
            short, long = await bench.serve(trace(args.requests, load / mean_s), args.long)
            slowed = [one.last_token_s / long_alone.last_token_s for one in long]
            print(
                f"load {load:.0%}: {_over(short, short_alone)}; {len(long)} long ones slowed "
                f"p50 {percentile(slowed, 50):.2f} x, mean {statistics.fmean(slowed):.2f} x",
                flush=True,
            )
            print(f"  of those beside a long prompt: {_over(_beside(short, long), short_alone)}", flush=True)


def _over(short: list[Times], alone: Times) -> str:
    """Percentiles of times to the first token over that of a request alone."""
    ratios = [one.first_token_s / alone.first_token_s for one in short] or [0.0]
    values = ", ".join(f"p{percent} {percentile(ratios, percent):.2f} x" for percent in (50, 95, 99))
    return f"first of {len(short)} short ones over alone {values}"


def _beside(short: list[Times], long: list[Times]) -> list[Times]:
    """Those that came while a long prompt was computed."""
    spans = [(one.due_at, one.due_at + one.first_token_s) for one in long]
    return [one for one in short if any(began_at < one.due_at < ended_at for began_at, ended_at in spans)]


def main() -> None:
    """Write the model, start the engine, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompts")
    parser.add_argument("--output-len", type=int, default=20)
    parser.add_argument("--threads", type=int, help="that compute; one per core when left out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run_loop(measure(write_family(Path(name), "llama", MODEL, "bfloat16"), args))


if __name__ == "__main__":
    main()
