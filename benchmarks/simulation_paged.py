"""The figures of the PagedAttention paper (arXiv 2309.06180), from simulations with quire's own block manager.

    python -m benchmarks.simulation_paged [--requests 1000]

OPT-13B on one A100 with 40 GB, of which the KV cache has 15.7K slots (table 1 of the paper). Lengths are lognormal with
the means of the paper's workloads: ShareGPT 161 and 338 tokens, Alpaca 19 and 58 (figure 11). The baselines keep each
request's keys and values in one piece, reserved when it is admitted, as section 6.1 of the paper describes: up to the
context's end (Max), up to the next power of two of the output (Pow2), or for the true length (Oracle). Their memory has
no external fragmentation here, which favours them. The request-level baseline starts a batch when the one before has
ended. The candidates of beams are drawn (`DrawnCandidates`). Writes
benchmarks/results/simulation/paged_attention.json and docs/charts/paged_attention.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulated_models import OPT_13B, engine_on
from quire.config.engine import QuireConfig
from quire.core.kv.block_manager import BlockManager
from quire.core.sequence import Sequence
from quire.messages.output import PositionLogprobs
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.sampling_params import SamplingParams
from quire.simulation.chart import Line, Panel, line_chart
from quire.simulation.cost_model import CostModel, StepShape
from quire.simulation.executor import SimExecutor
from quire.simulation.replica import Hardware, Replica
from quire.simulation.routing import RoundRobin
from quire.simulation.run import Outcome, simulate
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.trace import TraceRequest
from quire.simulation.workload import Workload
from quire.utils.math import cdiv, round_up

ROOT = Path(__file__).parents[1]
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 981, 16, 2048
WORKLOADS = {"ShareGPT": (161, 338, 1.0), "Alpaca": (19, 58, 0.8)}
"""Mean prompt, mean output, sigma."""
RATES = {
    "ShareGPT": (0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0),
    "Alpaca": (2, 5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 80),
}
SHARED_RATES = {"Alpaca": 4.0, "ShareGPT": 0.3}
"""Requests a second where sharing is counted: the pool does not fill up."""
WIDTHS = (2, 4, 6)
"""Samples, or beams, of a request."""
BLOCK_SIZES = (4, 8, 16, 32)
FEWER_REQUESTS = {"saved_by_sharing_of_beams": 100, "token_share_by_block_size": 300}
"""Where as many show the same: at most so many are simulated."""
MOST_LATENCY_S = 1.0
"""Normalized latency per token at which the chart ends, as in figure 12."""


class ContiguousBlocks(BlockManager):
    """Reserves all that a sequence may come to when it is admitted."""

    def __init__(self, config: QuireConfig, reserve: Callable[[Sequence], int]) -> None:
        """`reserve`: tokens."""
        super().__init__(
            config.cache_config.num_blocks,
            [group.spec for group in config.kv_layout.groups],
            max_chunk_tokens=config.scheduler_config.max_chunk_tokens,
            enable_prefix_caching=False,
        )
        self._reserve = reserve

    def most_blocks(self, seq: Sequence) -> int:
        """See `BlockManager`."""
        return cdiv(self._reserve(seq), self.block_size)

    def append(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]] | None:
        """See `BlockManager`."""
        return super().append(seq, max(num_new_tokens, self._reserve(seq) - seq.num_computed_tokens))


class Contiguous(Replica):
    """An engine whose requests have their memory in one piece."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        blocks = ContiguousBlocks(hardware.config, self.reserve)
        self.scheduler.blocks = self.core.lives.blocks = blocks

    def reserve(self, seq: Sequence) -> int:
        """Tokens."""
        raise NotImplementedError


class OrcaMax(Contiguous):
    """The whole context."""

    def reserve(self, seq: Sequence) -> int:
        """See `Contiguous`."""
        return CONTEXT


class OrcaPow2(Contiguous):
    """The output's length, rounded up to a power of two."""

    def reserve(self, seq: Sequence) -> int:
        """See `Contiguous`."""
        group = seq.group
        return min(CONTEXT, group.num_prompt_tokens + (1 << (group.request.max_tokens - 1).bit_length()))


class OrcaOracle(Contiguous):
    """The true length."""

    def reserve(self, seq: Sequence) -> int:
        """See `Contiguous`."""
        return seq.group.max_num_tokens


