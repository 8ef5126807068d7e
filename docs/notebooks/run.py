"""Write the notebooks from the .py files next to them, with what their cells print.

    python docs/notebooks/run.py

A notebook is a .py file in the percent format: ``# %%`` begins code, ``# %% [markdown]`` text. Its cells run here in
one process, without Jupyter.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SOURCES = sorted(path for path in FOLDER.glob("*.py") if path.name != "run.py")
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def cells_of(source: str) -> list[tuple[str, str]]:
    """Return kind and text of every cell."""
    cells = []
    for part in source.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = (line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip()))
    return cells


def executed(path: Path) -> dict[str, Any]:
    """Run the cells of a .py file and return the notebook."""
    namespace: dict[str, Any] = {"__name__": path.stem}
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells_of(path.read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, f"{path.name}, cell {number}", "exec"), namespace)
            lines = printed.getvalue().splitlines(keepends=True)
            output = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell |= {"execution_count": sum(c["cell_type"] == "code" for c in cells) + 1, "outputs": output}
        cells.append(cell)
    return {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Write every notebook."""
    for path in SOURCES:
        path.with_suffix(".ipynb").write_text(json.dumps(executed(path), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
