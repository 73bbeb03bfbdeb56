"""Conversations that come back after others have filled the KV cache: with `--kv-ram` and without.

    python benchmarks/tiers.py [--model DIR] [--conversations 12] [--turns 3] [--tokens 1024] [--kv-ram 4GiB]

Every conversation has a turn, then every one its next, one request at a time. The cache holds a third of them, so each
has been evicted when it comes back. Printed are tokens computed and the time to the first token of turns after the
first, and the time of prompts of which nothing is used again. Without a model a random bf16 checkpoint of Qwen3-0.6B
shapes is used. `--kv-disk DIR` adds a file, a new one each time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_checkpoint
from quire import LLM, SamplingParams
from quire.config.flags.knobs import whole_number

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
OUTPUT_TOKENS = 16


def conversations(llm: LLM, args: argparse.Namespace) -> tuple[float, int]:
    """Median seconds to the first token of later turns, and the tokens computed for them."""
    prompts = [[7 + number] * args.tokens for number in range(args.conversations)]
    _run(llm, prompts)
    before, times = _computed(llm), []
    for turn in range(1, args.turns):
        for prompt in prompts:
            prompt += [100 + turn] * OUTPUT_TOKENS
            times += _run(llm, [prompt])
    return statistics.median(times), _computed(llm) - before


def without_reuse(llm: LLM, args: argparse.Namespace) -> float:
    """Seconds for prompts that nobody has asked before."""
    first = 1000
    began_at = time.perf_counter()
    _run(llm, [[first + number] * args.tokens for number in range(args.conversations)])
    return time.perf_counter() - began_at


def _run(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of each, one after the other."""
    times = []
    for prompt in prompts:
        began_at = time.perf_counter()
        llm.generate([prompt], ONE, use_tqdm=False)  # type: ignore[arg-type]
        times.append(time.perf_counter() - began_at)
    return times


def _computed(llm: LLM) -> int:
    stats = llm.engine.last_stats
    assert stats is not None
    return stats.num_computed_tokens


def measure(model: str, args: argparse.Namespace, tiers: dict[str, Any]) -> None:
    """Print one line."""
    longest = args.tokens + args.turns * OUTPUT_TOKENS
    blocks = args.conversations // 3 * (-(-longest // 16) + 1)
    options = {"max_model_len": longest + 16, "block_size": 16, "num_gpu_blocks_override": blocks}
    with LLM(model, skip_tokenizer_init=True, **options, **tiers) as llm:
        first_token_s, computed = conversations(llm, args)
        alone_s = without_reuse(llm, args)
        stats = llm.engine.last_stats
        assert stats is not None
        print(
            f"{'tiers' if tiers else 'none':6} first token {first_token_s * 1e3:8.1f} ms, {computed:7d} computed, "
            f"{stats.num_tier_loads} pages loaded, {stats.num_tier_saves} saved, {stats.num_tier_failures} failed; "
            f"nothing used again: {alone_s:.2f} s"
        )


def main() -> None:
    """Without and with tiers, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--kv-ram", type=whole_number, default=4 << 30)
    parser.add_argument("--kv-disk")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or str(write_checkpoint(Path(directory)))
        for repeat in range(args.repeats):
            tiers: dict[str, Any] = {"kv_ram": args.kv_ram}
            if args.kv_disk is not None:
                tiers["kv_disk"] = str(Path(args.kv_disk) / str(repeat))
            measure(model, args, {})
            measure(model, args, tiers)


if __name__ == "__main__":
    main()