class RequestLevel(OrcaMax):
    """A batch begins when the one before has ended, with as many requests as fit."""

    def admit(self) -> list[EngineCoreRequest]:
        """See `Replica`."""
        if self.core.has_work():
            return []
        size = NUM_BLOCKS // cdiv(CONTEXT, BLOCK_SIZE)
        admitted, self.inbox = self.inbox[:size], self.inbox[size:]
        return admitted


class Sharing(Replica):
    """Counts what sequences would hold without sharing."""

    unshared_block_seconds = 0.0

    def count_step(self, shape: StepShape, seconds: float) -> None:
        """See `Replica`."""
        super().count_step(shape, seconds)
        self.unshared_block_seconds += seconds * sum(seq.num_blocks for seq in self.scheduler.running)


class DrawnCandidates(SimExecutor):
    """Reports the likeliest tokens of each sequence, with probabilities that are drawn.

    They break a stick: each candidate has a uniform share of what those before it left, so that the likeliest token has
    a probability of 0.62 on average. They are drawn for each beam and step anew.
    """

    WIDTH = max(WIDTHS)

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """See `Executor`."""
        result = super().execute(plan)
        rng = random.Random(hash(tuple(plan.seq_ids)) ^ plan.num_batched_tokens ^ sum(plan.num_computed_tokens))
        for seq_id, drawn in zip(plan.seq_ids, result.token_ids, strict=True):
            if drawn:
                result.logprobs[seq_id] = [self._candidates(rng)]
        return result

    def _candidates(self, rng: random.Random) -> PositionLogprobs:
        left, shares = 1.0, []
        for _ in range(self.WIDTH):
            shares.append(left * rng.random())
            left -= shares[-1]
        logprobs = sorted((math.log(max(share, 1e-30)) for share in shares), reverse=True)
        return PositionLogprobs(token_ids=list(range(self.WIDTH)), logprobs=logprobs, rank=1)


class Beams(Sharing):
    """Makes each request a beam search as wide as the samples that it asks for."""

    executor_type = DrawnCandidates

    def send(self, request: EngineCoreRequest) -> float:
        """See `Replica`."""
        params = SamplingParams(
            n=request.sampling_params.n, use_beam_search=True, temperature=0.0, ignore_eos=True, detokenize=False
        )
        return super().send(replace(request, sampling_params=params))


SYSTEMS: dict[str, type[Replica]] = {
    "PagedAttention (quire)": Replica,
    "Orca (Oracle)": OrcaOracle,
    "Orca (Pow2)": OrcaPow2,
    "Orca (Max)": OrcaMax,
    "request-level batches": RequestLevel,
}


@dataclass(frozen=True)
class Bench:
    """What all simulations have in common."""

    config: QuireConfig
    cost: CostModel
    num_requests: int

    def run(
        self, workload: str, rate: float, replica_type: type[Replica], *, n: int = 1, skips: bool = True
    ) -> Outcome:
        """A trace at a rate."""
        trace = self.trace(workload, rate, n)
        return simulate(self.config, self.cost, trace, RoundRobin(), skips_steps=skips, replica_type=replica_type)

    def trace(self, workload: str, rate: float, n: int = 1) -> list[TraceRequest]:
        """Requests of a workload."""
        prompt, output, sigma = WORKLOADS[workload]
        shape = Workload(
            num_requests=self.num_requests,
            rate=rate,
            prompt_len=prompt,
            output_len=output,
            lengths="lognormal",
            sigma=sigma,
            n=n,
            max_model_len=CONTEXT,
        )
        return synthetic_trace(shape, seed=0)


def latency(outcome: Outcome) -> float:
    """Seconds per output token, the mean over requests of the time from arrival to end."""
    return statistics.fmean(result.e2el / result.num_output_tokens for result in outcome.results)


def token_share(outcome: Outcome, block_size: int = BLOCK_SIZE) -> float:
    """The share of the memory in use that holds tokens."""
    usage = outcome.replicas[0].usage
    return usage.token_seconds / (usage.block_seconds * block_size)


def throughput_and_latency(bench: Bench) -> dict[str, Any]:
    """By workload and system: (rate, latency), and the share of memory at the highest rate that it keeps up with."""
    found: dict[str, Any] = {}
    for workload, rates in RATES.items():
        found[workload] = {}
        for name, replica_type in SYSTEMS.items():
            points, share = [], 0.0
            for rate in rates:
                outcome = bench.run(workload, rate, replica_type)
                points.append((rate, latency(outcome)))
                share = token_share(outcome)
                if points[-1][1] > MOST_LATENCY_S:
                    break
            found[workload][name] = {"points": points, "token_share": share}
            print(workload, name, f"tokens {share:.1%}", *(f"{rate}:{seconds:.3f}" for rate, seconds in points))
    return found


