"""SVG written by hand, so that nothing has to be installed for a picture.

Thread:     the caller's

Text is the viewer's own font; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CELL_W, CELL_H, CHAR_W = 62, 22, 7


def text(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False) -> str:
    """A line of text that begins, ends or is centred at x."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """A whole picture."""
    style = "text{font:12px sans-serif;fill:#1b1f24}.small{font-size:11px}"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
        )
    ) + "\n"  # fmt: skip
