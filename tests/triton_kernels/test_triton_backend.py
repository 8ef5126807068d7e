"""Experts of the backend ``"triton"`` have the results of ``"torch-grouped"``: every policy, gate and layout.

The kernels sum in another order. So a rounding to bf16 may lie across a border, and in MXFP8 a code may too: bounds are
those of one rounding of every value. The forward's gradient of the routing weights is a sum in fp32 of such values.
"""

from __future__ import annotations

import copy
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.activation_policy import canonical_keep, parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, Routing, Wants
from hf_neuron_moe.backends.triton import backend, device_functions, expert_gemm, gate_epilogue, mx_both_ways
from hf_neuron_moe.errors import BackendUnavailableError
from scripts.count_launches import Layer, counted
from tests.tiny_models import tiny_model
from tests.triton_kernels.grouped_rows import small_integers

pytestmark = pytest.mark.triton
GATES = {
    "silu": Gate(),
    "gpt_oss": Gate("swish", 1.702, gate_max=7.0, up_max=7.0, up_min=-7.0, up_offset=1.0),
    "squared_relu": Gate("squared_relu", gated=False),
}
LAYOUTS = ("stock", "transposed", "interleaved")
NOTHING_TO_INTERLEAVE = ("squared_relu", "interleaved")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program costs the interpreter the same, however large its tile is; ``test_mx_both_ways`` has the others."""
    own, larger = mx_both_ways.tile_sizes, {"TILE_R": 128, "TILE_C": 128}
    monkeypatch.setattr(mx_both_ways, "tile_sizes", lambda kernel: own(kernel) | larger)


def run(
    backend: str,
    precision: str,
    policy: str,
    gate: Gate,
    *,
    transposed: bool,
    interleaved: bool,
    wants: Wants,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    inner: int = 72,
    integers: bool = False,
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    experts, tokens, hidden = 2, 13, 64
    x, dout = (torch.randn(tokens, hidden, generator=draw).to(dtype) for _ in range(2))
    shapes = [(experts, (2 if gate.gated else 1) * inner, hidden), (experts, hidden, inner)]
    gate_up, down = (torch.randn(s, generator=draw).div(s[2] ** 0.5).to(weight_dtype or dtype) for s in shapes)
    if integers:
        x, dout, gate_up, down = (
            small_integers(*part.shape, seed=seed) / (1 if seed < 2 else 8)
            for seed, part in enumerate((x, dout, gate_up, down))
        )
        x *= 2 ** (torch.arange(hidden) % 4)  # sums have more bits than bf16
    biases = [torch.randn(shape[:2], generator=draw) for shape in shapes] if gate.up_offset else [None, None]
    if transposed:
        gate_up, down = (part.transpose(1, 2).contiguous() for part in (gate_up, down))
    index = torch.rand(tokens, experts + 1, generator=draw).topk(2).indices  # the last is another rank's
    routing = Routing(index, torch.rand(index.shape, generator=draw))
    spec = BlockSpec(precision, 128, transposed, gate, interleaved)
    keep, kernels = parse_keep(canonical_keep(policy, precision)), get_backend(backend)
    weights = ExpertWeights(gate_up, down, *biases)
    y, saved = kernels.experts_forward(x, routing, weights, spec, keep)
    return [y, *kernels.experts_backward(dout, x, routing, weights, saved, BackwardCall(spec, keep, wants))]


@pytest.mark.sampled(4)
@pytest.mark.thinned(4, 4)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("policy", ["minimal", "full", "recompute", "fp8"])
@pytest.mark.parametrize(
    ("name", "layout"), [pair for pair in product(GATES, LAYOUTS) if pair != NOTHING_TO_INTERLEAVE]
)
def test_experts_are_those_of_torch_grouped(precision: str, policy: str, layout: str, name: str) -> None:
    gate = GATES[name]
    options = {"transposed": layout == "transposed", "interleaved": layout == "interleaved", "wants": Wants()}
    found, expected = (run(b, precision, policy, gate, **options) for b in ("triton", "torch-grouped"))
    bound = 2**-8 if precision == "bf16" else 2**-6
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        distance = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
        assert distance <= bound, (number, distance.item())


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_sums_have_equal_roundings(precision: str, layout: str) -> None:
    """Gate, up and the intermediate's gradient are exact in any order; the last sums cross a border in few places."""
    gate = Gate("squared_relu", gate_max=60.0)
    options = {"transposed": layout == "transposed", "interleaved": layout == "interleaved", "wants": Wants()}
    pairs = [run(b, precision, "minimal", gate, **options, integers=True) for b in ("triton", "torch-grouped")]
    for mine, theirs in zip(*(part[:5] for part in pairs), strict=True):
        if theirs.dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
        else:
            assert (mine != theirs).double().mean() < 0.01
            torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.sampled(2)
