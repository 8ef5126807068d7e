"""Syntax trees of functions, and what their text alone says."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from hf_neuron_moe.patching.source_values import NotSwiGLU


@cache
def parsed(forward: Callable[..., Any], title: str = "its forward") -> ast.FunctionDef:
    """Return the syntax tree of a plain function, which messages call `title`.

    Raises:
        NotSwiGLU: it is not plain, or its source is not available.
    """
    if hasattr(forward, "__wrapped__"):
        raise NotSwiGLU(f"{title} is wrapped by a decorator", unread=True)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError) as error:
        reason = f"the source of {title} is not available ({type(error).__name__})"
        raise NotSwiGLU(reason, unread=True) from error
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise NotSwiGLU(f"{title} is not a plain function", unread=True)
    decorators = [ast.unparse(each) for each in function.decorator_list]
    if decorators not in ([], ["staticmethod"], ["torch.jit.script"]):  # which compute what the function does
        raise NotSwiGLU(f"{title} is decorated with @{decorators[0]}", unread=True)
    return _Attributes().visit(function)


class _Attributes(ast.NodeTransformer):
    """Writes ``getattr(x, "name")`` as ``x.name``."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return the call, or the attribute that it gets."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("getattr"), [holder, ast.Constant(value=str() as name)], []) if name.isidentifier():
                return ast.Attribute(holder, name, ast.Load())
        return node


def scope_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the global names of a plain function that no local variable hides."""
    code = function.__code__
    hidden = {*code.co_varnames, *code.co_freevars, *code.co_cellvars}
    return {name: value for name, value in function.__globals__.items() if name not in hidden}


_PRODUCTS = frozenset({"mul", "mul_", "multiply", "glu", "einsum", "addcmul", "prod"})
"""Names of functions that may multiply two branches."""


@cache
def multiplies_branches(forward: Callable[..., Any]) -> bool:
    """Return whether a forward may multiply two values that both depend on its arguments, not as its result.

    It may where its source is not available, or where it multiplies by a function of one of the names above.
    """
    try:
        function = parsed(inspect.unwrap(forward))
    except NotSwiGLU:
        return True
    own = {each.arg for each in function.args.args[:1]}
    names = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)} - own
    assigned = (each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    depends = names | {each.id for each in assigned}

    def is_branch(node: ast.expr) -> bool:
        return any(isinstance(each, ast.Name) and each.id in depends for each in ast.walk(node))

    inner = (each for each in ast.walk(function) if isinstance(each, ast.FunctionDef) and each is not function)
    nested = {each for one in inner for each in ast.walk(one)}  # whose results are not the forward's
    results = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each not in nested]
    returned = {part for each in results for part in (each.elts if isinstance(each, ast.Tuple) else [each])}
    for node in ast.walk(function):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if is_branch(left) and is_branch(right):
                if node not in returned:
                    return True
            case ast.AugAssign(op=ast.Mult(), value=value) if is_branch(value):
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _PRODUCTS:
                return True
    return False
