"""Which gates are read from source, which numbers they depend on, and which sources are no gate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.gate_source import read_gate
from hf_neuron_moe.modules.structure import act_of, gate_of


class Holder(nn.Module):
    """What the methods below read."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.limit = 7
        self.alpha = 1.702
        self.none = None
        self.endless = math.inf
        self.undefined = math.nan
        self.tensor = torch.tensor(7.0)
        self.flag = True
        self.size = 12
        self.gate_up_proj = nn.Parameter(torch.zeros(1, 24, 8))
        self.drop, self.drop_half, self.same = nn.Dropout(0.0), nn.Dropout(0.5), nn.Identity()


def plain(self: Any, z: Tensor) -> Tensor:
    """The usual one."""
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def up_first_in_the_product(self: Any, z: Tensor) -> Tensor:
    gate, up = torch.chunk(z, 2, -1)
    h = up * F.silu(gate)
    return h


def spelled_out(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return torch.sigmoid(gate.float()) * up.float() * gate.float()


def alternating(self: Any, z: Tensor) -> Tensor:
    gate, up = z[..., ::2], z[..., 1::2]
    return (1 + up) * gate * (self.alpha * gate).sigmoid()


def clamped(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    gate, up = torch.clamp(gate, max=self.limit), up.clamp(-self.limit, self.limit)
    return torch.mul(self.act_fn(gate), up)


def clamped_after(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate).clamp(max=self.limit) * up


def without_end(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(self.none, self.endless)) * up.clamp(min=-self.endless, max=self.endless)


def softcapped(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    dtype = z.dtype
    capped = torch.tanh(gate / 4.0) * 4.0 * torch.sigmoid(gate)
    return (capped * (torch.tanh(up / self.limit) * self.limit)).to(dtype)


def cast_back(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


def by_index(self: Any, z: Tensor) -> Tensor:
    parts = z.contiguous().chunk(2, dim=-1)
    return self.act_fn(parts[0].contiguous()) * parts[-1]


def in_place(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    gate = self.act_fn(gate)
    gate *= up
    return gate


def of_exponentials(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def of_scaled_exponentials(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    sigmoid = 1.0 / ((-self.alpha * gate).exp() + 1.0)
    return gate * sigmoid * up


def walrus(self: Any, z: Tensor) -> Tensor:
    return (halves := z.chunk(2, dim=-1))[1] * F.silu(halves[0])


def split_at_the_middle(self: Any, z: Tensor) -> Tensor:
    gate, up = torch.split(z, self.size, dim=-1)
    return self.act_fn(gate) * up


def sliced(self: Any, z: Tensor) -> Tensor:
    return F.gelu(z[..., : self.size], approximate="tanh") * z[..., 12:]


def split_at_half_its_width(self: Any, z: Tensor) -> Tensor:
    gate, up = z.split(z.shape[-1] // 2, dim=-1)
    return self.act_fn(gate) * up


def sliced_at_half_its_width(self: Any, z: Tensor) -> Tensor:
    half = z.size(-1) // 2
    return F.silu(z[..., :half]) * z[..., half:]


def in_parts(self: Any, z: Tensor) -> Tensor:
    gate, up = z.unflatten(-1, (2, -1)).unbind(-2)
    return self.act_fn(gate) * up


def in_alternating_parts(self: Any, z: Tensor) -> Tensor:
    gate, up = z.unflatten(dim=-1, sizes=(-1, 2)).unbind(dim=-1)
    return self.act_fn(gate) * up


def limited_where_there_is_a_limit(self: Any, z: Tensor) -> Tensor:
    gate, up = z.split(split_size=self.size, dim=-1)
    if self.limit is not None:
        gate = gate.clamp_max(self.limit)
    if not self.flag:
        return up
    up = up if self.none is None else up.clamp_min(self.none)
    return self.act_fn(gate) * torch.clamp_min(up, -self.limit)


def plus_itself(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    glu = self.act_fn(gate)
    return glu * up + glu


def nothing_dropped(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.drop(F.dropout(self.same(self.act_fn(gate)), 0.0, self.training)) * up


READ: dict[Callable[..., Tensor], tuple[Gate, bool, dict[str, Any]]] = {
    plain: (Gate(), False, {}),
    up_first_in_the_product: (Gate(), False, {}),
    spelled_out: (Gate(), False, {}),
    alternating: (Gate("swish", 1.702, up_offset=1.0), True, {"alpha": 1.702}),
    clamped: (Gate(gate_max=7.0, up_max=7.0, up_min=-7.0), False, {"limit": 7}),
    clamped_after: (Gate(act_max=7.0), False, {"limit": 7}),
    without_end: (Gate(), False, {"none": None, "endless": math.inf}),
    softcapped: (Gate(gate_softcap=4.0, up_softcap=7.0), False, {"limit": 7}),
    cast_back: (Gate(), False, {}),
    by_index: (Gate(), False, {}),
    in_place: (Gate(), False, {}),
    of_exponentials: (Gate(), False, {}),
    of_scaled_exponentials: (Gate("swish", 1.702), False, {"alpha": 1.702}),
    walrus: (Gate(), False, {}),
    split_at_the_middle: (Gate(), False, {"size": 12}),
    sliced: (Gate("gelu_tanh"), False, {"size": 12}),
    split_at_half_its_width: (Gate(), False, {}),
    sliced_at_half_its_width: (Gate(), False, {}),
    in_parts: (Gate(), False, {}),
    in_alternating_parts: (Gate(), True, {}),
    limited_where_there_is_a_limit: (
        Gate(gate_max=7.0, up_min=-7.0),
        False,
        {"size": 12, "limit": 7, "flag": True, "none": None},
    ),
    plus_itself: (Gate(up_offset=1.0), False, {}),
    nothing_dropped: (Gate(), False, {"drop": nn.Dropout, "drop.p": 0.0, "same": nn.Identity}),
}


@pytest.mark.parametrize("method", READ, ids=lambda method: method.__name__)
def test_what_a_method_computes_is_read(method: Callable[..., Tensor]) -> None:
    gate, interleaved, constants = READ[method]
    found = read_gate(Holder(), method)
    assert (found.gate, found.interleaved, dict(found.constants)) == (gate, interleaved, constants)
    functions = (
        up_first_in_the_product,
        spelled_out,
        alternating,
        softcapped,
        walrus,
        sliced,
        sliced_at_half_its_width,
    )
    called = method not in (*functions, of_exponentials, of_scaled_exponentials)
    assert found.activation == ("act_fn" if called else None)


def second_half(self: Any, z: Tensor) -> Tensor:
    up, gate = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def doubled(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up * 2


def other_sigmoid(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return gate * torch.sigmoid(up)


def sigmoid_of_clamped(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate.clamp(max=self.limit)) * up


def activated_twice(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * self.act_fn(up)


def clamped_whole(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return (self.act_fn(gate) * up).clamp(max=self.limit)


def rounded(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.to(torch.bfloat16)) * up


def half_in_place(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    gate *= 1
    return self.act_fn(gate) * up


def in_a_pair_before_a_change(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    act = self.act_fn(gate)
    both = (act, up)
    act *= 2
    return both[0] * both[1]


def input_in_place(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    z += 1
    return self.act_fn(gate) * up


def read_after_a_change(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    up = up.clamp(max=self.limit)
    same = up
    up += 1
    return self.act_fn(gate) * same


def third_part(self: Any, z: Tensor) -> Tensor:
    parts = z.chunk(2, dim=-1)
    return self.act_fn(parts[0]) * parts[2]


def other_exponentials(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return gate / (2 + torch.exp(-gate)) * up


def in_thirds(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(3, dim=-1)
    return self.act_fn(gate) * up


def along_rows(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=0)
    return self.act_fn(gate) * up


def softcap_of_another_number(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return torch.tanh(gate / 4.0) * 5.0 * torch.sigmoid(gate) * up


def reads_a_tensor(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.tensor)) * up


def reads_a_flag(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.flag)) * up


def reads_nan(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.undefined)) * up


def crossed_limits(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up.clamp(self.limit, self.alpha)


def branches(self: Any, z: Tensor) -> Tensor:
    if self.flag:
        return z
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def depends_on_training(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * (up if self.training else up.clamp(max=self.limit))


def depends_on_a_value(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    if gate.sum() > 0:
        gate = gate.clamp(max=self.limit)
    return self.act_fn(gate) * up


def drops(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.dropout(self.act_fn(gate), training=self.training) * up


def drops_in_a_module(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.drop_half(self.act_fn(gate)) * up


def split_elsewhere(self: Any, z: Tensor) -> Tensor:
    gate, up = z.split(self.limit, dim=-1)
    return self.act_fn(gate) * up


def split_at_a_third(self: Any, z: Tensor) -> Tensor:
    gate, up = z.split(z.shape[-1] // 3, dim=-1)
    return self.act_fn(gate) * up


def sliced_elsewhere(self: Any, z: Tensor) -> Tensor:
    return self.act_fn(z[..., : self.size]) * z[..., 11:]


def unbound_along_another_axis(self: Any, z: Tensor) -> Tensor:
    gate, up = z.unflatten(-1, (2, -1)).unbind(-1)
    return self.act_fn(gate) * up


def plus_another(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up + gate


REFUSED = {
    depends_on_training: "reads training, bool, not a number",
    depends_on_a_value: r"depends on `gate\.sum\(\) > 0`",
    drops: r"computes `F\.dropout",
    drops_in_a_module: "its activation is Dropout",
    split_elsewhere: r"z\.split\(self\.limit, dim=-1\)",
    split_at_a_third: r"computes `z\.shape\[-1\] // 3`",
    sliced_elsewhere: r"computes `z\[\.\.\., 11:\]`",
    unbound_along_another_axis: r"unbind\(-1\)",
    plus_another: r"computes `self\.act_fn\(gate\) \* up \+ gate`",
    second_half: "the gate in the second",
    doubled: "its gate is not act",
    other_sigmoid: "its gate is not act",
    sigmoid_of_clamped: "its gate is not act",
    activated_twice: "its gate is not act",
    clamped_whole: "its gate is not act",
    rounded: "computes `torch.bfloat16`",
    half_in_place: "the statement `gate \\*= 1`",
    input_in_place: "the statement `z \\+= 1`",
    read_after_a_change: "computes `same`",
    in_a_pair_before_a_change: "computes `both`",
    third_part: r"computes `parts\[2\]`",
    other_exponentials: r"computes `gate / \(2 \+ torch\.exp\(-gate\)\)`",
    in_thirds: r"z.chunk\(3, dim=-1\)",
    along_rows: r"z.chunk\(2, dim=0\)",
    softcap_of_another_number: "its gate is not act",
    reads_a_tensor: "reads tensor, Tensor, not a number",
    reads_a_flag: "reads flag, bool, not a number",
    reads_nan: "reads undefined, NaN, not a number",
    crossed_limits: "its gate defines no function: up_min",
    branches: "its gate is not act",
}


@pytest.mark.parametrize("method", REFUSED, ids=lambda method: method.__name__)
def test_what_is_no_known_gate_gets_a_reason(method: Callable[..., Tensor]) -> None:
    with pytest.raises(UnknownForm, match=REFUSED[method]):
        read_gate(Holder(), method)


@pytest.mark.parametrize("method", READ, ids=lambda method: method.__name__)
def test_what_is_read_is_what_the_method_computes(method: Callable[..., Tensor]) -> None:
    """By the operators' own gating, at values on both sides of the limits."""
    from hf_neuron_moe.modules import ops

    torch.manual_seed(0)
    found, holder, columns = read_gate(Holder(), method), Holder(), 12
    z = torch.randn(9, 2 * columns) * 8
    eye = torch.eye(2 * columns).unsqueeze(0)
    y = ops.experts(
        z,
        torch.zeros(9, 1, dtype=torch.int64),
        torch.ones(9, 1),
        eye,
        torch.eye(2 * columns, columns).unsqueeze(0),
        transposed=False,
        precision="fp32",
        block_size=128,
        backend="torch",
        gate=found.gate,
        interleaved=found.interleaved,
    )
    torch.testing.assert_close(y[:, :columns], method(holder, z), rtol=1e-5, atol=1e-5)


ACTS = {
    "silu": ["silu", "swish"],
    "gelu": ["gelu", "gelu_python"],
    "gelu_tanh": ["gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast"],
    "squared_relu": ["relu2"],
    "swish": ["quick_gelu"],
}


@pytest.mark.parametrize("name", sorted(ACT2CLS))
def test_every_activation_of_transformers_is_its_row_or_none(name: str) -> None:
    """The row's function at 2001 points, to the rounding of fp32; names without a row have none."""
    activation = ACT2FN[name]
    row = next((row for row, names in ACTS.items() if name in names), None)
    assert act_of(activation) == row
    if row is None:
        return
    from hf_neuron_moe.backends.torch.activation_rows import ACTIVATIONS
    from hf_neuron_moe.backends.torch.gating import gating_of

    x = torch.linspace(-12, 12, 2001)
    gate = gate_of(activation)
    assert gate is not None
    for value in (ACTIVATIONS[row].value(x), gating_of(gate).activate_(x.clone())):
        torch.testing.assert_close(value, activation(x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "activation",
    [
        functools.partial(F.gelu, approximate="tanh"),
        nn.ReLU(),
        torch.relu,
        type("SiLU", (nn.SiLU,), {})(),
        ACT2FN["gelu_10"],
    ],
    ids=["partial", "relu", "function", "subclass", "clipped"],
)
def test_other_activations_have_no_row(activation: Any) -> None:
    assert act_of(activation) is None


def test_an_activation_whose_function_was_exchanged_has_no_row() -> None:
    for name in ("gelu", "gelu_pytorch_tanh"):
        activation = ACT2FN[name]
        activation.act = F.relu
        assert act_of(activation) is None


@pytest.mark.parametrize("options", [{}, {"approximate": "none"}])
def test_a_gelu_by_tanh_that_calls_another_one_is_no_row(options: dict[str, str]) -> None:
    activation = ACT2FN["gelu_pytorch_tanh"]
    assert act_of(activation) == "gelu_tanh"
    activation.act = functools.partial(F.gelu, **options)
    assert act_of(activation) is None
