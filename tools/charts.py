"""Draw the charts of README and docs from the figures in benchmarks/results.

python -m tools.charts
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.utils.svg import MARGIN, card, text_at

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
CHARTS = ROOT / "docs/charts"
OURS = "quire"
TIMES = "\N{MULTIPLICATION SIGN}"

NAMES_AT, BARS_AT, LONGEST = 200, 322, 284
"""Where engines' names and bars begin, and the length of a panel's longest bar."""
HEAD, PITCH, LINE, THICKNESS, GAP, FOOT = 84, 22, 18, 14, 16, 40
"""Height above the panels; of a row, a line of text, a bar, the space between panels; and below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One engine in one panel."""

    engine: str
    share: float
    """Of the panel's longest bar."""
    value: str
    ratio: str
    """How many times better quire is; empty for quire."""


def chart_names() -> list[str]:
    """Every chart, by the name of its figures."""
    return sorted(file.stem for file in RESULTS.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """The figures of a chart."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def bars(panel: dict[str, Any]) -> list[Bar]:
    """One bar for each engine of a panel, quire first."""
    values, measured = panel["values"], panel.get("ratios", {})
    return [
        Bar(
            engine=engine,
            share=value / max(values.values()),
            value=number(value),
            ratio="" if engine == OURS else f"{measured.get(engine) or _ratio(panel, engine):.3g}",
        )
        for engine, value in values.items()
    ]


def _ratio(panel: dict[str, Any], engine: str) -> float:
    """How many times better quire is."""
    ours, theirs = panel["values"][OURS], panel["values"][engine]
    better: float = theirs / ours if panel.get("less_is_better") else ours / theirs
    return better


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def label(bar: Bar, unit: str) -> str:
    """What stands at the end of a bar."""
    if bar.engine == OURS:
        return f"{bar.value} {unit}"
    return f"{bar.value} ({bar.ratio}{TIMES})"


def description(figures: dict[str, Any]) -> str:
    """Everything the chart shows, in words."""
    panels = (
        f"{', '.join([panel['title'], *_detail(panel)])}: "
        + ", ".join(f"{bar.engine} {label(bar, panel['unit'])}" for bar in bars(panel))
        for panel in figures["panels"]
    )
    return f"{figures['subtitle']} {'. '.join(panels)}. {figures['note']}"


def svg(figures: dict[str, Any]) -> str:
    """The chart as a file that needs nothing else: no fonts, no scripts, light and dark."""
    body, y = [], HEAD
    for panel in figures["panels"]:
        body.append(_panel(panel, y))
        y += _height(panel) + GAP
    height = y - GAP + FOOT
    return card(
        figures["title"], figures["subtitle"], body, figures["note"], description=description(figures), height=height
    )


def _panel(panel: dict[str, Any], y: int) -> str:
    lines = [
        text_at(MARGIN, y + THICKNESS - 2, panel["title"], "strong"),
        *(
            text_at(MARGIN, y + THICKNESS - 2 + LINE * line, part, "quiet")
            for line, part in enumerate(_detail(panel), 1)
        ),
    ]
    for row, bar in enumerate(bars(panel)):
        lines += _bar(bar, panel["unit"], y + PITCH * row)
    return "\n".join(lines)


def _detail(panel: dict[str, Any]) -> list[str]:
    return [panel["detail"], *(["less is better"] if panel.get("less_is_better") else [])]


def _height(panel: dict[str, Any]) -> int:
    return max(PITCH * len(bars(panel)), LINE * (1 + len(_detail(panel))))


def _bar(bar: Bar, unit: str, y: int) -> list[str]:
    colour, weight = ("ours", "strong") if bar.engine == OURS else ("theirs", "")
    length = round(bar.share * LONGEST, 1)
    base = y + THICKNESS - 2
    return [
        text_at(NAMES_AT, base, bar.engine, weight),
        f'<rect class="{colour}" x="{BARS_AT}" y="{y}" width="{length}" height="{THICKNESS}" rx="2"/>',
        text_at(BARS_AT + length + 8, base, label(bar, unit), weight),
    ]


def main() -> None:
    """Write every chart."""
    CHARTS.mkdir(exist_ok=True)
    for name in chart_names():
        (CHARTS / f"{name}.svg").write_text(svg(read(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
