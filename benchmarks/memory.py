"""Peak memory of `LLM(...)` against its own plan: weights + KV + at most 500 MiB.

    python benchmarks/memory.py [--model DIR] [--kv 1GiB]

Without a model a random bf16 checkpoint of Qwen3-0.6B shapes is written to a temporary directory first.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.checkpoints import write_checkpoint
from quire.config.flags.knobs import whole_number

LIMIT = 500 << 20


def child(model: str, kv_bytes: int) -> None:
    """Load, touch the whole KV cache, generate; print the peak and the plan."""
    from quire import LLM, SamplingParams

    llm = LLM(model, kv_cache_memory_bytes=kv_bytes, max_model_len=4096, skip_tokenizer_init=True)
    loaded = _peak()
    for cache in llm.engine.parts.core.executor.worker.cache.caches:  # type: ignore[attr-defined]
        cache.zero_()
    prompts = [[7 + i] * 512 for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True), use_tqdm=False)  # type: ignore[arg-type]
    plan = llm.engine.config.memory_plan
    budget = plan["weights"] + plan["kv_cache"]
    print(
        f"after load {loaded / 2**20:.0f} MiB; peak with the cache full {_peak() / 2**20:.0f} MiB; weights "
        f"{plan['weights'] / 2**20:.0f} + KV {plan['kv_cache'] / 2**20:.0f} MiB; beyond them "
        f"{(_peak() - budget) / 2**20:.0f} MiB (limit {LIMIT >> 20})"
    )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run the measurement in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--kv", type=whole_number, default=1 << 30)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.kv)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or str(write_checkpoint(Path(directory)))
        command = [sys.executable, "-m", "benchmarks.memory", "--child", "--model", model, "--kv", str(args.kv)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
