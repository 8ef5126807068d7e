"""What the patch report says of blocks that the kernels compute: sizes, kept bytes, open points."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.activation_policy import keep_strings
from hf_neuron_moe.backends.torch import gating
from hf_neuron_moe.errors import NothingToPatchError
from hf_neuron_moe.modules import structure
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import set_activations
from hf_neuron_moe.training import measure_saved_bytes
from tests.neuron.small_runs import CASES, DENSE, DENSE_BF16, EXPERTS, EXPERTS_MX, Case
from tests.refusals import refused
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]


def patched(case: Case, **options: Any) -> tuple[Any, Any]:
    model = case.model(**options.pop("sizes", {}))
    return model, patch_model(model, {**case.options, "backend": "neuron", **options})


def block_of(model: Any) -> tuple[str, NeuronBlock]:
    return next((name, found) for name, found in model.named_modules() if isinstance(found, NeuronBlock))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("dense", (2, 33)),
        ("dense-bf16", (2, 33)),
        ("dense-bf16", (2, 29)),
        ("experts-mxfp8", (2, 33)),
        ("experts-bf16", (2, 33)),
        ("experts-bf16", (2, 29)),
    ],
)
def test_kept_bytes_are_those_that_are_measured(name: str, release: tuple[int, int], machine: Start) -> None:
    case = CASES[name]
    machine(target=case.target, release=release)
    model, _ = patched(case)
    name, block = block_of(model)
    for policy in ("minimal", "recompute", "fp8", "gate_pre+up") if case is not DENSE else ("full", "fp8", "gate_pre"):
        assert policy in {"full", *keep_strings(case.precision)}
        set_activations(model, policy)
        for length in (16, 150):
            with measure_saved_bytes({name: block}) as saved:
                model(input_ids=tokens(2, length))
            measured = saved.modules[name].bytes_per_token * 2 * length
            assert round(measured) == block.saved_bytes(2 * length), (policy, length)


def test_a_dense_block_in_bf16_keeps_whole_blocks_of_512_tokens(machine: Start) -> None:
    machine(target="trn2")
    _, report = patched(DENSE_BF16, activations="full")
    (entry,) = report.patched
    inner = entry.padded_sizes[1]
    # Gate and up, and the input of the stock hidden size: 2 bytes each. The plan has 4 per slot and block.
    assert entry.saved_bytes_per_token == 2 * (2 * inner + DENSE_BF16.sizes["hidden_size"]) + 4 * 513 / 512
    assert entry.saved_bytes_per_call == 0


@pytest.mark.parametrize("case", [EXPERTS, EXPERTS_MX], ids=["bf16", "mxfp8"])
def test_every_call_keeps_blocks_that_the_worst_routing_could_fill(case: Case, machine: Start) -> None:
    machine(target=case.target)
    model, report = patched(case, activations="full")
    (entry,), (_, block) = report.patched, block_of(model)
    experts, size, inner = 4, case.block_size, entry.padded_sizes[1]
    # E - 1 spare blocks of gate and up in bf16; an even number of blocks in all where the cores share them.
    spare = experts - 1 + (case is EXPERTS_MX)
    plan = spare * (size + 1) * 4
    assert entry.saved_bytes_per_call == block.saved_bytes_per_call == spare * size * 2 * inner * 2 + plan
    assert entry.saved_bytes_per_token == block.saved_bytes_per_token
    for count in (2 * size, 8 * size):
        assert block.saved_bytes(count) == count * entry.saved_bytes_per_token + entry.saved_bytes_per_call
    assert report.saved_bytes_per_call == report.to_dict()["saved_bytes_per_call"] == entry.saved_bytes_per_call
    total = report.saved_bytes_per_token + report.saved_bytes_per_call / 4096
    assert f"at 4,096 tokens {total / 1024:.2f} KiB per token" in str(report)
    set_activations(model, "recompute")
    assert block.saved_bytes_per_call == plan


def test_a_budget_for_a_number_of_tokens_counts_the_unfilled_blocks(machine: Start) -> None:
    machine(target="trn2")
    model, _ = patched(EXPERTS, activations="full")
    _, block = block_of(model)
    exact = block.saved_bytes(512)
    for limit, kept in ((exact, True), (exact - 1, False)):
        model, _ = patched(EXPERTS, activations={"total_bytes": limit, "tokens": 512})
        assert (block_of(model)[1].saved_bytes(512) == exact) == kept
    # Per token, without a number of tokens, long calls are meant.
    long_call = block.saved_bytes_per_token
    _, report = patched(EXPERTS, activations={"bytes_per_token": long_call})
    assert report.patched[0].saved_bytes_per_token == long_call


@pytest.mark.parametrize("case", [EXPERTS, EXPERTS_MX, DENSE], ids=["bf16", "mxfp8", "dense"])
def test_sizes_are_those_of_the_kernels(case: Case, machine: Start) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 80}
    _, plain = patched(case, backend="torch", sizes=sizes)
    double = machine(target=case.target).double
    model, report = patched(case, sizes=sizes)
    entry = report.patched[0]
    wanted = (512, 128) if case is EXPERTS else (128, 128)
    assert entry.padded_sizes == wanted and entry.to_dict()["padded_sizes"] == list(wanted)
    assert f"{wanted[0]} x {wanted[1]}" in str(report)
    assert entry.padding_overhead_percent == pytest.approx(100 * (wanted[0] * wanted[1] / (96 * 80) - 1))
    assert plain.patched[0].padded_sizes == (128, 128)
    model(input_ids=tokens())
    call = double.calls[0].arguments
    assert call["hidden" if case is DENSE else "hidden_states"].shape[1] == wanted[0]
    down = call["down_weights" if case is DENSE else "down_proj_weight"].shape
    assert set(down[-2:]) == set(wanted)


def test_where_pytorch_computes_the_sizes_are_not_the_kernels(machine: Start) -> None:
    machine(target="trn2")
    _, report = patched(
        EXPERTS, precision="mxfp8", fallback="torch", sizes={"hidden_size": 512, "intermediate_size": 80}
    )
    entry = report.patched[0]
    assert entry.backend == "torch" and entry.padded_sizes == (512, 128) and entry.saved_bytes_per_call == 0


def test_the_open_point_of_the_bf16_pair_is_told(machine: Start) -> None:
    machine(target="trn2")
    _, report = patched(EXPERTS)
    (note,) = report.patched[0].notes
    assert "leave open" in note and "verify-device checks it" in note
    assert f"Note on {report.patched[0].name}: {note}." in str(report)
    machine()
    for case in (DENSE, EXPERTS_MX):
        _, report = patched(case)
        assert report.patched[0].notes == ()


@pytest.mark.parametrize("case", [DENSE, EXPERTS_MX, EXPERTS], ids=["dense", "mxfp8", "bf16"])
def test_what_is_computed_in_vain_for_frozen_weights_is_told(case: Case, machine: Start) -> None:
    machine(target=case.target)
    model = case.model()
    model.requires_grad_(False)
    report = patch_model(model, {**case.options, "backend": "neuron"})
    note = report.patched[0].notes[-1]
    hidden, inner = report.patched[0].padded_sizes or (0, 0)
    size = (1 if case is DENSE else 4) * 3 * hidden * inner * 2 / 2**20
    assert "its weights are frozen" in note and f"3 of its 6 products and {size:,.1f} MiB" in note
    assert note in str(report)
    _, trained = patched(case)
    assert "in vain" not in str(trained), "their gradients are read"


def test_bf16_experts_are_documented_for_trn2_only(machine: Start) -> None:
    double = machine(target="trn3").double
    with refused(NothingToPatchError, "model", "for Trn2 only, and this is trn3; precision='mxfp8' has"):
        patched(EXPERTS)
    _, report = patched(EXPERTS, fallback="torch")
    entry = report.patched[0]
    assert entry.backend == "torch" and "for Trn2 only" in entry.fallback and entry.notes == ()
    assert not double.launches


def test_a_gate_of_pytorch_alone_is_left_to_it(machine: Start, monkeypatch: Any) -> None:
    """A new row of the torch backend says nothing about the kernels: they decline by themselves."""
    tanh = gating.Activation(torch.tanh, lambda x: x.tanh_().square_().neg_().add_(1))
    monkeypatch.setitem(gating.ACTIVATIONS, "tanh", tanh)
    monkeypatch.setitem(
        structure.ACTIVATIONS, "tanh", structure.Recognized("tanh", lambda found: isinstance(found, torch.nn.Tanh))
    )
    machine(target=EXPERTS.target)
    with refused(NothingToPatchError, "model", "its gate is tanh"):
        patched(EXPERTS, sizes={"hidden_act": "tanh"})
    _, report = patched(EXPERTS, fallback="torch", sizes={"hidden_act": "tanh"})
    assert report.patched[0].backend == "torch" and "its gate is tanh" in report.patched[0].fallback


def test_where_nothing_says_which_chip_it_is_both_precisions_are_taken(machine: Start, monkeypatch: Any) -> None:
    machine(target="trn2")
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    for case in (EXPERTS, EXPERTS_MX):
        _, report = patched(case)
        assert report.patched[0].backend == "neuron"
