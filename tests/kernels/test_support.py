"""The support column of docs/kernels.md is true: every argument that is not plainly supported is tried.

The specification's entries have an example, a Python expression: `refused` is a value that is an error, `accepted` one
that changes no bit, `given` are other arguments that they need.
"""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import NeuronMoEError
from hf_neuron_moe.kernels import TensorDescriptor
from hf_neuron_moe.reference.specification import FAMILIES, family
from tests.kernels.documented_calls import CALLS, Call


def entry_of(argument: str, *sections: dict[str, Any]) -> dict[str, Any]:
    """An argument's entry: a function's own by name, then by pattern, then its family's likewise."""
    for entries in sections:
        for key, entry in sorted(entries.items(), key=lambda pair: pair[0] != argument):
            if fnmatchcase(argument, key):
                return dict(entry)
    raise AssertionError(argument)


CLAIMS = [
    pytest.param(function["name"], argument, entry, id=f"{function['name']}-{argument}")
    for each in map(family, FAMILIES)
    for function in each["function"]
    for argument in inspect.signature(getattr(kernels, function["name"])).parameters
    for entry in [entry_of(argument, function.get("arguments", {}), each.get("arguments", {}))]
    if entry["support"] != "yes"
]


def call_of(function: str) -> Call:
    torch.manual_seed(5)
    return CALLS[function]()


def meant(example: str, call: Call) -> Any:
    """The value of an example: the package's names, the call's arguments, and the letters of the MoE's sizes."""
    names: dict[str, Any] = vars(kernels) | {"torch": torch, "call": call}
    if "block_to_expert" in call:
        tokens, hidden = call["hidden_states"].shape
        names |= {"T": tokens - 1, "H": hidden, "E": 2, "I": 64, "B": call["block_size"]}
        names["N"] = len(call["block_to_expert"])
    elif "w" in call:
        names |= {"T": len(call["x"]), "E": call["w"].shape[1], "K": call["k"]}
    elif "dtype" in call:  # a step, whose product is of the last two descriptors
        names["left"], names["right"] = [each.data for each in call.values() if isinstance(each, TensorDescriptor)][-2:]
    return eval(example, names)  # our own data


def changed(argument: str, example: str, entry: dict[str, Any], call: Call) -> Call:
    return call | {
        name: meant(text, call) for name, text in {**entry.get("given", {}), argument: example}.items()
    }  # fmt: skip


def results(function: str, call: Call) -> list[Tensor]:
    """Everything that a call returns or writes."""
    returned = getattr(kernels, function)(**call)
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        value = value.data if isinstance(value, TensorDescriptor) else value
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            for each in value:
                collect(each)

    collect([returned, *call.values()])
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("function", "argument", "entry"), CLAIMS)
def test_what_is_not_plainly_supported(function: str, argument: str, entry: dict[str, Any]) -> None:
    assert entry.keys() & {"refused", "accepted"}, "an argument that is not plainly supported needs an example"
    assert ("accepted" in entry) == (entry["support"] == "no effect")
    if "refused" in entry:
        call = changed(argument, entry["refused"], entry, call_of(function))
        with pytest.raises(NeuronMoEError) as caught:
            getattr(kernels, function)(**call)
        where = "recompute_intermediate" if function == "recompute_hidden" else function
        assert argument in str(caught.value) and caught.value.where == where
        return
    call = call_of(function)
    change = changed(argument, entry["accepted"], entry, call_of(function))
    one, other = results(function, call), results(function, {name: change[name] for name in change})
    tensors = [each for each in (argument, *entry.get("given", {})) if isinstance(change[each], Tensor)]
    assert len(one) == len(other) - len([each for each in tensors if each not in call])
    for left, right in zip(one, other):
        if not any(right is change[each] for each in tensors):
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (left, right)))


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_themselves_are_legal(function: str) -> None:
    made = results(function, call_of(function))
    assert any(bool(each.float().abs().sum() > 0) for each in made)


def test_every_function_with_reservations_has_a_call() -> None:
    assert {parameter.values[0] for parameter in CLAIMS} == set(CALLS)
    assert len(CLAIMS) > 150


TENSORS = [
    pytest.param(function["name"], argument, entry, id=f"{function['name']}-{argument}")
    for each in map(family, FAMILIES)
    for function in each["function"]
    if function["name"] in CALLS
    for argument in call_of(function["name"])
    for entry in [entry_of(argument, function.get("arguments", {}), each.get("arguments", {}))]
    if entry.keys() & {"shape", "dtypes"} and isinstance(call_of(function["name"])[argument], Tensor | TensorDescriptor)
]


def extents(shape: str, function: str, call: Call) -> list[int]:
    """The numbers behind a shape's letters, as the calls are made."""
    letters = {"S": 128, "H": 256, "I": 256}
    if "block_to_expert" in call:
        rows, hidden = call["hidden_states"].shape
        inner = 128 if function.endswith("mxfp8") else 64
        letters = {"rows": rows, "H": hidden, "E": 2, "I": inner, "B": call["block_size"]}
        letters["N"] = len(call["block_to_expert"])
    elif "w" in call:
        letters = {"H": 128, "E": 8}
    axes = shape[1:-1].replace("T'", "rows").replace("2I", "2 * I").replace("..., N/QB", "64, 128 // 16")
    return [eval(axis, dict(letters)) for axis in axes.split(", ")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("function", "argument", "entry"), TENSORS)
def test_shapes_and_dtypes_are_the_claimed(function: str, argument: str, entry: dict[str, Any]) -> None:
    call = call_of(function)
    wrapped = isinstance(call[argument], TensorDescriptor)
    tensor: Tensor = call[argument].data if wrapped else call[argument]
    if "shape" in entry and "x4 words" not in entry.get("note", ""):
        assert list(tensor.shape) == extents(entry["shape"], function, call)
    for dtype in entry.get("dtypes", []):
        value = tensor.to(getattr(torch, dtype))
        getattr(kernels, function)(**call | {argument: TensorDescriptor(value) if wrapped else value})
    if "dtypes" in entry:
        with pytest.raises(NeuronMoEError) as caught:
            value = tensor.double()
            getattr(kernels, function)(**call | {argument: TensorDescriptor(value) if wrapped else value})
        assert isinstance(caught.value, TypeError)
