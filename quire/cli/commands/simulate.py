"""`quire simulate [MODEL]`: how an engine, or several behind a router, would serve requests, without computing them.

The scheduler and the block manager are the real ones. The time of each step comes from a cost model: measured by `quire
bench steps` (--cost), or estimated from a data sheet (--hardware).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.commands.show import config_directory
from quire.cli.output import check_writable, reason_of
from quire.config.flags.args import EMBEDDED, add_flags, from_namespace
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError, counted
from quire.simulation.hardware import HERE, NAMES
from quire.simulation.routing import ROUTERS
from quire.simulation.workload import LENGTHS

if TYPE_CHECKING:
    from quire.config.engine import QuireConfig
    from quire.simulation.cost_model import CostModel
    from quire.simulation.run import Result
    from quire.simulation.trace import TraceRequest

SKIPPED = (
    "model", "tokenizer", "generation_config", "override_generation_config", "skip_tokenizer_init", "chat_template",
    "load_format", "use_tqdm_on_load", "disable_log_stats", "log_stats_interval",
)  # fmt: skip
"""Options of an engine that a simulation has no use for."""
MAX_REPLICAS = 10_000
MAX_SYNTHETIC = 10_000_000
"""Requests."""
MAX_RATE = 1e9
MAX_LEN = 1 << 24
MAX_SIGMA = 10.0
BURSTS = 0.25
"""Burstiness of --arrivals bursty unless it is given."""
METRIC_NAMES = ("ttft", "tpot", "e2el")
SYNTHETIC: dict[str, Any] = {
    "rate": None, "num_requests": 1000, "prompt_len": 512, "output_len": 128, "lengths": "fixed", "sigma": 1.0,
    "burstiness": None, "num_prefixes": 0, "prefix_len": 0, "n": 1,
}  # fmt: skip
"""Flags of synthetic traces and their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help=f"directory, org/name or short name; {EMBEDDED} if absent"
    )
    source = parser.add_argument_group("requests", "From a file, or made up. --seed makes others.")
    source.add_argument(
        "--trace", metavar="FILE", help="JSON lines with arrival_s, prompt_tokens, output_tokens; also prefix_id with "
        "prefix_tokens, n, tenant, priority",
    )  # fmt: skip
    source.add_argument("--arrivals", choices=("poisson", "bursty"), help="make up a trace")
    source.add_argument("--rate", type=float, metavar="R", help="requests a second, of all replicas; inf: all at once")
    _add_number(source, "--num-requests", "requests")
    _add_number(source, "--prompt-len", "mean prompt tokens, beside a shared prefix")
    _add_number(source, "--output-len", "mean output tokens")
    source.add_argument("--lengths", choices=LENGTHS, help="distribution of both lengths (default: fixed)")
    source.add_argument("--sigma", type=float, metavar="S", help="of lognormal lengths (default: 1.0)")
    source.add_argument(
        "--burstiness", type=float, metavar="B", help=f"with --arrivals bursty; 1 would be Poisson (default: {BURSTS})"
    )
    _add_number(source, "--num-prefixes", "prefixes, one of which each prompt begins with")
    _add_number(source, "--prefix-len", "tokens of each of them")
    _add_number(source, "--n", "branches of each request")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--replicas", type=whole_number, default=1, metavar="N", help="engines (default: 1)")
    engines.add_argument(
        "--routing",
        choices=tuple(ROUTERS),
        default="round-robin",
        help="which one gets a request (default: %(default)s)",
    )
    engines.add_argument(
        "--hardware", choices=NAMES, default=HERE,
        help="device of each: its memory, and the times of steps unless --cost says them (default: cpu, this machine)",
    )  # fmt: skip
    engines.add_argument("--cost", metavar="FILE", help="times of steps, from `quire bench steps`")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits of ttft, tpot, e2el for a good request"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--plot", metavar="FILE", help="draw the distribution of the times as SVG")
    add_flags(parser, skip=SKIPPED)
    parser.set_defaults(run=run)


