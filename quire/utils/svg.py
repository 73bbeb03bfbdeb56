"""Pieces of charts as SVG that needs nothing else: no fonts, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

WIDTH, MARGIN = 760, 24
STYLE = """\
  svg { color-scheme: light dark; font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
  .card { fill: #fffefb; stroke: #dedbd2; }
  text { fill: #23282b; }
  .title { font-size: 18px; font-weight: 650; }
  .strong { font-weight: 600; }
  .quiet { fill: #5c6468; }
  .note { fill: #5c6468; font-size: 12px; }
  .ours { fill: #1f6f6e; }
  .theirs { fill: #a3a199; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1c2124; stroke: #333b3f; }
    text { fill: #e4e6e3; }
    .quiet, .note { fill: #9ba5a8; }
    .ours { fill: #6cc0b4; }
    .theirs { fill: #6b767c; }
  }
"""


def text_at(x: float, y: float, text: str, kind: str) -> str:
    """A line of text whose class is `kind`."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def card(
    title: str, subtitle: str, body: Iterable[str], note: str, *, description: str, height: int, style: str = STYLE
) -> str:
    """A whole file: a frame with headings, what is drawn, and a note below."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>\n{style}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text_at(MARGIN, 38, title, "title"),
        text_at(MARGIN, 60, subtitle, "quiet"),
        *body,
        text_at(MARGIN, height - 18, note, "note"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
