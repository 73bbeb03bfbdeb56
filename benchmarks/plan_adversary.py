"""An engine under the largest requests that it accepts, without a pause: does its memory stay within the plan?

    python -m benchmarks.plan_adversary [--minutes 60] [--seed 0] [--model NAME ...] [--waiting 128]

Each configuration runs for its share of the time in a core process of its own, as `quire serve` starts it. First
long prompts fill its KV cache. Then as many requests as it has seats are kept in it, and those that wait until a front
would refuse more: the largest n, best_of and beam width, the longest prompts and outputs, log-probabilities of both,
every list at its bound, penalties, seeds, repeated prompts, several tenants, and aborts in the middle. The
peak is what the kernel says of that process (VmHWM), pages of mapped files included; where there is a file of KV pages,
which the plan leaves to the system, it is the largest of samples without its pages. Prints a table; the status is 1
when a peak exceeds its plan. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_family
from benchmarks.largest_requests import Bounds
from benchmarks.plan import EMBEDDED, MIB
from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.engine.front.seeds import same_seeds
from quire.engine.front.startup import load_front
from quire.engine.process.client import ProcessCoreClient
from quire.engine.process.protocol import CoreConfigured
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import CoreDown, CoreEvent, CoreGone, CoreSupervisor, CoreUp
from quire.engine.request_memory import RequestMemory
from quire.errors import EngineOverloaded, RequestError
from quire.messages.output import EngineCoreOutputs, FinishReason
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import StepStats
from quire.sampling_params import SamplingParams

SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
}
GEMMA3 = {
    **SMALL,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
MOE = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
SMALL_GPT2 = {"vocab_size": 50_257, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 8192}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: family, configuration, dtype of the checkpoint
    "llama": ("llama", SMALL, "bfloat16"),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 151_936}, "bfloat16"),
    "gemma2": ("gemma2", {**SMALL, "head_dim": 64, "sliding_window": 512}, "bfloat16"),
    "gemma3": ("gemma3_text", GEMMA3, "bfloat16"),
    "gpt2": ("gpt2", SMALL_GPT2, "float32"),
    "qwen3_moe": ("qwen3_moe", {**SMALL, **MOE, "head_dim": 64}, "bfloat16"),
}
LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 128, "max_num_seqs": 32}
"""Few blocks, so that requests soon fill them all."""
NUM_TENANTS = 4
TIERS = {"kv_load_min_tokens": 1, "kv_ram": 8 * MIB}
"""What is found is loaded, however short it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration."""

    model: str
    options: dict[str, Any]
    on_disk: bool = False
    """Whether evicted pages go to a file."""

    @property
    def name(self) -> str:
        """For people: what differs from the other configurations."""
        words = [f"{name}={_short(value)}" for name, value in self.options.items() if LIMITS.get(name) != value]
        return " ".join([self.model, *words, *(["kv_disk"] if self.on_disk else [])])


def _short(value: object) -> str:
    return f"{value // MIB}MiB" if isinstance(value, int) and value >= MIB else str(value)


CASES = [
    Case(EMBEDDED, LIMITS),
    Case(EMBEDDED, {**LIMITS, "quantization": "int8", "kv_cache_dtype": "int8", "max_num_seqs": 128}),
    Case(EMBEDDED, {**LIMITS, **TIERS, "block_size": 8, "num_gpu_blocks_override": 512}, True),
    Case(EMBEDDED, {**LIMITS, "max_logprobs": -1, "max_num_batched_tokens": 256, "max_num_seqs": 8}),
    Case("llama", {**LIMITS, "max_logprobs": 1000, "max_num_batched_tokens": 512}),
    Case("qwen3", {**LIMITS, **TIERS, "quantization": "int4"}),
    Case("gemma2", {**LIMITS, "quantization": "int8", "kv_cache_dtype": "int8", "max_num_seqs": 64}),
    Case("gemma3", {**LIMITS, **TIERS, "num_gpu_blocks_override": 256}, True),
    Case("gemma3", {**LIMITS, "num_gpu_blocks_override": 256, "quantization": "int4", "max_num_batched_tokens": 512}),
    Case("qwen3_moe", LIMITS),
    Case("qwen3_moe", {**LIMITS, **TIERS, "quantization": "int8", "kv_cache_dtype": "int8"}),
    Case("gpt2", {**LIMITS, **TIERS, "kv_cache_dtype": "float16", "scheduling_policy": "priority"}, True),
]


class Watch:
    """The memory of a process, sampled by a thread."""

    def __init__(self, pid: int, kv_file: Path | None) -> None:
        self._proc, self._kv_file = Path(f"/proc/{pid}"), kv_file
        self.most: Counter[str] = Counter()
        """The largest bytes seen, by name."""
        self.cpu_s = 0.0
        """Of the process so far."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more samples."""
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """Bytes at most, without pages of the KV file."""
        return self.most["VmHWM" if self._kv_file is None else "resident"]

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            with suppress(OSError):  # it has ended
                status = self._status()
                status["resident"] = status.get("VmRSS", 0) - self._mapped()
                for name, size in status.items():
                    self.most[name] = max(self.most[name], size)
                self.cpu_s = self._cpu_s()

    def _status(self) -> dict[str, int]:
        lines = (self._proc / "status").read_text().splitlines()
        return {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}

    def _cpu_s(self) -> float:
        user, system = (self._proc / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _mapped(self) -> int:
        """Resident pages of the KV file."""
        if self._kv_file is None:
            return 0
        found = False
        for line in (self._proc / "smaps").read_text().splitlines():
            if line.startswith("Rss:") and found:
                return int(line.split()[1]) << 10
            found = found or line.endswith(str(self._kv_file))
        return 0


@dataclass(slots=True)
class Live:
    """A request that the core has."""

    num_left: int
    """Branches that have not ended."""
    num_until_abort: int
    """Outputs before it is aborted; below 0: it is not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Attack:
    """A core process, and the requests that are kept in it."""

    def __init__(self, args: EngineArgs, rng: random.Random) -> None:
        policy = RestartPolicy(
            max_engine_restarts=0, step_timeout=600, startup_timeout=3600
        )  # however busy the machine
        self._supervisor = CoreSupervisor(args, policy)
        self._rng = rng
        self._live: dict[str, Live] = {}
        self._client: ProcessCoreClient | None = None
        self._bounds: Bounds | None = None
        self._memory = RequestMemory(0)
        self._num_drawn = 0
        self.num_most = 0
        """Requests in the core at most."""
        self.counts: Counter[str] = Counter()
        """Requests by how they ended; tokens drawn."""
        self.stats = StepStats()
        self.used_most = 0.0
        """Largest share of the KV blocks in use."""
        self._lost = asyncio.Event()

    async def start(self) -> QuireConfig:
        """Wait for the core. Raises: what kept it from starting."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[CoreEvent]()
        self._supervisor.subscribe(lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        while self._client is None:
            match await events.get():
                case CoreConfigured() as event:
                    front = await asyncio.to_thread(load_front, event.config, seeds=same_seeds)
                    self._bounds = Bounds(front.config, front.input_processor, self._rng)
                    self._memory = RequestMemory(front.config.scheduler_config.max_request_bytes)
                case CoreUp() as event:
                    client = ProcessCoreClient(self._on_outputs, lambda request_id: None, self._lost.set)
                    await client.connect(event.connection)
                    self._client = client
                case CoreGone() as event:
                    raise event.error
                case CoreDown() as event:
                    raise RuntimeError(event.reason)
        assert self._bounds is not None
        return self._bounds.config

    @property
    def pid(self) -> int | None:
        """Of the core."""
        return self._supervisor.core_pid

    async def run(self, num_requests: int, seconds: float) -> None:
        """Keep so many requests in the core. Raises: RuntimeError when the core ends."""
        feeders = [
            asyncio.create_task(self._feed(f"{number}.", f"tenant {number % NUM_TENANTS}"))
            for number in range(num_requests)
        ]
        try:
            async with asyncio.timeout(seconds):
                await self._lost.wait()
            raise RuntimeError("the engine process ended")
        except TimeoutError:
            pass
        finally:
            for feeder in feeders:
                feeder.cancel()
            await asyncio.gather(*feeders, return_exceptions=True)

    def close(self) -> None:
        """End the core."""
        if self._client is not None:
            self._client.close()
        self._supervisor.close()

    async def _feed(self, prefix: str, tenant: str) -> None:
        """One request after the other."""
        assert self._client is not None
        number = 0
        while True:
            number += 1
            request = self._request(f"{prefix}{number}", tenant)
            if request is None:
                await asyncio.sleep(0)
                continue
            while not self._takes(request):
                await asyncio.sleep(0.05)
            params = request.sampling_params
            aborts_after = self._rng.choice([-1, -1, self._rng.randrange(30)])
            num_left = params.n if params.use_beam_search else params.num_sequences
            live = self._live[request.request_id] = Live(num_left, aborts_after)
            self.num_most = max(self.num_most, len(self._live))
            self._client.add(request)
            await live.ended.wait()

    def _takes(self, request: EngineCoreRequest) -> bool:
        """Whether a front would not refuse it."""
        try:
            self._memory.take(request)
        except EngineOverloaded:
            return False
        return True

    def _request(self, request_id: str, tenant: str) -> EngineCoreRequest | None:
        """A request as the front hands it to the core; None when it was refused."""
        assert self._bounds is not None
        fills = self._num_drawn < self._bounds.config.scheduler_config.max_num_seqs
        prompt, fields = self._bounds.fill() if fills else self._bounds.draw()
        self._num_drawn += 1
        try:
            params = SamplingParams(**fields)
            return self._bounds.processor.process(request_id, {"prompt_token_ids": prompt}, params, tenant).core
        except RequestError as error:
            self.counts["refused"] += 1
            print(f"refused: {error.message[:200]}", file=sys.stderr)
            return None

    def _on_outputs(self, news: EngineCoreOutputs) -> None:
        if news.stats is not None:
            self.stats = news.stats
            self.used_most = max(self.used_most, 1 - news.stats.num_free_blocks / news.stats.num_total_blocks)
        for output in news.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue  # it was aborted, and the step ran already
            self.counts["tokens"] += len(output.new_token_ids)
            self.counts["failed"] += output.error is not None
            live.num_left -= output.finish_reason is not None
            live.num_until_abort -= 1
            if live.num_left == 0:
                self._end(output.request_id, "ended" if output.finish_reason is not FinishReason.ERROR else "errors")
            elif live.num_until_abort == -1:
                assert self._client is not None
                self._client.abort(AbortRequest(request_id=output.request_id))
                self._end(output.request_id, "aborted")

    def _end(self, request_id: str, how: str) -> None:
        self.counts[how] += 1
        self._memory.give_back(request_id)
        self._live.pop(request_id).ended.set()


COLUMNS = (
    "configuration", "plan", "peak", "peak / plan", "anonymous", "at once", "requests", "aborted", "drawn", "computed",
    "CPU s", "blocks in use", "KV fills", "preemptions", "loads",
)  # fmt: skip


async def attack(case: Case, model: str | None, until: float, seed: int, waiting: int, disk: str) -> float:
    """Run a configuration until a moment and print its row; the share of its plan that the peak takes."""
    options = {**case.options, "tokenizer": str(EMBEDDED_MODEL), "seed": seed, "use_tqdm_on_load": False}
    if case.on_disk:
        options |= {"kv_disk": disk, "kv_disk_size": 64 * MIB}
    running = Attack(EngineArgs.from_options({"model": model, **options}), random.Random(seed))
    watch = None
    try:
        config = await running.start()
        assert running.pid is not None
        watch = Watch(running.pid, Path(disk, "quire-kv-pages") if case.on_disk else None)
        await running.run(config.scheduler_config.max_num_seqs + waiting, until - time.monotonic())
    finally:
        if watch is not None:
            watch.close()
        running.close()
    plan = sum(config.memory_plan.values())
    print(_row(case, config, running, watch), flush=True)
    return watch.peak / plan


def _row(case: Case, config: QuireConfig, running: Attack, watch: Watch) -> str:
    plan, counts, stats = sum(config.memory_plan.values()), running.counts, running.stats
    cells = [
        case.name,
        f"{plan / MIB:,.0f}",
        f"{watch.peak / MIB:,.0f}",
        f"{watch.peak / plan:.3f}",
        f"{watch.most['RssAnon'] / MIB:,.0f}",
        f"{running.num_most:,}",
        f"{counts['ended']:,}" + (f" ({counts['failed']} failed)" if counts["failed"] else ""),
        f"{counts['aborted']:,}",
        f"{counts['tokens']:,}",
        f"{stats.num_computed_tokens:,}",
        f"{watch.cpu_s:,.0f}",
        f"{running.used_most:.0%}",
        f"{stats.num_computed_tokens / config.cache_config.num_tokens:.1f}",
        f"{stats.num_preemptions:,}",
        f"{stats.num_tier_loads:,}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the configurations one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of all configurations together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="+", choices=(EMBEDDED, *MODELS), help="only configurations of these models")
    parser.add_argument("--waiting", type=int, default=128, help="requests kept in the core beyond its seats")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.model or case.model in args.model]
    seconds, until = 60 * args.minutes / len(cases), time.monotonic()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    shares = []
    for model, group in groupby(cases, key=lambda case: case.model):
        with tempfile.TemporaryDirectory() as name:
            path = None
            if model != EMBEDDED:
                path = str(write_family(Path(name), *MODELS[model]))
            for number, case in enumerate(group):
                disk = tempfile.mkdtemp(dir=name)
                until += seconds
                shares.append(asyncio.run(attack(case, path, until, args.seed + number, args.waiting, disk)))
    exceeded = sum(share > 1 for share in shares)
    print(f"{args.minutes:g} minutes, {len(shares)} configurations, {exceeded} beyond plan, at most {max(shares):.3f}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
