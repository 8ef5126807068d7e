"""The kernels behind ``moe_cte``, made from a table: their argument orders, other names and other defaults.

A row, a table ``[function.kernel]`` of ``specification/moe_cte.toml``, is everything that a direct kernel of
:mod:`hf_neuron_moe.reference.moe_cte_direct` has of its own. Types and defaults that a row does not name are those of
``moe_cte`` and of the option records.

Source: nki-library 2.29 ``core.moe.moe_cte.bwmm_shard_on_{block,I,block_mx,I_mx}`` and
``experimental.moe.forward.bwmm_shard_on_H``. Positions are those of 2.29; what 2.31 and 2.33 inserted is by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from inspect import Parameter
from typing import Any, NamedTuple

from torch import Tensor

from hf_neuron_moe.checks import Rule, check_rules, check_shape
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.moe_cte import MoEForward, forward
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_types import (
    MoECTEImplementation,
    MoECTESpec,
    ShardOnBlockConfig,
    ShardOnIConfig,
    bound,
)
from hf_neuron_moe.reference.specification import family

_CONFIGS = (ShardOnBlockConfig, ShardOnIConfig)
_OPTIONS = {kind: [field.name for field in fields(kind)] for kind in _CONFIGS}
# Names of the direct kernels for arguments of moe_cte.
_RENAMED = {"gate_up_hidden_scale": "gate_up_in_scale", "down_hidden_scale": "down_in_scale"}
_CLAIMS = {
    "is_block_quant": Parameter("is_block_quant", Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"),
    "is_per_tensor": Parameter("is_per_tensor", Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"),
    "use_block128_scales": Parameter("use_block128_scales", Parameter.KEYWORD_ONLY, default=False, annotation="bool"),
}
"""Arguments that only repeat what the shape of ``gate_up_proj_scale`` says, and must agree with it."""

_BUFFERS = ("gate_up_activations_T", "down_activations")


class Kernel(NamedTuple):
    """One direct kernel, a row of the table."""

    implementation: str  # its name
    text: str  # the docstring
    positional: str  # arguments in order
    keywords: str = ""  # arguments by keyword
    defaults: Mapping[str, str] = {}  # where they differ: "required", "None" or the name of a member
    writes: bool = False  # the activations go to the caller's buffers


_FUNCTIONS = family("moe_cte")["function"]
KERNELS = {function["name"]: Kernel(**function["kernel"]) for function in _FUNCTIONS if "kernel" in function}


def signature_of(kernel: Kernel) -> inspect.Signature:
    """Return a kernel's signature; types and defaults come from the records unless its row has others."""
    known = dict(_CLAIMS)
    for record in (Arguments, *_CONFIGS):
        known |= inspect.signature(record).parameters
    parameters, keywords = [], kernel.keywords.split()
    for name in (*kernel.positional.split(), *keywords):
        declared = known[_RENAMED.get(name, name)]
        kind = Parameter.KEYWORD_ONLY if name in keywords else Parameter.POSITIONAL_OR_KEYWORD
        annotation, default, text = declared.annotation, declared.default, kernel.defaults.get(name)
        if isinstance(default, Enum) and text is not None:
            default = type(default)[text]
        else:
            default = {None: default, "None": None, "required": Parameter.empty}[text]
        if default is None and "None" not in str(annotation):
            annotation = f"{annotation} | None"
        parameters.append(declared.replace(name=name, kind=kind, default=default, annotation=annotation))
    return inspect.Signature(parameters, return_annotation="MoEForward")


def direct(name: str, module: str) -> Callable[..., MoEForward]:
    """Return the kernel `name` as a function of `module`."""
    kernel = KERNELS[name]
    signature = signature_of(kernel)

    def call(*args: object, **kwargs: object) -> MoEForward:
        return _run(kernel, bound(name, signature, args, kwargs))

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = module, kernel.text
    call.__dict__["__signature__"] = signature
    return public(call)


def _run(kernel: Kernel, given: dict[str, Any]) -> MoEForward:
    """Check and compute a call, by ``moe_cte``."""
    scale = given.get("gate_up_proj_scale")
    check_rules(_claim(claim, given.pop(claim), scale) for claim in _CLAIMS if claim in given)
    given = {_RENAMED.get(name, name): value for name, value in given.items()}
    buffers: dict[str, Tensor | None] = {}
    if kernel.writes:
        buffers = {name: given.pop(name) for name in _BUFFERS}
        given["checkpoint_activation"] = any(buffer is not None for buffer in buffers.values())
    on_block, on_i = ({name: given.pop(name) for name in _OPTIONS[kind] if name in given} for kind in _CONFIGS)
    kind = MoECTEImplementation[kernel.implementation]
    spec = MoECTESpec(kind, ShardOnBlockConfig(**on_block), ShardOnIConfig(**on_i))
    result = forward(Arguments(spec=spec, **given), shard_hidden=kernel.writes)
    for name, buffer in buffers.items():
        if buffer is not None:
            values = getattr(result, name)
            check_shape(buffer, tuple(values.shape), "the activations", name)
            buffer.copy_(values)
    return MoEForward(result.output, *buffers.values()) if kernel.writes else result


def _claim(name: str, claimed: object, scale: object) -> Rule:
    """A claim on the shape of the gate and up scale: ``[E, H/256, 2, I/256, 128]``, ``[E, 2, 1]``, four block rows."""
    shape = tuple(scale.shape) if isinstance(scale, Tensor) else ()
    fix = "Leave it out, or pass scales of the other kind."
    if name == "use_block128_scales":
        fix = "One scale byte per 128 x 128 block has four rows, one per group of 8 partitions sixteen."
    found = {
        "is_block_quant": len(shape) == 5,
        "is_per_tensor": len(shape) == 3 and shape[1] * shape[2] == 2,
        "use_block128_scales": len(shape) > 1 and shape[1] == 4,
    }[name]
    holds = claimed is found or (claimed is None and name != "use_block128_scales")
    return Rule(holds, name, f"{found}, as the shape of gate_up_proj_scale says", claimed, fix)
