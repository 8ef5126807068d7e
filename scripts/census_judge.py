"""What `hf_neuron_moe` does with one class of transformers: patched and equal to stock, refused, or no candidate."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
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
TOKENS = (2, 10)
"""Batch and sequence: a multiple of the four experts that an instance has."""
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
            with suppress(NotBuilt):
                yield from (instance for _, instance in variants(getattr(module, node.name)))


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
    for layout in LAYOUTS:
        try:
            compare(container, layout)
        except AssertionError as error:
            return row._replace(result=DIFFERENT, reason=" ".join(str(error).split())[:300])
        except NeuronMoEError as error:
            if layout == LAYOUTS[0]:
                return row._replace(result=REFUSED, reason=str(error))
            row = row._replace(reason=f"in {LAYOUTS[0]} layout only")
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
        assert expected["output"].abs().max() > 0, "the stock output is zero"
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
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    generator = torch.Generator().manual_seed(3)
    hidden_BSH = torch.randn(*TOKENS, _hidden_size(module), generator=generator)
    if len(names) == 3 and "ind" in names[1] and "weights" in names[2]:
        experts = int(getattr(module, "num_experts", 0)) or next(module.parameters()).shape[0]
        scores_TE = torch.rand(TOKENS[0] * TOKENS[1], experts, generator=generator)
        weights_TK, index_TK = scores_TE.topk(min(TOP_K, experts), dim=-1)
        return dict(zip(names, (hidden_BSH.flatten(0, 1), index_TK, weights_TK)))
    needed = [each.name for each in parameters if each.name in names and each.default is each.empty]
    given = dict[str, Any]((name, hidden_BSH.clone()) for name in needed)
    if len(needed) == 2 and _is_stacked(module):  # experts that all compute, and their weights
        given[needed[1]] = torch.rand(*TOKENS, next(module.parameters()).shape[0], generator=generator)
    return given | {name: given[name].flatten(0, 1) for name in given if _is_stacked(module)}


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module holds one matrix per expert itself: its hidden states are rows."""
    return any(param.dim() == 3 for param in module._parameters.values() if param is not None)


def _hidden_size(module: nn.Module) -> int:
    """The width of the input: of the first linear layer, or what experts say about themselves."""
    for name in ("input_size", "hidden_dim", "hidden_size"):
        value = getattr(module, name, None)
        if type(value) is int and not any(isinstance(each, nn.Linear) for each in module.children()):
            return value
    stacks = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
    if stacks:
        return stacks[0].shape[-1]
    return next(each.in_features for each in module.modules() if isinstance(each, nn.Linear))
