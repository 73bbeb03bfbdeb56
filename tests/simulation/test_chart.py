"""Line charts: whole files that say what they show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from quire.simulation.chart import LEFT, PLOT_HEIGHT, TOP, Line, Panel, line_chart
from quire.utils.svg import MARGIN, WIDTH

SVG = "{http://www.w3.org/2000/svg}"


def panel(*lines: Line, most_y: float | None = None) -> Panel:
    return Panel(title="A & B", x_label="rate", y_label="ms", lines=lines, most_y=most_y)


def test_lines_are_drawn_to_scale() -> None:
    line = Line(name="one", points=[(0.0, 0.0), (5.0, 10.0), (10.0, 20.0)])
    root = ElementTree.fromstring(line_chart("Title", "below", [panel(line)], "note"))
    drawn, _ = root.findall(f"{SVG}path[@class='line0']")
    left, right, bottom = MARGIN + LEFT, WIDTH - MARGIN, TOP + PLOT_HEIGHT
    middle = (left + right) / 2, bottom - PLOT_HEIGHT / 2
    expected = f"M{left:.1f} {bottom:.1f}L{middle[0]:.1f} {middle[1]:.1f}L{right:.1f} {TOP:.1f}"
    assert drawn.get("d") == expected
    said = root.findtext(f"{SVG}desc")
    assert said == "A & B, ms over rate: one 20 at 10"


def test_a_line_ends_where_it_leaves_the_axis() -> None:
    line = Line(name="one", points=[(0.0, 0.0), (2.0, 1.0), (4.0, 3.0), (3.0, 0.0)])
    root = ElementTree.fromstring(line_chart("Title", "below", [panel(line, most_y=2.0)], "note"))
    drawn, _ = root.findall(f"{SVG}path[@class='line0']")
    steps = (drawn.get("d") or "").removeprefix("M").split("L")
    assert len(steps) == 3
    x, y = map(float, steps[-1].split())
    assert y == TOP
    assert x == pytest.approx(MARGIN + LEFT + 3 / 4 * (WIDTH - 2 * MARGIN - LEFT), abs=0.1)


@pytest.mark.parametrize("num_panels", [1, 2, 3])
def test_a_chart_needs_nothing_else_and_stays_in_its_frame(num_panels: int) -> None:
    lines = [Line(name=f"line {index}", points=[(0.0, 1.0), (1.0, 1.0 + index)]) for index in range(5)]
    text = line_chart("Title", "below", [panel(*lines)] * num_panels, "note")
    root = ElementTree.fromstring(text)
    assert {element.tag for element in root.iter()} == {
        SVG + tag for tag in ("svg", "title", "desc", "style", "rect", "text", "path")
    }
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x", "")) < WIDTH
        assert 0 < float(element.get("y", "")) < float(root.get("height", ""))
    assert len(root.findall(f"{SVG}path[@class='line4']")) == num_panels + 1


def test_a_panel_without_lines_is_drawn() -> None:
    assert ElementTree.fromstring(line_chart("Title", "below", [panel()], "note")) is not None
