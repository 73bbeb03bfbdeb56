"""`quire bench latency|throughput|startup|steps|machine|serve|record`: how fast this model is here, what this machine
can do, how fast a server anywhere is, and what it is asked for."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from quire.cli.bench import machine, record, serve, startup, steps
from quire.cli.output import check_writable, write_json
from quire.config.flags.args import add_flags, from_namespace
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError
from quire.utils.math import percentile

if TYPE_CHECKING:
    from quire.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    latency = kinds.add_parser("latency", help="time of one batch from start to end")
    latency.add_argument("--batch-size", type=whole_number, default=8, metavar="N", help="sequences (default: 8)")
    latency.add_argument(
        "--num-iters-warmup", type=whole_number, default=2, metavar="N", help="not counted (default: 2)"
    )
    latency.add_argument("--num-iters", type=whole_number, default=5, metavar="N", help="counted (default: 5)")
    latency.set_defaults(run=run_latency)
    throughput = kinds.add_parser("throughput", help="tokens per second over many requests at once")
    throughput.add_argument("--num-prompts", type=whole_number, default=64, metavar="N", help="requests (default: 64)")
    throughput.set_defaults(run=run_throughput)
    startup.add_arguments(kinds)
    steps.add_arguments(kinds)
    machine.add_arguments(kinds)
    serve.add_arguments(kinds)
    record.add_arguments(kinds)
    for child in (latency, throughput):
        child.add_argument(
            "--input-len", type=whole_number, default=32, metavar="N", help="prompt tokens (default: 32)"
        )
        child.add_argument(
            "--output-len", type=whole_number, default=128, metavar="N", help="output tokens (default: 128)"
        )
        child.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
        add_flags(child)


def run_latency(args: argparse.Namespace) -> int:
    """Time whole batches, one after the other.

    Raises: QuireError.
    """
    _check(args, batch_size=1, num_iters=1, num_iters_warmup=0, input_len=1, output_len=1)
    with _llm(args) as llm:
        for _ in range(args.num_iters_warmup):
            _run_once(llm, args, args.batch_size)
        seconds = [_run_once(llm, args, args.batch_size) for _ in range(args.num_iters)]
    percentiles = {str(p): percentile(seconds, p) for p in PERCENTILES}
    result = {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": percentiles,
        "output_tokens_per_second": args.batch_size * args.output_len / percentiles["50"],
    }
    print(f"average {result['avg_latency']:.3f} s for {args.batch_size} x ({args.input_len}, {args.output_len})")
    for name, value in percentiles.items():
        print(f"  p{name:<3} {value:.3f} s")
    print(f"  {result['output_tokens_per_second']:.1f} output tok/s at the median")
    return _write(args, result)


def run_throughput(args: argparse.Namespace) -> int:
    """Time many requests handed in together.

    Raises: QuireError.
    """
    _check(args, num_prompts=1, input_len=1, output_len=1)
    with _llm(args) as llm:
        _run_once(llm, args, min(args.num_prompts, 8))
        seconds = _run_once(llm, args, args.num_prompts)
    num_output = args.num_prompts * args.output_len
    num_total = num_output + args.num_prompts * args.input_len
    result = {
        "elapsed_time": seconds,
        "num_requests": args.num_prompts,
        "total_num_tokens": num_total,
        "requests_per_second": args.num_prompts / seconds,
        "tokens_per_second": num_total / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
    print(
        f"{args.num_prompts} x ({args.input_len}, {args.output_len}) in {seconds:.2f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.1f} tok/s, "
        f"{result['output_tokens_per_second']:.1f} output tok/s"
    )
    return _write(args, result)


def _llm(args: argparse.Namespace) -> LLM:
    from quire.llm import LLM

    llm = LLM.from_engine_args(from_namespace(args))
    limit = llm.engine.config.model_config.max_model_len
    if args.input_len + args.output_len > limit:
        llm.close()
        raise ConfigError(
            f"--input-len {args.input_len} and --output-len {args.output_len} exceed the context, {limit}; lower them"
        )
    return llm


def _run_once(llm: LLM, args: argparse.Namespace, num_prompts: int) -> float:
    """Seconds for a set of fresh random prompts; nothing is found in the prefix cache."""
    from quire.sampling_params import SamplingParams

    llm.reset_prefix_cache()
    vocab_size = llm.engine.config.model_config.arch.vocab_size
    prompts: list[Any] = [
        {"prompt_token_ids": [random.randrange(vocab_size) for _ in range(args.input_len)]} for _ in range(num_prompts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    started_at = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started_at


def _check(args: argparse.Namespace, **least: int) -> None:
    """Refuse numbers below `least`, and a file that could not be written, before any time is spent."""
    for name, smallest in least.items():
        if vars(args)[name] < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {smallest}, got {vars(args)[name]}")
    if args.output_json:
        check_writable("--output-json", args.output_json)


def _write(args: argparse.Namespace, result: dict[str, Any]) -> int:
    if args.output_json:
        write_json(args.output_json, result)
    return 0
