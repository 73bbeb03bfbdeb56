"""Checkpoints and engines that many tests share."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis
import pytest

from quire import LLM

# Threads of torch that wait for their next piece sleep: by default they spin, and take what others could compute with.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

# Triton reads it when it is imported, as transformers does: its kernels run in the interpreter unless 0 asks for a GPU.
if os.environ.setdefault("TRITON_INTERPRET", "1") != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # engines are those of the CPU where no device is named

# No test depends on how fast the machine is, nor on a draw: what passed passes again. `--hypothesis-profile draw` looks
# for cases that nobody has seen yet.
hypothesis.settings.register_profile("draw", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quire", hypothesis.settings.get_profile("draw"), derandomize=True, database=None)
hypothesis.settings.load_profile("quire")

Checkpoint = Callable[..., Path]


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's, whatever an earlier test has made of quire's own logger."""
    logger = logging.getLogger("quire")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    yield caplog
    logger.propagate = before[0]
    logger.setLevel(before[1])


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """Commands that run in this process take its signals; the next test finds them as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """family -> a directory with a tiny random model of it, made once per session; overrides make another one."""
    from tests.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = make_checkpoint(family, tmp_path_factory.mktemp(family), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llm() -> Iterator[LLM]:
    """The embedded model, ready to generate."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter without what takes most of its time and gives nothing.

    At each call of a function it exchanges Triton's language. Once a launch is enough: the language is exchanged
    already if its builtins are none. And it computes whether integers overflow, but looks at that only if it debugs.
    """
    if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    def prepare_once(function: FunctionType) -> object:
        is_ready = not any(tl.core.is_builtin(module.load) for module in (tl, tl.core))
        return interpreter._LangPatchScope() if is_ready else prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
