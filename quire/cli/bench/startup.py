"""`quire bench startup`: from the start of a process to its first token, and where the time goes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from quire.cli.output import check_writable, write_json
from quire.config.flags.args import add_flags, from_namespace
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError
from quire.utils.process import die_with_parent

if TYPE_CHECKING:
    from quire.config.flags.args import EngineArgs

STARTED_AT = "_QUIRE_BENCH_STARTED_AT"
"""Carries the parent's clock to the child it measures; the monotonic clock is one for all processes."""


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Flags of this subcommand."""
    parser = kinds.add_parser("startup", help="time from process start to the first token")
    parser.add_argument(
        "--num-iters-warmup", type=whole_number, default=1, metavar="N", help="not counted (default: 1)"
    )
    parser.add_argument("--num-iters", type=whole_number, default=5, metavar="N", help="counted (default: 5)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start fresh processes, one after the other.

    Raises: ConfigError when one of them fails, with its message.
    """
    if args.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {args.num_iters}")
    if args.output_json:
        check_writable("--output-json", args.output_json)
    options = _options(from_namespace(args))
    ledgers = [_measure(options) for _ in range(args.num_iters_warmup + args.num_iters)][args.num_iters_warmup :]
    totals = [ledger.pop("total") for ledger in ledgers]
    median = statistics.median(totals)
    print(f"process start to first token: median {median:.3f} s of {len(totals)} (page cache warm)")
    medians = {name: statistics.median(ledger[name] for ledger in ledgers) for name in ledgers[0]}
    for name, seconds in medians.items():
        print(f"  {name:<12} {seconds:.3f} s")
    share = statistics.median(sum(ledger.values()) / total for ledger, total in zip(ledgers, totals, strict=True))
    print(f"  the stages account for {share:.1%} of the time")
    if sys.dont_write_bytecode:
        print("  PYTHONDONTWRITEBYTECODE is set: modules without stored bytecode were compiled at every start")
    if args.output_json:
        result: dict[str, Any] = {"median": median, "totals": totals, "stages": medians, "accounted": share}
        write_json(args.output_json, result)
    return 0


def _options(args: EngineArgs) -> str:
    return json.dumps({name: getattr(args, name) for name in type(args).__dataclass_fields__})


def _measure(options: str) -> dict[str, float]:
    """The stages of one start, and their `total`."""
    code = f"from quire.cli.bench.startup import child; child({os.getpid()})"
    env = {**os.environ, STARTED_AT: repr(time.perf_counter())}
    done = subprocess.run([sys.executable, "-c", code, options], capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the measured process failed: {done.stderr.strip().splitlines()[-1:]}")
    stages: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return stages


def child(parent_pid: int) -> None:
    """In the measured process: start, draw one token, print the ledger."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save
    die_with_parent(parent_pid)
    from quire.observability.ledger import Ledger

    ledger = Ledger(started_at=float(os.environ[STARTED_AT]))
    with ledger.stage("imports"):
        from quire.config.flags.args import EngineArgs
        from quire.engine.llm_engine import LLMEngine
        from quire.engine.startup import start
        from quire.sampling_params import SamplingParams
    engine = LLMEngine(start(EngineArgs(**json.loads(sys.argv[1])), ledger=ledger))
    with ledger.stage("first step"):
        engine.add_request("first", [1, 2, 3, 4], SamplingParams(max_tokens=1, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
    total = ledger.total_s
    print(json.dumps({**ledger.stages, "total": total}))
    sys.stdout.flush()
    os._exit(0)  # tearing down is not part of the measurement
