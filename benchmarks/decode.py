"""Decoding of one sequence in two situations, each against the undisturbed short context in the same minutes.

    python -m benchmarks.decode --model DIR [--rounds 5] [--context 8192] [--kv-cache-dtype int8]

- beside a process that keeps one core busy;
- at a long context, against what the added bytes of keys and values explain at the read bandwidth measured here.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time

from quire import LLM, SamplingParams
from quire.ops.cpu import library
from quire.ops.cpu.runtime import memory

SHORT = 128
TOKENS = 40


def ms_per_token(llm: LLM, prompt: list[int]) -> float:
    """Time of one decoded token: a long answer minus a short one, the prompt from the prefix cache."""
    seconds = []
    for count in (4, 4 + TOKENS):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return 1000 * (seconds[1] - seconds[0]) / TOKENS


def read_bandwidth(megabytes: int = 800) -> float:
    """Bytes a second."""
    data, total = memory.zeros(megabytes << 20), ctypes.c_uint64()
    data.fill_(1)
    start = time.perf_counter()
    library.load().qr_read_bandwidth(data.data_ptr(), data.numel(), ctypes.byref(total))
    return data.numel() / (time.perf_counter() - start)


def main() -> None:
    """Print two lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    llm = LLM(args.model, kv_cache_dtype=args.kv_cache_dtype, max_model_len=args.context + 2 * TOKENS)
    layout = llm.engine.parts.config.kv_layout
    token_bytes = sum(sum(group.page_sizes) for group in layout.groups) / layout.page.block_size
    prompts = {length: [7 * i % 1000 for i in range(length)] for length in (SHORT, args.context)}
    for prompt in prompts.values():
        ms_per_token(llm, prompt)
    quiet, busy, long, bandwidths = [], [], [], []
    for _ in range(args.rounds):
        quiet.append(ms_per_token(llm, prompts[SHORT]))
        long.append(ms_per_token(llm, prompts[args.context]))
        bandwidths.append(read_bandwidth())
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
            time.sleep(0.3)
            busy.append(ms_per_token(llm, prompts[SHORT]))
            neighbour.kill()
    undisturbed, bandwidth = statistics.median(quiet), statistics.median(bandwidths)
    print(
        f"one core busy: {1000 / statistics.median(busy):.1f} tok/s of {1000 / undisturbed:.1f}: "
        f"{undisturbed / statistics.median(busy):.0%}"
    )
    measured = statistics.median(long)
    explained = undisturbed + 1000 * (args.context - SHORT) * token_bytes / bandwidth
    print(
        f"context {args.context}: {measured:.1f} ms a token; {undisturbed:.1f} ms at {SHORT} and the "
        f"added bytes at {bandwidth / 1e9:.1f} GB/s make {explained:.1f}: {measured / explained - 1:+.0%}"
    )


if __name__ == "__main__":
    main()
