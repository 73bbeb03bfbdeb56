"""What a step runs does not wait for its device: nothing reads a tensor on the host, but for the places named here.

Read from the source: a GPU computes behind the host, which has to be ahead of it. `tests/models/test_triton.py` watches
whole models run, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
PLACES = (
    "ops/triton",
    "ops/shared/blocks.py",
    "ops/shared/dequantize.py",
    "layers",
    "models",
    "sampling/drawn.py",
    "sampling/sampler.py",
    "worker/input_builder.py",
    "worker/last_tokens.py",
    "worker/model_runner.py",
    "worker/step_buffers.py",
    "worker/device_link.py",
)
READS = frozenset(
    ("item", "cpu", "tolist", "numpy", "nonzero", "equal", "allclose", "unique", "masked_select", "bincount")
)
"""Methods of tensors, and functions of torch, whose result the host has to wait for."""
REDUCTIONS = frozenset(("any", "all", "max", "min", "sum", "amax", "amin", "isfinite"))
"""Methods whose result makes the host wait once it is taken for a bool or a number."""
NUMBERS = frozenset(("bool", "int", "float"))
ALLOWED = {
    "ops/triton/sampling.py": {
        "row_max": "the host decides by it; one read a step, of all rows",
        "allowed_max": "the same, for rows with a grammar",
    },
    "ops/triton/gemm.py": {"tiles_agree": "a question about a device, asked before anything is served"},
    "ops/triton/quantized.py": {
        "_are_same": "weights are packed when a model is loaded",
        "_pack": "the same",
        "_codes": "the same",
        "_checked_order": "the same",
    },
    "sampling/drawn.py": {"read": "the host asks for the result, when the next step may have begun"},
    "sampling/sampler.py": {
        "_choose": "only in steps whose tokens the host needs first; `draw` leaves them there",
        "take_largest": "the same; `leave_largest` leaves them there",
        "_errors": "the same",
    },
    "worker/step_buffers.py": {"__init__": "memory of the host, when an engine starts"},
    "worker/input_builder.py": {"_slots_in": "memory of the host"},
    "layers/activation.py": {"_xielu_parameters": "read from the checkpoint"},
    "models/blocks.py": {"attention_of": "it builds a layer", "_learned_difference": "read from the checkpoint"},
    "models/variants/gemma4.py": {"_output_scale": "read from the checkpoint"},
    "layers/recurrent/gated.py": {"__init__": "read from the checkpoint"},
    "layers/embedding.py": {"__init__": "a number of the host, rounded when a model is loaded"},
    "layers/attention.py": {"position_scales": "numbers of the host, made when a model is loaded"},
    "layers/experts.py": {"_token_table": "read from the checkpoint", "__init__": "a number of the config"},
    "layers/recurrent/ngrams.py": {"_hashes": "read from the checkpoint"},
    "models/variants/dory.py": {"_multiplied": "read from the checkpoint"},
}
"""File -> function -> why it may."""
LOADING = ("layers/quantization/",)
"""Read checkpoints, and run in no step."""
FALLBACK = ("models/fallback/",)
"""Models that run through transformers, which no GPU does."""


def files() -> Iterator[Path]:
    for place in PLACES:
        found = PACKAGE / place
        yield from sorted(found.rglob("*.py")) if found.is_dir() else [found]


def relative(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Those that the host runs: no kernels."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What a function has, without functions within it."""
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            queue.extend(ast.iter_child_nodes(node))


def method(node: ast.AST) -> str:
    """The name of the method that is called; "" if none is."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""  # type: ignore[attr-defined]


def is_wait(node: ast.AST) -> bool:
    """Whether the host waits there for what a tensor holds."""
    if method(node) in READS:
        return True
    if method(node) in ("tensor", "as_tensor") and any(k.arg == "device" for k in node.keywords):  # type: ignore[attr-defined]
        return True  # torch waits until such a copy is done; `.to(device, non_blocking=True)` does not
    taken: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
        taken = node.args
    elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        taken = [node.test]
    elif isinstance(node, ast.BoolOp):
        taken = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        taken = [node.operand]
    return any(method(part) in REDUCTIONS for expression in taken for part in ast.walk(expression))


def waits(source: str) -> dict[str, list[int]]:
    """Function -> lines on which it waits."""
    found = {}
    for function in functions(ast.parse(source)):
        lines = sorted({node.lineno for node in own_nodes(function) if is_wait(node)})  # type: ignore[attr-defined]
        if lines:
            found[function.name] = lines
    return found


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "y = x[0].cpu()",
        "return x.max(1).values.tolist()",
        "torch.nonzero(x)",
        "if x.isfinite().all(): pass",
        "n = int(x.max())",
        "assert not x.any()",
        "while a or x.any(): pass",
        "z = torch.tensor([1], device=x.device)",
    ],
)
def test_a_wait_is_found(line: str) -> None:
    assert waits(f"def step(x):\n    a = x.max(1)\n    {line}\n") == {"step": [3]}


def test_what_stays_on_the_device_is_no_wait() -> None:
    assert not waits("def step(x):\n    a = x.max(1).values\n    return torch.where(x > a, x.sum(0), 0.0)\n")
    assert not waits("@triton.jit\ndef kernel(x):\n    if tl.max(x) > 0:\n        return x.item()\n")


@pytest.mark.parametrize("file", list(files()), ids=relative)
def test_no_step_waits_for_its_device(file: Path) -> None:
    name = relative(file)
    if name.startswith((*LOADING, *FALLBACK)):
        pytest.skip("runs in no step of a GPU")
    found = waits(file.read_text())
    unknown = {function: lines for function, lines in found.items() if function not in ALLOWED.get(name, {})}
    assert not unknown, f"{name} waits for the device in {unknown}: keep it there, or say here why it may"


def test_a_step_whose_tokens_stay_reads_nothing() -> None:
    """No function that such a step runs is among those that may wait."""
    runs = {"draw", "_draw", "leave_largest", "_candidates", "_begin", "_forward", "put", "take", "_take_drawn"}
    runs |= {"build", "begin", "send", "keep"}
    assert not runs & {function for functions in ALLOWED.values() for function in functions}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_may_wait_does(name: str) -> None:
    assert set(waits((PACKAGE / name).read_text())) >= set(ALLOWED[name])


def test_what_only_loads_is_not_called_in_a_step() -> None:
    """No layer's `__call__` or forward names a module of `layers.quantization`."""
    for file in files():
        if relative(file).startswith(LOADING):
            continue
        for function in functions(ast.parse(file.read_text())):
            if function.name in ("__call__", "forward", "compute_logits", "largest_logits", "largest"):
                names = {node.id for node in own_nodes(function) if isinstance(node, ast.Name)}
                assert not names & {"scheme_for", "plain", "copied", "dequantize"}, f"{relative(file)}: {function.name}"
