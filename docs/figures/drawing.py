"""What the figures share: colors for light and dark pages, boxes, arrows, lines of text, and the SVG around them."""

from __future__ import annotations

from html import escape

STYLE = """
  .back { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0 }
  text { fill: #1f2328; font: 12px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif }
  .title { font-size: 14px; font-weight: 600 } .muted { fill: #59636e }
  .small { font-size: 10px } .strong { font-weight: 600 }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
  .box { fill: #f6f8fa; stroke: #8c959f } .blue { fill: #ddf4ff; stroke: #0969da }
  .orange { fill: #fff1e5; stroke: #bc4c00 }
  .green { fill: #dafbe1; stroke: #1a7f37 } .purple { fill: #fbefff; stroke: #8250df }
  .arrow { stroke: #59636e; fill: none; stroke-width: 1.4; marker-end: url(#tip) } .tip { fill: #59636e }
  .bar { fill: #0969da } .bar.stock { fill: #8c959f } .bar.extra { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
    text { fill: #f0f6fc } .muted { fill: #9198a1 }
    .box { fill: #151b23; stroke: #656c76 } .blue { fill: #121d2f; stroke: #58a6ff }
    .orange { fill: #2b1d0e; stroke: #ffa657 }
    .green { fill: #12261e; stroke: #3fb950 } .purple { fill: #1f1530; stroke: #bc8cff }
    .arrow { stroke: #9198a1 } .tip { fill: #9198a1 }
    .bar { fill: #58a6ff } .bar.stock { fill: #656c76 } .bar.extra { fill: #ffa657 }
  }
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
)


def text(x: float, y: float, content: str, *, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; `kind` is its class."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, *lines: str, kind: str = "box", font: str = "") -> str:
    """Return a box with lines in its middle; `kind` is its color, `font` the class of the lines after the first."""
    parts = [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>']
    first = y + height / 2 + 4 - 7.5 * (len(lines) - 1)
    for number, line in enumerate(lines):
        own = font if number or len(lines) == 1 else "strong"
        parts.append(text(x + width / 2, first + 15 * number, line, kind=own, anchor="middle"))
    return "".join(parts)


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points that ends in an arrow."""
    return f'<polyline class="arrow" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def picture(size: tuple[int, int], title: str, description: str, parts: list[str], style: str = "") -> str:
    """Return the SVG. It has its own background, so that it can be read on any page."""
    width, height = size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">{escape(title, quote=False)}</title>',
            f'<desc id="desc">{escape(description, quote=False)}</desc>',
            f"<style>{STYLE}{style}</style>",
            f"<defs>{TIP}</defs>",
            f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
