"""What `hf_neuron_moe` does with one class of transformers: patched and equal to stock, refused, or no candidate."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from census_build import NotBuilt, class_of, variants
from census_classes import OTHER_EXPERTS, UNGATED, Listed
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NeuronMoEError
from hf_neuron_moe.patching.discovery import discover

PATCHED, IN_PART, NO_GATE, UNSEEN, REFUSED, NOT_BUILT, DIFFERENT, DIED = RESULTS = (
    "patched", "in part", "no gate", "no candidate", "refused", "not built", "differs", "died",
)  # fmt: skip
"""Results: `patched` means patched and equal to the class's own forward and gradients, however the library makes it."""
LAYOUTS = ("stock", "kernel")
TOKENS = (2, 9)
TOP_K = 2


class Row(NamedTuple):
    """What the census says about one class."""

    family: str
    name: str
    kind: str
    result: str
    gate: str = ""
    reason: str = ""


def judge(listed: Listed) -> Row:
    """Return the row of a class; never raises for what the class does."""
    rows: dict[str, Row] = {}
    try:
        for arguments, module in variants(class_of(listed)):
            rows[arguments] = _judge_instance(listed, module)
    except (NotBuilt, ImportError) as error:
        return Row(*listed, NOT_BUILT, reason=str(error))
    worst, best = (pick(rows.values(), key=lambda row: RESULTS.index(row.result)) for pick in (max, min))
    if best.result != PATCHED or worst.result in (PATCHED, DIFFERENT):
        return worst
    others = [f"{arguments or 'else'}: {row.reason}" for arguments, row in rows.items() if row.result != PATCHED]
    return best._replace(result=IN_PART, reason="not with " + "; ".join(dict.fromkeys(others)))


def _judge_instance(listed: Listed, module: nn.Module) -> Row:
    row = _judge_block(listed, nn.ModuleDict({"block": module}), "block")
    if row.result == PATCHED or listed.kind != OTHER_EXPERTS:
        return row
    for holder in _holders(class_of(listed)):  # a block around the experts may be patched as a whole
        with_name = next((name for name, each in holder.named_modules() if type(each) is type(module)), None)
        candidates = {each.name: each for each in discover(nn.ModuleDict({"block": holder}))}
        found = candidates.get("block")
        if with_name is not None and found is not None and found.reason is None:
            return _judge_block(listed, nn.ModuleDict({"block": holder}), "block")._replace(
                reason=f"as part of {type(holder).__name__}"
            )
    return row


def _holders(cls: type[nn.Module]) -> Iterator[nn.Module]:
    module = importlib.import_module(cls.__module__)
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef) or node.name == cls.__name__:
            continue
        if any(isinstance(call, ast.Call) and ast.unparse(call.func) == cls.__name__ for call in ast.walk(node)):
            try:
                yield from (instance for _, instance in variants(getattr(module, node.name)))
            except NotBuilt:
                continue


def _judge_block(listed: Listed, container: nn.ModuleDict, name: str) -> Row:
    candidate = next((each for each in discover(container) if each.name == name), None)
    if candidate is None:
        return Row(*listed, NO_GATE if listed.kind == UNGATED else UNSEEN)
    if not candidate.gated and candidate.reason is not None:
        return Row(*listed, NO_GATE if listed.kind == UNGATED else REFUSED, reason=candidate.reason)
    if candidate.reason is not None:
        return Row(*listed, REFUSED, reason=candidate.reason)
    gate = candidate.gate
    row = Row(*listed, PATCHED, gate=getattr(gate, "text", str(gate)))
    try:
        for layout in LAYOUTS:
            compare(container, layout)
    except AssertionError as error:
        return row._replace(result=DIFFERENT, reason=" ".join(str(error).split())[:300])
    except NeuronMoEError as error:
        return row._replace(result=REFUSED, reason=str(error))
    return row


def compare(container: nn.ModuleDict, layout: str) -> None:
    """Compare a patched copy with the class's own eager forward: output and every gradient, in eval and train mode.

    Raises:
        AssertionError: something differs by more than the rounding of fp32.
    """
    patched = copy.deepcopy(container)
    patch_model(patched, {"precision": "fp32", "weights": layout})
    inputs = _inputs(container["block"])
    for training in (False, True):
        expected = results(container.train(training), inputs)
        actual = results(patched.train(training), inputs)
        assert actual.keys() == expected.keys(), f"{sorted(actual.keys() ^ expected.keys())} of one only"
        for name, value in expected.items():
            assert_close(actual[name], value, f"{name} in {layout} layout, {training=}")


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal up to fp32 rounding: the tolerance of tests/modules/test_equals_stock.py."""
    atol = max(2e-6 * expected.abs().max().item(), 1e-11)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")


def results(container: nn.ModuleDict, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Run the block on copies of `inputs`: its output, gradients of floating inputs, gradients in stock layout."""
    torch.manual_seed(5)  # for dropout
    container.zero_grad()
    given = {
        name: value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    output = container["block"](*given.values())
    found = {"output": output[0] if isinstance(output, tuple) else output}
    scale = torch.randn(found["output"].shape, generator=torch.Generator().manual_seed(2))
    (found["output"] * scale).sum().backward()
    found["output"] = found["output"].detach()
    for name, value in given.items():
        if isinstance(value, Tensor) and value.grad is not None:
            found[f"gradient of {name}"] = value.grad
    return found | _gradients(container)


def _gradients(container: nn.Module) -> dict[str, Tensor]:
    """Gradients under the names and in the layout of the stock state dict."""
    saved = {name: param.detach().clone() for name, param in container.named_parameters()}
    with torch.no_grad():
        for param in container.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        found = {f"gradient of {name}": value.clone() for name, value in container.state_dict().items()}
        for name, param in container.named_parameters():
            param.copy_(saved[name])
    return found


def _inputs(module: nn.Module) -> dict[str, Any]:
    """Arguments for the forward of a gated MLP, of experts, or of a block with experts."""
    forward = inspect.signature(inspect.unwrap(type(module).forward))
    names = [
        name
        for name, parameter in list(forward.parameters.items())[1:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    generator = torch.Generator().manual_seed(3)
    hidden_BSH = torch.randn(*TOKENS, _hidden_size(module), generator=generator)
    if {"top_k_index", "top_k_weights"} <= set(names):
        count = TOKENS[0] * TOKENS[1]
        experts = int(getattr(module, "num_experts", 0)) or next(module.parameters()).shape[0]
        scores_TE = torch.rand(count, experts, generator=generator)
        weights_TK, index_TK = scores_TE.topk(min(TOP_K, experts), dim=-1)
        return dict(zip(names, (hidden_BSH.flatten(0, 1), index_TK, weights_TK)))
    return {name: 0 if name == "layer_idx" else hidden_BSH.clone() for name in names}


def _hidden_size(module: nn.Module) -> int:
    """The width of the input: of the first linear layer, or what experts say about themselves."""
    for name in ("hidden_dim", "hidden_size", "input_size"):
        value = getattr(module, name, None)
        if type(value) is int and not any(isinstance(each, nn.Linear) for each in module.children()):
            return value
    return next(each.in_features for each in module.modules() if isinstance(each, nn.Linear))
