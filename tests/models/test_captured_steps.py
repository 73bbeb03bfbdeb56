"""Whole engines whose decode steps are padded and captured: the bits of steps that run op by op, on every page too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import EngineArgs, SamplingParams
from quire.config.engine import CompilationConfig
from quire.engine.core_startup import create_config
from quire.engine.engine_core import EngineCore
from quire.executor.inproc import InprocExecutor
from quire.messages.request import EngineCoreRequest
from quire.observability.ledger import Ledger
from quire.ops.backends import implementation_of
from quire.ops.contracts.operands import Largest
from quire.ops.contracts.ops import Ops
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_builder import StepInputs, StepShape

pytest.importorskip("triton", reason="triton is not installed")
Checkpoint = Callable[..., Path]
DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
SIZES = (1, 2, 4)
SMALL = {"vocab_size": 72, "bos_token_id": 70, "eos_token_id": 71}
"""A vocabulary of more than one tile of the product with the head, and no larger: the interpreter is slow."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1, "sliding_window": 5},
    "mamba": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}
"""Grouped queries, a window, a recurrence, experts."""
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 2},
    "deepseek_v2": {"num_hidden_layers": 2},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "qwen3_next": {"num_hidden_layers": 2},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 2},
    "minimax": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 1},
}
"""The other ops that a decode step has: of latents, recurrences of all kinds, soft caps, learned positions."""
FIRST = [(5, 2), (2, 3)]
SECOND = [(3, 5), (9, 3), (4, 6), (1, 4)]
"""Requests: tokens of the prompt and of the answer. They end one after the other."""


@pytest.fixture(autouse=True)
def _interpreted(triton_interpreter: None) -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


class Watched(GraphRunner):
    """Keeps what steps gave, and counts those that ran op by op."""

    outputs: list[tuple[StepShape, Tensor, Tensor | None]]
    num_eager = 0

    def run(self, shape: StepShape) -> tuple[Tensor, Tensor | Largest | None]:
        hidden, logits = super().run(shape._replace(only_largest=False))
        assert not isinstance(logits, Largest)
        self.outputs.append((shape, hidden.clone(), None if logits is None else logits.clone()))
        return hidden, logits

    def _forward(self, shape: StepShape) -> tuple[Tensor, ...]:
        self.num_eager += 1
        return super()._forward(shape)


class Engine:
    """A core on the device under test, in the interpreter with the double that replays."""

    def __init__(self, directory: Path, sizes: tuple[int, ...]) -> None:
        from tests.ops.triton.recorded import make_graphs

        args = EngineArgs(
            model=str(directory),
            ops="triton",
            device=DEVICE,
            dtype="float32",
            max_model_len=32,
            max_num_seqs=4,
            num_gpu_blocks_override=24,
            override_generation_config={"eos_token_id": SMALL["eos_token_id"]},
            enable_prefix_caching=False,
            async_scheduling=True,
            use_tqdm_on_load=False,
        )
        config = replace(create_config(args), compilation_config=CompilationConfig(graph_sizes=sizes))
        executor = InprocExecutor(config, Ledger())
        assert executor.worker is not None
        self.runner, self.graphs = executor.worker.runner, make_graphs()
        table = implementation_of("triton", DEVICE) | {"make_graphs": lambda: self.graphs}
        self.steps = self.runner.graphs = Watched(
            Ops("triton", table, device=DEVICE), self.runner.model, self.runner.inputs
        )
        for part in self.runner.cache.parts:
            part.fill_(7.0)
        self.core = EngineCore(config, executor)
        self.reset()

    def reset(self) -> None:
        self.steps.outputs, self.steps.num_eager, self.graphs.num_replays = [], 0, 0

    def run(self, requests: list[tuple[int, int]]) -> None:
        """All of them at once; every second one draws."""
        for index, (num_prompt_tokens, max_tokens) in enumerate(requests):
            draws = {"temperature": 1.0} if index % 2 else {"temperature": 0.0}
            self.core.add(
                EngineCoreRequest(
                    request_id=f"{num_prompt_tokens} {max_tokens} {index}",
                    prompt_token_ids=[3 + index + place for place in range(num_prompt_tokens)],
                    sampling_params=SamplingParams(ignore_eos=True, **draws),
                    seed=index,
                    max_tokens=max_tokens,
                )
            )
        while self.core.has_work():
            self.core.step()

    def pages(self) -> list[Tensor]:
        return [part.view(torch.uint8).clone() for part in self.runner.cache.parts]


