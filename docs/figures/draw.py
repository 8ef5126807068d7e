"""Draw the pictures of docs/concepts.md and docs/architecture.md, one SVG per script of this folder.

python docs/figures/draw.py             # all
python docs/figures/draw.py mx_block    # one
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FIGURES = ("calls", "mx_block", "swizzle_tile", "block_forward", "layouts", "policies", "packages")


def drawn(name: str) -> str:
    """Return the SVG that a script draws."""
    return importlib.import_module(name).draw()


def main() -> None:
    """Write the SVG files."""
    for name in sys.argv[1:] or FIGURES:
        Path(__file__).with_name(f"{name}.svg").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
