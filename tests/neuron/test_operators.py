"""The four operators on the Neuron backend: registration, traces, compiled models, recompilations.

Letters: S tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_neuron_moe import patch_model
from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants
from hf_neuron_moe.modules import ops
from tests.neuron.small_runs import CASES, DENSE, EXPERTS, EXPERTS_MX, SOME_SLOW, Case
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]
S = 20


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No compiled code from other tests, none left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp_operands(grad: bool = False) -> tuple[Any, ...]:
    H, inner = DENSE.sizes["hidden_size"], DENSE.sizes["intermediate_size"]
    shapes = ((S, H), (inner, H), (inner, H), (H, inner))
    tensors = [(torch.randn(shape) * 0.2).bfloat16().requires_grad_(grad) for shape in shapes]
    return *tensors, None, None, None, BlockCall(BlockSpec("mxfp8"), parse_keep("minimal"), "neuron").encode()


def expert_operands(case: Case, grad: bool = False) -> tuple[Any, ...]:
    H, inner, experts = case.sizes["hidden_size"], case.sizes["intermediate_size"], 4
    x = (torch.randn(S, H) * 0.2).bfloat16().requires_grad_(grad)
    weights, index = torch.rand(S, experts).softmax(-1).topk(2, -1)
    gate_up = (torch.randn(experts, 2 * inner, H) * 0.2).bfloat16().requires_grad_(grad)
    down = (torch.randn(experts, H, inner) * 0.2).bfloat16().requires_grad_(grad)
    weights = weights.requires_grad_(grad)
    spec = BlockSpec(case.precision, case.block_size)
    return x, index, weights, gate_up, down, None, None, BlockCall(spec, parse_keep("minimal"), "neuron").encode()


OPERATORS = {
    "dense": ("mlp", lambda grad=False: mlp_operands(grad)),
    "experts-mxfp8": ("moe", lambda grad=False: expert_operands(EXPERTS_MX, grad)),
    "experts-bf16": ("moe", lambda grad=False: expert_operands(EXPERTS, grad)),
}


def registered(name: str) -> Any:
    """An operator as it is registered for the machine that runs now."""
    resolve_backend("neuron", torch.device("cpu"))
    get_backend("neuron")
    return getattr(ops, name)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def test_operators_are_registered_through_nki_op(machine: Start) -> None:
    double = machine().double
    patch_model(DENSE.model(), {**DENSE.options, "backend": "neuron"})
    names = {"mlp_fwd", "mlp_bwd", "moe_fwd", "moe_bwd"}
    assert {f"hf_neuron_moe::{name}" for name in names} <= set(double.operators)
    assert all(type(getattr(ops, name)) is torch.library.CustomOpDef for name in names)


def test_operators_that_were_registered_again_stay_the_named_ones(machine: Start) -> None:
    """Selective checkpointing compares what is called with what was named."""

    def named_and_called() -> list[tuple[Any, Any]]:
        gc.collect()  # what was registered before
        names = ("mlp_fwd", "mlp_bwd", "moe_fwd", "moe_bwd")
        return [(getattr(torch.ops.hf_neuron_moe, name).default, getattr(ops, name)._opoverload) for name in names]

    patch_model(DENSE.model(), {**DENSE.options, "backend": "torch"})
    machine()
    for backend in ("neuron", "torch"):
        patch_model(DENSE.model(), {**DENSE.options, "backend": backend})
        assert all(named is called for named, called in named_and_called())


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_operators_pass_opcheck(name: str, machine: Start) -> None:
    double = machine(target=CASES[name].target).double
    kind, make = OPERATORS[name]
    op = registered(f"{kind}_fwd")
    result = torch.library.opcheck(op, make(True), test_utils=CHECKS)
    assert set(result.values()) == {"SUCCESS"}
    assert double.launches and not double.traced, "fakes are shapes only: no kernel is traced"


@pytest.mark.parametrize("name", SOME_SLOW)
def test_backward_operators_pass_opcheck(name: str, machine: Start) -> None:
    double = machine(target=CASES[name].target).double
    kind, make = OPERATORS[name]
    operands = make()
    y, *saved = registered(f"{kind}_fwd")(*operands)
    dout = torch.randn_like(y)
    if name == "dense":
        args = (dout, *operands[:-1], *saved, operands[-1], True, True)
        result = torch.library.opcheck(registered("mlp_bwd"), args, test_utils=("test_schema", "test_faketensor"))
    else:
        args = (dout, *operands[:-1], *saved, operands[-1], True, True, True)
        result = torch.library.opcheck(registered("moe_bwd"), args, test_utils=("test_schema", "test_faketensor"))
    assert set(result.values()) == {"SUCCESS"}
    assert not double.traced


def forward_and_backward(name: str, operands: tuple[Any, ...]) -> list[Tensor]:
    """The backend's own calls, as ``nki_op`` traces them under a compiler: without the operators around."""
    backend = get_backend(resolve_backend("neuron", torch.device("cpu")))
    *tensors, text = operands
    call = BlockCall.decode(text)
    backward = BackwardCall(call.spec, call.keep, Wants())
    if name == "dense":
        given = (tensors[0], FFNWeights(*tensors[1:]))
        y, saved = backend.mlp_forward(*given, call.spec, call.keep)
        return [y, *saved, *backend.mlp_backward(torch.ones_like(y), *given, saved, backward)]
    routed = (tensors[0], Routing(tensors[1], tensors[2]), ExpertWeights(tensors[3], tensors[4]))
    y, saved = backend.experts_forward(*routed, call.spec, call.keep)
    return [y, *saved, *backend.experts_backward(torch.ones_like(y), *routed, saved, backward)]


