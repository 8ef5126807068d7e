"""Other readings of the same documents: fewer options, records of other forms, other modules, decorated or not."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.neuron.double import signatures
from tests.neuron.double.records import Library
from tests.neuron.small_runs import CASES, DENSE, EXPERTS, EXPERTS_MX, Case, run

Start = Callable[..., SimpleNamespace]
NAMES = frozenset

MACHINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": ({}, ("mlp_forward", "mlp_forward_quantized", "mlp_backward")),
    "dense 2.30": ({"release": (2, 30)}, ("mlp_forward", "mlp_backward")),
    "bf16 experts": ({"target": "trn2"}, ("moe_forward", "moe_backward", "moe_forward_mx", "moe_forward_mx_wide")),
    "bf16 experts 2.29": (
        {"release": (2, 29), "target": "trn2"},
        ("moe_forward", "moe_backward", "moe_forward_mx", "moe_forward_mx_wide"),
    ),
    "MXFP8 experts": ({"config_pair": False}, ("moe_forward_mxfp8", "moe_backward_mxfp8")),
    "MXFP8 experts, record": ({}, ("moe_forward_mxfp8", "moe_backward_mxfp8")),
}
RECORD_FIELDS = (
    "shard_option", "affinity_option", "skip_dma", "is_tensor_update_accumulating", "accumulate_hidden_states_grad",
    "single_expert_dense", "fast_dma_transpose", "reuse_spilled_weights", "use_1x32_pe_swizzle", "pe_transpose_only",
    "gate_up_proj_act_td", "checkpoint_config", "compute_dtype", "fp8_x4_dtype", "activation_type", "clamp_limits",
    "bias",
)  # fmt: skip


def backend_module(name: str) -> ModuleType:
    """A module of the backend as it is for the machine that runs now."""
    return importlib.import_module(f"hf_neuron_moe.backends.neuron.{name}")


def installed(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Let the adapter find a changed version of one object of nkilib."""
    adapter = backend_module("adapter")
    find = backend_module("nkilib_objects").find_object
    found = change(find(name))
    monkeypatch.setattr(adapter, "find_object", lambda wanted: found if wanted == name else find(wanted))


def without(*names: str) -> Callable[[Any], Any]:
    """Drop arguments of a function."""

    def change(function: Any) -> Any:
        def stub(**arguments: Any) -> None: ...

        signature = backend_module("signatures").signature_of(function)
        kept = [found for key, found in signature.parameters.items() if key not in names]
        stub.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return stub

    return change


def functions_of(need: str) -> tuple[str, Any]:
    """Name of the installed function for a need, and the generation of its argument set."""
    found = backend_module("adapter").match(need)
    assert found.generation is not None, found.reason
    return found.function, found.generation


@pytest.mark.parametrize("name", MACHINES)
def test_every_needed_argument_that_is_gone_is_named(name: str, machine: Start, monkeypatch: Any) -> None:
    options, needs = MACHINES[name]
    machine(**options)
    for need in needs:
        function, generation = functions_of(need)
        for argument in sorted(generation.needed - {"config"}):
            with monkeypatch.context() as patch:
                installed(patch, function, without(argument))
                found = backend_module("adapter").match(need)
                # Where moe_cte has no arguments for scales, the kernel behind it has.
                direct = need == "moe_forward_mx" and found.function == "bwmm_shard_on_block_mx" != function
                assert direct or argument in found.reason, (need, argument)


@pytest.mark.parametrize("name", MACHINES)
def test_every_other_argument_may_be_missing(name: str, machine: Start, monkeypatch: Any) -> None:
    options, needs = MACHINES[name]
    machine(**options)
    for need in needs:
        function, generation = functions_of(need)
        signature = backend_module("signatures").signature_of(backend_module("nkilib_objects").find_object(function))
        others = sorted(signature.parameters.keys() - generation.needed)
        assert others
        for gone in (*((other,) for other in others), tuple(others)):
            with monkeypatch.context() as patch:
                installed(patch, function, without(*gone))
                assert backend_module("adapter").match(need).generation == generation, (need, gone)