@pytest.mark.thinned(2, 2)
@pytest.mark.parametrize("gate", [Gate(), Gate("squared_relu", gated=False)], ids=["gated", "plain"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.slow
def test_codes_give_what_their_values_give(gate: Gate, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"transposed": transposed, "interleaved": False, "wants": Wants()}
    expected = run("triton", "mxfp8", "minimal", gate, **options)
    monkeypatch.setattr(backend, "multiplies_codes", lambda device: True)
    for mine, theirs in zip(run("triton", "mxfp8", "minimal", gate, **options), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.sampled(2)
@pytest.mark.thinned(2, 2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize(("policy", "inner"), [("minimal", 520), ("recompute", 72)])
@pytest.mark.slow
def test_what_is_made_again_has_the_forward_s_bits(precision: str, policy: str, inner: int) -> None:
    """From 512 columns of up on, ``"minimal"`` saves a part of them."""
    options = {"transposed": False, "interleaved": True, "wants": Wants(), "inner": inner}
    found, expected = (run("triton", precision, name, GATES["gpt_oss"], **options) for name in (policy, "full"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_every_kernel_takes_part(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for module in (expert_gemm, gate_epilogue, mx_both_ways):
        own = module.launch

        def launch(kernel, *arguments, own=own, **constants):
            launched.append(kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__)
            own(kernel, *arguments, **constants)

        monkeypatch.setattr(module, "launch", launch)
    run("triton", precision, "full", Gate(), transposed=False, interleaved=False, wants=Wants())
    counts = {name: launched.count(name) for name in launched}
    expected = {"_grouped_product": 4, "_forward": 1, "_backward": 1, "_weight_gradient": 2}
    if precision == "mxfp8":
        expected |= {"_quantize": 13, "_weight_gradient": 3}  # gate and up are padded, so they are two sums
    assert counts == expected


@pytest.mark.slow
def test_only_what_is_wanted() -> None:
    options = {"transposed": False, "interleaved": False}
    every = run("triton", "mxfp8", "minimal", Gate(), **options, wants=Wants())
    some = run("triton", "mxfp8", "minimal", Gate(), **options, wants=Wants(weights=False))
    assert [part.numel() > 0 for part in some[:5]] == [True, True, True, False, False]
    for mine, theirs in zip(some[:3], every[:3], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_a_patched_model_trains() -> None:
    model = tiny_model("mixtral").bfloat16().train()
    losses, gradients = [], []
    for name in ("triton", "torch-grouped"):
        own = copy.deepcopy(model)
        report = patch_model(own, NeuronMoEConfig(backend=name))
        assert ("in Triton kernels" in str(report)) == (name == "triton")
        tokens = torch.arange(12)[None] % own.config.vocab_size
        loss = own(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([part.grad.double().flatten() for part in own.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
    assert (gradients[0] - gradients[1]).norm() <= 2**-6 * gradients[1].norm()


@pytest.mark.slow
def test_fp32_operands_are_rounded_to_bf16_before_mx() -> None:
    options = {"transposed": False, "interleaved": False, "wants": Wants()}
    whole, rounded = (
        run("triton", "mxfp8", "recompute", Gate(), **options, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    for mine, theirs in zip(whole, rounded, strict=True):
        assert torch.equal(mine.bfloat16(), theirs.bfloat16())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_weights_in_half_precision(precision: str) -> None:
    options = {"transposed": True, "interleaved": False, "wants": Wants(), "weight_dtype": torch.float16}
    found, expected = (run(name, precision, "minimal", Gate(), **options) for name in ("triton", "torch-grouped"))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert (mine.double() - theirs.double()).norm() <= 2**-6 * theirs.double().norm()


@pytest.mark.parametrize("reason", ["not installed", "without a CUDA device"])
def test_where_it_cannot_run_it_says_so(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if reason == "not installed":
        monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(device_functions.INTERPRETED, "value", False)
    with pytest.raises(BackendUnavailableError, match=reason):
        resolve_backend("triton", torch.device("cpu"))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other releases dispatch other operations")
def test_the_documents_have_the_counts_of_operations(repo_root: Path) -> None:
    """Of the layer of docs/performance.md: its table, and that of the Triton backend."""
    layer, precision = Layer(experts=128, hidden=128, inner=128, tokens=1024, top_k=8), ""
    rows = re.findall(
        r"^\|(?: `(\w+)`)? \| `(\w+)` \| (\d+) \| (\d+) \|$", (repo_root / "docs/triton.md").read_text(), re.M
    )
    assert len(rows) == 7
    for named, policy, operations, kernels in rows:
        precision = named or precision
        found = counted(layer.patched("triton", precision, policy), accelerator=True, triton=True)
        assert (found["operations"], found["triton_kernels"]) == (int(operations), int(kernels)), (precision, policy)
    table = (repo_root / "docs/performance.md").read_text().partition("| at once | bf16")[2]
    for precision, operations in zip(("bf16", "mxfp8", "fp32"), re.findall(r"(\d+) \| 0 \|", table)[:3], strict=True):
        assert counted(layer.patched("torch-grouped", precision, "minimal"))["operations"] == int(operations), precision
