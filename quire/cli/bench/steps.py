"""`quire bench steps`: measure steps of the engine, and fit the cost model that `quire simulate --cost` takes."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.output import check_writable, write_json
from quire.config.flags.args import add_flags, from_namespace
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError
from quire.worker.graph_cache import MAX_KEPT_TOKENS

if TYPE_CHECKING:
    from quire.config.engine import QuireConfig
    from quire.engine.llm_engine import LLMEngine
    from quire.simulation.fit import Fit
    from quire.simulation.measure import MeasuringExecutor

MAX_ROUNDS = 1000
NUM_OUTPUT = 8
"""Tokens of each sequence."""
SHORTEST_PROMPT = 4
NUM_ARRIVALS = 12
"""Requests of a round that come one by one, and so many that come faster than they are served."""
NUM_ARRIVAL_OUTPUT = 48
"""Tokens of each: most steps are like the one before, as when requests are served."""
LONGEST_ARRIVAL = 256
"""Tokens of their prompts."""
LONGEST_PAUSE_S = 0.05
"""After the last of those before has ended."""
MAX_PROMPTS_PER_BATCH = 8
"""Full steps of prompts; a batch has no more of them."""
TERMS = {
    "fixed_s": "every step",
    "token_s": "token",
    "context_token_s": "token of context",
    "prompt_s": "step with a prompt",
    "pair_s": "pair of tokens in a prompt",
    "sequence_s": "sequence",
    "draw_s": "token that is drawn",
    "new_batch_s": "step of another batch",
    "idle_s": "step after a pause",
    "record_s": "step of a new size",
}


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Flags of this subcommand."""
    parser = kinds.add_parser("steps", help="times of steps by what is in them, for `quire simulate --cost`")
    parser.add_argument("--num-rounds", type=whole_number, default=3, metavar="N", help="repetitions (default: 3)")
    parser.add_argument(
        "--max-batch-size", type=whole_number, default=64, metavar="N", help="sequences at once at most (default: 64)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the cost model to a file")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and fit.

    Raises: QuireError.
    """
    for name, value, most in (
        ("--num-rounds", args.num_rounds, MAX_ROUNDS),
        ("--max-batch-size", args.max_batch_size, 1 << 20),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{name} must be from 1 to {most:,}, got {value}")
    if args.output_json:
        check_writable("--output-json", args.output_json)
    from quire.engine.llm_engine import LLMEngine
    from quire.simulation.fit import fit_cost
    from quire.simulation.measure import MeasuringExecutor

    with LLMEngine.from_engine_args(from_namespace(args)) as engine:
        executor = MeasuringExecutor(engine.parts.core.executor)
        engine.parts.core.executor = executor
        measure_steps(engine, executor, args.num_rounds, args.max_batch_size)
        device = engine.config.device_config
        source = f"measured: {engine.config.model_config.model} on {device.capabilities.name}"
    fit = fit_cost(executor.steps, source)
    _print(fit)
    if args.output_json:
        errors = {"steps": fit.num_steps, "outliers": fit.num_outliers, "median_error": fit.median_error}
        write_json(args.output_json, {"cost": fit.cost.as_dict(), **errors, "p90_error": fit.p90_error})
    return 0


def measure_steps(engine: LLMEngine, executor: MeasuringExecutor, num_rounds: int, max_batch_size: int) -> None:
    """Run batches of every size with prompts of every length, in another order in each round, and lone arrivals."""
    rng = random.Random(0)
    batches = list(_batches(engine.config, max_batch_size))
    for round_ in range(num_rounds + 1):
        if round_ == 1:
            executor.steps.clear()  # the first round is for warming up
        for num_seqs, prompt_len in rng.sample(batches, len(batches)):
            lengths = _lengths(num_seqs, prompt_len, rng)
            _run_batch(engine, executor, lengths, rng)
            if sum(lengths) <= MAX_KEPT_TOKENS:
                _run_batch(engine, executor, lengths, rng)  # by the graphs that were recorded now
        if batches:
            _run_arrivals(engine, executor, rng, 2 * NUM_ARRIVAL_OUTPUT)
            _run_arrivals(engine, executor, rng, NUM_ARRIVAL_OUTPUT // 3)


def _batches(config: QuireConfig, max_batch_size: int) -> Iterator[tuple[int, int]]:
    """(sequences, prompt tokens) in powers of two and four, as far as they fit."""
    limits, cache = config.scheduler_config, config.cache_config
    most_seqs = min(max_batch_size, limits.max_num_seqs, cache.num_sequences or limits.max_num_seqs)
    prompt_len = SHORTEST_PROMPT
    while prompt_len + NUM_OUTPUT <= config.model_config.max_model_len:
        num_seqs = 1
        while num_seqs <= most_seqs:
            num_tokens = num_seqs * (prompt_len + NUM_OUTPUT + cache.block_size)
            is_long = num_seqs * prompt_len > MAX_PROMPTS_PER_BATCH * limits.max_num_batched_tokens
            fits = cache.num_tokens is None or num_tokens <= cache.num_tokens
            if fits and not is_long:
                yield num_seqs, prompt_len
            num_seqs *= 2
        prompt_len *= 4


def _run_batch(engine: LLMEngine, executor: MeasuringExecutor, lengths: list[int], rng: random.Random) -> None:
    engine.reset_prefix_cache()
    for index, length in enumerate(lengths):
        _add(engine, str(index), length, rng)
    while engine.has_unfinished_requests():
        engine.step()
    executor.pause()


def _lengths(num_seqs: int, prompt_len: int, rng: random.Random) -> list[int]:
    """Of up to so many prompts of up to so many tokens: as when requests are served, most steps are of a new size."""
    count = rng.randint(num_seqs // 2 + 1, num_seqs)
    return [rng.randint(prompt_len - prompt_len // 4, prompt_len) for _ in range(count)]


def _run_arrivals(engine: LLMEngine, executor: MeasuringExecutor, rng: random.Random, most_steps: int) -> None:
    """Requests that come one by one, while others decode or after a pause, with less than `most_steps` between them.

    Code and data of a prompt's step have left the caches then, and the cores may have slept: it takes longer than among
    steps of its kind.
    """
    max_model_len = engine.config.model_config.max_model_len
    num_output = min(NUM_ARRIVAL_OUTPUT, max_model_len // 2)
    longest = min(LONGEST_ARRIVAL, max_model_len - num_output)
    for index in range(NUM_ARRIVALS):
        if not engine.has_unfinished_requests():
            executor.arrive()
        _add(engine, str(index), rng.randint(1, longest), rng, num_output)
        for _ in range(rng.randrange(most_steps)):
            if not engine.has_unfinished_requests():
                time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
                break
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    executor.pause()


def _add(engine: LLMEngine, request_id: str, prompt_len: int, rng: random.Random, num_output: int = NUM_OUTPUT) -> None:
    from quire.sampling_params import SamplingParams

    vocab_size = engine.config.model_config.arch.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    engine.add_request(request_id, [rng.randrange(vocab_size) for _ in range(prompt_len)], params)


def _print(fit: Fit) -> None:
    print(f"{fit.num_steps} steps, {fit.num_outliers} of them left out; seconds for each")
    for name, what in TERMS.items():
        print(f"  {what:<28} {fit.cost.as_dict()[name]:.3g}")
    print(f"  tokens that cost nothing     {fit.cost.free_tokens:g}")
    print(f"error of a step: median {fit.median_error:.1%}, p90 {fit.p90_error:.1%}; of all {fit.total_error:+.1%}")
