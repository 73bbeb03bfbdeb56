"""Checkpoints and engines that many tests share."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected: there is little, and looking for it takes a third of the time.

    What stands then, modules and tests, stays to the end. Each full collection would look at all of it for a second.
    Tests make many objects and few cycles, so young ones are looked at more rarely than by default, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


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
    """family -> a directory with a tiny random model of it, made once per run; overrides make another one."""
    from tests.checkpoints import make_checkpoint

    shared = checkpoints_of_this_run(tmp_path_factory)
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = shared / f"{family}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
            if not made[key].exists():
                making = make_checkpoint(family, tmp_path_factory.mktemp(family), **overrides)
                with suppress(OSError):  # another process was first
                    making.rename(made[key])
        return made[key]

    return make


def checkpoints_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of a run share: below pytest's own, in which each process of xdist has another."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checkpoints"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def tiny_llm() -> Iterator[LLM]:
    """The embedded model, ready to generate."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, hastened; nothing where kernels run on a GPU."""
    if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
        return
    from tests import triton_interpreter

    triton_interpreter.patch_once(monkeypatch)
    triton_interpreter.let_integers_overflow(monkeypatch)
    triton_interpreter.share_types(monkeypatch)
    triton_interpreter.share_numpy_types(monkeypatch)