def _add_number(group: argparse._ArgumentGroup, flag: str, help_text: str) -> None:
    default = SYNTHETIC[flag[2:].replace("-", "_")]
    group.add_argument(flag, type=whole_number, metavar="N", help=f"{help_text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the figures.

    Raises: ConfigError.
    """
    from quire.observability.progress import generate_progress
    from quire.simulation.report import report
    from quire.simulation.run import simulate
    from quire.simulation.trace import check_fits

    _check(args)
    goodput = _limits(args.goodput)
    config, cost = _engine(args)
    requests = _requests(args, config)
    limits, length = config.scheduler_config, config.model_config.max_model_len
    has_priorities = limits.policy == "priority"
    check_fits(requests, max_model_len=length, max_num_seqs=limits.max_num_seqs, has_priorities=has_priorities)
    with generate_progress(True, len(requests)) as show:
        router = ROUTERS[args.routing]()
        outcome = simulate(config, cost, requests, router, num_replicas=args.replicas, on_progress=show)
    figures = report(
        outcome,
        num_prompt_tokens=sum(request.prompt_tokens for request in requests),
        num_output_tokens=sum(request.output_tokens * request.n for request in requests),
        goodput=goodput,
    )
    figures |= {"model": config.model_config.model, "routing": args.routing, "goodput": goodput, "cost": cost.as_dict()}
    if args.plot is not None:
        _draw(args.plot, outcome.results, figures)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures, goodput)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers out of range and flags that contradict each other, and set what was left out.

    Raises: ConfigError.
    """
    if (args.trace is None) == (args.arrivals is None):
        raise ConfigError("give the requests: either --trace FILE, or --arrivals poisson with --rate")
    if args.arrivals is not None and args.sigma is not None and args.lengths != "lognormal":
        raise ConfigError("--sigma has no effect without --lengths lognormal; give both or none")
    for name, default in SYNTHETIC.items():
        if args.trace is not None and vars(args)[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with --trace; the file says it")
        if vars(args)[name] is None:
            setattr(args, name, default)
    if not 1 <= args.replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas must be from 1 to {MAX_REPLICAS:,}, got {args.replicas}")
    if args.arrivals is not None:
        _check_synthetic(args)
    if args.plot is not None:
        check_writable("--plot", args.plot)


def _check_synthetic(args: argparse.Namespace) -> None:
    if args.rate is None:
        raise ConfigError(f"--arrivals {args.arrivals} needs --rate, requests a second")
    if not (0 < args.rate <= MAX_RATE or args.rate == math.inf):
        raise ConfigError(f"--rate must be above 0 and at most {MAX_RATE:g}, or inf, got {args.rate}")
    if args.arrivals == "poisson" and args.burstiness is not None:
        raise ConfigError("--burstiness has no effect with --arrivals poisson; use --arrivals bursty")
    if args.burstiness is not None and not 0.001 <= args.burstiness <= 1000:
        raise ConfigError(f"--burstiness must be from 0.001 to 1000, got {args.burstiness}")
    if not 0 <= args.sigma <= MAX_SIGMA:
        raise ConfigError(f"--sigma must be from 0 to {MAX_SIGMA:g}, got {args.sigma}")
    least = {"num_requests": 1, "prompt_len": 1, "output_len": 1, "num_prefixes": 0, "prefix_len": 0, "n": 1}
    most = {"num_requests": MAX_SYNTHETIC, "n": 1024}
    for name, smallest in least.items():
        value, largest = vars(args)[name], most.get(name, MAX_LEN)
        if not smallest <= value <= largest:
            raise ConfigError(f"--{name.replace('_', '-')} must be from {smallest} to {largest:,}, got {value}")
    if (args.num_prefixes > 0) != (args.prefix_len > 0):
        raise ConfigError("--num-prefixes and --prefix-len belong together; give both or none")


def _limits(given: Sequence[str]) -> dict[str, float]:
    """METRIC:MS of each metric, at most once.

    Raises: ConfigError.
    """
    limits: dict[str, float] = {}
    for text in given:
        name, limit = _limit(text)
        if name in limits:
            raise ConfigError(f"--goodput has two limits of {name}; give one")
        limits[name] = limit
    return limits


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if name not in METRIC_NAMES or not 0 <= limit <= 1e9:
        raise ConfigError(f"--goodput takes METRIC:MS with one of {', '.join(METRIC_NAMES)}, got {text!r}")
    return name, limit


def _engine(args: argparse.Namespace) -> tuple[QuireConfig, CostModel]:
    """What each replica is: decided as a start on the device would, all of its memory being free.

    Raises: ConfigError.
    """
    from quire.simulation.cost_model import read_cost
    from quire.simulation.hardware import cost_on
    from quire.simulation.machine import config_on, paced

    if args.name is not None:
        args.model = args.name
    cost = None if args.cost is None else read_cost(args.cost)
    options = from_namespace(args)
    config, device = config_on(args.hardware, options, config_directory(options))
    cost = cost or cost_on(device, config)
    return paced(config, cost, args.hardware), cost


def _requests(args: argparse.Namespace, config: QuireConfig) -> Sequence[TraceRequest]:
    from quire.simulation.synthetic import synthetic_trace
    from quire.simulation.trace import read_trace
    from quire.simulation.workload import Workload

    if args.trace is not None:
        return read_trace(args.trace)
    burstiness = 1.0 if args.arrivals == "poisson" else args.burstiness or BURSTS
    length = config.model_config.max_model_len
    num_tokens = args.prefix_len + args.prompt_len + args.output_len
    if num_tokens > length:
        raise ConfigError(
            f"--prefix-len {args.prefix_len}, --prompt-len {args.prompt_len} and --output-len {args.output_len} make "
            f"{num_tokens} tokens, and the context has {length}; lower them or raise --max-model-len"
        )
    workload = Workload(
        num_requests=args.num_requests,
        rate=args.rate,
        burstiness=burstiness,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        lengths=args.lengths,
        sigma=args.sigma,
        num_prefixes=args.num_prefixes,
        prefix_len=args.prefix_len,
        n=args.n,
        max_model_len=length,
    )
    return synthetic_trace(workload, config.model_config.seed)


def _print(figures: Mapping[str, Any], goodput: Mapping[str, float]) -> None:
    print(
        f"{counted(figures['num_requests'], 'request')} in {figures['duration']:.2f} s of "
        f"{counted(figures['num_replicas'], 'replica')}, {figures['routing']}; "
        f"times of steps: {figures['cost']['source'] or 'a file'}"
    )
    within = " within " + ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.items()) if goodput else ""
    rows = {
        "requests/s": f"{figures['request_throughput']:.2f}",
        f"good requests/s{within}": f"{figures['request_goodput']:.2f}",
        "output tok/s": f"{figures['output_throughput']:.2f}",
        "steps": f"{figures['num_steps']:,}",
        "time in steps": f"{figures['busy']:.1%}",
        "preemptions": f"{figures['num_preemptions']:,}",
        "prefix hits": f"{figures['prefix_cache_hit_rate']:.1%} of prompt tokens",
        "KV blocks in use": f"{figures['kv_usage_mean']:.1%} of {figures['num_blocks']:,}, at most "
        f"{figures['kv_usage_max']:.1%}",
        "tokens in their slots": f"{figures['kv_token_share']:.1%}",
    }
    for title, value in rows.items():
        print(f"  {title:<26} {value}")
    names = ("mean", "p50", "p95", "p99")
    print(f"  {'ms':<8}" + "".join(f"{name:>12}" for name in names))
    for metric in METRIC_NAMES:
        if f"mean_{metric}_ms" in figures:
            print(f"  {metric:<8}" + "".join(f"{figures[f'{name}_{metric}_ms']:>12.2f}" for name in names))


def _draw(name: str, results: list[Result], figures: Mapping[str, Any]) -> None:
    """Write the chart.

    Raises: ConfigError.
    """
    from quire.simulation.chart import Line, Panel, line_chart
    from quire.simulation.report import times_ms
    from quire.utils.math import percentile

    panels = []
    for metric, values in times_ms(results).items():
        if values and metric != "e2el":
            ordered = sorted(values)
            points = [(float(percent), percentile(ordered, percent)) for percent in range(100)]
            lines = [Line(name="simulated", points=points)]
            panels.append(Panel(title=metric.upper(), x_label="percent of requests", y_label="ms", lines=lines))
    subtitle = f"{figures['model']}, {counted(figures['num_replicas'], 'replica')}, {figures['routing']}"
    chart = line_chart(
        f"{figures['request_throughput']:.3g} requests/s, simulated", subtitle, panels, figures["cost"]["source"]
    )
    try:
        Path(name).write_text(chart, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {name} cannot be written: {reason_of(error)}") from None
