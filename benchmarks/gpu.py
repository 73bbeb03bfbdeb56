"""Decoding and prompts on a GPU, with made-up weights of real shapes, against the bandwidth of copies in the same run.

    python -m benchmarks.gpu [--shape qwen3-8b] [--device cuda] [--batches 1 16 64 256] [--prompt-len 1024] [--rounds 5]

Nothing is read from disk but a config.json. The first line has the time from the start of the process to the first
token, kernels compiled (or found in Triton's cache) included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.checkpoints import QWEN3_06B
from quire import LLM, SamplingParams
from quire.config.memory.weight_shapes import weight_bytes

STARTED_AT = time.perf_counter()
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
OUTPUT = 64
COPIED_BYTES = 1 << 30


def generate(llm: LLM, num_seqs: int, prompt_len: int, num_tokens: int, seed: int) -> float:
    """Seconds for so many sequences of so many tokens; no prompt is that of an earlier call."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1000, (num_seqs, prompt_len), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    began_at = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - began_at


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target, found = torch.empty_like(source), []
    for _ in range(rounds + 1):
        began_at = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(2 * COPIED_BYTES / (time.perf_counter() - began_at))
    return statistics.median(found[1:])


def measure(llm: LLM, num_seqs: int, args: argparse.Namespace, bandwidth: float, num_bytes: int) -> None:
    """A line for one batch size: prompts alone, and with tokens behind them, in turn."""
    prompts, whole = [], []
    for turn in range(args.rounds + 1):
        prompts.append(generate(llm, num_seqs, args.prompt_len, 1, 2 * turn + 1000 * num_seqs))
        whole.append(generate(llm, num_seqs, args.prompt_len, 1 + OUTPUT, 2 * turn + 1 + 1000 * num_seqs))
    prompt_s, whole_s = statistics.median(prompts[1:]), statistics.median(whole[1:])
    step_s = (whole_s - prompt_s) / OUTPUT
    print(
        f"{num_seqs:>4} x ({args.prompt_len}, {OUTPUT}): prompts {num_seqs * args.prompt_len / prompt_s:,.0f} tok/s, "
        f"decoding {num_seqs / step_s:,.0f} tok/s, {1000 * step_s:.2f} ms a step, of which reading the weights at the "
        f"bandwidth of copies is {num_bytes / bandwidth / step_s:.0%}"
    )


def main() -> None:
    """Print a line for the start, the bandwidth, and each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
        longest = args.prompt_len + OUTPUT + 1
        with LLM(directory, device=args.device, max_model_len=longest, **options) as llm:
            generate(llm, 1, 16, 1, 0)
            config = llm.engine.config
            print(f"{args.shape} on {config.device_config.capabilities.name} ({config.device_config.ops} ops)")
            print(f"first token {time.perf_counter() - STARTED_AT:.2f} s after torch was imported")
            bandwidth = copy_bandwidth(config.device_config.torch_device, args.rounds)
            print(f"copies {bandwidth / 1e9:,.0f} GB/s")
            num_bytes = weight_bytes(config.model_config.arch, config.model_config.dtype, ops=config.device_config.ops)
            for num_seqs in args.batches:
                measure(llm, num_seqs, args, bandwidth, num_bytes)


if __name__ == "__main__":
    main()
