"""Routing, FP8 checkpoints and limits of the Neuron backend, without any of its packages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.neuron import fp8_checkpoints
from hf_neuron_moe.backends.neuron.adapter import Match
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, _used_slots
from hf_neuron_moe.backends.neuron.generations import FUNCTIONS
from hf_neuron_moe.backends.neuron.limits import Block, Device, block_sizes, check_call, most_tokens, unsupported_reason
from hf_neuron_moe.backends.neuron.orientation import pad_axes
from hf_neuron_moe.backends.neuron.static_plan import block_count, plan_blocks, route, routing_gradient
from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.backends.torch.saved import FP8Gating, FP8Rows, fp8_storage
from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats.block_plan import count_blocks
from tests.refusals import refused

TRN2, TRN3 = Device("trn2", 2), Device("trn3", 2)


class Installed:
    """An adapter for which the newest (or given) generation of everything is installed."""

    def __init__(self, missing: str = "", parameters: frozenset[str] = frozenset(), **generations: str) -> None:
        self.missing, self.parameters, self.generations = missing, parameters, generations

    def match(self, need: str) -> Match:
        function, known = FUNCTIONS[need]
        wanted = self.generations.get(need, known[0].name)
        return Match(function, next(found for found in known if found.name == wanted), self.parameters)

    def unsupported_reason(self, *needs: str) -> str | None:
        return "it is not there" if self.missing in needs else None


@given(
    tokens=st.integers(1, 400),
    top_k=st.integers(1, 6),
    experts=st.integers(1, 9),
    size=st.sampled_from([128, 256]),
    per_iteration=st.sampled_from([1, 2]),
)
def test_the_block_count_is_the_documented_one(
    tokens: int, top_k: int, experts: int, size: int, per_iteration: int
) -> None:
    expected = count_blocks(tokens, top_k, experts, size, n_block_per_iter=per_iteration)
    assert block_count(tokens * min(top_k, experts), experts, size, per_iteration) == expected


def test_slots_point_at_the_sink_row_or_nowhere() -> None:
    index = torch.tensor([[0, 2], [2, 1], [3, 0]])  # expert 3 is another rank's
    weight = torch.tensor([[0.25, 0.75], [0.5, 0.125], [0.875, 1.0]])
    routing = Routing(index, weight)
    sink = route(plan_blocks(index, 3, 128, 1), routing, 3, sink=True, dtype=torch.bfloat16)
    none = route(plan_blocks(index, 3, 128, 2), routing, 3, sink=False, dtype=torch.float32)
    assert sink.expert_affinities_masked.shape == (12, 1) and sink.expert_affinities_masked.dtype == torch.bfloat16
    assert none.expert_affinities_masked.shape == (9, 1) and none.expert_affinities_masked.dtype == torch.float32
    assert none.expert_affinities_masked.view(3, 3).tolist() == [[0.25, 0, 0.75], [0, 0.125, 0.5], [1.0, 0, 0]]
    assert sink.expert_affinities_masked.view(4, 3)[3].eq(0).all()
    (_, sink_ids, _), (_, ids, blocks) = sink, none
    assert set(sink_ids.tolist()) == {0, 1, 2, 3} and set(ids.tolist()) == {-1, 0, 1, 2}
    assert ids.dtype == blocks.dtype == torch.int32 and len(blocks) % 2 == 0
    for block, expert in zip(ids.view(len(blocks), 128), blocks[:, 0].tolist()):
        assert all(expert in index[token].tolist() for token in block[block >= 0].tolist())


def test_the_routing_gradient_reads_selected_entries_only() -> None:
    index = torch.tensor([[0, 2], [3, 1]])
    dense = torch.tensor([[1.0, float("nan"), 2.0], [float("nan"), 3.0, float("nan")]]).reshape(-1, 1)
    assert routing_gradient(dense, index, 3, torch.float64).tolist() == [[1.0, 2.0], [0.0, 3.0]]


def test_the_sink_row_is_zero() -> None:
    assert pad_axes(torch.ones(2, 3), (3, 3)).tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("columns", [64, 100, 256])
def test_fp8_checkpoints_are_those_of_the_torch_backend(columns: int) -> None:
    rows = (torch.randn(7, columns) * torch.logspace(-3, 3, 7)[:, None]).bfloat16()
    rows[0] = 0
    codes, scales = fp8_storage(rows, (7,), columns)
    FP8Rows(codes, scales).put(slice(None), slice(0, columns), rows)
    own_codes, own_scales = fp8_checkpoints.pack(rows)
    assert torch.equal(own_codes, codes) and torch.equal(own_scales, scales)
    fakes = fp8_storage(rows, (7,), columns)
    assert [(t.shape, t.dtype) for t in fakes] == [(t.shape, t.dtype) for t in (own_codes, own_scales)]
    values = FP8Rows(codes, scales).take(slice(None), slice(0, columns))
    assert torch.equal(fp8_checkpoints.unpack(own_codes, own_scales), values.bfloat16())
    both = [fp8_checkpoints.pack(torch.stack([rows, rows.flip(0)]))]
    gate, up = (FP8Rows(both[0][0][i], both[0][1][i]).take(slice(None), slice(0, columns)) for i in (0, 1))
    product, act = torch.empty_like(gate), torch.empty_like(gate)
    FP8Gating().product(gate, up, product, act)
    found = fp8_checkpoints.coat_checkpoints(*both[0])
    expected = {"gate_pre": gate, "up": up, "gate_act": act, "intermediate": product}
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


MLP = Block("mlp", "mxfp8", 96, 200)
BF16 = Block("experts", "bf16", 1000, 100)
MX = Block("experts", "mxfp8", 1000, 100, 128)


def test_sizes_are_padded_to_what_the_kernels_take() -> None:
    assert MLP.padded == (128, 256) and MX.padded == (1024, 128)
    assert BF16.padded == (1024, 128) and replace(BF16, inner=65).padded == (1024, 128)


@pytest.mark.parametrize(
    ("block", "device", "installed", "reason"),
    [
        (MLP, TRN3, Installed(), None),
        (MLP, Device("trn3", 1), Installed(), None),
        (BF16, TRN2, Installed(), None),
        (BF16, TRN3, Installed(), "for Trn2 only, and this is trn3; precision='mxfp8' has"),
        (BF16, replace(TRN3, assumed=True), Installed(), None),
        (MX, TRN3, Installed(), None),
        (MLP, TRN2, Installed(), "Trn3 only, and this is trn2"),
        (MX, TRN2, Installed(), "Trn3 only, and this is trn2"),
        (replace(MLP, precision="bf16", hidden=512), TRN2, Installed(), None),
        (replace(MLP, precision="bf16"), TRN3, Installed(), "for Trn2 only, and this is trn3; precision='mxfp8' has"),
        (replace(MLP, precision="bf16"), Device("trn2", 1), Installed(), "LNC 2"),
        (replace(MLP, precision="fp32"), TRN3, Installed(), "no Neuron kernel computes in fp32"),
        (replace(BF16, precision="fp32"), TRN2, Installed(), "no Neuron kernel computes in fp32"),
        (BF16, Device("trn2", 1), Installed(), "LNC 2"),
        (MX, Device("trn3", 1), Installed(), "LNC 2"),
        (replace(BF16, block_size=128), TRN2, Installed(), "take block sizes 256, 512, 1024, and block_size is 128"),
        (replace(BF16, block_size=2048), TRN2, Installed(), "block_size is 2048"),
        (replace(BF16, block_size=2048), TRN2, Installed(parameters=frozenset({"skip_gate_proj"})), None),
        (replace(MX, block_size=4096), TRN3, Installed(), None),
        (replace(MX, block_size=4096), TRN3, Installed(moe_backward_mxfp8="2.31"), "block_size is 4096"),
        (replace(BF16, hidden=8192), TRN2, Installed(), None),
        (replace(BF16, hidden=8193), TRN2, Installed(), "hidden size of 512 to 8192, and it is 8193"),
        (MLP, TRN3, Installed("mlp_backward"), "it is not there"),
        (MX, TRN3, Installed("moe_forward_mxfp8"), "it is not there"),
    ],
)
def test_every_limit_has_its_reason(block: Block, device: Device, installed: Installed, reason: str | None) -> None:
    found = unsupported_reason(block, device, installed)  # type: ignore[arg-type]
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("block", [BF16, replace(MLP, precision="bf16")], ids=["experts", "mlp"])
@pytest.mark.parametrize("changes", [{"biased": (True, True)}, {"gate": Gate(act="gelu")}], ids=["biases", "gelu"])
def test_mxfp8_is_named_only_where_its_pair_computes_the_block(block: Block, changes: dict[str, Any]) -> None:
    found = unsupported_reason(replace(block, **changes), TRN3, Installed())  # type: ignore[arg-type]
    assert str(found).endswith("and this is trn3")


def test_block_sizes_are_those_of_both_directions() -> None:
    assert block_sizes(BF16, Installed()) == (256, 512, 1024)  # type: ignore[arg-type]
    assert block_sizes(MX, Installed()) == (128, 256, 512, 1024, 2048, 4096)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "tokens", "dtype", "kind", "argument", "says"),
    [
        (BF16, 32769, "torch.bfloat16", ShapeError, "the number of tokens (batch size times length)", "got 32769"),
        (MX, 1 << 24, "torch.bfloat16", ShapeError, "the number of tokens (batch size times length)", "got 16777216"),
        (BF16, 4, "torch.float32", DTypeError, "hidden states", "got torch.float32"),
        (
            replace(BF16, block_size=128),
            4,
            "torch.bfloat16",
            ConfigError,
            "the experts block (H=1000, I=100, precision=bf16)",
            "fallback='torch'",
        ),
    ],
)
def test_calls_are_refused_before_a_kernel(
    block: Block, tokens: int, dtype: str, kind: type[NeuronMoEError], argument: str, says: str
) -> None:
    with refused(kind, argument, says):
        check_call(block, tokens, dtype, TRN2 if block.precision == "bf16" else TRN3, Installed())  # type: ignore[arg-type]


def test_a_long_dense_call_is_none_of_the_plans_matter() -> None:
    assert most_tokens(MLP) is None and most_tokens(BF16) == 32768
    check_call(MLP, 1 << 24, "torch.bfloat16", TRN3, Installed())  # type: ignore[arg-type]
    check_call(BF16, 32768, "torch.bfloat16", TRN2, Installed())  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "blocks"), [("mxfp8", 4), ("bf16", 3)])
def test_two_cores_share_whole_blocks_in_mxfp8_only(precision: str, blocks: int) -> None:
    """256 pairs of two experts need three blocks of 128 at worst; the MXFP8 forward takes an even number."""

    class Released:
        def generation(self, need: str) -> str:
            return "2.33"

    kernels = ExpertKernels(Released(), None, None)  # type: ignore[arg-type] -- nothing is called
    block = Block("experts", precision, 256, 256, 128)
    x = torch.empty(256, 256, dtype=torch.bfloat16)
    assert kernels.fake_saved(x, 1, 2, block, parse_keep("gate_pre+up"))[0].shape == (blocks, 2, 256, 128)


def test_slots_without_a_token_are_zero_before_they_share_a_scale() -> None:
    """No document says what the MXFP8 forward leaves there, and NaN would spread over its FP8 group."""
    index = torch.tensor([[0], [1], [1]])
    slots = torch.full((2, 2, 4, 128), torch.nan)
    slots[0, :, :, :1] = 1
    slots[1, :, :, :2] = 2
    used = _used_slots(slots, plan_blocks(index, 2, 128, 2))
    assert torch.equal(used, slots.nan_to_num(nan=0.0))
