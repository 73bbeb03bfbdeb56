"""The engine that tests share, and a place for the traces of cores that are killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.engine.process.cores import SharedCore


@pytest.fixture(scope="package")
def shared() -> Iterator[SharedCore]:
    core = SharedCore()
    yield core
    core.close()


@pytest.fixture(scope="package", autouse=True)
def _traces_among_other_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("traces"))
    yield
    tempfile.tempdir = before