def saved(outcome: Outcome) -> float:
    """Blocks saved by sharing, as a share of those without it."""
    (replica,) = outcome.replicas
    assert isinstance(replica, Sharing)
    return 1 - replica.usage.block_seconds / replica.unshared_block_seconds


def sharing(bench: Bench, replica_type: type[Sharing]) -> dict[str, dict[str, float]]:
    """Blocks saved by sharing, by workload and width."""
    found: dict[str, dict[str, float]] = {}
    for workload, rate in SHARED_RATES.items():
        found[workload] = {}
        for n in WIDTHS:
            outcome = bench.run(workload, rate, replica_type, n=n, skips=False)
            found[workload][str(n)] = saved(outcome)
        print(workload, replica_type.__name__, found[workload])
    return found


def most_token_share(requests: Iterable[TraceRequest], block_size: int) -> float:
    """The share of memory that can hold tokens while only the last block of a sequence is not full.

    Every token of the output takes one step, whose time is the same for all.
    """
    num_tokens = num_slots = 0
    for request in requests:
        for length in range(request.prompt_tokens + 1, request.prompt_tokens + request.output_tokens):
            num_tokens += length
            num_slots += round_up(length, block_size)
    return num_tokens / num_slots


def token_shares(num_requests: int) -> dict[str, dict[str, tuple[float, float]]]:
    """By workload and block size: the share of memory in use that holds tokens, and the most that is possible."""
    found: dict[str, dict[str, tuple[float, float]]] = {workload: {} for workload in WORKLOADS}
    for block_size in BLOCK_SIZES:
        bench = bench_of(num_requests, block_size)
        for workload, rate in SHARED_RATES.items():
            share = token_share(bench.run(workload, rate, Replica), block_size)
            most = most_token_share(bench.trace(workload, rate), block_size)
            found[workload][str(block_size)] = share, most
            print(workload, f"blocks of {block_size}: {share:.1%} holds tokens, at most {most:.1%}")
    return found


def chart(found: dict[str, Any]) -> str:
    """Latency over rate, one panel for each workload."""
    panels = [
        Panel(
            title=workload,
            x_label="requests/s",
            y_label="s per output token",
            lines=[Line(name=name, points=one["points"]) for name, one in systems.items()],
            most_y=MOST_LATENCY_S,
        )
        for workload, systems in found.items()
    ]
    return line_chart(
        "Latency over load: memory in blocks, and in one piece",
        "OPT-13B on an A100 with 40 GB, simulated; after figure 12 of the PagedAttention paper",
        panels,
        "Mean of each request's time from arrival to end, divided by its output tokens. benchmarks/simulation.md",
    )


def bench_of(num_requests: int, block_size: int = BLOCK_SIZE) -> Bench:
    """The paper's engine, with blocks of another size."""
    config, cost = engine_on(
        "a100-40gb",
        OPT_13B,
        block_size=block_size,
        num_gpu_blocks_override=NUM_BLOCKS * BLOCK_SIZE // block_size,
        max_num_seqs=256,
        gpu_memory_utilization=None,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    return Bench(config, cost, num_requests)


def main() -> None:
    """Run all, write the figures and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    bench = bench_of(args.requests)
    num_requests = {"latency": args.requests, "saved_by_sharing": args.requests}
    for name, most in FEWER_REQUESTS.items():
        num_requests[name] = min(most, args.requests)
    figures = {
        "num_requests": num_requests,
        "latency": throughput_and_latency(bench),
        "saved_by_sharing": sharing(bench, Sharing),
        "saved_by_sharing_of_beams": sharing(bench_of(num_requests["saved_by_sharing_of_beams"]), Beams),
        "token_share_by_block_size": token_shares(num_requests["token_share_by_block_size"]),
        "cost": bench.cost.as_dict(),
    }
    results = ROOT / "benchmarks/results/simulation"
    results.mkdir(parents=True, exist_ok=True)
    (results / "paged_attention.json").write_text(json.dumps(figures, indent=1) + "\n")
    (ROOT / "docs/charts/paged_attention.svg").write_text(chart(figures["latency"]), encoding="utf-8")


if __name__ == "__main__":
    main()
