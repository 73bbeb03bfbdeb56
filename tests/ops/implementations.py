"""The op implementations that run on this machine, by op, and how tests compare them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from quire.config.layers.experts import Routing
from quire.errors import ConfigError
from quire.ops import backends
from quire.ops.cpu import library
from quire.ops.reference.experts import route

REFERENCE = backends.ops_of("reference")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the largest magnitude of the expected values."""


def implementations_of(*ops: str) -> list[object]:
    """Parameters for `pytest.mark.parametrize`: implementations that bring one of these ops, or why one cannot run."""
    parameters: list[object] = []
    for name in backends.ON_CPU:
        package = backends.IMPLEMENTATIONS[name]
        try:
            provided = importlib.import_module(package).OPS
        except ConfigError as error:
            parameters.append(pytest.param(name, marks=pytest.mark.skip(reason=str(error))))
            continue
        if any(op in provided for op in ops):
            parameters.append(name)
    return parameters


def run(implementation: str, op: str, *args: object, **kwargs: object) -> Tensor:
    return ops(implementation)[op](*args, **kwargs)


def ops(implementation: str) -> dict[str, Callable[..., Tensor]]:
    return backends.implementation_of(implementation)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def native_route(logits: Tensor, routing: Routing, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`reference.experts.route` as the library does it; as that does it where there is no library."""
    if not library.available():
        return route(logits, routing, choice_bias)
    from quire.ops.cpu.products import experts

    return experts.route(logits, routing, choice_bias)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    wide = expected.double()
    tolerance = TOLERANCE[actual.dtype] * max(1.0, wide.abs().max().item())
    assert (actual.double() - wide).abs().max().item() <= tolerance


def assert_rows_alone(compute: Callable[[slice], Tensor], num_rows: int) -> None:
    """compute(rows) gives the same bits for a row whatever rows stand beside it, on one thread and on two."""
    with torch_threads(1):
        whole = compute(slice(0, num_rows))
    for threads in (1, 2):
        with torch_threads(threads):
            for size in (1, 2, 7, 8, 13, num_rows):
                for start in range(0, num_rows, size):
                    rows = slice(start, min(start + size, num_rows))
                    assert torch.equal(compute(rows), whole[rows]), f"{threads} threads, rows {rows}"
