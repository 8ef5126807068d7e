"""Print how large and how tangled the package is: lines, checks, parameters, imports, names.

    python scripts/code_figures.py            # a table
    python scripts/code_figures.py --json     # the same as JSON
    python scripts/code_figures.py --list     # the functions, imports and names behind the figures too

The limits are those that docs/architecture.md promises; a figure beyond its limit makes the exit code 1.

Not counted: lines of the package's .json, .pyi and .css files; imports by a string, as in the lazy names of an
``__init__``, ``config.BACKENDS`` and the rows of ``cli/main.py``; files of ``cli/`` with the name of the module that
does the work; and, on a value's way, files that lie behind one call of a file on it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_neuron_moe"

GROUND = frozenset(
    {"errors", "environment", "activation_policy", "precision_map", "config", "_version", "_lazy", "output_files"}
)
# What each package may import besides itself, from the bottom up. Names with a dot are packages within one.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "_version": frozenset(),
    "_lazy": frozenset(),
    "environment": frozenset({"errors"}),
    "output_files": frozenset({"errors"}),
    "activation_policy": frozenset({"errors"}),
    "precision_map": frozenset({"errors"}),
    "config": frozenset({"errors", "activation_policy", "precision_map"}),
    "checks": GROUND,
    "formats": GROUND | {"checks"},
    "backends": GROUND | {"checks", "formats"},
    "reference": GROUND | {"checks", "formats", "backends"},
    "kernels": GROUND | {"formats", "reference"},
    "modules": GROUND | {"checks", "formats", "backends"},
    "patching": GROUND | {"checks", "formats", "backends", "modules"},
    "training": GROUND | {"checks", "formats", "backends", "modules", "patching"},
    "convert": GROUND | {"checks", "formats", "patching"},
    "quantizers": GROUND | {"checks", "formats", "backends", "modules", "patching", "convert"},
    "parity": GROUND | {"patching"},
    "device": GROUND | {"checks", "formats", "backends", "modules", "patching", "convert", "quantizers", "reference"},
    "report": GROUND,
    "explore": GROUND
    | {"checks", "formats", "backends", "modules", "patching", "training", "convert", "device", "report"},
    "recipes": GROUND | {"patching", "training", "convert", "explore", "report"},
    "demo": GROUND | {"patching", "training", "report", "recipes"},
    "finetune": GROUND | {"checks", "backends", "modules", "patching", "training", "convert", "quantizers", "device"},
    "cli": GROUND
    | {"backends", "patching", "training", "convert", "device", "report", "explore", "recipes", "finetune", "demo"},
    "__main__": frozenset({"cli"}),
    "__init__": GROUND | {"modules", "patching", "quantizers", "training"},
}

LIMITS = {
    "lines": 31_000,
    "validation_percent": 12.0,
    "functions_with_many_parameters": 40,
    "imports_up": 0,
    "circles_between_packages": 0,
    "circles_between_files": 0,
    "files_of_a_value": 7,
    "longest_file": 400,
    "shared_names": 0,
}
MANY = 7
# Files whose name says the same in both folders: what a backend is, and how it computes experts. A file of a command
# line's verb has the verb's name, as the module has that does the work.
MEANT_TWINS = frozenset({"__init__.py", "backend.py", "experts.py"})
VERBS = "cli/"
CHECK_NAME = re.compile(r"_?(check|require|validate|why_not|unsupported_reason)")
BUILDERS = frozenset({"refuse", "about", "not_one_of"})
ROWS = frozenset({"Rule", "Wrong"})
"""Records of one rule each; what makes them only checks."""
WALK = re.compile(r"^## A value's way$(.*?)^## ", re.MULTILINE | re.DOTALL)


@dataclass
class Figures:
    """What is measured, and behind each figure the places that make it up."""

    lines: int = 0
    code_lines: int = 0
    docstring_lines: int = 0
    validation_lines: int = 0
    files: int = 0
    longest_file: int = 0
    by_package: dict[str, int] = field(default_factory=dict)
    many_parameters: list[str] = field(default_factory=list)
    up: list[str] = field(default_factory=list)
    package_circles: list[str] = field(default_factory=list)
    file_circles: list[str] = field(default_factory=list)
    twins: list[str] = field(default_factory=list)
    walk: list[str] = field(default_factory=list)

    def measures(self) -> dict[str, float]:
        """Return the figures that have a limit."""
        return {
            "lines": self.lines,
            "validation_percent": round(100 * self.validation_lines / self.code_lines, 1),
            "functions_with_many_parameters": len(self.many_parameters),
            "imports_up": len(self.up),
            "circles_between_packages": len(self.package_circles),
            "circles_between_files": len(self.file_circles),
            "files_of_a_value": len(self.walk),
            "longest_file": self.longest_file,
            "shared_names": len(self.twins),
        }


def module_of(path: Path, root: Path) -> tuple[str, ...]:
    """Return ``("formats", "mx")`` for ``hf_neuron_moe/formats/mx.py``; a package's own file is its ``__init__``."""
    return path.relative_to(root / PACKAGE).with_suffix("").parts


