"""What mkdocs does to the pages of docs/ besides rendering them (``hooks`` in mkdocs.yml).

Pages read the same on GitHub and on the site. So CONTRIBUTING.md, CHANGELOG.md and the notebooks become pages here,
links to them lead to those pages, and docs/cli.md gets the options of every command from the application.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # files above docs/
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
COMMANDS = "<!-- The site has every option of every command here. -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no Markdown files of docs/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        content = notebook_page(json.loads(notebook.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links that hold on the site, and the options of the commands."""
    path = page.file.src_uri
    source = {page: name for name, page in PAGES.items()}.get(path, f"docs/{path}")
    if path == "cli.md":
        assert COMMANDS in markdown
        markdown = markdown.replace(COMMANDS, "\n".join(commands()))
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(lambda link: site_link(link, source, path), markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join(parts) + LINK.sub(lambda link: site_link(link, source, path), markdown[end:])


def on_page_content(html: str, **_: Any) -> str:
    """Return the page without Sphinx's roles, which docstrings have and mkdocstrings prints."""
    return re.sub(r":(?:func|class|data|meth|mod|attr|exc|obj):<code>~?", "<code>", html)


def site_link(link: re.Match[str], source: str, path: str) -> str:
    """Return a Markdown link as page `path` of the site needs it; one to a file without a page becomes code."""
    text, (target, _, anchor) = link[1], link[2].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if whole == "README.md":
        whole = "docs/index.md"
    whole = f"docs/{PAGES[whole]}" if whole in PAGES else whole
    if whole.startswith("docs/notebooks/"):
        whole = whole.replace(".ipynb", ".md")
    if not whole.startswith("docs/"):
        assert (ROOT / whole).exists(), f"{source}: no file {whole}"
        return text if text.startswith("`") else f"{text} (`{whole}`)"
    relative = posixpath.relpath(whole.removeprefix("docs/"), posixpath.dirname(path) or ".")
    return f"[{text}]({relative}{'#' + anchor if anchor else ''})"


def commands() -> Iterator[str]:
    """Yield one section per command: its summary, its arguments and its options."""
    import typer

    from hf_neuron_moe.cli.main import application

    for name, command in typer.main.get_command(application()).commands.items():  # type: ignore[attr-defined]
        yield f"\n## `hf-neuron-moe {name}`\n\n{command.help}\n"
        yield "| argument or option | default | meaning |\n|---|---|---|"
        for option in command.params:
            names = ", ".join(f"`{spelling}`" for spelling in (*option.opts, *option.secondary_opts))
            if not names.startswith("`-"):
                names = f"`{(option.metavar or option.name).upper()}`"
            shown = getattr(option, "hidden", False)
            if not shown:
                yield f"| {names} | {shown_default(option)} | {shown_text(getattr(option, 'help', None))} |"


def shown_default(option: Any) -> str:
    """Return the default of an option for a cell."""
    if option.required:
        return "required"
    return "" if option.default in (None, (), [], False) or callable(option.default) else f"`{option.default}`"


def shown_text(text: str | None) -> str:
    """Return a help text for a cell."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its text, its code, and what the code printed or drew."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/svg+xml" in data:
                parts.append("".join(data["image/svg+xml"]).replace("\n\n", "\n"))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
