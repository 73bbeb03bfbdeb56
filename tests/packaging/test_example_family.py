"""A package that adds families is installed, listed, planned, run and served: `tests/packages/quire-example-family`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.cli.main import main
from tests.checkpoints import in_transformers, one_thread

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests/packages/quire-example-family"
RENAMED = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "context",
}
PARTS = {
    "model": "net",
    "embed_tokens": "tokens",
    "layers": "blocks",
    "self_attn": "attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "norm": "norm_out",
    "lm_head": "head",
}
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
NUM_TOKENS, SCALE = 12, 0.3
RUN = """
import json, sys
from quire import LLM, SamplingParams
from quire.config.memory.weights.sizes import weight_bytes
from tests.config.test_weight_shapes import tensors_of

directory, prompts, num_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]

with LLM(directory, dtype="float32", max_model_len=128, long_prefill_token_threshold=7) as llm:
    runner = llm.engine.parts.core.executor.worker.runner
    tensors = {tensor.data_ptr(): tensor for tensor in tensors_of(vars(runner.model))}.values()
    print(json.dumps({
        "alone": [tokens(llm.generate([prompt], params))[0] for prompt in prompts],
        "together": tokens(llm.generate(prompts, params)),
        "class": type(runner.model).__module__,
        "recordable": runner.graphs.recordable,
        "loaded": sum(tensor.nbytes for tensor in tensors),
        "planned": weight_bytes(llm.engine.config.model_config.arch, "float32", ops=runner.ops.name),
    }))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process which sees the installed package."""
    pytest.importorskip("setuptools")
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("package") / "source")
    target = tmp_path_factory.mktemp("installed")
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def models(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same Llama in the dialects of the package's families."""
    home, config = tmp_path_factory.mktemp("models"), json.loads((llama / "config.json").read_text())
    configs = {
        "renamed": {RENAMED.get(key, key): value for key, value in config.items()},
        "recall": {**config, "recall_scale": SCALE},
    }
    for name, values in configs.items():
        identity = {"model_type": name, "architectures": [f"{name.title()}ForCausalLM"]}
        shutil.copytree(llama, home / name)
        (home / name / "config.json").write_text(json.dumps({**values, **identity}))
    tensors = load_file(llama / "model.safetensors")
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, home / "renamed/model.safetensors")
    return {name: home / name for name in configs}


def renamed(name: str) -> str:
    return ".".join(PARTS.get(part, part) for part in name.split("."))


def expected(llama: Path, prompt: list[int], scale: float) -> list[int]:
    """Greedy tokens of transformers' Llama, whose layers are given the embeddings times `scale`, too."""
    model, token_ids = in_transformers(llama), list(prompt)
    embeddings: list[Tensor] = []

    def keep(module: object, args: object, out: Tensor) -> None:
        embeddings.append(out)

    def add(module: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0] + scale * embeddings[-1], *args[1:]), kwargs

    with ExitStack() as stack, torch.no_grad(), one_thread():
        stack.enter_context(model.model.embed_tokens.register_forward_hook(keep))
        for layer in model.model.layers:
            stack.enter_context(layer.register_forward_pre_hook(add, with_kwargs=True))
        for _ in range(NUM_TOKENS):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def quire(environment: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "quire.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_families_are_listed_with_their_package(environment: dict[str, str]) -> None:
    rows = [json.loads(line) for line in quire(environment, "models", "quire-example-family", "--json").splitlines()]
    found = {row["architecture"]: (row["name"], row["kind"], row["has_own_class"], row["problem"]) for row in rows}
    assert found == {
        "RecallForCausalLM": ("Recall", "dense", True, ""),
        "RenamedForCausalLM": ("Renamed", "dense", False, ""),
    }


@pytest.mark.parametrize("name", ["renamed", "recall"])
def test_without_the_package_they_are_refused(
    name: str, models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(models[name])]) == 2
    assert f"the architecture '{name.title()}ForCausalLM' is not supported" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "scale", "module"),
    [("renamed", 0.0, "quire.models.decoder"), ("recall", SCALE, "quire_example_family.recall_model")],
)
def test_they_run_with_the_tokens_of_transformers_and_the_planned_bytes(
    name: str, scale: float, module: str, environment: dict[str, str], models: dict[str, Path], llama: Path
) -> None:
    command = [sys.executable, "-c", RUN, str(models[name]), json.dumps(PROMPTS), str(NUM_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["alone"] == [expected(llama, prompt, scale) for prompt in PROMPTS]
    assert found["together"] == found["alone"]
    assert found["class"] == module
    assert found["recordable"]
    assert found["planned"] == found["loaded"]


def test_their_plan_is_that_of_llama(environment: dict[str, str], models: dict[str, Path], llama: Path) -> None:
    paths = [llama, *models.values()]
    wanted, *plans = [json.loads(quire(environment, "plan", str(path), "--json", "--memory", "2GiB")) for path in paths]
    assert wanted["fits"]
    for plan in plans:
        for name in ("parameters", "weights_bytes", "workspace_bytes", "block_bytes", "total_bytes", "max_context"):
            assert plan[name] == wanted[name], name


@pytest.fixture
def url(environment: dict[str, str], models: dict[str, Path], tmp_path: Path) -> Iterator[str]:
    """Of a server of the model with a class of its own."""
    log, flags = tmp_path / "log", ["--port", "0", "--dtype", "float32", "--max-model-len", "128"]
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(models["recall"]), *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--kv-cache-memory-bytes", "8M"], stderr=stderr, env=environment, cwd=ROOT
        )
    try:
        deadline = time.monotonic() + 120
        while not (ready := re.search(r"serving on (\S+),", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield ready.group(1)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_one_is_served(url: str, llama: Path) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"x-quire-receipt": "1"}, timeout=60).json()
    assert json.dumps(expected(llama, PROMPTS[1], SCALE)) in json.dumps(reply["receipt"])
