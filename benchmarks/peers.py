"""quire against its peers on the same synthetic checkpoint (random weights), in turn.

    QUIRE_PEER_OPENVINO=/path/to/python QUIRE_PEER_LLAMACPP=... python -m benchmarks.peers --work DIR --rounds 3

Installs nothing: each peer lives in an environment of its own, whose Python an environment variable names
(QUIRE_PEER_OPENVINO, QUIRE_PEER_LLAMACPP, QUIRE_PEER_VLLM, QUIRE_PEER_TRANSFORMERS). QUIRE_PEER_IKLLAMA names a
directory of ik_llama.cpp's sources whose library is built in `build` there (target `llama`): ik_llama_worker.cpp is
compiled against it, weights are repacked while loading, and the model is llama.cpp's.
The checkpoint is written to DIR and converted there once; for OpenVINO that needs optimum-intel in its environment, for
GGUF the package gguf in llama.cpp's.
`--weights int8` and `int4`: each engine rounds in its own way. The other names are formats of files that quire and its
peers load alike: GGUF (`q4_k_m`), and `gptq` and `awq` checkpoints, beside which OpenVINO runs its own int4.
`--shapes qwen3-moe` is a mixture of experts (of Qwen3-30B-A3B's size, 16 experts in 4 layers), `deepseek-v2` has latent
attention and experts, `mamba2` recurrent layers alone; the latter two run with transformers and llama.cpp alone.
All engines are loaded, then each case is run by each engine in turn, round after round. A busy neighbour does not hurt
all alike: engines whose threads spin while they wait lose most. So a run in which other processes took more than
`MOST_OF_OTHERS` is repeated, up to `TRIES` times, and the one they disturbed least counts. The table shows medians,
their ratio to the best peer, the machine's read bandwidth measured between rounds, and how often an engine's first
token after a prompt is quire's: about always with bf16, for all compute one model; quantised weights are rounded
differently by each.
`--peers`, `--cases` and `--minutes` make a run short.

On a CPU with AMX, llama.cpp compiled by GCC 12 crashes with int8 and int4 weights: the stores that fill its tile
configuration are optimised away. CXXFLAGS="-fno-tree-dse -fno-dse" keeps them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import convert, disturbance
from benchmarks.checkpoints import SHAPES
from benchmarks.convert import Write, num_bytes, write_tokenizer

PAUSE_S = 1.0
"""Between two engines: the threads of some spin for a while after their work, beside whoever comes next."""


MOST_OF_OTHERS = 0.05
"""Of one CPU: time of processes other than the engine, above which a run is repeated."""
TRIES = 4
ENGINES = ("quire", "openvino", "llamacpp", "ikllama", "vllm", "transformers")
ALL_SHAPES = ("llamacpp", "transformers")
"""Peers that run more than the shapes of `ATTENTION`."""
ATTENTION = ("qwen3-0.6b", "qwen3-moe")


@dataclass(frozen=True)
class Format:
    """What weights are kept in: the engines that run it, and what writes the form that each of them loads."""

    forms: Mapping[str, Write]
    is_one_file: bool = False
    """quire and the peers load the same file; OpenVINO, if it is there, its own form of the same numbers."""


def one_gguf(kind: str) -> Format:
    """A GGUF file for quire, llama.cpp and ik_llama.cpp."""
    write = convert.gguf(kind)
    return Format({"quire": write, "llamacpp": write, "ikllama": write}, is_one_file=True)


def one_checkpoint(method: str) -> Format:
    """int4 in groups of 128 for quire and vLLM; for OpenVINO, int4 of its own with groups of that size."""
    write = convert.safetensors(method)
    return Format({"quire": write, "vllm": write, "openvino": convert.openvino("int4")}, is_one_file=True)


def rounded_by_each(openvino: str, gguf: str) -> Format:
    """Each engine's own way to that many bits. quire reads the plain checkpoint."""
    write = convert.gguf(gguf)
    forms = {"openvino": convert.openvino(openvino), "llamacpp": write, "ikllama": write}
    return Format({"quire": convert.as_it_is} | forms)


GGUF_KINDS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
FORMATS = {
    "bf16": Format(
        {
            "quire": convert.as_it_is,
            "openvino": convert.openvino("fp16"),
            "llamacpp": convert.plain_gguf,
            "ikllama": convert.plain_gguf,
            "vllm": convert.as_it_is,
            "transformers": convert.as_it_is,
        }
    ),
    "int8": rounded_by_each("int8", "Q8_0"),
    "int4": rounded_by_each("int4", "Q4_0"),
    **{kind.lower(): one_gguf(kind) for kind in GGUF_KINDS},
    "gptq": one_checkpoint("gptq"),
    "awq": one_checkpoint("awq"),
}


