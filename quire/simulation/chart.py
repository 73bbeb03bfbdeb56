"""Line charts as SVG: panels side by side, each with lines over a common axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.utils.svg import MARGIN, STYLE, WIDTH, card, text_at

Point = tuple[float, float]

TOP, BOTTOM, PLOT_HEIGHT, GAP, LEGEND_LINE = 96, 56, 220, 56, 18
LEFT = 52
"""Room for the numbers of a vertical axis."""
NUM_TICKS = 4
COLOURS = ("#1f6f6e", "#c2662d", "#6a5acd", "#a3a199", "#b03a5b", "#4f7d2a")
DARK_COLOURS = ("#6cc0b4", "#e39a68", "#a79ff0", "#8b969c", "#e0809c", "#9cc96f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; it ends where it leaves the axes."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes, which begin at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    most_y: float | None = None
    """Where the vertical axis ends; at the highest point when left out."""


def line_chart(title: str, subtitle: str, panels: Sequence[Panel], note: str) -> str:
    """The chart as a file. Lines have the same colour in all panels, by their place."""
    width = (WIDTH - 2 * MARGIN - GAP * (len(panels) - 1)) / len(panels)
    body = []
    for index, panel in enumerate(panels):
        body += _panel(panel, MARGIN + index * (width + GAP), width)
    names = [line.name for line in max(panels, key=lambda panel: len(panel.lines)).lines]
    for index, name in enumerate(names):
        body += _legend(index, name)
    height = TOP + PLOT_HEIGHT + BOTTOM + LEGEND_LINE * math.ceil(len(names) / 3) + 40
    text = "; ".join(_said(panel) for panel in panels)
    return card(title, subtitle, body, note, description=text, height=height, style=STYLE + _style())


def _style() -> str:
    light = "".join(f"  .line{i} {{ stroke: {c}; fill: none; stroke-width: 2; }}\n" for i, c in enumerate(COLOURS))
    dark = "".join(f"    .line{i} {{ stroke: {c}; }}\n" for i, c in enumerate(DARK_COLOURS))
    axes = "  .axis { stroke: #dedbd2; fill: none; }\n"
    return f"{light}{axes}  @media (prefers-color-scheme: dark) {{\n    .axis {{ stroke: #333b3f; }}\n{dark}  }}\n"


def _said(panel: Panel) -> str:
    """A panel in words: where each line ends."""
    ends = ", ".join(
        f"{line.name} {line.points[-1][1]:.4g} at {line.points[-1][0]:.4g}" for line in panel.lines if line.points
    )
    return f"{panel.title}, {panel.y_label} over {panel.x_label}: {ends}"


def _panel(panel: Panel, x: float, width: float) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    most_x = _round_up(max((point[0] for point in points), default=1.0))
    most_y = panel.most_y or _round_up(max((point[1] for point in points), default=1.0))
    left, right, bottom = x + LEFT, x + width, TOP + PLOT_HEIGHT
    body = [text_at(x, TOP - 14, f"{panel.title}: {panel.y_label}", "strong")]
    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        y = bottom - share * PLOT_HEIGHT
        body.append(f'<path class="axis" d="M{left:g} {y:.1f}H{right:g}"/>')
        body.append(text_at(x, round(y + 4, 1), f"{share * most_y:.3g}", "note"))
        body.append(text_at(round(left + share * (right - left) - 8, 1), bottom + 18, f"{share * most_x:.3g}", "note"))
    body.append(text_at(left, bottom + 38, panel.x_label, "quiet"))
    for index, line in enumerate(panel.lines):
        inside = _clipped(line.points, most_y)
        steps = [
            f"{left + px / most_x * (right - left):.1f} {bottom - py / most_y * PLOT_HEIGHT:.1f}" for px, py in inside
        ]
        if steps:
            body.append(f'<path class="line{index % len(COLOURS)}" d="M{"L".join(steps)}"/>')
    return body


def _clipped(points: Sequence[Point], most_y: float) -> list[Point]:
    """The points up to the first one beyond the axis, and where the line to that one crosses its end."""
    inside: list[Point] = []
    for x, y in points:
        if y > most_y:
            if inside:
                last_x, last_y = inside[-1]
                inside.append((last_x + (x - last_x) * (most_y - last_y) / (y - last_y), most_y))
            break
        inside.append((x, y))
    return inside


def _legend(index: int, name: str) -> list[str]:
    x = MARGIN + index % 3 * (WIDTH - 2 * MARGIN) / 3
    y = TOP + PLOT_HEIGHT + BOTTOM + LEGEND_LINE * (index // 3) + 4
    return [
        f'<path class="line{index % len(COLOURS)}" d="M{x:g} {y - 4:g}h18"/>',
        text_at(x + 26, y, name, "quiet"),
    ]


def _round_up(value: float) -> float:
    """The next number with one or two digits, so that ticks are round."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if step * unit >= value * (1 - 1e-9))