def test_a_new_argument_without_a_default_is_named(machine: Start, monkeypatch: Any) -> None:
    machine()

    def with_mesh(function: Any) -> Any:
        stub = without()(function)
        mesh = inspect.Parameter("mesh", inspect.Parameter.KEYWORD_ONLY)
        found = stub.__signature__
        stub.__signature__ = found.replace(parameters=[*found.parameters.values(), mesh])
        return stub

    for need, function in (("moe_backward", "blockwise_mm_bwd"), ("mlp_forward", "mlp_forward_mxfp8_nki")):
        with monkeypatch.context() as patch:
            installed(patch, function, with_mesh)
            assert "needs mesh" in str(backend_module("adapter").Adapter().unsupported_reason(need))


@pytest.mark.parametrize(
    ("need", "function", "argument", "default"),
    [
        ("moe_forward", "moe_cte", "is_tensor_update_accumulating", False),
        ("moe_forward", "moe_cte", "activation_function", Enum("ActFnType", ["GELU"]).GELU),
        ("moe_forward", "moe_cte", "skip_dma", SimpleNamespace(skip_token=True, skip_weight=False)),
        ("moe_forward_mx_wide", "blockwise_mm_shard_intermediate_mx", "is_tensor_update_accumulating", False),
        ("moe_backward", "blockwise_mm_bwd", "skip_grad_initialization", True),
        ("mlp_forward_quantized", "mlp_forward_mxfp8_nki", "use_scale_packing", False),
    ],
)
def test_an_option_that_is_left_alone_has_its_documented_default(
    need: str, function: str, argument: str, default: Any, machine: Start, monkeypatch: Any
) -> None:
    machine()

    def change(found: Any) -> Any:
        stub = without()(found)
        parameters = dict(stub.__signature__.parameters)
        parameters[argument] = parameters[argument].replace(default=default)
        stub.__signature__ = stub.__signature__.replace(parameters=list(parameters.values()))
        return stub

    installed(monkeypatch, function, change)
    assert f"{argument} defaults to" in str(backend_module("adapter").Adapter().unsupported_reason(need))


def test_a_missing_enum_member_or_record_field_is_named(machine: Start, monkeypatch: Any) -> None:
    machine(config_pair=True)
    adapter = backend_module("adapter")
    for need, name, changed, shown in (
        ("moe_forward", "ShardOnIConfig", SimpleNamespace, "ShardOnIConfig has no checkpoint_activation"),
        ("moe_backward_mxfp8", "ShardOption", Enum("ShardOption", ["AUTO"]), "ShardOption has no SHARD_ON_FREE"),
        ("moe_backward_mxfp8", "BackwardSkipMode", None, "SkipMode not found"),
        ("moe_backward_mxfp8", "MXFP8MOEBwdConfig", None, "MXFP8MOEBwdConfig not found"),
        ("moe_backward_mxfp8", "SwizzleMode", None, "SwizzleMode.DGT is not found"),
        ("moe_forward_mxfp8", "TensorOrientation", None, "TensorOrientation.K_BY_F is not found"),
    ):
        if name == "ShardOnIConfig":
            changed = type(name, (), {"__init__": lambda self, num_static_block=None: None})
        with monkeypatch.context() as patch:
            installed(patch, name, lambda _, changed=changed: changed)
            assert shown in str(adapter.Adapter().unsupported_reason(need)), shown


def test_the_backward_before_2_31_is_told_by_its_enum_and_its_arguments(machine: Start, monkeypatch: Any) -> None:
    old = {"release": (2, 29), "target": "trn2"}
    machine(**old)
    assert functions_of("moe_backward")[1].name == "2.29"

    def newer(function: Any) -> Any:
        stub = without()(function)
        text = signatures.blockwise_mm_bwd((2, 31))
        stub.__signature__ = signatures.parse(text, Library.of((2, 31)))
        return stub

    installed(monkeypatch, "blockwise_mm_bwd", newer)  # its enum is still 2.29's
    reason = str(backend_module("adapter").Adapter().unsupported_reason("moe_backward"))
    assert "ShardOption has no SHARD_ON_FREE" in reason and "not 2.29's: has accumulation_dtype" in reason