@dataclass(frozen=True)
class Case:
    """What is measured. `steady` takes the time of one output token off: decoding alone."""

    name: str
    batch: int
    input: int
    output: int
    steady: bool = False
    prefill: bool = False

    def rate(self, engine: Engine, seed: int) -> float:
        """Output tokens per second (prompt tokens per second for prefill)."""
        first = engine.seconds(self, 1, seed) if self.steady or self.prefill else 0.0
        if self.prefill:
            return self.batch * self.input / first
        whole = engine.seconds(self, self.output, seed + 1)
        return self.batch * (self.output - (1 if self.steady else 0)) / (whole - first)


CASES = (
    Case("1 sequence, decode", 1, 32, 64, steady=True),
    Case("8 sequences, decode", 8, 32, 64, steady=True),
    Case("16 x (128, 64)", 16, 128, 64),
    Case("32 x (128, 128)", 32, 128, 128),
    Case("prefill 1024", 1, 1024, 1, prefill=True),
)
SHORT_CASES = (
    Case("1 sequence, decode", 1, 32, 64, steady=True),
    Case("16 sequences, decode", 16, 32, 64, steady=True),
    Case("prefill 512", 1, 512, 1, prefill=True),
)
"""Of all shapes but the dense ones."""
ONE_FILE_CASES = (
    Case("1 sequence, decode", 1, 32, 64, steady=True),
    Case("8 sequences, decode", 8, 32, 32, steady=True),
    Case("16 sequences, decode", 16, 32, 32, steady=True),
    Case("prefill 512", 1, 512, 1, prefill=True),
)
"""Of the dense shapes, where all engines run the same file."""


def known_cases(shapes: str, format: Format) -> tuple[Case, ...]:
    """What is measured with these shapes and weights."""
    if shapes != "qwen3-0.6b":
        return SHORT_CASES
    return ONE_FILE_CASES if format.is_one_file else CASES


