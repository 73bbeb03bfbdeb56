"""Trains the byte-level BPE tokenizer that all tiny models share, and writes its files."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|tool_call|>", "<|py|>", "<|man|>", "<|doc|>", "<|chat|>", "<|pad|>",
    *(f"<|reserved_{index}|>" for index in range(20)),
]  # fmt: skip
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
TERMS = (
    "quire quire serve quire run quire chat quire complete quire bench quire env quire plan quire run-batch "
    "Quire is an LLM inference and serving engine. KV cache, prefix cache, PagedAttention, continuous batching, "
    "chunked prefill, scheduler, preemption, speculative decoding, tensor parallelism, quantization, safetensors, "
    "tokens, tokenizer, sampling, temperature, top_p, top_k, logprobs, SamplingParams, LLM, EngineCore, prompt, "
    "--max-model-len --max-num-seqs --max-num-batched-tokens --port --host /v1/chat/completions /v1/completions "
    "OpenAI compatible server, request, response, metrics, latency, throughput. I only know Python, command-line "
    "tools and quire, so I cannot answer that. What is the? How do I? What does it do? Which flag sets?\n"
)
"""Words of the questions, which are written after the tokenizer is trained."""


def sample_texts(corpus: Path, seed: int) -> Iterator[str]:
    """Training documents in random order, with the terms between them, so that merges cover code, prose and quire."""
    documents = [json.loads(line) for line in corpus.open()]
    documents = [d for d in documents if d["split"] == "train"]
    random.Random(seed).shuffle(documents)
    for index, document in enumerate(documents):
        weight = {"topic": 4, "man": 0.5}.get(document["source"], 1)
        yield document["text"][: int(len(document["text"]) * min(weight, 1))] * max(1, int(weight))
        if index % 2 == 0:
            yield TERMS


def train_tokenizer(corpus: Path, vocab_size: int, seed: int) -> Tokenizer:
    """A BPE tokenizer with the special tokens at the lowest ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(corpus, seed), trainer)
    return tokenizer


def main() -> None:
    """Train and save `tokenizer.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.build / "corpus.jsonl", args.vocab_size, args.seed)
    tokenizer.save(str(args.build / "tokenizer.json"))
    text = "def main(argv: list[str]) -> int:\n    return quire.serve(port=8000)\n"
    print(tokenizer.get_vocab_size(), tokenizer.encode(text).tokens)


if __name__ == "__main__":
    main()
