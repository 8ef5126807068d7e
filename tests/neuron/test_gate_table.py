"""Which gate each kernel of nkilib takes, and with which arguments: one row per gate, one column per kernel family.

A "yes" goes through the mock, which checks the call against the documentation, and equals the torch backend. A "no" has
its reason, and nothing is launched. Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hf_neuron_moe import NeuronMoEConfig, set_backend
from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import WORDS, MXExpertStack, MXLayout
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NeuronMoEWarning
from hf_neuron_moe.formats.moe_mx import moe_bias_from_lanes, quantize_moe_down, quantize_moe_gate_up
from hf_neuron_moe.modules.quantized_blocks import QuantizedExperts
from tests.neuron.gate_runs import BF16, E, H, I, K, T, deviations, neuron, normal, results, routing, stack
from tests.refusals import refused
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]
NO_KERNEL = "which no kernel computes"
NO_GELU = "the bf16 kernels leave the intermediate of a GELU unwritten, and their backward has no GELU"
ONLY_SILU = "the MXFP8 kernels compute SiLU only"
NO_BIASES = "the MXFP8 kernels of experts take no biases"
TWICE = "shard_on_i_mx, adds the down bias twice"


class Row(NamedTuple):
    """A gate, its arguments, and per column why its kernels do not take it; None where they do."""

    gate: Gate
    biased: bool
    activation: str  # nkilib's name
    limits: tuple[float | None, ...]  # upper and lower one of gate, then of up
    bf16: str | None = None
    mx: str | None = None
    wide: str | None = None  # MX words of a hidden size above 8192
    pair: str | None = None
    since: tuple[int, int] = (2, 29)  # release of the first bf16 kernels that take it
    exact_limits: tuple[Any, ...] = ()  # those for MX words, where they differ


ABSENT = (None,) * 4
ROWS = {
    "plain": Row(SWIGLU, False, "SiLU", ABSENT),
    "plain biased": Row(SWIGLU, True, "SiLU", ABSENT, wide=TWICE, pair=NO_BIASES),
    "clamped": Row(Gate(gate_max=1.0, up_max=1.0, up_min=-1.0), False, "SiLU", (1.0, None, 1.0, -1.0)),
    "offset biased": Row(
        Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0),
        True, "Swish", (1.0, None, 2.0, 0.0), wide=TWICE, pair=ONLY_SILU,
    ),
    "offset": Row(
        Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0),
        False, "Swish", (1.0, None, 2.0, 0.0), wide=TWICE, pair=ONLY_SILU,
    ),
    "gelu_tanh": Row(Gate("gelu_tanh"), False, "GELU_Tanh_Approx", ABSENT, bf16=NO_GELU, pair=ONLY_SILU),
    "gelu": Row(Gate("gelu"), False, "GELU", ABSENT, bf16=NO_GELU, pair=ONLY_SILU),
    "squared_relu": Row(
        Gate("squared_relu", gated=False), False, "SquaredReLU", ABSENT, since=(2, 33),
        mx="always compute a gate projection", wide="always compute a gate projection", pair=ONLY_SILU,
    ),
    "softcaps": Row(
        Gate(gate_softcap=4.0, up_softcap=25.0), False, "", ABSENT, NO_KERNEL, NO_KERNEL, NO_KERNEL, NO_KERNEL
    ),
    # silu(1.0203) = 0.75, gelu(1) = 0.8413; where a backward reads masks, the limit is the nearest number of bf16.
    "capped": Row(
        Gate(act_max=0.75, up_max=0.75, up_min=-0.75), False, "SiLU", (1.0234375, None, 0.75, -0.75),
        exact_limits=(pytest.approx(1.02035, abs=1e-5), None, 0.75, -0.75),
    ),
    "capped gelu": Row(
        Gate("gelu", act_max=0.8413447), False, "GELU", (pytest.approx(1.0, abs=1e-6), None, None, None), NO_GELU,
        pair=ONLY_SILU,
    ),
    "another alpha": Row(
        Gate("swish", 1.5), False, "", ABSENT,
        *("the kernels' Swish has alpha 1.702, and the block's is 1.5",) * 3, pair=ONLY_SILU,
    ),
    "plus one": Row(Gate(up_offset=1.0), False, "SiLU", ABSENT, wide=TWICE, pair="no biases, so up has no offset"),
    "gated squared_relu": Row(
        Gate("squared_relu"), False, "", ABSENT, *("its gate is squared_relu, with which the kernels are not",) * 3,
        pair=ONLY_SILU,
    ),
    "odd shifted limit": Row(
        Gate(up_max=255.5, up_offset=1.0), False, "SiLU", (None, None, 256.5, None), wide=TWICE,
        bf16="up_clamp_upper_limit 256.5 is no", pair="no biases, so up has no offset",
    ),
    "alpha 1": Row(Gate("swish", 1.0), False, "SiLU", ABSENT),
    # MX words have no backward that would read masks.
    "odd limit": Row(
        Gate(gate_max=1.01), False, "SiLU", (1.01, None, None, None),
        bf16="gate_clamp_upper_limit 1.01 is no", pair="gate_clamp_upper_limit 1.01 is no",
    ),
}  # fmt: skip
NAMES = ("gate_clamp_upper_limit", "gate_clamp_lower_limit", "up_clamp_upper_limit", "up_clamp_lower_limit")
SLOW = pytest.mark.slow
RELEASES = [*(pytest.param((2, minor), marks=SLOW) for minor in (29, 30, 31, 32)), (2, 33)]
WORD_SIZES = {"mx": (512, 96, "e4m3fn"), "wide": (8704, 1024, "e2m1")}  # H, I and element format


def limits_of(call: Any) -> tuple[float | None, ...]:
    """The limits of one call, of the forward or the backward, in the order of :data:`NAMES`."""
    record = call.get("clamp_limits") or getattr(call.get("config"), "clamp_limits", None)
    if record is None:
        return tuple(call.get(name) for name in NAMES)
    up_high, up_low, gate_high, gate_low = vars(record).values()  # linear is up
    return gate_high, gate_low, up_high, up_low


def check_trainable(double: Any, row: Row, reason: str | None, spec: BlockSpec) -> None:
    """Forward and backward equal the torch backend with the row's arguments, or nothing is launched."""
    torch.manual_seed(0)
    weights, shape = stack(spec, biased=row.biased), BlockShape("experts", H, I, E, K, biased=(row.biased,) * 2)
    found = neuron().support(shape, spec).reason
    if reason is not None:
        assert reason in str(found), row
        with refused(ConfigError, f"the experts block (H={H}, I={I}, precision={spec.precision})", reason):
            neuron().experts_forward(
                normal(T, H, dtype=torch.bfloat16), routing(), weights, spec, parse_keep("minimal")
            )
        assert not double.launches
        return
    assert found is None, row
    given, x = routing(), normal(T, H, dtype=torch.bfloat16)
    passed = row.gate if row.gate.act_max is None else row.gate._replace(act_max=None, gate_max=row.limits[0])
    mine = results(neuron(), x, given, weights, spec, "minimal")
    theirs = results(get_backend("torch"), x, given, weights, spec._replace(gate=passed), "minimal")
    assert max(deviations(mine, theirs)) <= (BF16 if spec.precision == "bf16" else 0), row
    for call in (call.arguments for call in double.calls):
        assert limits_of(call) == row.limits
        activation = call.get("activation_function") or call.get("activation_type")
        assert spec.precision == "mxfp8" or activation.name == row.activation
        assert bool(call.get("skip_gate_proj")) == (not row.gate.gated)
    double.clear()


