"""Checkpoints and engines that many tests share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from quire import LLM

# Triton reads it when it is imported, as transformers does: its kernels run in the interpreter unless 0 asks for a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile(
    "quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # no test depends on how fast the machine is
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
