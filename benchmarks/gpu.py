"""Decoding and prompts on a GPU, with made-up weights of real shapes, against the bandwidth of copies in the same run.

    python -m benchmarks.gpu [--shape qwen3-8b] [--batches 1 16 64] [--context 1024] [--steps 48]
    python -m benchmarks.gpu --no-batch-invariant            # products of many rows by the GPU's library
    python -m benchmarks.gpu --engine transformers           # its continuous batching, on the same work

Nothing is read from disk but a config.json. The first line has the time from the start of the process to the first
token, and without what it took to make weights up; kernels are compiled in it, or found in Triton's cache.
A step of decoding is timed while all sequences of a batch decode: the median time between two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.checkpoints import QWEN3_06B
from quire import LLM, LLMEngine, SamplingParams
from quire.config.memory.weights.sizes import weight_bytes

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": {
        **QWEN3_06B,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
COPIED_BYTES = 1 << 30
WHOLE = (64, 1024, 128)
"""Sequences, tokens of their prompts and of their answers that are timed from the first prompt to the last token."""


def process_age_s() -> float:
    """Since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def prompts(num_seqs: int, num_tokens: int, seed: int) -> list[list[int]]:
    """No prompt is that of another seed."""
    return torch.randint(1000, (num_seqs, num_tokens), generator=torch.Generator().manual_seed(seed)).tolist()


def copy_bandwidth(rounds: int = 5) -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, found = torch.empty_like(source), []
    for _ in range(rounds + 1):
        began_at = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(2 * COPIED_BYTES / (time.perf_counter() - began_at))
    return statistics.median(found[1:])


class Timed:
    """An engine, and when each of its steps ended."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._num_requests = 0

    def run(self, token_ids: list[list[int]], num_tokens: int) -> list[tuple[float, int]]:
        """Of each step: seconds since the end of the one before it, and how many requests got a token."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        steps, ended_at = list[tuple[float, int]](), time.perf_counter()
        for ids in token_ids:
            self._num_requests += 1
            self.engine.add_request(str(self._num_requests), {"prompt_token_ids": ids}, params)
        while self.engine.has_unfinished_requests():
            num_given = len(self.engine.step())
            now = time.perf_counter()
            steps.append((now - ended_at, num_given))
            ended_at = now
        return steps

    def seconds(self, token_ids: list[list[int]], num_tokens: int) -> float:
        """From the first request to the last token."""
        return sum(seconds for seconds, _ in self.run(token_ids, num_tokens))

    def step_s(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Of decoding, once all sequences have their first token."""
        num_prompt_steps = num_seqs * context // self.engine.config.scheduler_config.max_num_batched_tokens
        steps = self.run(prompts(num_seqs, context, num_seqs), num_steps + num_prompt_steps + 8)
        full = [seconds for seconds, num_given in steps if num_given == num_seqs]
        return statistics.median(full[4 : num_steps + 4])


def idle_share(timed: Timed, num_seqs: int, num_steps: int) -> float:
    """Of the time between the first and the last kernel of some steps of decoding."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed.run(prompts(num_seqs, 16, 5), num_steps)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    spans = spans[len(spans) // 4 :]  # without the prompts
    busy, last = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    return 1 - busy / (last - spans[0][0])


def measure_quire(args: argparse.Namespace, directory: str) -> None:
    """A line for the start, the bandwidth, each batch size, prompts, and all together."""
    num_tokens = max(args.context + args.steps + max(args.batches) * args.context // 2048 + 9, WHOLE[1] + WHOLE[2] + 1)
    llm = LLM(
        directory,
        device=args.device,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=num_tokens,
        batch_invariant=args.batch_invariant,
    )
    timed, engine, config = Timed(llm.engine), llm.engine, llm.engine.config
    timed.run(prompts(1, 16, 0), 1)
    first_token_s, weights_s = process_age_s(), engine.parts.ledger.stages["weights"]
    print(
        f"{args.shape} on {config.device_config.capabilities.name}: first token after {first_token_s:.1f} s, "
        f"{first_token_s - weights_s:.1f} s without the weights"
    )
    engine.capture_graphs()
    bandwidth = copy_bandwidth()
    arch = config.model_config.arch
    weights = weight_bytes(arch, config.model_config.dtype, ops="triton") - table_bytes(args.shape)
    print(f"copies {bandwidth / 1e9:,.0f} GB/s; weights read in a step {weights / 1e9:.2f} GB")
    for num_seqs in args.batches:
        step_s = timed.step_s(num_seqs, args.context, args.steps)
        pages = num_seqs * (args.context + args.steps) * config.kv_layout.block_bytes / config.cache_config.block_size
        shares = [num_bytes / bandwidth / step_s for num_bytes in (weights, weights + pages)]
        print(
            f"{num_seqs:>4} sequences at {args.context}: {num_seqs / step_s:,.0f} tok/s, {1e3 * step_s:.2f} ms a step, "
            f"of which weights take {shares[0]:.0%} at the bandwidth of copies, with keys and values {shares[1]:.0%}"
        )
    for num_seqs in (1, 16):
        timed.run(prompts(num_seqs, 1024, 1), 1)
        took = timed.seconds(prompts(num_seqs, 1024, 2), 1)
        print(f"prompts of {num_seqs} x 1024: {num_seqs * 1024 / took:,.0f} tok/s")
    num_seqs, num_prompt_tokens, num_answered = WHOLE
    took = timed.seconds(prompts(num_seqs, num_prompt_tokens, 3), num_answered)
    print(f"{num_seqs} x ({num_prompt_tokens}, {num_answered}): {took:.2f} s")
    print(
        "idle while decoding:",
        ", ".join(f"{n}: {idle_share(timed, n, 40):.1%}" for n in dict.fromkeys((args.batches[0], 64))),
    )


def table_bytes(shape: str) -> int:
    """Of an embedding that is no head, of which a step reads a few rows."""
    config = SHAPES[shape]
    assert isinstance(config["vocab_size"], int)
    assert isinstance(config["hidden_size"], int)
    return 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]


def measure_transformers(args: argparse.Namespace, directory: str) -> None:
    """Its continuous batching, in bfloat16 with its default attention there."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16, attn_implementation=args.attention
        ).eval()
    print(f"{args.shape} in transformers, {args.attention}")
    for num_seqs, num_prompt_tokens, num_tokens in ((1, 1024, 64), WHOLE):
        generation = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        took = []
        for seed in (1, 2):
            began_at = time.perf_counter()
            results = model.generate_batch(
                inputs=prompts(num_seqs, num_prompt_tokens, seed), generation_config=generation
            )
            took.append(time.perf_counter() - began_at)
        counts = {len(result.generated_tokens) for result in results.values()}
        print(f"{num_seqs} x ({num_prompt_tokens}, {num_tokens}): {took[-1]:.2f} s; tokens {sorted(counts)}")


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", choices=("quire", "transformers"), default="quire")
    parser.add_argument("--attention", default="sdpa", help="of transformers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        (measure_quire if args.engine == "quire" else measure_transformers)(args, directory)


if __name__ == "__main__":
    main()
