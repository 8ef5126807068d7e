"""Which classes of the installed transformers are experts, gated MLPs, or MLPs without a gate, read from their source.

A class is gated if its forward multiplies two branches that both depend on the input, each through a projection of its
own (or through another part of a fused one), and if a projection takes the product. The source is followed statement by
statement; names of attributes and variables do not matter.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

EXPERTS, OTHER_EXPERTS, DENSE, OTHER_DENSE, UNGATED = KINDS = (
    "decorated experts",
    "other experts",
    "gated MLP",
    "gated, other names",
    "MLP without a gate",
)
"""Kinds of classes: `gated MLP` has the part names that discovery looks for, `gated, other names` has not."""

DECORATOR = "use_experts_implementation"
SUFFIXES = ("MLP", "Mlp", "FFN", "FeedForward", "GLU")
PART_NAMES = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"w1", "w3", "w2"})
_LAYER = re.compile(r"Linear\b|Parameter$")
_STACKED = re.compile(r"(torch\.)?nn\.Parameter\(torch\.\w+\(\w[\w.]*(experts|total)\w*, [^,]+, [^,]+\)\)$")
"""A parameter of three dimensions, the first one a number of experts."""
_CONTEXT = re.compile(r"mask|cache|past|position|state_dict|key_|query_|prompt")
"""Arguments of attention, decoders and recurrent layers, whose output gates are no MLPs."""
_FUNCTIONS = ("linear", "matmul", "bmm")


class Listed(NamedTuple):
    """One class of the library."""

    family: str  # the model's folder
    name: str
    kind: str

    @property
    def module(self) -> str:
        """The name of the module that defines it."""
        return f"transformers.models.{self.family}.{self.file}"

    @property
    def file(self) -> str:
        """The name of that module's file."""
        return f"modeling_{self.family}"


class Branch(NamedTuple):
    """What is known about a value: the projections it came through, and whether two of them were multiplied."""

    sources: frozenset[str] = frozenset()
    gated: bool = False
    of_input: bool = False


UNKNOWN = Branch()


def join(values: Iterable[Branch]) -> Branch:
    found = list(values)
    sources = frozenset[str]().union(*(value.sources for value in found))
    return Branch(sources, any(value.gated for value in found), any(value.of_input for value in found))


def product(left: Branch, right: Branch) -> Branch:
    both = join((left, right))
    return both._replace(gated=both.gated or bool(left.sources and right.sources and left.sources != right.sources))