def assert_same(one: Engine, other: Engine) -> None:
    assert [shape for shape, _, _ in one.steps.outputs] == [shape for shape, _, _ in other.steps.outputs]
    for (shape, hidden, logits), (_, other_hidden, other_logits) in zip(
        one.steps.outputs, other.steps.outputs, strict=True
    ):
        assert torch.equal(hidden, other_hidden), shape
        assert (logits is None) == (other_logits is None)
        assert logits is None or torch.equal(logits, other_logits), shape
    assert all(map(torch.equal, one.pages(), other.pages()))


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_have_the_bits_of_steps_op_by_op(checkpoint: Checkpoint, family: str) -> None:
    directory = checkpoint(family, **SMALL, **FAMILIES[family])
    engines = eager, captured = Engine(directory, ()), Engine(directory, SIZES)
    for engine in engines:
        engine.run(FIRST)
    assert_same(*engines)
    assert captured.graphs.num_replays <= 2, "but for steps of one sequence, nothing is captured yet"

    before = captured.pages()
    while captured.core.capture_graph():
        pass
    assert all(map(torch.equal, captured.pages(), before)), "to capture changes no page"
    for engine in engines:
        engine.reset()
        engine.run(SECOND)
    assert_same(*engines)
    shapes = [shape for shape, _, _ in captured.steps.outputs]
    decodes = [shape for shape in shapes if shape.num_tokens == shape.num_seqs]
    assert {shape.num_seqs for shape in decodes} >= {1, 3, 4}, "steps of a size, and of fewer sequences"
    assert captured.graphs.num_replays == len(decodes)
    assert captured.steps.num_eager == len(shapes) - len(decodes), "no Python of the model runs"
    assert eager.graphs.num_replays == 0


def test_a_length_of_the_host_that_is_captured_is_caught(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(checkpoint("llama", **SMALL, **FAMILIES["llama"]), SIZES)
    inputs_of = engine.runner.inputs.inputs

    def with_lengths_of_the_host(shape: StepShape) -> StepInputs:
        inputs = inputs_of(shape)
        (group,) = inputs.context.groups
        lengths = torch.tensor(group.attention.seq_lens.tolist(), dtype=torch.int32).to(DEVICE)
        attention = replace(group.attention, seq_lens=lengths)
        return replace(inputs, context=replace(inputs.context, groups=[replace(group, attention=attention)]))

    monkeypatch.setattr(engine.runner.inputs, "inputs", with_lengths_of_the_host)
    with caplog.at_level("INFO"):
        again = GraphRunner(engine.steps._ops, engine.runner.model, engine.runner.inputs)
    assert not again.recordable, "found at the start: one token at position 1 is not what it was at position 0"
    assert not again.capture_next()
    assert len([record for record in caplog.records if "runs op by op" in record.getMessage()]) == 1

    if DEVICE == "cpu":  # a GPU refuses to read lengths while it captures
        while engine.core.capture_graph():
            pass
        engine.reset()
        engine.run(SECOND)
        eager = Engine(checkpoint("llama", **SMALL, **FAMILIES["llama"]), ())
        eager.run(SECOND)
        with pytest.raises(AssertionError):
            assert_same(engine, eager)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_rows_of_nobody_change_no_row_and_no_page(checkpoint: Checkpoint, family: str) -> None:
    engine = Engine(checkpoint(family, **SMALL, **MORE_FAMILIES[family]), SIZES)
    run, found = engine.steps.run, list[StepShape]()

    def run_twice(shape: StepShape) -> tuple[Tensor, Tensor | None]:
        padded = shape.padded(SIZES)
        if padded == shape:
            return run(shape)
        before = [part.clone() for part in engine.runner.cache.parts]
        expected = engine.steps._forward(shape)
        after = engine.pages()
        for part, content in zip(engine.runner.cache.parts, before, strict=True):
            part.copy_(content)
        actual = engine.steps._forward(padded)
        for row, padded_rows in zip(expected, actual, strict=True):
            assert torch.equal(padded_rows[: shape.num_seqs], row)
            assert padded_rows.isfinite().all(), "nobody's rows cannot spread NaN either"
        assert all(map(torch.equal, engine.pages(), after))
        found.append(shape)
        return expected[0], expected[1]

    engine.steps.run = run_twice  # type: ignore[method-assign]
    engine.run([(5, 3), (2, 3), (3, 3)])
    assert StepShape(3, 3, 3) in found
