"""Short training runs through the Neuron backend on the contract double against the torch backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import ConfigError, NeuronMoEError
from tests.neuron.small_runs import (
    CASES,
    DENSE,
    DENSE_BF16,
    EXPERTS,
    EXPERTS_MX,
    SOME_SLOW,
    Case,
    close,
    first_gradients,
    run,
    train,
)
from tests.refusals import refused
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]
KERNELS = {
    "dense": ("mlp_forward_mxfp8_nki", "mlp_backward_mxfp8_nki"),
    "experts-mxfp8": ("blockwise_mm_fwd_mxfp8", "blockwise_mm_bwd_mxfp8"),
    "experts-bf16": ("moe_cte", "blockwise_mm_bwd"),
    "dense-bf16": ("moe_cte", "blockwise_mm_bwd"),
}


@functools.cache
def torch_losses(name: str, policy: str = "minimal") -> list[float]:
    return run(CASES[name], "torch", activations=policy)


@pytest.mark.sampled(2)
@pytest.mark.thinned(4, 4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("release", [(2, 29), (2, 30), (2, 31), (2, 33)])
def test_losses_are_those_of_the_torch_backend(release: tuple[int, int], name: str, machine: Start) -> None:
    case = CASES[name]
    double = machine(release=release, target=case.target).double
    since = {"dense": (2, 30), "experts-mxfp8": (2, 32)}.get(name, (2, 29))
    if release < since:
        with pytest.raises(NeuronMoEError):
            run(case, "neuron")
        assert not double.launches
        return
    losses = run(case, "neuron")
    # 2.30 contracts dX over gate and up apart: other MX groups than 2.31's unless I is a multiple of 512.
    bound = 2e-3 if release == (2, 30) and name == "dense" else case.bound
    assert close(losses, torch_losses(name), bound), (losses, torch_losses(name))
    assert len(set(losses)) == 3
    assert double.names == list(KERNELS[name]) * 3


def test_release_2_30_is_the_same_where_gate_and_up_share_no_mx_group(machine: Start) -> None:
    case = Case("llama", "mxfp8", "trn3", sizes={"hidden_size": 128, "intermediate_size": 512})
    expected = run(case, "torch")
    machine(release=(2, 30))
    assert run(case, "neuron") == expected


def test_the_config_generation(machine: Start) -> None:
    """The generation of the MXFP8 expert pair whose options are records: the same numbers, other weights."""
    expected = torch_losses("experts-mxfp8")
    double = machine(config_pair=True).double
    assert run(EXPERTS_MX, "neuron") == expected
    assert double.names == list(KERNELS["experts-mxfp8"]) * 3


LOSSLESS = ("full", "recompute", "gate_pre", "up", "gate_act", "intermediate")
POLICIES = [policy if policy == "recompute" else pytest.param(policy, marks=pytest.mark.slow) for policy in LOSSLESS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [*POLICIES, pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_every_activation_policy_gives_its_losses(name: str, policy: str, machine: Start) -> None:
    case = CASES[name]
    if case.precision == "bf16" and policy in ("gate_act", "intermediate"):
        with refused(ConfigError, "activations", "bf16"):
            run(case, "torch", activations=policy)
        return
    expected = torch_losses(name, policy)
    machine(target=case.target)
    losses = run(case, "neuron", activations=policy)
    # FP8 rounds what the kernels keep, in their blocks and padding; one e4m3 rounding is 2^-4, a loss averages them.
    bound = 2e-3 if policy == "fp8" else case.bound
    assert close(losses, expected, bound), (losses, expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_torch_backend(name: str, machine: Start) -> None:
    case = CASES[name]
    expected = first_gradients(case, "torch")
    machine(target=case.target)
    found = first_gradients(case, "neuron")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if case.bound == 0:
            assert torch.equal(found[key], value), key
        else:
            # The bf16 kernels' documented tolerance.
            assert (found[key] - value).abs().max() <= 2e-2 * value.abs().max(), key


@pytest.mark.parametrize(
    ("home", "dtype"),
    [
        ("kernel", torch.bfloat16),
        pytest.param("kernel", torch.float32, marks=pytest.mark.slow),
        pytest.param("stock", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", [DENSE, EXPERTS, EXPERTS_MX], ids=["dense", "experts-bf16", "experts-mxfp8"])
def test_homes_and_dtypes_of_the_weights(case: Case, home: str, dtype: torch.dtype, machine: Start) -> None:
    def losses(backend: str) -> list[float]:
        model = case.model().to(dtype)
        patch_model(model, {**case.options, "backend": backend, "weights": home})
        return train(model, steps=2)

    expected = losses("torch")
    machine(target=case.target)
    # A bf16 loss has 8 bits.
    assert close(losses("neuron"), expected, max(case.bound, 2**-7 if dtype == torch.bfloat16 else 0.0))


@pytest.mark.parametrize("lnc", [1, 2])
def test_the_grid_follows_the_logical_core(lnc: int, machine: Start) -> None:
    double = machine(lnc=lnc).double
    expected = run(DENSE, "torch")
    assert run(DENSE, "neuron") == expected
    assert {launch.grid for launch in double.launches} == {(lnc,)}


def test_nothing_that_the_device_leaves_unwritten_is_read(machine: Start) -> None:
    """Sink rows and the second slot hold NaN on the double; gradients and logits are finite all the same."""
    for case in (EXPERTS, EXPERTS_MX):
        machine(target=case.target)
        grads = first_gradients(case, "neuron")
        assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())


def test_tokens_that_no_kernel_tile_fits_are_padded(machine: Start) -> None:
    """One sequence of an odd length, and one token."""

    def logits(case: Case, backend: str, length: int) -> Tensor:
        model = case.model()
        patch_model(model, {**case.options, "backend": backend})
        out: Tensor = model(input_ids=tokens(1, length)).logits
        out.square().mean().backward()
        return out.detach()

    for case in CASES.values():
        for length in (1, 13):
            expected = logits(case, "torch", length)
            machine(target=case.target)
            found = logits(case, "neuron", length)
            if case.bound == 0:
                assert torch.equal(found, expected)
            else:
                assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("name", SOME_SLOW)
def test_inference_between_training_steps(name: str, machine: Start) -> None:
    """Generation and inference mode neither disturb training nor are disturbed by it."""

    def outcome(backend: str) -> tuple[list[int], Tensor, list[float]]:
        model = case.model()
        patch_model(model, {**case.options, "backend": backend})
        ids = tokens(1, 5)
        with torch.inference_mode():
            first = model(input_ids=ids).logits.clone()
        losses = train(model, steps=2)
        made = model.generate(ids, max_new_tokens=3, do_sample=False)
        return made[0].tolist(), first, losses

    case = CASES[name]
    expected = outcome("torch")
    machine(target=case.target)
    found = outcome("neuron")
    assert found[0] == expected[0]
    assert close(found[2], expected[2], case.bound)
    assert (found[1] - expected[1]).abs().max() <= (2e-2 if case.bound else 0.0) * expected[1].abs().max()


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("policy", ["minimal", "recompute", "fp8"])
@pytest.mark.parametrize("case", [EXPERTS, EXPERTS_MX, DENSE_BF16], ids=["bf16", "mxfp8", "dense"])
def test_the_block_plan_is_made_once_per_layer_and_step(
    case: Case, policy: str, machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward, the forward that it repeats, and FP8 read the saved one: a sort of all pairs is behind it."""
    machine(target=case.target)
    model = case.model(layers=2)
    patch_model(model, {**case.options, "backend": "neuron", "activations": policy})
    from hf_neuron_moe.backends.neuron import static_plan

    made: list[tuple[int, ...]] = []
    build = static_plan.build_block_plan

    def counted(mask: Tensor, *arguments: Any, **options: Any) -> Any:
        made.append(tuple(mask.shape))
        return build(mask, *arguments, **options)

    monkeypatch.setattr(static_plan, "build_block_plan", counted)
    assert len(train(model, steps=3)) == 3
    assert len(made) == 2 * 3, "two layers, three steps"
