"""The simulator against the real engine: one trace, served by the embedded model and by a simulation of it.

    python -m benchmarks.simulation_real [--requests 800] [--loads 0.3 0.6] [--slices 8]

The steps of the engine are measured and a slice of the trace is served in real time, twice, in turn, so that all meet
the same machine. Then the trace is simulated, twice: with the cost model that fits the steps, and with the time that
each step of the first serving took. Where both have the same steps, the second one shows what the simulator itself
gets wrong. By how much the two servings differ is what no simulation can know.
"""

from __future__ import annotations

import argparse
import math
import random
import time

import msgspec

from quire.cli.bench.steps import measure_steps
from quire.config.flags.args import EngineArgs
from quire.engine.llm_engine import LLMEngine
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.sampling_params import SamplingParams
from quire.simulation.cost_model import Batches
from quire.simulation.fit import Step, fit_cost
from quire.simulation.measure import MeasuringExecutor
from quire.simulation.replica import Hardware, Replica
from quire.simulation.report import METRICS, PERCENTILES, times_ms
from quire.simulation.routing import RoundRobin
from quire.simulation.run import Result, simulate
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.trace import TraceRequest
from quire.simulation.workload import Workload
from quire.utils.math import percentile

DRAINED_S = 60.0
"""In which all requests of a slice have ended."""
NUM_SIMULATED = 4
"""Times that the trace is simulated, with other steps held up in each: the p99 of 800 requests is that of eight."""


def replaying(seconds: list[float]) -> type[Replica]:
    """A replica whose steps take the given times, in order."""

    class Replayed(Replica):
        """See `replaying`."""

        def __init__(self, hardware: Hardware) -> None:
            super().__init__(hardware)
            self.left = list(reversed(seconds))
            self.sim_execute = self.core.executor.execute
            self.core.executor.execute = self.execute  # type: ignore[method-assign]

        def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
            """A step."""
            began_at = self.clock.now
            result = self.sim_execute(plan)
            self.clock.now = began_at + (self.left.pop() if self.left else 0.0)
            return result

    return Replayed