@pytest.mark.parametrize("release", RELEASES)
def test_bf16_experts(machine: Start, release: tuple[int, int]) -> None:
    double = machine(release=release, target="trn2").double
    for row in ROWS.values():
        reason = "moe_cte has no skip_gate_proj" if release < row.since else row.bf16
        check_trainable(double, row, reason, BlockSpec("bf16", 256, gate=row.gate))


@pytest.mark.parametrize("options", [pytest.param({"release": (2, 32)}, marks=SLOW), {}], ids=str)
def test_mxfp8_experts(machine: Start, options: dict[str, Any]) -> None:
    double = machine(**options).double
    for row in ROWS.values():
        check_trainable(double, row, row.pair, BlockSpec("mxfp8", 128, gate=row.gate))


def words(row: Row, hidden: int, inner: int, fmt: str) -> MXExpertStack:
    """Experts stored as MX words."""
    gate_up = quantize_moe_gate_up(normal(E, hidden, 2 if row.gate.gated else 1, inner, scale=0.1), fmt=fmt)
    down = quantize_moe_down(normal(E, inner, hidden, scale=0.1), fmt=fmt)
    layouts = (MXLayout(fmt, WORDS, "one_tile"), MXLayout(fmt, WORDS, "wrapX_single"))
    biases = (normal(E, 2 * inner), normal(E, hidden)) if row.biased else (None, None)
    return MXExpertStack(gate_up.words, gate_up.scales, down.words, down.scales, *layouts, row.gate, *biases)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("column", "release"),
    [
        *(pytest.param("mx", (2, minor), marks=SLOW) for minor in (29, 30, 31, 32)),
        ("mx", (2, 33)),
        *(pytest.param("wide", (2, minor), marks=SLOW) for minor in (29, 33)),
    ],
)
def test_mx_words(machine: Start, column: str, release: tuple[int, int]) -> None:
    double = machine(release=release).double
    for name, row in ROWS.items():
        reason = getattr(row, column)
        if column == "mx" or name in ("capped gelu", "offset biased"):  # the wide ones take seconds each
            check_words(double, row, column, reason)


