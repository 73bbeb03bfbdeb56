"""The table of families is what the specs and the tests say; nobody writes it by hand."""

from __future__ import annotations

import pytest

from quire.config.families import ARCHITECTURES
from tests.models import test_rounded
from tools import model_table
from tools.model_table import BEGIN, END, NO, PAGE, columns, rows_of, table, written


def cells(text: str, architecture: str) -> dict[str, str]:
    """Title -> cell of a family's row."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (row,) = (row for row in rows if f"`{architecture}`" in row)
    return dict(zip(rows[0], row, strict=True))


def test_the_committed_table_is_what_specs_and_tests_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert page == written(page), "run: python -m tools.model_table"


def test_every_family_has_a_row_and_two_configurations_at_least() -> None:
    for architecture in ARCHITECTURES.values():
        assert int(cells(PAGE.read_text(encoding="utf-8"), architecture)["configurations"]) >= 2


def test_a_family_that_no_test_has_is_not_said_to_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_table, "_configurations", lambda: [("llama", {})])
    mark = pytest.mark.parametrize(("quantization", "family"), [("int8", "gpt2"), pytest.param("int8", "opt", id="x")])
    test = test_rounded.test_rounded_weights_change_little_and_no_row_notices_another
    monkeypatch.setattr(test, "pytestmark", [mark.mark])
    text = table()
    assert cells(text, "LlamaForCausalLM")["configurations"] == "1"
    assert cells(text, "GPT2LMHeadModel")["configurations"] == NO
    tested = {column.title: column.families for column in columns()}
    assert (tested["int8"], tested["int4"], tested["windows"]) == ({"gpt2", "opt"}, set(), set())
    assert rows_of(test, "nothing") == []


def test_a_page_without_the_region_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        written("# Models\n")
