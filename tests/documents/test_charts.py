"""The charts show the figures that stand in the tables of benchmarks and README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.utils.svg import WIDTH
from tools.charts import CHARTS, OURS, bars, chart_names, number, read, svg

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
README = (ROOT / "README.md").read_text()
LETTER = 7.6
"""Pixels that a letter takes at most, on average, in any of the fonts."""

panels = pytest.mark.parametrize(
    ("name", "panel"),
    [
        pytest.param(name, panel, id=f"{name}, {panel['title']}")
        for name in chart_names()
        for panel in read(name)["panels"]
    ],
)
charts = pytest.mark.parametrize("name", chart_names())


def cells(text: str, row: str) -> list[str]:
    """What stands in the first row of a table that begins so."""
    return split(next(line for line in text.splitlines() if line.startswith(f"| {row} |")))


def split(line: str) -> list[str]:
    """The cells of a row, apart from the first."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]


def header(text: str, row: str) -> list[str]:
    """The columns of the table that has the row."""
    above = text[: text.index(f"\n| {row} |")].splitlines()
    rule = max(index for index, line in enumerate(above) if line.startswith("|---"))
    return split(above[rule - 1])


def numbers(cell: str) -> list[float]:
    """Every number of a cell."""
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


@charts
def test_the_files_are_what_the_figures_say(name: str) -> None:
    assert (CHARTS / f"{name}.svg").read_text() == svg(read(name)), "run: python -m tools.charts"


@panels
def test_figures_are_those_of_the_benchmarks(name: str, panel: dict[str, Any]) -> None:
    text = (ROOT / read(name)["source"]).read_text()
    names, row = header(text, panel["row"]), cells(text, panel["row"])
    for engine, value in panel["values"].items():
        assert numbers(row[names.index(engine.removesuffix(" GenAI"))])[0] == value


@pytest.mark.parametrize("panel", read("engines")["panels"], ids=lambda panel: panel["title"])
def test_ratios_are_those_of_the_readme(panel: dict[str, Any]) -> None:
    column = cells(README, "quire is faster than").index(panel["column"])
    for bar in bars(panel):
        if bar.engine != OURS:
            engine = {"vLLM": "vLLM for CPUs"}.get(bar.engine, bar.engine)
            assert cells(README, engine)[column] == f"{bar.ratio}x"


@panels
def test_bars_have_the_length_of_their_values(name: str, panel: dict[str, Any]) -> None:
    longest = max(panel["values"].values())
    for bar in bars(panel):
        assert bar.share == panel["values"][bar.engine] / longest
        assert bar.value == number(panel["values"][bar.engine])


@panels
def test_a_gain_is_said_where_quire_is_better(name: str, panel: dict[str, Any]) -> None:
    ours, less = panel["values"][OURS], panel.get("less_is_better", False)
    for bar in bars(panel):
        if bar.engine != OURS:
            theirs = panel["values"][bar.engine]
            assert float(bar.ratio) == pytest.approx(theirs / ours if less else ours / theirs, rel=0.03)


@charts
def test_a_chart_needs_nothing_else_and_says_what_it_shows(name: str) -> None:
    text = (CHARTS / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    assert {element.tag for element in root.iter()} == {
        SVG + tag for tag in ("svg", "title", "desc", "style", "rect", "text")
    }
    assert root.get("aria-labelledby") == "title description"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|href|@import|@font-face", text)
    said = root.findtext(f"{SVG}desc")
    for panel in read(name)["panels"]:
        assert all(value.value in (said or "") for value in bars(panel))


@charts
def test_no_text_leaves_the_chart_or_meets_another(name: str) -> None:
    root = ElementTree.fromstring((CHARTS / f"{name}.svg").read_text())
    ends: dict[float, float] = {}
    for text in root.iter(f"{SVG}text"):
        begin, line = float(text.get("x", "")), float(text.get("y", ""))
        assert begin > ends.get(line, 0), text.text
        ends[line] = begin + LETTER * len(text.text or "")
        assert ends[line] < WIDTH or text.get("class") in ("quiet", "note"), text.text


def test_readme_and_docs_show_them() -> None:
    for name in chart_names():
        assert f"](docs/charts/{name}.svg)" in README
        assert f"](charts/{name}.svg)" in (ROOT / "docs/performance.md").read_text()
