"""The memory plan against the measured peak of an engine that is driven to its bounds, over many configurations.

    python -m benchmarks.plan [--only WORD ...]

Each configuration runs in a process of its own: the whole KV cache is written, then the largest requests there are run:
every seat taken, a full step of prompt tokens, log-probabilities of prompts and outputs, lists at their bounds, n, and
as many others wait as a server lets wait. The peak is VmHWM of that process, pages of mapped files included.

Without grammars the engine has no tokenizer. With them, as many as a core keeps compiled are checked, compiled and
followed by requests of their own, and then the largest requests follow them. VmHWM of the process that checks them is
part of the peak; the tokenizer is not, for the plan does not have it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_family

MIB = 1 << 20
SHAPE = {
    "vocab_size": 64_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "pad_token_id": None,
}
GPT2 = {"vocab_size": 50_257, "n_embd": 1024, "n_layer": 8, "n_head": 16, "n_positions": 8192}
OPT = {
    "vocab_size": 50_272,
    "hidden_size": 1024,
    "word_embed_proj_dim": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
}
GEMMA3 = {
    **SHAPE,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}
QWEN3 = {**SHAPE, "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 151_936, "eos_token_id": 151_645}
MOE = {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: family, configuration, dtype of the checkpoint
    "llama": ("llama", SHAPE, "bfloat16"),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 1024}, "bfloat16"),
    "qwen2": ("qwen2", SHAPE, "bfloat16"),
    "qwen3": ("qwen3", QWEN3, "bfloat16"),
    "phi3": ("phi3", SHAPE, "bfloat16"),
    "gemma2": ("gemma2", {**SHAPE, "head_dim": 64, "vocab_size": 128_000, "query_pre_attn_scalar": 64}, "bfloat16"),
    "gemma3": ("gemma3_text", GEMMA3, "bfloat16"),
    "opt": ("opt", OPT, "float16"),
    "gpt2": ("gpt2", GPT2, "float32"),
    "qwen3_moe": ("qwen3_moe", {**SHAPE, **MOE, "head_dim": 64}, "bfloat16"),
}
EMBEDDED = "quire-tiny"
DEFAULTS: dict[str, Any] = {"kv_cache_memory_bytes": 384 * MIB, "max_num_seqs": 16, "max_model_len": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration and what its requests ask for."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    """Branches of each request."""
    has_grammars: bool = False
    """Each request follows a grammar."""

    @property
    def name(self) -> str:
        """For people."""
        words = [f"{name}={value}" for name, value in self.options.items()]
        words += [f"n={self.n}"] if self.n > 1 else []
        return " ".join([self.model, *words, *(["with grammars"] if self.has_grammars else [])])


def _cases() -> list[Case]:
    """Sorted by model, so that a checkpoint is written once."""
    tiny = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 * MIB}
    return [
        *(Case(model=model) for model in MODELS if model != "qwen3"),
        *(Case(model="qwen3", options=options) for options in OPTIONS),
        Case(model="qwen3", options={"max_num_seqs": 64}, n=8),
        Case(model="qwen3", options={"max_num_seqs": 64}, n=64),
        Case(model="qwen3", has_grammars=True),
        Case(model="qwen3", options={"max_num_seqs": 128}, has_grammars=True),
        Case(model=EMBEDDED, options=tiny),
        Case(model=EMBEDDED, options={**tiny, "quantization": "int8", "max_num_seqs": 256}),
        Case(model=EMBEDDED, options={**tiny, "max_logprobs": -1, "max_num_batched_tokens": 256}),
        Case(model=EMBEDDED, options={**tiny, "ops": "reference", "max_num_batched_tokens": 256}),
        Case(model=EMBEDDED, options=tiny, has_grammars=True),
        Case(model=EMBEDDED, options={**tiny, "max_num_seqs": 128}, has_grammars=True),
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "float32"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"block_size": 8},
    {"block_size": 20},
    {"block_size": 64},
    {"max_num_seqs": 1},
    {"max_num_seqs": 128},
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 4096},
    {"max_model_len": 16_384, "kv_cache_memory_bytes": 1024 * MIB},
    {"max_logprobs": 0},
    {"max_logprobs": 1000, "max_num_batched_tokens": 512},
    {"num_threads": 1},
]


def measure(model: str | None, options: dict[str, Any], n: int, has_grammars: bool = False) -> dict[str, Any]:
    """Load, write the whole KV cache, run the largest requests; the plan and the peak, in bytes."""
    from quire import LLM
    from quire.messages.request import AbortRequest
    from quire.utils.process import memory_status

    tokenizer = load_tokenizer_once(model) if has_grammars else 0
    options = {**DEFAULTS, **options, "skip_tokenizer_init": not has_grammars}
    with LLM(model, **options, use_tqdm_on_load=False) as llm:
        loaded = memory_status()
        core, config = llm.engine.parts.core, llm.engine.config
        for cache in core.executor.worker.cache.caches:  # type: ignore[attr-defined]
            cache.zero_()
        grammars = compiled_grammars(llm.engine.parts) if has_grammars else []
        running = largest_requests(config, n, grammars)
        waiting = waiting_requests(config, running)
        for request in (*running, *waiting):
            core.add(request)
        run_until_done(core, running)
        for request in waiting:
            core.abort(AbortRequest(request_id=request.request_id))
        peak = memory_status()["VmHWM"] - tokenizer + (checker_peak(llm.engine.parts) if has_grammars else 0)
        return {"plan": dict(config.memory_plan), "peak": peak, "loaded": loaded["VmHWM"]}


def run_until_done(core: Any, requests: list[Any]) -> None:
    """Step until none of these requests is left."""
    groups = core.scheduler.lives.groups
    while any(request.request_id in groups for request in requests):
        core.step()


# -- grammars -------------------------------------------------------------------------------------------------


def load_tokenizer_once(model: str | None) -> int:
    """Load the tokenizer that the engine will have; the bytes that it takes."""
    from quire.engine.core_startup import EMBEDDED_MODEL
    from quire.engine.front import startup
    from quire.tokenizer.tokenizer import load_tokenizer
    from quire.utils.process import memory_status

    before = memory_status()["VmRSS"]
    tokenizer = load_tokenizer(EMBEDDED_MODEL if model is None else Path(model))
    startup.load_tokenizer = lambda directory: tokenizer  # type: ignore[attr-defined]
    return memory_status()["VmRSS"] - before


def compiled_grammars(parts: Any) -> list[Any]:
    """As many grammars as a core keeps compiled; each was checked, and a request has followed it."""
    from quire import SamplingParams

    front, core = parts.input_processor, parts.core
    requests = []
    for index, form in enumerate(forms()):
        params = SamplingParams(structured_outputs=form, temperature=0.9, max_tokens=64, seed=index)
        requests.append(front.process(f"follows {index}", [1000], params).core)
    core.use_vocabulary(front.grammars.vocabulary())
    for request in requests:
        core.add(request)
    run_until_done(core, requests)
    grammars = [request.grammar for request in requests]
    assert all(grammar in core.executor.worker.grammars._compiled for grammar in grammars), "too many to be kept"
    return grammars


def forms() -> list[Any]:
    """Two large schemas and small ones: as many as a core keeps compiled, and nearly as many characters."""
    from quire.structured.grammar import MAX_COMPILED

    sizes = [NUM_LARGE] * 2 + [NUM_SMALL] * (MAX_COMPILED - 2)
    return [form_of(index, num_properties) for index, num_properties in enumerate(sizes)]


NUM_LARGE, NUM_SMALL = 1120, 3
"""Properties: 116,000 characters and 500."""


def form_of(number: int, num_properties: int) -> Any:
    """A schema that no other number has."""
    from quire import StructuredOutputsParams

    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40, "description": "of no meaning, as in schemas that people write"},
        {"type": "integer", "minimum": 0, "maximum": 10**6},
        {"enum": ["first", "second", "third"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 20},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
    ]
    named = {f"property_{100 + number}_{index}": kinds[index % len(kinds)] for index in range(num_properties)}
    schema = {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
    return StructuredOutputsParams(json=schema)


def checker_peak(parts: Any) -> int:
    """VmHWM of the process that checks grammars, without its children, in bytes."""
    pid = parts.input_processor.grammars._process._process.pid
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# -- requests -------------------------------------------------------------------------------------------------


def largest_requests(config: Any, n: int, grammars: list[Any]) -> list[Any]:
    """Requests that fill every seat and a whole step, with everything that takes memory at its bound.

    They follow the grammars in turn, if there are any.
    """
    from quire.engine.front.input_processor import as_bits
    from quire.messages.request import EngineCoreRequest
    from quire.sampling_params import SamplingParams

    limits, vocab_size = config.scheduler_config, config.model_config.arch.vocab_size
    num_logprobs = min(config.model_config.max_logprobs, vocab_size)
    count = max(1, limits.max_num_seqs // n)
    length = max(1, min(limits.max_num_batched_tokens // count, config.model_config.max_model_len - 8))
    words = tuple(
        tuple(1000 + word if place == 0 else 2000 + place for place in range(16)) for word in range(2048 // 16)
    )
    allowed = as_bits(range(vocab_size), vocab_size)
    requests = []
    for index in range(count):
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=[(7 + index + place * 31) % vocab_size for place in range(length)],
            sampling_params=SamplingParams(
                n=n,
                temperature=0.0 if index == 0 and count > 1 else 0.9,
                top_p=0.95,
                logprobs=num_logprobs,
                prompt_logprobs=num_logprobs,
                repetition_penalty=1.1,
                min_tokens=3,
                stop_token_ids=list(range(1000, 2024)),
                logit_bias={1000 + token: 0.5 + token for token in range(1024)},
            ),
            seed=index,
            max_tokens=4,
            eos_token_ids=config.model_config.eos_token_ids,
            grammar=grammars[index % len(grammars)] if grammars else None,
            bad_words_token_ids=words,
            allowed_tokens=allowed,
        )
        requests.append(_as_received(request))
    return requests


def waiting_requests(config: Any, running: list[Any]) -> list[Any]:
    """Requests with long prompts, as many as a server lets wait beside those that run."""
    from quire.engine.request_memory import bytes_of
    from quire.messages.request import EngineCoreRequest
    from quire.sampling_params import SamplingParams

    left = config.scheduler_config.max_request_bytes - sum(map(bytes_of, running))
    length = config.model_config.max_model_len - 1
    requests: list[Any] = []
    while True:
        request = EngineCoreRequest(
            request_id=f"waits {len(requests)}",
            prompt_token_ids=list(range(1000, 1000 + length)),
            sampling_params=SamplingParams(),
            seed=0,
            max_tokens=1,
        )
        left -= bytes_of(request)
        if left < 0:
            return requests
        requests.append(_as_received(request))


def _as_received(request: Any) -> Any:
    """As it comes to a core: with lists of its own."""
    import msgspec

    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))


def run_case(case: Case, directory: Path | None) -> dict[str, Any]:
    """Measure in a fresh process."""
    model = None if directory is None else str(directory)
    job = json.dumps({"model": model, "options": case.options, "n": case.n, "has_grammars": case.has_grammars})
    command = [sys.executable, "-m", "benchmarks.plan", "--child", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _write_tokenizer(directory: Path) -> None:
    """Here alone: a process that is measured imports nothing that an engine does not."""
    from benchmarks.structured import write_tokenizer

    write_tokenizer(directory)


def line(case: Case, found: dict[str, Any]) -> str:
    """A row of the table, in MiB."""
    plan, peak = found["plan"], found["peak"]
    total = sum(plan.values())
    parts = " | ".join(f"{plan[name] / MIB:,.0f}" for name in plan)
    return f"| {case.name} | {parts} | {total / MIB:,.0f} | {peak / MIB:,.0f} | {total / peak - 1:+.1%} |"


def main() -> None:
    """Print a table; lines come as they are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold every word")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(**json.loads(args.child))))
        return
    cases = [case for case in _cases() if all(word in case.name for word in args.only)]
    errors = []
    for model, group in groupby(cases, key=lambda case: case.model):
        with tempfile.TemporaryDirectory() as name:
            directory = None
            if model != EMBEDDED:
                family, config, dtype = MODELS[model]
                directory = write_family(Path(name), family, config, dtype)
            for case in group:
                if case.has_grammars and directory is not None:
                    _write_tokenizer(directory)
                found = run_case(case, directory)
                errors.append(sum(found["plan"].values()) / found["peak"] - 1)
                print(line(case, found), flush=True)
    worst = max(errors, key=abs)
    within = sum(abs(error) <= 0.03 for error in errors)
    print(f"{len(errors)} configurations, {within} within 3 %, the worst {worst:+.1%}")


if __name__ == "__main__":
    main()
