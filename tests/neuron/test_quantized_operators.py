"""The operators of networks with MX weights: registered, traced and compiled as the other four are.

Letters: T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from hf_neuron_moe.activation_policy import canonical_keep, parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.modules import quantized_ops
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]
SIZES = {
    "llama": {"hidden_size": 256, "intermediate_size": 1024},
    "mixtral": {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 2},
}
NAMES = ("frozen_fwd", "frozen_bwd")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of the first block of a converted tiny model of each family."""
    found = {}
    for family, sizes in SIZES.items():
        folder = tmp_path_factory.mktemp(family)
        purpose = "inference" if family == "mixtral" else "training"
        options = ConvertOptions(precision="mxfp8", layout="kernel", purpose=purpose)
        tiny_model(family, num_hidden_layers=1, **sizes).bfloat16().save_pretrained(folder / "source")
        convert_checkpoint(folder / "source", folder / "converted", options)
        model = AutoModelForCausalLM.from_pretrained(folder / "converted")
        found[family] = next(module for module in model.modules() if isinstance(module, QuantizedBlock)).neuron_stack
    return found


def operands(stack: Any, backend: str, *, grad: bool = False, keep: str = "") -> tuple[Any, ...]:
    """Arguments of the forward operator for 20 tokens."""
    x_TH = (torch.randn(20, stack.hidden) * 0.3).bfloat16().requires_grad_(grad)
    routing: tuple[Tensor | None, Tensor | None] = (None, None)
    if stack.gate_up_codes.dim() > 2:
        weight_TK, index_TK = torch.rand(20, 2).softmax(-1).topk(1, -1)
        routing = (index_TK, weight_TK.requires_grad_(grad))
    tensors = (stack.gate_up_codes, stack.gate_up_scales, stack.down_codes, stack.down_scales)
    layouts = (stack.gate_up_layout, stack.down_layout)
    call = BlockCall(BlockSpec("bf16"), parse_keep(keep), backend, layouts=layouts).encode()
    return x_TH, *routing, *tensors, None, None, call


def operator_of(name: str) -> Any:
    """An operator as it is registered for the machine that runs now."""
    resolve_backend("neuron", torch.device("cpu"))
    get_backend("neuron")
    return getattr(quantized_ops, name)


def test_operators_are_registered_through_nki_op_and_again_without_it(
    machine: Start, stacks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_neuron_moe.backends.operator_registration import plugin_function, register_again

    plain = getattr(quantized_ops, NAMES[0])
    double = machine().double
    now = operator_of(NAMES[0])
    assert now is not plain, "the plugin came after the operators"
    assert {f"hf_neuron_moe::{name}" for name in NAMES} <= set(double.operators)
    assert all(type(getattr(quantized_ops, name)) is torch.library.CustomOpDef for name in NAMES)
    registered = len(double.operators)
    assert operator_of(NAMES[0]) is now and len(double.operators) == registered, "once per plugin"
    for home in ("torch_neuronx", "torch_neuronx.nki_hop"):
        monkeypatch.delitem(sys.modules, home)
    assert plugin_function("nki_op") is None
    register_again()
    assert getattr(quantized_ops, NAMES[0]) is not now and len(double.operators) == registered
    stack = stacks["llama"]
    x_TH = (torch.randn(20, stack.hidden) * 0.3).bfloat16().requires_grad_()
    quantized_ops.quantized_network(x_TH, None, None, stack, backend="torch").sum().backward()
    assert x_TH.grad is not None and x_TH.grad.isfinite().all()


@pytest.mark.parametrize("family", SIZES)
def test_the_forward_operator_passes_opcheck_on_the_kernels(
    family: str, machine: Start, stacks: dict[str, Any]
) -> None:
    double = machine().double
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    result = torch.library.opcheck(operator_of("frozen_fwd"), operands(stacks[family], "neuron"), test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}
    assert double.launches and not double.traced, "fakes are shapes only: no kernel is traced"


@pytest.mark.parametrize("family", SIZES)
def test_both_operators_pass_opcheck_where_they_train(family: str, machine: Start, stacks: dict[str, Any]) -> None:
    """Registered through the plugin, computed by the torch backend: no kernel gives these gradients."""
    machine()
    keep = canonical_keep("minimal", "bf16")
    args = operands(stacks[family], "torch", grad=True, keep=keep)
    forward = operator_of("frozen_fwd")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    assert set(torch.library.opcheck(forward, args, test_utils=checks).values()) == {"SUCCESS"}
    with torch.no_grad():
        y_TH, *saved = forward(*args)
    plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    backward_args = (torch.randn_like(y_TH), *plain[:9], *saved, *plain[9:], True, plain[1] is not None)
    result = torch.library.opcheck(
        operator_of("frozen_bwd"), backward_args, test_utils=("test_schema", "test_faketensor")
    )
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", SIZES)
def test_a_compiled_network_is_one_graph_per_shape(family: str, machine: Start, stacks: dict[str, Any]) -> None:
    double, stack = machine().double, stacks[family]
    operator_of("frozen_fwd")

    def network(x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None) -> Tensor:
        return quantized_ops.quantized_network(x_TH, index_TK, weight_TK, stack, backend="neuron")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for rows in (20, 10, 20):
            inputs = [None if t is None else t[:rows] for t in operands(stack, "neuron")[:3]]
            assert torch.equal(compiled(*inputs), network(*inputs))
    assert counter.frame_count == 2, "one graph per shape"
    assert double.launches and not double.traced