def serve(engine: LLMEngine, trace: list[TraceRequest], stopwatch: MeasuringExecutor) -> list[Result]:
    """Serve a trace in real time, with random prompts."""
    rng, results = random.Random(1), dict[int, Result]()
    vocab_size = engine.config.model_config.arch.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(request.prompt_tokens)] for request in trace]
    started_at, num_sent = time.monotonic(), 0
    while len(results) < len(trace):
        now = time.monotonic() - started_at
        while num_sent < len(trace) and trace[num_sent].arrival_s <= now:
            params = SamplingParams(
                temperature=0.0, max_tokens=trace[num_sent].output_tokens, ignore_eos=True, detokenize=False
            )
            if not engine.has_unfinished_requests():
                stopwatch.end()
                stopwatch.arrive()
            engine.add_request(str(num_sent), prompts[num_sent], params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            stopwatch.end()
            time.sleep(max(0.0, trace[num_sent].arrival_s - (time.monotonic() - started_at)))
            continue
        for output in engine.step():
            if output.finished and output.metrics is not None:
                number, stats = int(output.request_id), output.metrics
                results[number] = Result(
                    arrived_at=trace[number].arrival_s,
                    first_token_at=stats.first_token_at - started_at,
                    ended_at=stats.last_token_at - started_at,
                    num_output_tokens=stats.num_generation_tokens,
                    num_preemptions=stats.num_preemptions,
                    num_cached_tokens=0,
                    replica=0,
                )
    stopwatch.end()
    return [results[number] for number in range(len(trace))]


def compare(real: list[Result], simulated: list[Result], name: str = "simulated") -> None:
    """Print percentiles of both, and how they differ."""
    found = times_ms(real), times_ms(simulated)
    for metric in METRICS:
        for percent in PERCENTILES:
            one, other = (percentile(times[metric], percent) for times in found)
            print(f"  {metric} p{percent:<3} real {one:9.2f} ms, {name} {other:9.2f} ms, {other / one - 1:+.1%}")


def main() -> None:
    """Fit, serve, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    with LLMEngine.from_engine_args(EngineArgs(enable_prefix_caching=False)) as engine:
        for load in args.loads:
            run_load(engine, args, load)


def run_load(engine: LLMEngine, args: argparse.Namespace, load: float) -> None:
    """Serve a trace in slices, and measure steps before each of them: a machine's speed changes by the minute."""
    core = engine.parts.core
    inner, batches = core.executor, Batches()
    measuring, stopwatch, other = (MeasuringExecutor(inner, batches=batches) for _ in range(3))
    core.executor = stopwatch
    workload = Workload(
        num_requests=args.requests,
        rate=load * rate_of(engine, args, stopwatch),
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        lengths="uniform",
        max_model_len=engine.config.model_config.max_model_len,
    )
    slices = sliced(synthetic_trace(workload, seed=0), args.slices)
    stopwatch.steps.clear()
    steps: list[Step] = []
    real: list[Result] = []
    again: list[Result] = []
    for part in slices:
        core.executor = measuring
        measure_steps(engine, measuring, 1, 32)
        steps += measuring.steps
        for results, timed_by in ((real, stopwatch), (again, other)):
            core.executor = timed_by
            results += serve(engine, part, timed_by)
    core.executor = inner
    fit = fit_cost(steps, "measured")
    errors = f"median error {fit.median_error:.1%}, p90 {fit.p90_error:.1%}"
    print(f"load {load}: {workload.rate:.2f} requests/s; {fit.num_steps} measured steps, {errors}; with the cost model")
    trace = joined(slices)
    compare(real + again, simulate(engine.config, fit.cost, joined(slices * NUM_SIMULATED), RoundRobin()).results)
    served = stopwatch.steps + other.steps
    expected = sum(fit.cost.step_s(step.shape) for step in served)
    print(f" {len(served)} served steps took {sum(step.seconds for step in served) / expected:.2f} of what it says")
    print(" the second serving beside the first")
    compare(real, again, "again")
    replayed = simulate(
        engine.config,
        fit.cost,
        trace,
        RoundRobin(),
        skips_steps=False,
        replica_type=replaying([step.seconds for step in stopwatch.steps]),
    )
    num_steps = replayed.replicas[0].scheduler.lives.totals.num_steps
    if num_steps == len(stopwatch.steps):
        print(" with the times of the real steps")
        compare(real, replayed.results)
    else:  # a prompt that comes a moment later is in another step, and all times behind it belong to others
        print(f" with the times of the real steps there are {num_steps} others: not comparable")


def sliced(trace: list[TraceRequest], num_slices: int) -> list[list[TraceRequest]]:
    """Parts of a trace, each of which begins at 0."""
    size = math.ceil(len(trace) / num_slices)
    parts = [trace[start : start + size] for start in range(0, len(trace), size)]
    return [shifted(part, -part[0].arrival_s) for part in parts]


def joined(slices: list[list[TraceRequest]]) -> list[TraceRequest]:
    """One trace in which each slice begins when nothing of the one before is left."""
    trace: list[TraceRequest] = []
    for part in slices:
        trace += shifted(part, trace[-1].arrival_s + DRAINED_S if trace else 0.0)
    return trace


def shifted(trace: list[TraceRequest], seconds: float) -> list[TraceRequest]:
    """The same requests, later."""
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s + seconds) for request in trace]


def rate_of(engine: LLMEngine, args: argparse.Namespace, stopwatch: MeasuringExecutor) -> float:
    """Requests a second of 32 that are served at once."""
    trace = [
        TraceRequest(arrival_s=0.0, prompt_tokens=args.prompt_len, output_tokens=args.output_len) for _ in range(32)
    ]
    results = serve(engine, trace, stopwatch)
    return len(results) / max(result.ended_at for result in results)


if __name__ == "__main__":
    main()
