"""Progress in a notebook: real cells, run by a Jupyter kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walks.notebook import opened

pytest.importorskip("ipykernel", reason="no notebook: pip install ipykernel")

LOAD = """
from quire.observability.progress import load_progress
import time
with load_progress({show}) as draw:
    for part in range(1, 4):
        time.sleep(0.11)
        draw and draw(part * {size}, 4 * {size})
"""


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_large_weights_have_a_line_of_progress_in_a_notebook(tmp_path: Path) -> None:
    with opened(tmp_path) as notebook:
        cell = notebook.run(LOAD.format(show=True, size=100_000_000))
        assert cell.error == ""
        lines = [line.strip() for line in cell.stderr.split("\r")[1:]]
        assert [line.split(",")[0] for line in lines[:3]] == [
            f"loading weights: {done}/400 MB" for done in (100, 200, 300)
        ]
        assert lines[-1].startswith("loading weights: 300/400 MB, ")
        assert cell.stderr.endswith("\n"), "what comes next has a line of its own"
        assert notebook.run(LOAD.format(show=True, size=1_000_000)).stderr == "", "over before it can be read"
        assert notebook.run(LOAD.format(show=False, size=100_000_000)).stderr == ""
        interrupted = notebook.run(LOAD.format(show=True, size=100_000_000) + "        if part == 2: raise OSError\n")
        assert interrupted.error.startswith("OSError")
        assert interrupted.stderr.endswith("\n")
