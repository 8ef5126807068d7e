"""The order of the MXFP8 experts' checkpoint is read off the installed record: shapes do not tell it at I = B."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.neuron.mxfp8_pair import gate_up_layout
from hf_neuron_moe.backends.neuron.signatures import UNKNOWN, field_defaults
from hf_neuron_moe.errors import BackendUnavailableError, NothingToPatchError
from tests.neuron.small_runs import EXPERTS_MX, Case, first_gradients, run
from tests.refusals import refused

Start = Callable[..., SimpleNamespace]
WIDER = Case("mixtral", "mxfp8", "trn3", 128, {"hidden_size": 128, "intermediate_size": 256})
Layout = Enum("Layout", ["TRANSPOSED", "DIRECT", "TILED"])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", [EXPERTS_MX, WIDER], ids=["I equals B", "I above B"])
@pytest.mark.parametrize("policy", ["full", "recompute", "fp8"])
def test_gradients_where_the_forward_saves_slots_before_columns(case: Case, policy: str, machine: Start) -> None:
    expected = first_gradients(case, "torch", activations=policy)
    double = machine(layout="DIRECT", config_pair=False).double
    found = first_gradients(case, "neuron", activations=policy)
    assert "blockwise_mm_bwd_mxfp8" in double.names
    for name, grad in expected.items():
        # FP8 policies round what the kernels wrote: without COAT's rounding of the gate's activation.
        close = torch.nn.functional.cosine_similarity(found[name].flatten(), grad.flatten(), 0) > 0.995
        assert close if policy == "fp8" else torch.equal(found[name], grad), name


@pytest.mark.parametrize("form", ["dataclass", "namedtuple", "class"])
def test_the_record_may_have_any_form(form: str, machine: Start) -> None:
    expected = run(EXPERTS_MX, "torch", steps=2)
    machine(layout="DIRECT", records=form, config_pair=False)
    assert run(EXPERTS_MX, "neuron", steps=2) == expected
    machine(layout="TRANSPOSED", records=form, config_pair=False)
    assert run(EXPERTS_MX, "neuron", steps=2) == expected


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"layout": "TILED"}, "gate_up_proj_act_layout defaults to <CheckpointLayout.TILED"),
        ({"layout": "DIRECT", "config_pair": True}, "gate_up_proj_act_layout, gate_up_proj_act_td contradict"),
    ],
)
def test_an_unknown_order_is_refused(options: dict[str, Any], shown: str, machine: Start) -> None:
    machine(**options)
    with refused(NothingToPatchError, "model", shown):
        patch_model(EXPERTS_MX.model(), {**EXPERTS_MX.options, "backend": "neuron"})


def test_an_order_that_agrees_with_what_is_asked_for(machine: Start) -> None:
    expected = run(EXPERTS_MX, "torch", steps=1)
    machine(layout="TRANSPOSED", config_pair=True)
    assert run(EXPERTS_MX, "neuron", steps=1) == expected


def record(**fields: Any) -> Any:
    return make_dataclass("Record", [(name, Any, field(default=value)) for name, value in fields.items()], frozen=True)


@dataclass(frozen=True)
class Required:
    gate_up_layout: Layout
    other: Any = field(default_factory=list)


class Anything:
    def __init__(self, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("defaults", "config", "order", "shown"),
    [
        ({}, None, "TRANSPOSED", None),
        ({"gate_up_proj_act_layout": Layout.DIRECT}, None, "DIRECT", None),
        ({"gate_up_proj_act_layout": "DIRECT"}, None, "DIRECT", None),
        ({"checkpoint_config": record(gate_up_act_layout=Layout.DIRECT)()}, None, "DIRECT", None),
        ({"checkpoint_config": record(save=True)()}, None, "TRANSPOSED", None),
        ({"checkpoint_config": record(down_layout=Layout.TILED)()}, None, "TRANSPOSED", None),
        ({}, record(checkpoint_config=record(gate_up_act_layout=Layout.DIRECT)()), "DIRECT", None),
        ({"gate_up_proj_act_layout": None}, None, None, "gate_up_proj_act_layout defaults to None"),
        ({"checkpoint_config": Anything()}, None, None, "whose fields cannot be read"),
        ({"checkpoint_config": Required}, None, None, "gate_up_layout defaults to"),
    ],
)  # fmt: skip
def test_where_an_order_may_stand(defaults: Any, config: Any, order: str | None, shown: str | None) -> None:
    found, reason = gate_up_layout(defaults, config)
    if shown is None:
        assert (found, reason) == (order, None)
    else:
        assert shown in str(reason)


def test_fields_and_their_defaults() -> None:
    assert field_defaults(None) == {} and field_defaults(Anything) is None
    assert field_defaults(Required) == {"gate_up_layout": UNKNOWN, "other": []}
    assert field_defaults(Required(Layout.DIRECT)) == {"gate_up_layout": Layout.DIRECT, "other": []}
    assert UNKNOWN is inspect.Parameter.empty


def test_a_forward_of_another_order_than_its_record_says_is_refused(machine: Start) -> None:
    double = machine(layout="TRANSPOSED", config_pair=False).double
    model = WIDER.model()
    patch_model(model, {**WIDER.options, "backend": "neuron"})
    double.layout = "DIRECT"
    ids = torch.arange(12)[None]
    with refused(BackendUnavailableError, "the experts' forward kernel", got="(4, 2, 128, 256)"):
        model(input_ids=ids, labels=ids)