def check_words(double: Any, row: Row, column: str, reason: str | None) -> None:
    """The forward equals the torch backend with the row's arguments, or nothing is launched."""
    torch.manual_seed(0)
    hidden, inner, fmt = WORD_SIZES[column]
    given, x, pairs = words(row, hidden, inner, fmt), normal(T, hidden, scale=0.3, dtype=torch.bfloat16), routing()
    found, keep = neuron().quantized_support(given, training=False).reason, parse_keep("")
    if reason is not None:
        assert reason in str(found), row
        with refused(BackendUnavailableError, "a block with MX weights", reason):
            neuron().quantized_forward(x, pairs, given, keep)
        assert not double.launches
        return
    assert found is None, row
    y = neuron().quantized_forward(x, pairs, given, keep)[0]
    expected = get_backend("torch").quantized_forward(x, pairs, given, keep)[0]
    # The kernel takes affinities in bf16 (2^-9), and rounds each expert's share and the sum to bf16.
    assert (y - expected).abs().max() <= 2**-6 * expected.abs().max(), row
    (call,) = (call.arguments for call in double.calls)
    double.clear()
    assert call["activation_function"].name == row.activation
    assert limits_of(call) == (row.exact_limits or row.limits)
    if column == "wide":
        assert call["gate_and_up_proj_bias"] is None and call["down_proj_bias"] is None
        return
    lanes, down_EH = call["gate_and_up_proj_bias"].data, call["down_proj_bias"].data
    bias_E2I = torch.zeros(E, 2, inner) if given.gate_up_bias is None else given.gate_up_bias.view(E, 2, inner)
    wanted = bias_E2I + torch.tensor([0.0, row.gate.up_offset])[:, None]
    assert torch.equal(moe_bias_from_lanes(lanes).float(), wanted)
    assert torch.equal(down_EH.float(), torch.zeros(E, hidden) if given.down_bias is None else given.down_bias)


def test_dense_mx_codes_have_swiglu_only(machine: Start) -> None:
    machine()
    layout = MXLayout()
    codes = [torch.zeros(shape, dtype=torch.uint8) for shape in ((256, 256), (8, 256), (256, 128), (4, 256))]
    for gate, biases, reason in (
        (Gate("gelu"), (None, None), "its gate is gelu, and the dense MXFP8 kernels compute"),
        (SWIGLU, (torch.zeros(256), None), "its projections have biases, and the dense MXFP8 kernels compute"),
    ):
        given = MXExpertStack(*codes, layout, layout, gate, *biases)
        assert reason in str(neuron().quantized_support(given, training=False).reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("another alpha", r"the kernels' Swish has alpha 1\.702, and the block's is 1\.5"),
        ("squared_relu", "the kernels for MX words always compute a gate projection"),
    ],
)
def test_words_that_no_kernel_takes_are_reported_and_run_on_torch(row: str, reason: str, machine: Start) -> None:
    double = machine().double
    given, (index, weight) = words(ROWS[row], 512, 96, "e4m3fn"), routing()
    names = QuantizedExperts.tensor_names(given.gate.gated)
    tensors = dict(zip(names, list(vars(given).values())[:4], strict=True))
    layouts = {"gate_up_proj": given.gate_up_layout, "down_proj": given.down_layout}
    family = tiny_model("mixtral" if given.gate.gated else "nemotron_h")
    original = next(module for name, module in family.named_modules() if name.endswith(".experts"))
    block = QuantizedExperts(original, "experts", NeuronMoEConfig(backend="torch"), layouts, tensors).eval()
    block.neuron_gate = given.gate
    model, x = torch.nn.ModuleDict({"experts": block}), normal(T, 512, dtype=torch.bfloat16)
    with refused(ConfigError, "backend", f"1 of 1; experts: {reason}"):
        set_backend(model, "neuron")
    with torch.no_grad():
        expected = block(x, index, weight)
        reasons = set_backend(model, "neuron", fallback="torch")
        assert re.search(reason, str(reasons["experts"]))
        with pytest.warns(NeuronMoEWarning, match="computed by PyTorch"):
            assert torch.equal(block(x, index, weight), expected)
    assert not double.launches
