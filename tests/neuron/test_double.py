"""The contract double itself: right calls pass with the documented result, each wrong one is caught.

Letters: S tokens, H hidden, I intermediate, T tokens, E experts, K experts per token, N blocks of B.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe import formats, kernels
from tests.neuron.double.contract import ContractError

S, H, INNER = 128, 128, 256
RELEASES = ((2, 29), (2, 30), (2, 31), (2, 33))
MLP = Callable[..., SimpleNamespace]
bf16 = torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
    return (torch.randn(shape) * 0.3).to(dtype)


def mlp_operands() -> list[Tensor]:
    return [normal(S, H), normal(2 * INNER, H), normal(H, INNER)]


@pytest.mark.parametrize("release", RELEASES)
def test_signatures_are_those_of_the_packages_kernels(release: tuple[int, int], machine: MLP) -> None:
    """Two readings of the same documents: the double's lists and the argument lists of this package's kernels."""
    machine(release=release)
    found = importlib.import_module("nkilib.core.moe.moe_cte").moe_cte
    names = list(inspect.signature(found).parameters)
    ours = [p.name for p in inspect.signature(kernels.moe_cte).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert names == ours[: len(names)] if release >= (2, 31) else set(names) < set(ours)
    assert ("gate_up_proj_scale" in names) == (release >= (2, 30))
    assert ("gate_up_in_scale" in names) == (release >= (2, 31))
    assert ("skip_gate_proj" in names) == (release >= (2, 33))
    bwd = importlib.import_module("nkilib.experimental.moe.bwd.blockwise_mm_backward").blockwise_mm_bwd
    names = list(inspect.signature(bwd).parameters)
    assert ("skip_grad_initialization" in names) == (release >= (2, 30))
    assert ("hidden_states_grad_out" in names) == (release >= (2, 31))
    present = "nkilib.experimental.mlp_mxfp8.mlp_bwd_mxfp8" in sys.modules
    assert present == (release >= (2, 30))
    if present:
        mlp = sys.modules["nkilib.experimental.mlp_mxfp8.mlp_bwd_mxfp8"].mlp_backward_mxfp8_nki
        mine = kernels.mlp_backward_mxfp8_nki if release >= (2, 31) else kernels.mlp_backward_mxfp8_nki_2_30
        wanted = [p.name for p in inspect.signature(mine).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert list(inspect.signature(mlp).parameters) == wanted
    assert importlib.metadata.version("nki-library") == f"2.{release[1]}.0"


def test_nothing_is_left_after_a_machine(machine: MLP) -> None:
    assert not {"nki", "nkilib", "torch_neuronx"} & set(sys.modules)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("nki-library")
    assert callable(machine)


def test_a_right_mlp_pass_gives_the_documented_numbers(machine: MLP, hand: Any) -> None:
    double = machine().double
    own = hand()
    operands = mlp_operands()
    out, gate, up, inter = own.mlp_forward[(2,)](*operands, True)
    wanted = kernels.mlp_forward_mxfp8(*operands, save_gate_pre=True, save_up=True, save_hidden=True)
    for mine, theirs in ((out, wanted.output), (gate, wanted.gate_pre), (up, wanted.up), (inter, wanted.hidden)):
        assert torch.equal(mine, theirs)
    grad = normal(S, H)
    grads = own.mlp_backward[(2,)](grad, *operands, gate, up)
    theirs = kernels.mlp_backward_mxfp8(grad, *operands, gate_pre=gate, up=up)
    assert all(torch.equal(mine, their) for mine, their in zip(grads, theirs))
    assert double.names == ["mlp_forward_mxfp8_nki", "mlp_backward_mxfp8_nki"]
    assert len(double.launches) == 2 and not double.traced


def test_wrapped_in_an_operator_it_has_gradients_and_a_fake(machine: MLP, hand: Any) -> None:
    double = machine().double
    own = hand()
    neuronx = importlib.import_module("torch_neuronx")
    lnc = importlib.import_module("torch_neuronx.utils").get_logical_neuron_cores

    def forward(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return neuronx.wrap_nki(own.mlp_forward)[(int(lnc()),)](x, gate_up, down, True)

    op = neuronx.nki_op("neuron_double_test::mlp_fwd", mutates_args=())(forward)
    op.register_fake(lambda x, gate_up, down: (torch.empty_like(x), *(x.new_empty(S, INNER) for _ in range(3))))
    operands = mlp_operands()
    assert torch.equal(op(*operands)[0], kernels.mlp_forward_mxfp8(*operands).output)
    torch.library.opcheck(op, tuple(operands), test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in operands]
        assert op(*fake)[0].shape == (S, H)
        assert not double.traced, "the shape-only fake runs instead of the kernel"
        assert [tuple(t.shape) for t in forward(*fake)] == [(S, H), (S, INNER), (S, INNER), (S, INNER)]
    assert double.traced == ["mlp_forward"]


@pytest.mark.parametrize("packed", [True, False])
def test_quantized_weights_need_the_announced_scale_layout(packed: bool, machine: MLP, hand: Any) -> None:
    machine()
    own = hand()
    hidden, inner = 1024, 128
    x, gate_up, down = normal(S, hidden), normal(2 * inner, hidden), normal(hidden, inner)
    prepared = []
    for weight in (gate_up, down):
        found = formats.quantize_mx(weight)
        prepared += [
            formats.pack_x4(found.codes),
            (formats.to_packed if packed else formats.to_oversized)(found.scales),
        ]
    out, _ = own.mlp_forward_quantized[(2,)](x, *prepared, packed)
    # Weights quantized beforehand hold the bits that the kernel would make of the raw ones.
    assert torch.equal(out, kernels.mlp_forward_mxfp8(x, gate_up, down).output)
    with pytest.raises(ContractError, match="as use_scale_packing"):
        own.mlp_forward_quantized[(2,)](x, *prepared, not packed)
    prepared[1] = prepared[1].to(torch.int32)
    with pytest.raises(ContractError, match="scales of gate_up_weights is uint8"):
        own.mlp_forward_quantized[(2,)](x, *prepared, packed)


def test_unwritten_memory_is_nan(machine: MLP, hand: Any) -> None:
    machine()
    out, kept, inter = hand().mlp_forward_kept_unused[(2,)](*mlp_operands())
    assert torch.isfinite(out).all() and torch.isfinite(kept).all()
    assert torch.isnan(inter).all()


WRONG_MLP: dict[str, tuple[str, Callable[[Any, list[Tensor]], Any]]] = {
    "grid missing": ("launch grid", lambda own, t: own.mlp_forward(*t, True)),
    "grid is an int": ("launch grid", lambda own, t: own.mlp_forward[2](*t, True)),
    "grid of one core": ("launch grid", lambda own, t: own.mlp_forward[(1,)](*t, True)),
    "grid of a tensor": ("launch grid", lambda own, t: own.mlp_forward[(torch.tensor(2),)](*t, True)),
    "grid and switch disagree": ("run_with_lnc2", lambda own, t: own.mlp_forward[(2,)](*t, False)),
    "argument missing": ("missing a required argument", lambda own, t: own.mlp_forward[(2,)](*t)),
    "fp32": ("bfloat16, float16, got float32", lambda own, t: own.mlp_forward[(2,)](t[0].float(), *t[1:], True)),
    "fp64": ("dtype that reaches", lambda own, t: own.mlp_forward[(2,)](t[0].double(), *t[1:], True)),
    "transposed view": ("contiguous", lambda own, t: own.mlp_forward[(2,)](normal(H, S).t(), *t[1:], True)),
    "another H": ("contract over one axis", lambda own, t: own.mlp_forward[(2,)](normal(S, 256), *t[1:], True)),
    "H not in tiles": ("multiple of 128", lambda own, t: own.mlp_forward[(2,)](normal(S, 96), *t[1:], True)),
    "odd S": ("multiple of 8", lambda own, t: own.mlp_forward[(2,)](normal(127, H), *t[1:], True)),
    "down transposed": ("contract over I", lambda own, t: own.mlp_forward[(2,)](*t[:2], normal(INNER, H), True)),
    "output not shared": ("shared_hbm", lambda own, t: own.mlp_forward_private[(2,)](*t)),
    "write lost": (
        "written but not returned",
        lambda own, t: own.mlp_forward_lost[(2,)](*t, normal(S, INNER)),
    ),
    "positional": ("by keyword", lambda own, t: own.mlp_forward_positional[(2,)](*t)),
    "closure": ("module level", lambda own, t: own.make_closure()),
    "number returned": ("returns its tensors", lambda own, t: own.returns_number[(2,)](t[0])),
    "torch object": ("tensor, number, string", lambda own, t: own.mlp_forward[(2,)](*t, torch.float32)),
    "two devices": ("one device", lambda own, t: own.mlp_forward[(2,)](t[0].to("meta"), *t[1:], True)),
    "NaN read": ("never written", lambda own, t: own.mlp_backward_unwritten[(2,)](t[0], *t)),
}


@pytest.mark.parametrize("case", WRONG_MLP)
def test_a_wrong_mlp_call_is_caught(case: str, machine: MLP, hand: Any) -> None:
    double = machine().double
    message, call = WRONG_MLP[case]
    with pytest.raises(ContractError, match=message):
        call(hand(), mlp_operands())
    assert not double.launches


def test_a_grid_on_the_kernel_is_lost_by_wrap_nki(machine: MLP, hand: Any) -> None:
    machine()
    own, wrap = hand(), importlib.import_module("torch_neuronx").wrap_nki
    with pytest.raises(ContractError, match="launch grid"):
        wrap(own.mlp_forward[(2,)])(*mlp_operands(), True)


def test_mx_kernels_are_for_trn3(machine: MLP, hand: Any) -> None:
    machine(target="trn2")
    with pytest.raises(ContractError, match="trn3 only"):
        hand().mlp_forward[(2,)](*mlp_operands(), True)


def test_one_core_is_another_grid(machine: MLP, hand: Any) -> None:
    machine(lnc=1)
    operands = mlp_operands()
    out, *_ = hand().mlp_forward[(1,)](*operands, False)
    assert torch.equal(out, kernels.mlp_forward_mxfp8(*operands).output)


def test_a_compilation_is_counted_once_per_shape(machine: MLP, hand: Any) -> None:
    double = machine().double
    own = hand()
    for tokens in (128, 256, 128):
        own.mlp_forward[(2,)](normal(tokens, H), *mlp_operands()[1:], True)
    assert len(double.launches) == 3
    assert len(double.compilations) == 2


def test_the_simulator_takes_arrays_and_tensors(machine: MLP, hand: Any) -> None:
    machine()
    simulate = importlib.import_module("nki").simulate
    operands = mlp_operands()
    kernel = hand().mlp_forward
    out = simulate(kernel[(2,)])(*operands, True)[0]
    assert torch.equal(out, simulate(kernel[2])(*operands, True)[0])
    array = simulate(hand().returns_input[(2,)])(np.ones((2, 2), dtype=np.float32))
    assert isinstance(array, np.ndarray)


class Experts:
    """Operands of a small blockwise call, sink row included."""

    def __init__(self, tokens: int = 24, hidden: int = 512, inner: int = 64, block: int = 256) -> None:
        self.experts, self.block, self.tokens = 4, block, tokens
        logits = torch.rand(tokens, self.experts)
        weight_TK, index_TK = logits.softmax(-1).topk(2, -1)
        mask = kernels.expert_mask(index_TK, self.experts)
        plan = kernels.build_block_plan(mask, block, top_k=2, n_block_per_iter=2)
        self.x = torch.cat([normal(tokens, hidden), torch.zeros(1, hidden, dtype=bf16)])
        self.affinity = kernels.masked_affinities(index_TK, weight_TK, self.experts)
        self.gate_up, self.down = normal(self.experts, hidden, 2, inner), normal(self.experts, inner, hidden)
        self.ids, self.owners = plan.token_position_to_id.int(), plan.block_to_expert.int()

    @property
    def operands(self) -> list[Any]:
        return [self.x, self.affinity, self.gate_up, self.down, self.ids, self.owners, self.block]


def reference(e: Experts) -> Tensor:
    """What the documented mathematics gives for the real rows, in fp32."""
    table = e.affinity.view(-1, e.experts)
    total = torch.zeros(e.tokens, e.x.shape[1])
    for expert in range(e.experts):
        x, gate_up = e.x[:-1].float(), e.gate_up[expert].float()
        gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
        total += table[:-1, expert, None] * ((torch.nn.functional.silu(gate) * up) @ e.down[expert].float())
    return total


def test_a_right_experts_pass_gives_the_documented_numbers(machine: MLP, hand: Any) -> None:
    double = machine(release=(2, 31), target="trn2").double
    own, e = hand(), Experts()
    out, gate_up, down = own.moe_forward[(2,)](*e.operands, True)
    # The documents' own bound for bf16: 2e-2 of the largest value.
    wanted = reference(e)
    assert (out[:-1].float() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    assert torch.isnan(out[-1]).all(), "the sink row is nobody's to read"
    assert gate_up.shape == (len(e.owners), 2, 64, e.block) and down.shape == (len(e.owners), e.block, 512)
    grad = torch.cat([normal(e.tokens, 512), torch.zeros(1, 512, dtype=bf16)])
    *front, ids, owners, block = e.operands
    grads = own.moe_backward[(2,)](*front, gate_up, down, ids, owners, grad, block, True)
    theirs = kernels.blockwise_mm_bwd(
        *front, gate_up, down, ids, owners, grad, block, shard_option=kernels.ShardOption.SHARD_ON_FREE
    )
    assert all(torch.equal(mine, their) for mine, their in zip(grads, theirs, strict=True))
    assert double.names == ["moe_cte", "blockwise_mm_bwd"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_block_sharded_kernel_returns_two_slots(release: tuple[int, int], machine: MLP, hand: Any) -> None:
    machine(release=release, target="trn2")
    e = Experts(tokens=128)
    out = hand().moe_forward_blocks[(2,)](*e.operands)
    assert out.shape == (129, 2, 512 + (e.experts if release >= (2, 30) else 0))
    plain = hand().moe_forward[(2,)](*e.operands, False)
    assert torch.equal(out[:-1, 0, :512], plain[:-1])
    assert torch.isnan(out[:, 1]).all()


def test_2_29_never_zeroes_part_of_an_odd_number_of_experts(machine: MLP, hand: Any) -> None:
    machine(release=(2, 29), target="trn2")
    own, e = hand(), Experts()
    keep = [expert for expert in range(4) if expert != 3]
    table = e.affinity.view(-1, 4)
    e.experts = 3
    index = table[:-1, keep].topk(2, -1).indices
    plan = kernels.build_block_plan(kernels.expert_mask(index, 3), e.block, top_k=2)
    weights = torch.full(index.shape, 0.5)
    e.affinity = kernels.masked_affinities(index, weights, 3)
    e.gate_up, e.down = e.gate_up[keep], e.down[keep]
    e.ids, e.owners = plan.token_position_to_id, plan.block_to_expert
    _, gate_up, down = own.moe_forward[(2,)](*e.operands, True)
    *front, ids, owners, block = e.operands
    grads = own.moe_backward[(2,)](*front, gate_up, down, ids, owners, torch.zeros_like(e.x), block, False)
    assert torch.isnan(grads[1]).any() and all(torch.isfinite(grads[i]).all() for i in (0, 2, 3))
    chosen = kernels.expert_mask(index, 3)
    assert torch.isfinite(grads[1].view(-1, 3)[:-1][chosen]).all()


def changed(e: Experts, name: str, change: Callable[[Tensor], Any]) -> Experts:
    setattr(e, name, change(getattr(e, name).clone()))
    return e


def put(place: Any, value: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return change


WRONG_EXPERTS: dict[str, tuple[str, Callable[[Experts], Experts]]] = {
    "sink row of hidden states": ("sink row", lambda e: changed(e, "x", put(-1, 1.0))),
    "sink row of affinities": ("sink row", lambda e: changed(e, "affinity", put(-1, 1.0))),
    "no sink row": ("has shape", lambda e: changed(e, "x", lambda x: x[:-1])),
    "ids in int64": ("dtype that reaches", lambda e: changed(e, "ids", lambda t: t.long())),
    "ids out of range": ("token_position_to_id lies", lambda e: changed(e, "ids", put(0, 1000))),
    "ids with -1": ("token_position_to_id lies", lambda e: changed(e, "ids", put(-1, -1))),
    "experts out of range": ("block_to_expert lies", lambda e: changed(e, "owners", put(-1, 4))),
    "blocks out of order": ("in expert order", lambda e: changed(e, "owners", lambda t: t.flip(0).contiguous())),
    "a token twice": ("one slot per expert", lambda e: changed(e, "ids", put(1, int(e.ids[0])))),
    "unmasked affinities": (
        "outside of the plan",
        lambda e: changed(e, "affinity", put(slice(0, -4), 0.5)),
    ),
    "compact affinities": ("has shape", lambda e: changed(e, "affinity", lambda t: t[: 2 * len(e.x)])),
    "gate and up swapped axes": ("has shape", lambda e: changed(e, "gate_up", lambda t: t.mT.contiguous())),
    "weights in fp32": ("bfloat16, got float32", lambda e: changed(e, "down", lambda t: t.float())),
    "H in no tiles": ("multiple of 512", lambda e: Experts(hidden=256)),
    "I in no tiles": ("multiple of 16", lambda e: Experts(inner=24)),
    "B too small": ("multiple of 256", lambda e: Experts(block=128)),
    "B and ids disagree": (r"N\*B ids", lambda e: changed(e, "ids", lambda t: t[:-1])),
}


@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_a_wrong_experts_call_is_caught(case: str, machine: MLP, hand: Any) -> None:
    double = machine(target="trn2").double
    message, change = WRONG_EXPERTS[case]
    own = hand()
    with pytest.raises(ContractError, match=message):
        own.moe_forward[(2,)](*change(Experts()).operands, True)
    assert not double.launches and not double.calls


def test_an_argument_of_a_later_release_is_caught(machine: MLP, hand: Any) -> None:
    machine(release=(2, 30), target="trn2")
    with pytest.raises(ContractError, match="gate_up_in_scale"):
        hand().moe_forward_in_scale[(2,)](*Experts().operands)


def test_the_backwards_defaults_and_its_sink_row_are_checked(machine: MLP, hand: Any) -> None:
    machine(release=(2, 31), target="trn2")
    own, e = hand(), Experts()
    _, gate_up, down = own.moe_forward[(2,)](*e.operands, True)
    *front, ids, owners, block = e.operands
    with pytest.raises(ContractError, match="SHARD_ON_FREE"):
        own.moe_backward[(2,)](*front, gate_up, down, ids, owners, torch.zeros_like(e.x), block, False)
    with pytest.raises(ContractError, match="sink row"):
        own.moe_backward[(2,)](*front, gate_up, down, ids, owners, torch.ones_like(e.x), block, True)


def test_the_mxfp8_pair_has_two_weight_layouts(machine: MLP, hand: Any) -> None:
    machine(config_pair=False)
    own, e = hand(), Experts(hidden=128, inner=128, block=128)
    stock = [e.gate_up.permute(0, 2, 3, 1).contiguous(), e.down.mT.contiguous()]
    front, rest = [e.x, e.affinity], [e.ids, e.owners[:, None], e.block]
    out, gate_up, _ = own.moe_forward_mxfp8[(2,)](*front, *stock, *rest)
    wanted = kernels.blockwise_mm_fwd_mxfp8(*front, *stock, *rest)
    assert torch.equal(out[:-1], wanted.output[:-1]) and torch.isnan(out[-1]).all()
    grad = torch.cat([normal(e.tokens, 128), torch.zeros(1, 128, dtype=bf16)])
    ids, owners, block = rest
    grads = own.moe_backward_mxfp8[(2,)](*front, e.gate_up, e.down, gate_up, ids, owners, grad, block)
    theirs = kernels.blockwise_mm_bwd_mxfp8(*front, e.gate_up, e.down, gate_up, ids, owners, grad, block)
    assert all(torch.equal(mine, their) for mine, their in zip(grads, theirs, strict=True))
    with pytest.raises(ContractError, match="has shape"):
        own.moe_backward_mxfp8[(2,)](*front, *stock, gate_up, ids, owners, grad, block)


@pytest.mark.parametrize("name", ["moe_forward", "mlp_forward"])
def test_kernels_have_no_values_under_fake_tensors(name: str, machine: MLP, hand: Any) -> None:
    double = machine().double
    own, e = hand(), Experts()
    operands = [*e.operands, True] if name == "moe_forward" else [*mlp_operands(), True]
    real = getattr(own, name)[(2,)](*operands)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in operands]
        traced = getattr(own, name)[(2,)](*fake)
    assert [(t.shape, t.dtype) for t in traced] == [(t.shape, t.dtype) for t in real]
    assert double.traced == [name] and len(double.launches) == 1