def spare(names: str) -> frozenset[str]:
    return frozenset(names.split())


FEWER = {
    "dense": spare("dtype spill_reload use_scale_packing fp8_x4_dtype save_gate_act save_hidden matmul_config"),
    "experts-bf16": spare(
        "activation_function activation_type skip_gate_proj compute_dtype is_tensor_update_accumulating "
        "expert_affinities_scaling_mode kernel_type_option bias skip_grad_initialization quantization_config"
    ),
    "experts-mxfp8": spare(
        "shard_option affinity_option compute_dtype is_tensor_update_accumulating no_indirect_load checkpoint_config "
        "skip_dma bias skip_grad_initialization"
    ),
}


@pytest.mark.parametrize("name", FEWER)
def test_training_goes_on_without_the_options(name: str, machine: Start) -> None:
    case: Case = CASES[name]
    machine(target=case.target)
    expected = run(case, "neuron", steps=1)
    double = machine(target=case.target, without=FEWER[name]).double
    assert run(case, "neuron", steps=1) == expected
    assert len(double.calls) == 2 and all(FEWER[name].isdisjoint(call.arguments) for call in double.calls)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("form", ["dataclass", "namedtuple", "class"])
@pytest.mark.parametrize("fewer", [False, True])
def test_training_with_records_of_other_forms(form: str, fewer: bool, machine: Start) -> None:
    machine()
    expected = run(EXPERTS_MX, "neuron", steps=1)
    modes = {f"{name}_swizzle_mode" for name in ("output_grad", "d_gate_up", "d_gate_up_t", "hidden_states_t")}
    gone = frozenset(RECORD_FIELDS) | modes if fewer else frozenset()
    machine(config_pair=True, records=form, without=gone)
    assert run(EXPERTS_MX, "neuron", steps=1) == expected


@pytest.mark.parametrize("case", [DENSE, EXPERTS, EXPERTS_MX], ids=["dense", "experts-bf16", "experts-mxfp8"])
def test_functions_on_their_packages_only_and_decorated(case: Case, machine: Start) -> None:
    """The documents name packages for some functions; a package may also hold a submodule of the function's name."""
    machine(target=case.target)
    expected = run(case, "neuron", steps=1)
    found = machine(target=case.target)
    jit = sys.modules["nki"].jit
    for package, home, names in (
        ("nkilib.experimental.mlp_mxfp8", "mlp_fwd_mxfp8", ["mlp_forward_mxfp8_nki"]),
        ("nkilib.experimental.mlp_mxfp8", "mlp_bwd_mxfp8", ["mlp_backward_mxfp8_nki"]),
        ("nkilib.experimental.moe.bwd", "blockwise_mm_backward", ["blockwise_mm_bwd"]),
        ("nkilib.experimental.moe_mxfp8", "fwd.blockwise_mm_forward_mxfp8", ["blockwise_mm_fwd_mxfp8"]),
        ("nkilib.experimental.moe_mxfp8", "bwd.blockwise_mm_backward_mxfp8", ["blockwise_mm_bwd_mxfp8"]),
        ("nkilib.core.moe.moe_cte", "moe_cte", ["MoECTESpec", "ShardOnIConfig", "MoECTEImplementation"]),
    ):
        inner = found.modules[f"{package}.{home}"]
        for name in names:
            held = vars(inner).pop(name)
            setattr(
                found.modules[package], name, held if isinstance(held, type) or hasattr(held, "grid") else jit(held)
            )
    # As in a package whose submodule was imported: the name is the module there, and the function is in it.
    found.modules["nkilib.core.moe.moe_cte"].moe_cte = found.modules["nkilib.core.moe.moe_cte.moe_cte"]
    assert run(case, "neuron", steps=1) == expected
