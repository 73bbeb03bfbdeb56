"""`quire env` speaks of each instruction set that the library may choose."""

import json

import pytest

from quire.cli.main import main
from quire.ops.cpu import library
from quire.platforms.kernel_sets import FORMATS, KERNEL_SETS


def test_every_instruction_set_is_described() -> None:
    assert set(KERNEL_SETS) == set(library.ISA_NAMES) - {"none"}


def test_env_says_how_products_are_computed_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    if library.available():
        assert kernels == KERNEL_SETS[library.isa()].lines()
        assert [name.split()[0] for name in kernels] == list(FORMATS)
    else:
        assert "reference" in kernels
