"""`quire bench startup`: real starts, and where their time went."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.cli.main import main


@pytest.mark.parametrize("dont_write", [False, True])
def test_stages_add_up_and_what_slows_imports_is_said(
    dont_write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", dont_write)
    path = tmp_path / "figures.json"
    runs = ["--num-iters", "1", "--num-iters-warmup", "0"]
    assert main(["bench", "startup", *runs, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["totals"] == [found["median"]]
    assert sum(found["stages"].values()) <= found["median"]
    assert {"imports", "weights", "first step"} <= found["stages"].keys()
    assert ("compiled at every start" in capsys.readouterr().out) == dont_write
