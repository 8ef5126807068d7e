"""Operands as products see them, and predictions against derivatives that are made another way."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch.compute import OPTION
from hf_neuron_moe.explore.explain import block_of_channels
from hf_neuron_moe.explore.measure import Pass, drawn_labels, loss_sum
from hf_neuron_moe.explore.measured_changes import at_precisions, losses_of, rank_correlation
from hf_neuron_moe.explore.measures import FORMATS, Measures
from hf_neuron_moe.explore.operand_sums import Operand, mx_values
from hf_neuron_moe.formats.mx import fake_quantize_mx
from hf_neuron_moe.modules import ops
from hf_neuron_moe.training.block_calls import BlockCalls, Call, intermediate, rounded_product
from hf_neuron_moe.training.blocks import patched_blocks
from scripts.count_launches import Launches
from tests.explore.models import checkpoint, loaded
from tests.tiny_models import tiny_model

FAMILIES = ("llama", "phi3", "mixtral", "gpt_oss", "gemma3", "nemotron_h", "llama4", "deepseek_v4", "dbrx")


def calls_of(family: str) -> tuple[Any, list[Call], dict[str, tuple[Tensor, Tensor]]]:
    """One backward's calls, and by block the output and its gradient, by hooks."""
    torch.manual_seed(0)
    model = tiny_model(family).eval().requires_grad_(False)
    patch_model(model, {"precision": "bf16", "activations": "recompute"})
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Any:
        def forward_hook(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: seen.update({name: (output.detach(), grad)}))

        return forward_hook

    for name, block in patched_blocks(model).items():
        block.train()
        block.register_forward_hook(watch(name))
    ids = torch.randint(3, 64, (2, 24))
    with BlockCalls(model, outputs=True) as calls:
        inputs = model.get_input_embeddings()(ids).requires_grad_()
        loss_sum(model(inputs_embeds=inputs, use_cache=False).logits, ids).backward()
    return model, calls.seen, seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_is_seen_and_computed_again_with_its_own_bits(family: str) -> None:
    model, calls, seen = calls_of(family)
    assert {call.block for call in calls} == set(patched_blocks(model))
    for call in calls:
        assert call.out_TH is not None and torch.equal(call.out_TH, call.forward("bf16"))
        output, gradient = seen[call.block]
        if output.numel() != call.x_TH.numel() or call.spec.gate.gated is False or family == "dbrx":
            continue  # a call that does more around its operator
        if family in ("llama", "phi3", "mixtral", "gpt_oss"):
            assert torch.equal(call.forward("bf16").to(output.dtype).view(output.shape), output)
            assert torch.equal(call.dout_TH, gradient.reshape(call.dout_TH.shape).to(call.dout_TH.dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_rows_make_the_output(family: str) -> None:
    """gate, up and the intermediate of every expert's rows, in fp32: within the roundings of bf16 (1 of the output for
    each of three rounded operands, and those of sums over experts)."""
    _, calls, _ = calls_of(family)
    for call in calls:
        total_TH = torch.zeros(call.x_TH.shape, dtype=torch.float64)
        for rows in call.experts():
            with torch.no_grad():
                h_RI = intermediate(call.spec.gate, *call.pre_activations(rows))
            y_RH = h_RI.double() @ call.projections.down_EHI[rows.expert].double().t()
            bias = call.weights[5] if call.routing is None else call.weights[3]
            if bias is not None:
                y_RH += (bias if call.routing is None else bias[rows.expert]).double()
            weight_R = torch.ones(len(rows.token_R))
            if call.routing is not None:
                here_RK = call.routing.index_TK[rows.token_R] == rows.expert
                weight_R = (call.routing.weight_TK[rows.token_R] * here_RK).sum(1)
            total_TH.index_add_(0, rows.token_R, y_RH * weight_R.double()[:, None])
        actual_TH = call.forward("bf16").double()
        assert (actual_TH - total_TH).norm() <= 2**-7 * total_TH.norm()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1"])
def test_values_are_those_of_the_formats(axis: int, fmt: str) -> None:
    values = torch.randn(96, 160) * 2.0 ** torch.randint(-20, 20, (96, 160))
    before = values.clone()
    padded = F.pad(values.bfloat16().float(), (0, 96) if axis else (0, 0, 0, 32))
    expected = fake_quantize_mx(padded, axis, fmt=fmt).narrow(axis, 0, values.shape[axis])
    assert torch.equal(mx_values(values, axis, fmt), expected)
    assert torch.equal(values, before)


def test_figures_of_an_operand() -> None:
    operand = Operand.empty(2, 4)
    values, seen = torch.tensor([[1.0, -8.0, 0.5, 0.0]]), torch.tensor([[1.0, -8.0, 0.0, 0.0]])
    operand.add(1, values, seen, torch.tensor([7]))
    figures = operand.figures()
    assert (figures["amax"], figures["channel"], figures["expert"], figures["token"]) == (8.0, 1, 1, 7)
    assert figures["flushed"] == 0.25 and figures["saturated"] == 0.0
    assert figures["sqnr_db"] == pytest.approx(10 * torch.log10(torch.tensor(65.25 / 0.25)).item())
    assert operand.sqnr_by_expert()[1] == pytest.approx(figures["sqnr_db"])


@pytest.mark.parametrize(("fmt", "rule"), [("e2m1", "neuron"), ("e2m1", "rceil"), ("e4m3fn", "neuron")])
def test_no_finite_value_saturates(fmt: str, rule: str) -> None:
    """The largest of a block moves by rounding only, to either side: nothing is cut off."""
    values = torch.linspace(1.0, 2.0, 257)[:-1, None].bfloat16().float() * torch.tensor([[1.0] + [2.0**-20] * 31])
    ratio = mx_values(values, 1, fmt, rule)[:, 0] / values[:, 0]
    assert ratio.max() > 1.0 or fmt != "e2m1"
    assert ratio.min() >= (1 - 1 / 16 if fmt == "e4m3fn" else 4 / 5)


@pytest.mark.parametrize("channels", [96, 128, 384, 576, 1536])
def test_channels_share_a_block_exactly_where_a_huge_value_reaches(channels: int) -> None:
    ids = block_of_channels(channels)
    for channel in (0, 37, channels - 1):
        row = torch.ones(1, channels)
        row[0, channel] = 2.0**30  # everything that shares its scale becomes zero
        reached = mx_values(row, 1)[0] == 0
        expected = ids == ids[channel]
        expected[channel] = False
        assert torch.equal(reached, expected)


class Twice(torch.nn.Module):
    """A model that calls its experts twice: with another routing, or with a part of the tokens."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.experts, self.other = tiny_model("mixtral").model.layers[0].mlp.experts, other

    def forward(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        both = [(x_TH, index_TK, weight_TK), (x_TH, (index_TK + 1) % 4, weight_TK)]
        if self.other == "part":
            both[1] = (x_TH[:5], index_TK[:5], weight_TK[:5])
        return sum(self.experts(*call).sum(0) * (place + 1) for place, call in enumerate(both))  # type: ignore[return-value]


@pytest.mark.parametrize("other", ["routing", "part"])
def test_outputs_are_of_the_call_they_are_kept_for(other: str) -> None:
    model = Twice(other).eval().requires_grad_(False)
    patch_model(model, {"precision": "bf16", "activations": "recompute", "backend": "torch"})
    for block in patched_blocks(model).values():
        block.train()
    x_TH = torch.randn(24, model.experts.hidden_dim).bfloat16().requires_grad_()
    with BlockCalls(model, outputs=True) as calls:
        model(x_TH, torch.randint(0, 4, (24, 2)), torch.rand(24, 2)).sum().backward()
    assert len(calls.seen) == 2
    for call in calls.seen:
        assert call.out_TH is not None and torch.equal(call.out_TH, call.forward("bf16"))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_first_order_is_the_derivative_of_the_loss(family: str, tmp_path: Path) -> None:
    """Against a central difference along the change, added to the block's output by a hook. The model computes in fp32,
    since roundings to bf16 behind the hook would move the loss as much; an eighth of the change turns no routing."""
    model = loaded(checkpoint(tmp_path / "model", family))
    row_L = torch.randint(3, 200, (48,))
    measures = Measures()
    blocks = patched_blocks(model)
    with at_precisions(model, dict.fromkeys(blocks, "fp32")):
        Pass(model, ("mxfp8",), measures, draws=0).run(row_L)
        with BlockCalls(model) as calls:
            inputs = model.get_input_embeddings()(row_L[None]).requires_grad_()
            loss_sum(model(inputs_embeds=inputs, use_cache=False).logits, row_L[None]).backward()
        for call in calls.seen:
            change = call.forward("mxfp8").float() - call.forward("bf16").float()
            losses = []
            for step in (-0.125, 0.125):
                handle = blocks[call.block].register_forward_hook(
                    lambda m, a, y, added=step * change: y + added.view(y.shape)
                )
                with torch.no_grad():
                    logits = model(input_ids=row_L[None], use_cache=False).logits
                losses.append(loss_sum(logits.double(), row_L[None]).item())
                handle.remove()
            slope = (losses[1] - losses[0]) / 0.25
            assert measures.blocks[call.block].scores["mxfp8"].first == pytest.approx(slope, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_gradients_of_experts_rows(family: str) -> None:
    """A row's gradient is the call's times the weight its token has for this expert."""
    _, calls, _ = calls_of(family)
    for call in calls:
        assert call.routing is not None
        index_TK, weight_TK = call.routing
        for rows in call.experts():
            for row, token in enumerate(rows.token_R.tolist()):
                (place,) = (index_TK[token] == rows.expert).nonzero().flatten().tolist()
                expected_H = call.dout_TH[token].float() * weight_TK[token, place]
                assert torch.equal(rows.dout_RH[row], expected_H)


def test_the_second_order_is_half_the_expected_square(tmp_path: Path) -> None:
    """Of labels drawn once: half of the summed squares of (gradient of their loss) times (change), by token."""
    model = loaded(checkpoint(tmp_path / "model"))
    row_L = torch.randint(3, 200, (48,))
    measures = Measures()
    Pass(model, ("mxfp8",), measures, draws=1).run(row_L)
    with BlockCalls(model) as calls:
        inputs = model.get_input_embeddings()(row_L[None]).requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits
        loss_sum(logits, drawn_labels(logits.detach(), torch.Generator().manual_seed(0))).backward()
    for call in calls.seen:
        change_TH = call.forward("mxfp8").double() - call.forward("bf16").double()
        expected = 0.5 * (call.dout_TH.double() * change_TH).sum(1).square().sum().item()
        assert measures.blocks[call.block].scores["mxfp8"].second == pytest.approx(expected, rel=1e-3)


def test_products_of_a_block_add_up(tmp_path: Path) -> None:
    measures = Measures()
    Pass(loaded(checkpoint(tmp_path / "model")), ("mxfp8",), measures, draws=2).run(torch.randint(3, 200, (48,)))
    for block in measures.blocks.values():
        parts = sum(block.scores[f"mxfp8 {product}"].first for product in ("gate_up", "down"))
        assert parts == pytest.approx(block.scores["mxfp8"].first, rel=1e-4, abs=1e-6)
        assert block.scores["mxfp8"].second > 0
        assert set(block.products) == {
            f"{product}{end}" for product in ("gate_up", "down") for end in ("", ".dx", ".dw")
        }
        for signal, noise in block.products.values():
            assert 0 < noise < signal / 100  # e4m3 has about 31 dB for one operand


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured_in_every_format(family: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(family).eval().requires_grad_(False)
    patch_model(model, {"precision": "bf16", "activations": "recompute"})
    for block in patched_blocks(model).values():
        block.train()
    measures = Measures()
    Pass(model, FORMATS, measures).run(torch.randint(3, 64, (24,)))
    assert measures.blocks.keys() == patched_blocks(model).keys()
    for block in measures.blocks.values():
        assert {"bf16", "mxfp8", "mxfp4", "mxfp8 down", "mxfp4 down"} <= block.scores.keys()
        assert all(math.isfinite(score.total) for score in block.scores.values())
        assert block.scores["mxfp4"].second > block.scores["mxfp8"].second > block.scores["bf16"].second
        figures = {key: operand.figures() for key, operand in block.operands.items()}
        assert all(each["sqnr_db"] > 15 for key, each in figures.items() if "mxfp4" not in key)


def test_drawn_labels_follow_the_predictions() -> None:
    logits = torch.zeros(1, 4001, 4)
    logits[..., 1] = 1.0
    labels = drawn_labels(logits, torch.Generator().manual_seed(0))
    assert labels.shape == (1, 4001) and labels[0, 0] == -100
    share = (labels[0, 1:] == 1).float().mean().item()
    assert share == pytest.approx(torch.e / (torch.e + 3), abs=4 * (0.25 / 4000) ** 0.5)


@pytest.mark.parametrize("vocabulary", [7, 50_000])
def test_drawn_labels_are_possible_ones(vocabulary: int) -> None:
    """Neither the first nor the last is drawn without a chance, and none is beyond the last."""
    logits = torch.full((1, 65, vocabulary), -torch.inf)
    logits[..., vocabulary // 2 :: 2] = torch.randn(len(range(vocabulary // 2, vocabulary, 2)))
    logits[..., -1] = -torch.inf
    labels = drawn_labels(logits, torch.Generator().manual_seed(0))[0, 1:]
    assert logits[0, 0, labels].isfinite().all()


@pytest.mark.parametrize("value", [3.0, torch.inf])
def test_flushed_values_are_counted_beside_infinities(value: float) -> None:
    operand = Operand.empty(1, 4)
    operand.add(0, torch.tensor([[value, 1.0, 0.0, 0.5]]), torch.tensor([[448.0, 0.0, 0.0, 0.5]]))
    figures = operand.figures()
    assert figures["flushed"] == 0.25
    assert figures["saturated"] == (0.25 if value == torch.inf else 0.0)


def test_precisions_change_for_a_while_only(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "model"))
    rows = torch.randint(3, 200, (2, 40))
    names = list(patched_blocks(model))
    before = losses_of(model, rows)
    with at_precisions(model, dict.fromkeys(names, "mxfp8")):
        changed = losses_of(model, rows)
    assert changed != before
    assert losses_of(model, rows) == before


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([1.0, 2.0, 3.0], [10.0, 20.0, 90.0], 1.0), ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0)],
)
def test_rank_correlation(one: list[float], other: list[float], expected: float) -> None:
    assert rank_correlation(one, other) == pytest.approx(expected)


def test_blocks_are_seen_after_their_operators_were_registered_again() -> None:
    """As when the Neuron plugin is loaded after this package: ``torch.ops`` then holds other objects."""
    importlib.reload(ops)
    model, calls, _ = calls_of("llama")
    assert {call.block for call in calls} == set(patched_blocks(model))


@pytest.mark.parametrize("option", ["native", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_round_once_and_are_fp32_where_bf16_is_slow(
    option: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTION, option)
    left, right = (torch.randn(64, 64).mul(torch.randint(1, 9, (64, 64)).exp2()).to(dtype) for _ in range(2))
    found, made = rounded_product(left, right), left.double() @ right.double()
    assert found.dtype == dtype
    # Half a step of the dtype, and the fp32 sums' own rounding, relative to the magnitudes that are summed.
    bound = torch.finfo(dtype).eps / 2 * made.abs() + 64 * 2**-24 * (left.double().abs() @ right.double().abs())
    assert ((found - made).abs() <= bound).all()
    with Launches() as counts:
        rounded_product(left, right)
    assert counts.operations["_to_copy"] == 3 * (dtype == torch.bfloat16 and option == "fp32")