@dataclass
class SourceFile:
    """The classes of one modeling file."""

    classes: dict[str, ast.ClassDef]

    def is_stacked(self, value: str) -> bool:
        """Whether the source of a value makes a parameter with one matrix per expert, or a layer that holds one."""
        if _STACKED.match(value):
            return True
        layer = self.classes.get(value.split("(")[0])
        return layer is not None and any(map(_STACKED.match, self.attributes(layer).values()))

    def method(self, node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
        """The method that an instance has, of the class or of a base in the same file."""
        for each in self.bases(node):
            for statement in each.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    return statement
        return None

    def bases(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        yield node
        for base in node.bases:
            if (known := self.classes.get(ast.unparse(base))) is not None and known is not node:
                yield from self.bases(known)

    def attributes(self, node: ast.ClassDef) -> dict[str, str]:
        """What the constructors assign to ``self``: the attribute and the source of its value."""
        found: dict[str, str] = {}
        for each in self.bases(node):
            for statement in ast.walk(next((f for f in each.body if _is_function(f, "__init__")), ast.Pass())):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    for target in targets:
                        if isinstance(target, ast.Attribute):
                            found.setdefault(target.attr, ast.unparse(statement.value))
        return found


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


@dataclass
class Reader:
    """Follows the statements of a forward."""

    file: SourceFile
    node: ast.ClassDef
    layers: set[str]
    own: str
    values: dict[str, Branch]
    within_method: bool = False  # whether this is a method that forward calls; what that calls in turn is not read
    projected: bool = False  # whether a projection took a product of two branches
    returned: Branch = UNKNOWN

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for name, value in zip(names, [self.read(value) for value in values]):
                        self.assign(name, value)
                case ast.Assign(targets=targets, value=value):
                    read = self.read(value)
                    for target in targets:
                        self.assign(target, read)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, self.read(value))
                case ast.AugAssign(target=target, op=op, value=value):
                    pair = self.read(target), self.read(value)
                    self.assign(target, product(*pair) if isinstance(op, ast.Mult) else join(pair))
                case ast.Return(value=ast.expr() as value):
                    self.returned = join((self.returned, self.read(value)))
                case ast.Expr(value=value):
                    self.read(value)
                case ast.If(body=then, orelse=other):
                    self.run([*then, *other])
                case ast.For(body=inner) | ast.With(body=inner):
                    self.run(inner)

    def assign(self, target: ast.expr, value: Branch) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part, name in enumerate(target.elts):
                self.assign(name, value._replace(sources=frozenset(f"{each} {part}" for each in value.sources)))

    def read(self, node: ast.expr) -> Branch:
        match node:
            case ast.Name(id=name):
                return self.values.get(name, Branch())
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return product(self.read(left), self.read(right))
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                return self.project(node, join((self.read(left), self.read(right))))
            case ast.Subscript(value=value, slice=index):
                whole = self.read(value)
                return whole._replace(sources=frozenset(f"{each} {ast.unparse(index)}" for each in whole.sources))
            case ast.Call(func=function, args=arguments, keywords=keywords):
                values = [self.read(argument) for argument in arguments]
                return self.call(node, function, [*values, *(self.read(keyword.value) for keyword in keywords)])
            case ast.Starred(value=value):
                return self.read(value)
        return join(self.read(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def call(self, node: ast.Call, function: ast.expr, given: list[Branch]) -> Branch:
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        match function:
            case ast.Attribute(value=ast.Name(self.own), attr=part) if part in self.layers:
                return self.project(function, join(given))
            case ast.Attribute(value=ast.Name(self.own), attr=part):
                method = None if self.within_method else self.file.method(self.node, part)
                return join(given) if method is None else self.follow(method, given)
            case ast.Attribute(value=holder) if name == "mul" and given:
                first = given if len(given) == 2 else [self.read(holder), *given]
                return product(first[0], first[1])
            case ast.Attribute(value=holder):
                given = [self.read(holder), *given]
        return self.project(node, join(given)) if name in _FUNCTIONS else join(given)

    def project(self, node: ast.expr, value: Branch) -> Branch:
        if not value.of_input:
            return value
        self.projected |= value.gated
        return Branch(frozenset([ast.unparse(node)]), value.gated, True)

    def follow(self, method: ast.FunctionDef, given: list[Branch]) -> Branch:
        """What a method of the class returns."""
        names = [argument.arg for argument in method.args.args]
        inner = Reader(self.file, self.node, self.layers, "".join(names[:1]), dict(zip(names[1:], given)), True)
        inner.run(method.body)
        self.projected |= inner.projected
        return inner.returned


def is_gated(file: SourceFile, node: ast.ClassDef, layers: set[str]) -> bool:
    """Whether the class's forward multiplies two branches before a projection."""
    forward = file.method(node, "forward")
    if forward is None:
        return False
    names = [argument.arg for argument in forward.args.args]
    # The input is the first argument, or the second where the first is what the result is added to.
    for name in names[1:3]:
        reader = Reader(file, node, layers, names[0], {name: Branch(of_input=True)})
        reader.run(forward.body)
        if reader.projected:
            return True
    return False


def kind_of(file: SourceFile, node: ast.ClassDef) -> str | None:
    """The kind of a class; None for one that is neither experts nor an MLP."""
    forward = file.method(node, "forward")
    if forward is None or _required(forward) > 3:
        return None
    if any(DECORATOR in ast.unparse(decorator) for decorator in node.decorator_list):
        return EXPERTS
    suffixed, experts = node.name.endswith(SUFFIXES), node.name.endswith("Experts")
    if not (suffixed or experts or _is_like_an_mlp(node, forward) or _names_parts(node)):
        return None
    attributes = file.attributes(node)
    made = {name: value.split("(")[0] for name, value in attributes.items()}
    stacked = {name for name, value in attributes.items() if file.is_stacked(value)}
    inner = {name for name, maker in made.items() if experts and "Expert" in maker and maker in file.classes}
    if stacked or experts:
        return OTHER_EXPERTS if inner or is_gated(file, node, stacked) else None
    layers = {name for name, maker in made.items() if _LAYER.search(maker)}
    if is_gated(file, node, layers):
        return DENSE if any(names <= attributes.keys() for names in PART_NAMES) else OTHER_DENSE
    return UNGATED if suffixed else None


def _required(forward: ast.FunctionDef) -> int:
    """The number of arguments without a default, without ``self``."""
    return len(forward.args.args) - len(forward.args.defaults) - 1


def _names_parts(node: ast.ClassDef) -> bool:
    """Whether a constructor assigns the parts of a gated MLP."""
    made = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return any(names <= made for names in PART_NAMES)


def _is_like_an_mlp(node: ast.ClassDef, forward: ast.FunctionDef) -> bool:
    """Whether forward takes one tensor and multiplies, and neither it nor the class's name is about attention."""
    names = [argument.arg for argument in forward.args.args][1:]
    if _required(forward) > 1 or any(map(_CONTEXT.search, names[1:])) or re.search(r"Attention|Attn", node.name):
        return False
    if not any(isinstance(each, ast.Mult) for each in ast.walk(forward)):
        return False
    return re.search(r"softmax|Conv\dd", ast.unparse(node)) is None


def source_file(path: Path) -> SourceFile:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return SourceFile({node.name: node for node in tree.body if isinstance(node, ast.ClassDef)})


@cache
def library_classes() -> tuple[Listed, ...]:
    """Every class of the installed transformers that has a kind, by family and name."""
    import transformers

    collecting = gc.isenabled()
    gc.disable()  # a syntax tree is full of objects and has no cycles: collections take four times its own time
    try:
        found = []
        for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
            if path.stem != f"modeling_{path.parent.name}":
                continue
            file = source_file(path)
            kinds = ((name, kind_of(file, node)) for name, node in file.classes.items())
            found += [Listed(path.parent.name, name, kind) for name, kind in kinds if kind is not None]
    finally:
        if collecting:
            gc.enable()
    return tuple(sorted(found))