def package_of(module: tuple[str, ...]) -> str:
    """Return the row of :data:`ALLOWED` that a module belongs to."""
    inner = ".".join(module[:2])
    return inner if inner in ALLOWED else module[0]


@functools.lru_cache(1)
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return every node of a file."""
    return list(ast.walk(tree))


def imports_of(tree: ast.AST, module: tuple[str, ...], files: set[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield every module of the package that a file imports, inside functions too, but not for type checkers alone."""
    for_types = {inner for node in nodes_of(tree) for each in _for_types(node) for inner in ast.walk(each)}
    here = (PACKAGE, *module[:-1])
    for node in nodes_of(tree):
        names: list[tuple[str, ...]] = []
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            stem = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*stem, alias.name) for alias in node.names]
        yield from (resolved(name[1:], files) for name in names if name[:1] == (PACKAGE,))


def _for_types(node: ast.AST) -> list[ast.stmt]:
    """Return the branch of a node that is never run: that of ``if TYPE_CHECKING``, or the other of ``if not ...``."""
    if not isinstance(node, ast.If):
        return []
    test, branch = node.test, node.body
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, branch = test.operand, node.orelse
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return branch if name == "TYPE_CHECKING" else []


def resolved(name: tuple[str, ...], files: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the module that a dotted name lies in: itself, a package's ``__init__``, or its parent."""
    for candidate in (name, (*name, "__init__"), name[:-1], (*name[:-1], "__init__")):
        if candidate in files:
            return candidate
    return name[:1] or ("__init__",)


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the strongly connected groups of more than one node, each as ``a <-> b``."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, graph: dict[str, set[str]], into: list[str]) -> None:
        stack = [(node, iter(sorted(graph.get(node, ()))))]
        seen.add(node)
        while stack:
            current, followers = stack[-1]
            for follower in followers:
                if follower not in seen:
                    seen.add(follower)
                    stack.append((follower, iter(sorted(graph.get(follower, ())))))
                    break
            else:
                stack.pop()
                into.append(current)

    for node in sorted(edges):
        if node not in seen:
            visit(node, edges, order)
    backwards: dict[str, set[str]] = defaultdict(set)
    for node, followers in edges.items():
        for follower in followers:
            backwards[follower].add(node)
    seen.clear()
    groups = []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(node, backwards, group)
            if len(group) > 1:
                groups.append(" <-> ".join(sorted(group)))
    return sorted(groups)


def lines_of_code(path: Path, tree: ast.Module) -> tuple[set[int], set[int]]:
    """Return the numbers of a file's lines that hold code, and of those that hold docstrings."""
    docstrings: set[int] = set()
    for node in nodes_of(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    code: set[int] = set()
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in blank:
                code.update(range(token.start[0], token.end[0] + 1))
    return code - docstrings, docstrings


def validation_of(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that only check.

    These are raises, statements that call a check or build an error or a :data:`rule <ROWS>`, branches and loops with
    nothing else in them, and the whole of functions whose name says that they check or that return errors or rules.
    """
    found: set[int] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.stmt) and _only_checks(node):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _only_checks(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return bool(CHECK_NAME.match(node.name)) or _makes_rules(node)
    if isinstance(node, ast.If | ast.For):
        return all(_only_checks(each) for each in (*node.body, *node.orelse))
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Expr | ast.Assign | ast.Return):
        return False
    value = node.value
    while isinstance(value, ast.Yield | ast.YieldFrom):
        value = value.value  # type: ignore[assignment]  # a bare yield ends the loop
    return any(CHECK_NAME.match(name) or name in BUILDERS | ROWS for name in _called(value))


def _makes_rules(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function returns or yields errors or rules: its annotation says so, or a yield of one does."""
    returns = ast.walk(function.returns) if function.returns else ()
    names = [node.id for node in returns if isinstance(node, ast.Name)]
    yields = [node.value for node in ast.walk(function) if isinstance(node, ast.Yield)]
    rows = any(name in ROWS for value in yields for name in _called(value))
    return rows or any(name in ROWS or name.endswith("Error") for name in names)


def _called(value: ast.expr | None) -> Iterator[str]:
    """Yield the names of a chain of calls: ``named`` and ``about`` for ``ConfigError.about(...).named(...)``."""
    while isinstance(value, ast.Call):
        function = value.func
        yield function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        value = function.value if isinstance(function, ast.Attribute) else None


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its dotted name."""

    def walk(node: ast.AST, above: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = above
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from walk(child, name)

    return walk(tree, "")


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of a function's parameters, without ``self`` and ``cls``; 0 for kernels of a GPU.

    A kernel has no records: pointers, sizes and strides are parameters.
    """
    if "triton.jit" in map(ast.unparse, function.decorator_list):
        return 0
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stars = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len([name for name in names if name not in ("self", "cls")]) + stars


def documented_names(root: Path) -> set[tuple[tuple[str, ...], str]]:
    """Return module and name of the kernel functions of the specification: their signatures are AWS's, not ours."""
    import tomllib

    files = (root / PACKAGE / "reference" / "specification").glob("*.toml")
    families = [tomllib.loads(path.read_text(encoding="utf-8")) for path in files]
    names = {function["name"] for each in families for function in each.get("function", [])}
    tree = ast.parse((root / PACKAGE / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = [(tuple((node.module or "").split(".")[1:]), alias.name) for node in imports for alias in node.names]
    return {(module, name) for module, name in exported if name in names}


def walk_of(root: Path) -> list[str]:
    """Return the files of "A value's way" in docs/architecture.md, in their order."""
    text = WALK.search((root / "docs" / "architecture.md").read_text(encoding="utf-8"))
    found: list[str] = []
    for line in text.group(1).split("\n\nOn Trainium")[0].splitlines() if text else []:
        if re.match(r"\d+\. ", line):
            found += [name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", line) if name not in found]
    return found


def measure(root: Path = ROOT) -> Figures:
    """Read the package under `root` and return its figures."""
    figures = Figures()
    documented = documented_names(root)
    paths = sorted((root / PACKAGE).rglob("*.py"))
    files = {module_of(path, root) for path in paths}
    by_name: dict[str, list[str]] = defaultdict(list)
    file_edges: dict[str, set[str]] = defaultdict(set)
    package_edges: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        shown, module = str(path.relative_to(root / PACKAGE)), module_of(path, root)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, shown)
        package, length = package_of(module), len(text.splitlines())
        figures.files += 1
        figures.lines += length
        figures.longest_file = max(figures.longest_file, length)
        figures.by_package[package] = figures.by_package.get(package, 0) + length
        code, docstrings = lines_of_code(path, tree)
        figures.code_lines += len(code)
        figures.docstring_lines += len(docstrings)
        figures.validation_lines += len(validation_of(tree) & code)
        if not shown.startswith(VERBS):
            by_name[path.name].append(shown)
        for name, function in functions_of(tree):
            count = parameters_of(function)
            if count > MANY and (module, name) not in documented:
                figures.many_parameters.append(f"{shown}: {name} ({count})")
        for target in imports_of(tree, module, files):
            other = package_of(target)
            if other != package and other not in ALLOWED.get(package, frozenset()):
                figures.up.append(f"{shown} imports {'.'.join(target)}")
            if other != package:
                package_edges[package].add(other)
            if target != module and target[-1] != "__init__":
                file_edges[".".join(module)].add(".".join(target))
    figures.up = sorted(set(figures.up))
    figures.package_circles = circles(package_edges)
    figures.file_circles = circles(file_edges)
    figures.twins = [
        f"{name}: {', '.join(places)}"
        for name, places in sorted(by_name.items())
        if len(places) > 1 and name not in MEANT_TWINS
    ]
    figures.walk = walk_of(root)
    return figures


def show(figures: Figures, listed: bool) -> None:
    """Print the figures beside their limits."""
    for name, value in figures.measures().items():
        mark = "" if value <= LIMITS[name] else "  <- beyond"
        print(f"{name.replace('_', ' '):34}{value:>10,}   at most {LIMITS[name]:>8,}{mark}")
    print(f"\n{figures.files} files, {figures.code_lines:,} lines of code, {figures.docstring_lines:,} of docstrings")
    for package, lines in sorted(figures.by_package.items(), key=lambda item: -item[1]):
        print(f"  {package:20}{lines:>8,}")
    if listed:
        for title in ("many_parameters", "up", "package_circles", "file_circles", "twins", "walk"):
            print(f"\n{title.replace('_', ' ')}")
            for each in getattr(figures, title):
                print(f"  {each}")


def main() -> int:
    """Print the figures; return 1 if one is beyond its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print the places behind the figures")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout of the project")
    options = parser.parse_args()
    figures = measure(options.root.resolve())
    measures = figures.measures()
    if options.json:
        print(json.dumps({"measures": measures, "limits": LIMITS} | asdict(figures), indent=1))
    else:
        show(figures, options.list)
    return int(any(measures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