@dataclass
class Engine:
    """A worker process."""

    name: str
    process: subprocess.Popen[str]
    load_s: float
    rates: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)
    """case -> the share of one CPU that other processes took in the runs that count."""
    first_tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(case, seed) -> the first token after each prompt."""

    def seconds(self, case: Case, output: int, seed: int) -> float:
        """Wall time of one run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"batch": case.batch, "input": case.input, "output": output, "seed": seed}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died on {request}")
        answer = json.loads(line)
        self.first_tokens[case.name, seed] = answer["first_tokens"]
        return float(answer["seconds"])

    def least_disturbed(self, case: Case, seed: int) -> tuple[float, float]:
        """The rate of a case, and the share of one CPU that others took meanwhile."""
        best = (0.0, math.inf)
        for _ in range(TRIES):
            time.sleep(PAUSE_S)
            before, start = disturbance.read(self.process.pid), time.perf_counter()
            rate = case.rate(self, seed)
            seconds = time.perf_counter() - start
            others = disturbance.read(self.process.pid).others_since(before, seconds)
            best = min(best, (rate, others), key=lambda run: run[1])
            if others <= MOST_OF_OTHERS:
                break
        return best

    def agreement(self, other: Engine) -> float:
        """The share of prompts after which both choose the same token."""
        same = [
            a == b
            for run, tokens in self.first_tokens.items()
            for a, b in zip(tokens, other.first_tokens.get(run, []), strict=False)
        ]
        return statistics.fmean(same) if same else math.nan

    def close(self) -> None:
        """End of input: the worker leaves, and takes the engine's other processes with it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def vllm_environment(python: str) -> dict[str, str]:
    """vLLM's manual wants its OpenMP and tcmalloc preloaded; both are looked for in the environment's `lib`."""
    directory = Path(python).parents[1] / "lib"
    found = [str(directory / name) for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
    return {"LD_PRELOAD": ":".join(path for path in found if Path(path).exists())}


def start(name: str, python: str, model: Path, weights: str, threads: int, kv_cache_dtype: str) -> Engine:
    """Start a worker and wait until its model is loaded."""
    worker = Path(__file__).parent / "peer_worker.py"
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if name == "quire":
        env["PYTHONPATH"] = str(worker.parents[1])
    if name == "vllm":
        env |= vllm_environment(python)
    with (model.parent / f"{name}-{weights}.log").open("w") as log:
        process = subprocess.Popen(
            [python, str(worker), name, str(model), weights, str(threads), kv_cache_dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
    assert process.stdout is not None
    word, _, seconds = process.stdout.readline().partition(" ")
    if word != "ready":
        raise RuntimeError(f"{name} did not start; see {log.name}")
    return Engine(name, process, float(seconds))


def models(work: Path, format: Format, shapes: str, wanted: list[str]) -> dict[str, tuple[str, Path]]:
    """engine -> (the Python it runs under, its form of the checkpoint), for the engines that are there."""
    checkpoint = work / "checkpoint"
    if not (checkpoint / "config.json").exists():
        SHAPES[shapes](checkpoint)
        write_tokenizer(checkpoint)
    found = {"quire": (sys.executable, format.forms["quire"](checkpoint, work))}
    for engine in wanted:
        place = os.environ.get(f"QUIRE_PEER_{engine.upper()}")
        is_run = engine in format.forms and (shapes in ATTENTION or engine in ALL_SHAPES)
        if place is not None and is_run:
            python = sys.executable if engine == "ikllama" else place  # ik_llama.cpp is a program of its own
            found[engine] = python, format.forms[engine](checkpoint, work)
    return found


def read_bandwidth(threads: int) -> float:
    """GB/s of reading 1 GiB in huge pages with the kernels' own pool: the best of five."""
    code = (
        "from benchmarks.ops import read_bandwidth\nfrom quire.ops.backends import ops_of\n"
        f"ops_of('cpu', num_threads={threads}).use_this_thread()\ncase = read_bandwidth(1024)\n"
        "for _ in range(5): case.measure()\nprint(case.num_bytes / min(case.times) / 1e9)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where the checkpoint and its conversions are kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", choices=tuple(FORMATS), default="bf16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="of quire alone")
    parser.add_argument("--shapes", choices=tuple(SHAPES), default="qwen3-0.6b", help="a DIR holds one of them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cases", help="comma-separated numbers of cases, from 1")
    parser.add_argument("--peers", default=",".join(ENGINES[1:]), help="comma-separated names")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many; print what counts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    format = FORMATS[args.weights]
    known = known_cases(args.shapes, format)
    wanted = [int(i) - 1 for i in args.cases.split(",")] if args.cases else range(len(known))
    cases = [known[i] for i in wanted]
    found = models(args.work, format, args.shapes, args.peers.split(","))
    engines = [
        start(name, python, model, args.weights, args.threads, args.kv_cache_dtype)
        for name, (python, model) in found.items()
    ]
    bandwidths: list[float] = []
    deadline = time.monotonic() + 60 * args.minutes
    for round_number in range(-1, args.rounds):  # the first round warms up and is not counted
        bandwidths.append(read_bandwidth(args.threads))
        for case, engine in itertools.product(cases, engines):
            if time.monotonic() < deadline:
                measure(engine, case, round_number)
    for engine in engines:
        engine.close()
    print_table(engines, cases, bandwidths, args.weights)
    if format.is_one_file:
        print_shares(engines, {name: num_bytes(model) for name, (_, model) in found.items()}, bandwidths)
    if args.json:
        args.json.write_text(json.dumps({e.name: e.rates for e in engines}, indent=2) + "\n")


def measure(engine: Engine, case: Case, round_number: int) -> None:
    """Run a case and keep its rate."""
    rate, others = engine.least_disturbed(case, seed=1000 * round_number)
    if round_number >= 0:
        engine.rates.setdefault(case.name, []).append(rate)
        engine.others.setdefault(case.name, []).append(others)
    now = time.strftime("%H:%M:%S")
    print(f"# {now} {case.name} {engine.name} {rate:.1f} others {others:.0%}", file=sys.stderr, flush=True)


def print_table(engines: list[Engine], cases: list[Case], bandwidths: list[float], weights: str) -> None:
    """Medians of tokens per second, and quire over the best peer."""
    print(f"weights {weights}; read bandwidth median {statistics.median(bandwidths):.1f} GB/s; tok/s, medians\n")
    print("| case | " + " | ".join(engine.name for engine in engines) + " | quire / best peer |")
    print("|---|" + "---|" * (len(engines) + 1))
    for case in cases:
        medians = {e.name: statistics.median(e.rates[case.name]) for e in engines if case.name in e.rates}
        best = max((rate for name, rate in medians.items() if name != "quire"), default=None)
        ratio = f"{medians['quire'] / best:.2f}" if best and "quire" in medians else "-"
        cells = [f"{medians[e.name]:.1f}" if e.name in medians else "-" for e in engines]
        print(f"| {case.name} | " + " | ".join(cells) + f" | {ratio} |")
    shares = [f"{engine.agreement(engines[0]):.0%}" for engine in engines]
    print("| first token as quire's | " + " | ".join(shares) + " | |")
    most = [max(itertools.chain([0.0], *engine.others.values())) for engine in engines]
    print("| most of a CPU taken by others | " + " | ".join(f"{share:.0%}" for share in most) + " | |")
    print("| load, s | " + " | ".join(f"{engine.load_s:.1f}" for engine in engines) + " | |")


def print_shares(engines: list[Engine], sizes: dict[str, int], bandwidths: list[float]) -> None:
    """How much of the read bandwidth one sequence takes. A token reads each byte of such a file: its table is tied."""
    print("| file, MB | " + " | ".join(f"{sizes[engine.name] / 1e6:.0f}" for engine in engines) + " | |")
    bandwidth = 1e9 * statistics.median(bandwidths)
    rates = [statistics.median(engine.rates.get(ONE_FILE_CASES[0].name, [math.nan])) for engine in engines]
    shares = [f"{rate * sizes[engine.name] / bandwidth:.0%}" for rate, engine in zip(rates, engines, strict=True)]
    print("| 1 sequence, of the read bandwidth | " + " | ".join(shares) + " | |")


if __name__ == "__main__":
    main()