@pytest.mark.parametrize("name", SOME_SLOW)
def test_bodies_trace_without_looking_at_values(name: str, machine: Start) -> None:
    """Under ``torch.compile`` on a device an operator's body becomes part of the graph: shapes only, no ``.item()``."""
    double = machine(target=CASES[name].target).double
    _, make = OPERATORS[name]
    operands = make()
    real = forward_and_backward(name, operands)
    double.clear()
    with FakeTensorMode() as mode:
        fake = tuple(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in operands)
        traced = forward_and_backward(name, fake)
    assert [(t.shape, t.dtype, t.stride()) for t in traced] == [(t.shape, t.dtype, t.stride()) for t in real]
    assert len(double.traced) == 2 and not double.launches
    tensors = [value for value in operands if isinstance(value, Tensor)]

    def body(*values: Tensor) -> list[Tensor]:
        left = iter(values)
        return forward_and_backward(name, tuple(next(left) if isinstance(v, Tensor) else v for v in operands))

    graph = make_fx(body, tracing_mode="fake")(*tensors)
    names = {str(node.target) for node in graph.graph.nodes}
    again = forward_and_backward(name, operands)
    assert all(torch.equal(mine, before) for mine, before in zip(again, real)), "no fake was kept"
    assert not names & {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.unique2.default"}


@pytest.mark.parametrize("name", OPERATORS)
def test_bodies_for_the_torch_backend_stay_whole(name: str, machine: Start) -> None:
    """A compiler traces the bodies also where PyTorch computes the block: that looks at values and stays one node."""
    double = machine(target=CASES[name].target).double
    kind, make = OPERATORS[name]
    *tensors, text = make()
    operands = [*tensors, BlockCall.decode(text)._replace(backend="torch").encode()]
    registered(f"{kind}_fwd")
    body = double.bodies[f"hf_neuron_moe::{kind}_fwd"]
    real = body(*operands)
    places = [place for place, value in enumerate(operands) if isinstance(value, Tensor)]

    def on_tensors(*tensors: Tensor) -> Any:
        return body(*({**dict(enumerate(operands)), **dict(zip(places, tensors, strict=True))}.values()))

    graph = make_fx(on_tensors, tracing_mode="fake")(*(operands[place] for place in places))
    called = {str(node.target) for node in graph.graph.nodes if "hf_neuron_moe" in str(node.target)}
    assert called == {f"hf_neuron_moe.{kind}_fwd_torch.default"}
    again = graph(*(operands[place] for place in places))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, real, strict=True))
    assert not double.launches and not double.traced


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_is_one_graph_and_compiles_once_per_shape(name: str, machine: Start) -> None:
    case = CASES[name]
    double = machine(target=case.target).double
    model = case.model()
    patch_model(model, {**case.options, "backend": "neuron"})
    expected = {length: model(input_ids=tokens(2, length)).logits.detach() for length in (8, 200)}
    eager = dict(double.compilations)
    double.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for length in (8, 200, 8, 200):
        logits = compiled(input_ids=tokens(2, length)).logits
        assert torch.equal(logits, expected[length])
        logits.square().mean().backward()
    assert counter.frame_count == 2, "one graph per shape"
    assert not double.traced
    forward = {key for key in double.compilations if key in eager}
    assert forward == set(eager) and len(eager) == 2
    assert len(double.compilations) == 4, "two shapes of a forward and a backward"


@pytest.mark.parametrize("name", ["dense"])
def test_lengths_that_pad_to_one_shape_share_a_kernel(name: str, machine: Start) -> None:
    case = CASES[name]
    double = machine(target=case.target).double
    model = case.model()
    patch_model(model, {**case.options, "backend": "neuron"})
    for length in (7, 9, 30):
        model(input_ids=tokens(2, length)).logits.sum().backward()
    assert len(double.launches) == 6
    assert len(double.compilations) == 2


def test_routing_changes_no_shape(machine: Start) -> None:
    """All tokens to one expert or spread out: one compilation, the block count is the worst case."""
    double = machine(target="trn2").double
    operands = list(expert_operands(EXPERTS))
    op = registered("moe_fwd")
    for index in (torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([3, 0])):
        operands[1] = index.expand(S, 2).contiguous()
        op(*operands)
    assert len(double.launches) == 3 and len(double.compilations) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_kept_outputs_have_no_gradient_and_strided_gradients_are_taken(name: str, machine: Start) -> None:
    machine(target=CASES[name].target)
    kind, make = OPERATORS[name]
    operands = make(True)
    y, *saved = registered(f"{kind}_fwd")(*operands)
    assert y.requires_grad and not any(tensor.requires_grad for tensor in saved)
    y.sum().backward()  # a gradient of strides (0, 0), which no kernel reads
    expanded = [t.grad.clone() for t in operands if isinstance(t, Tensor) and t.grad is not None]
    assert len(expanded) == 4
    for tensor in operands:
        if isinstance(tensor, Tensor):
            tensor.grad = None
    registered(f"{kind}_fwd")(*operands)[0].backward(torch.ones_like(y))
    whole = [t.grad for t in operands if isinstance(t, Tensor) and t.grad is not None]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(expanded, whole, strict=True))
