"""What grammars cost: masks of 32 sequences at a vocabulary of 151,936 tokens, and throughput beside free decoding.

    python -m benchmarks.structured masks [--rounds 3]
    python -m benchmarks.structured throughput [--rounds 3] [--tokens 48]

The vocabulary is made of the commonest pieces of this repository's texts; the model has the shapes of Qwen3-0.6B and
random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import QWEN3_06B, write_checkpoint
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.ops.backends import ops_of
from quire.structured.backend import grammar_of, mask_words, open_backend
from quire.structured.grammar import Vocabulary
from quire.tokenizer.tokenizer import byte_alphabet

VOCAB_SIZE, EOS = 151_936, 151_645
NUM_SEQUENCES = 32
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "kind": {"enum": ["first", "second", "third"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 10**6},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "kind", "count", "notes"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputsParams(json={"type": "array", "items": ITEM, "minItems": 40, "maxItems": 50}),
    StructuredOutputsParams(regex=r"([A-Z][a-z]{2,12} ){200,400}"),
    StructuredOutputsParams(grammar='start: line{100,200}\nline: /[a-z]{3,9}/ " = " /[0-9]{1,6}/ "\\n"'),
    StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 100}),
]


def pieces() -> list[bytes]:
    """All bytes, and the commonest pieces of words, as many as the vocabulary has room for."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(__file__).parents[1].glob("**/*.[pm][yd]"))[:700]:
        for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", path.read_text(encoding="utf-8")):
            counts.update(word[i:j] for i in range(len(word)) for j in range(i + 2, min(len(word), i + 9) + 1))
    common = [text.encode() for text, _ in counts.most_common(VOCAB_SIZE)]
    return [*(bytes([byte]) for byte in range(256)), *common][: EOS - 10]


def vocabulary() -> Vocabulary:
    tokens = pieces()
    tokens += [b""] * (VOCAB_SIZE - len(tokens))
    tokens[EOS] = b"<end>"
    return Vocabulary(tokens=tokens, special_ids=frozenset({EOS}), eos_token_ids=(EOS,))


def masks(rounds: int) -> None:
    """Microseconds a token on one thread: masks, taking a token, and drawing with and without the mask."""
    known = vocabulary()
    backend = open_backend("llguidance", known)
    ops = ops_of("cpu", num_threads=1)
    ops.use_this_thread()
    logits = torch.randn(NUM_SEQUENCES, VOCAB_SIZE)
    filled = np.zeros((NUM_SEQUENCES, mask_words(VOCAB_SIZE)), np.int32)
    rows = torch.arange(NUM_SEQUENCES)
    settings = torch.ones(len(rows)), torch.zeros_like(rows), torch.ones(len(rows)), torch.zeros(len(rows))
    numbers = torch.rand(len(rows), 1, dtype=torch.float64)
    times: dict[str, list[float]] = {"mask": [], "advance": [], "draw": [], "draw freely": []}
    for number in range(rounds):
        rng = random.Random(number)
        matchers = [backend.compile(grammar_of(FORMS[index % len(FORMS)])) for index in range(NUM_SEQUENCES)]
        for _ in range(60):
            began_at = time.perf_counter()
            backend.fill_masks(list(zip(matchers, range(NUM_SEQUENCES), strict=True)), filled)
            masked_at = time.perf_counter()
            ops.allowed_max(logits, rows, torch.from_numpy(filled))
            ops.sample(logits, *settings, numbers, rows, torch.from_numpy(filled))
            drawn_at = time.perf_counter()
            ops.sample(logits, *settings, numbers)
            freely_at = time.perf_counter()
            chosen = [_draw(rng, row) for row in filled]
            chosen_at = time.perf_counter()
            for matcher, token_id in zip(matchers, chosen, strict=True):
                matcher.advance(token_id)
            times["advance"].append(time.perf_counter() - chosen_at)
            times["mask"].append(masked_at - began_at)
            times["draw"].append(drawn_at - masked_at)
            times["draw freely"].append(freely_at - drawn_at)
    for name, seconds in times.items():
        each = [1e6 * second / NUM_SEQUENCES for second in seconds]
        p90 = statistics.quantiles(each, n=10)[-1]
        print(
            f"{name}: median {statistics.median(each):.1f} us a token, mean {statistics.mean(each):.1f}, p90 {p90:.1f}"
        )


def _draw(rng: random.Random, mask: Any) -> int:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[rng.randrange(len(allowed))])


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with the vocabulary."""
    character = {byte: letter for letter, byte in byte_alphabet().items()}
    vocab = {"".join(character[byte] for byte in token): index for index, token in enumerate(pieces())}
    special = {"id": EOS, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole = {
        "version": "1.0",
        "added_tokens": [{**special, **flags}],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab | {"<end>": EOS}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")


def throughput(rounds: int, tokens: int) -> None:
    """Tokens a second of 32 sequences, free and constrained in turn."""
    with tempfile.TemporaryDirectory() as name:
        directory = write_checkpoint(Path(name), QWEN3_06B)
        write_tokenizer(directory)
        with LLM(str(directory), max_model_len=512, max_num_seqs=NUM_SEQUENCES, disable_log_stats=True) as llm:
            base = SamplingParams(temperature=1.0, max_tokens=tokens, detokenize=False)
            free = [base.clone(seed=seed, ignore_eos=True) for seed in range(NUM_SEQUENCES)]
            bound = [base.clone(seed=s, structured_outputs=FORMS[s % len(FORMS)]) for s in range(NUM_SEQUENCES)]
            prompts = [[index + 1, 2, 3] for index in range(NUM_SEQUENCES)]
            found: dict[str, list[float]] = {"free": [], "constrained": []}
            run(llm, prompts, bound)
            for _ in range(rounds):
                found["free"].append(run(llm, prompts, free))
                found["constrained"].append(run(llm, prompts, bound))
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    print(*(f"{kind} {value:.1f} tok/s" for kind, value in medians.items()), sep=", ", end="")
    print(f": {medians['constrained'] / medians['free']:.3f}")


def run(llm: LLM, prompts: Iterable[list[int]], params: list[SamplingParams]) -> float:
    began_at = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - began_at
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["masks", "throughput"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    if args.what == "masks":
        masks(args.rounds)
    else:
        throughput(args.rounds, args.tokens)


if __name__ == "__main__":
    main()
