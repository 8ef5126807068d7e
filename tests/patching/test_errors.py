"""What cannot be computed or patched is refused with the reason, and nothing is half-patched."""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GemmaConfig,
    GPT2Config,
    NemotronHConfig,
)
from transformers.activations import ACT2FN
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.patching.discovery import discover
from tests.refusals import refused
from tests.tiny_models import assert_same_snapshot, snapshot, tiny_config, tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def refused_reason(model: nn.Module, **options: Any) -> str:
    """Patch in vain; return the message. The model must be untouched."""
    before = snapshot(model)
    with pytest.raises((NothingToPatchError, UnsupportedModelError)) as caught:
        patch_model(model, **options)
    assert_same_snapshot(snapshot(model), before)
    return str(caught.value)


def boxed(module: nn.Module) -> nn.Module:
    """A model that holds `module`; a model is never its own block."""
    return nn.ModuleDict({"block": module})


def gte_mlp() -> nn.Module:
    gte = pytest.importorskip("transformers.models.gte.modeling_gte", reason="this transformers has no gte")
    return gte.GteMLP(gte.GteConfig(**SIZES))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: AutoModelForCausalLM.from_config(GemmaConfig(**SIZES, head_dim=8, hidden_act="gelu_10")),
            "mlp .GemmaMLP.: its activation is ClippedGELUActivation, the kernels have SiLU, GELU",
        ),
        (
            lambda: boxed(NemotronHExperts(NemotronHConfig(mlp_hidden_act="relu"))),
            "NemotronHExperts.: its activation is ReLU, the kernels have SiLU",
        ),
        (
            lambda: boxed(FalconH1MLP(FalconH1Config(hidden_size=32, mlp_multipliers=[1.5, 1.0]))),
            r"FalconH1MLP.: its forward computes `self.gate_proj\(x\) \* self.gate_multiplier`, a factor of 1.5",
        ),
        (lambda: boxed(gte_mlp()), "GteMLP.: it has dropout, .*: dropout with p=0.1"),
        (
            lambda: AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)),
            "GPT2MLP.: it has no gate: two projections in a row",
        ),
    ],
    ids=["gemma", "nemotron_h", "falcon_h1", "gte", "gpt2"],
)
def test_families_the_kernels_do_not_compute(make: Any, reason: str) -> None:
    with torch.device("meta"):  # nemotron_h's default experts are large; the answer does not depend on the device
        model = make()
    message = refused_reason(model)
    assert_matches(reason, message)


def assert_matches(pattern: str, text: str) -> None:
    """Search `pattern` in `text`, showing both where it is absent."""
    assert re.search(pattern, text), f"{pattern!r} not in {text!r}"


class Gated(nn.Module):
    """A SwiGLU block under other names, with both products' orders exchanged."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.w1 = nn.Linear(8, 12, bias=False)
        self.w3 = nn.Linear(8, 12, bias=False)
        self.w2 = nn.Linear(12, 8, bias=False)
        self.act = nn.SiLU() if act is None else act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up first, then the activated gate."""
        gate, up = self.w1(x), self.w3(x)
        return self.w2(up * self.act(gate))


class GatedMLP(Gated):
    """The same with a form that is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up first, then the activated gate."""
        gate = self.w1(x)
        up = self.w3(x)
        return self.w2(up * self.act(gate))


def test_names_and_order_do_not_matter() -> None:
    model = boxed(GatedMLP())
    x = torch.randn(3, 8)
    expected = model["block"](x)
    report = patch_model(model, {"precision": "fp32"})
    assert report.patched[0].class_name == "GatedMLP"
    torch.testing.assert_close(model["block"](x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("act", [F.silu, ACT2FN["silu"], ACT2FN["swish"], nn.SiLU()])
def test_silu_is_recognized_in_every_form(act: Any) -> None:
    assert len(patch_model(boxed(GatedMLP(act))).patched) == 1


def test_a_silu_that_is_not_one_is_refused_by_name() -> None:
    assert_matches("activation is ReLU", refused_reason(boxed(GatedMLP(nn.ReLU()))))
    assert_matches("activation is mish", refused_reason(boxed(GatedMLP(F.mish))))


def test_unreadable_source_is_refused() -> None:
    scope: dict[str, Any] = {}
    text = "def forward(self, x):\n    return self.w2(self.act(self.w1(x)) * self.w3(x))\n"
    exec(compile(text, "<of no file>", "exec"), scope)  # Python 3.13 has a source of "<string>": what follows `-c`
    kind = type("GatedMLP", (Gated,), {"forward": scope["forward"]})
    assert_matches("source of its forward is not available", refused_reason(boxed(kind())))


def test_the_probe_catches_what_the_source_cannot_show() -> None:
    class Louder(nn.SiLU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = boxed(GatedMLP(Louder()))
    assert_matches("activation is Louder", refused_reason(model))

    code, names = GatedMLP.forward.__code__, {"w1": "w3", "w3": "w1"}
    other = FunctionType(code.replace(co_names=tuple(names.get(name, name) for name in code.co_names)), globals())
    assert_matches("differs from silu", refused_reason(boxed(type("ExchangedMLP", (GatedMLP,), {"forward": other})())))


def with_hook(module: nn.Module) -> None:
    module.gate_proj.register_forward_hook(lambda layer, args, out: out)


def with_parametrization(module: nn.Module) -> None:
    parametrize.register_parametrization(module.up_proj, "weight", nn.Identity())


def with_instance_forward(module: nn.Module) -> None:
    module.forward = type(module).forward.__get__(module)


def with_accelerate_hook(module: nn.Module) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(module, ModelHook())


def with_mixed_dtypes(module: nn.Module) -> None:
    module.down_proj.to(torch.bfloat16)


def with_float64(module: nn.Module) -> None:
    module.to(torch.float64)


def with_activation_hook(module: nn.Module) -> None:
    module.act_fn.register_forward_hook(lambda layer, args, out: out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, "gate_proj is a linear layer with hooks"),
        (
            with_parametrization,
            "up_proj is a torch.nn.utils.parametrize.ParametrizedLinear, not a plain",
        ),
        (with_instance_forward, "its forward is overridden on the instance"),
        (with_accelerate_hook, "accelerate dispatches it through a hook"),
        (with_mixed_dtypes, "its weights have different dtypes (torch.bfloat16, torch.float32); give them one"),
        (with_float64, "its weights are torch.float64"),
        (with_activation_hook, "act_fn has hooks"),
    ],
)
def test_modified_modules_are_refused_with_the_reason(change: Any, reason: str) -> None:
    model = tiny_model("llama")
    change(model.model.layers[1].mlp)
    message = refused_reason(model)
    assert_matches(f"model.layers.1.mlp .LlamaMLP.: .*{re.escape(reason)}", message)
    assert_matches("exclude=.*strict=False", message)
    report = patch_model(model, strict=False)
    assert [entry.status for entry in report.entries] == ["patched", "refused"]
    assert reason in report.refused[0].reason
    assert_matches("Refused blocks stay stock.*exclude=", str(report))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_of_all_modules_are_refused_while_a_model_is_patched(kind: str) -> None:
    model, called = tiny_model("llama"), []
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda *_: called.append(1))
    try:
        with refused(UnsupportedModelError, "model", f"got hooks of register_module_{kind}_hook"):
            patch_model(model)
        assert not called  # by the probe
    finally:
        handle.remove()
    report = patch_model(model)
    handle = register(lambda *_: called.append(1))
    try:
        assert patch_model(model) is report
        model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        assert called
    finally:
        handle.remove()


class Packed(torch.Tensor):
    """Stands for the tensor classes of quantizers, which report the dtype that they decode to."""


def test_experts_with_weights_of_a_tensor_subclass_are_refused() -> None:
    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().as_subclass(Packed))
    reason = "its down_proj is a Packed of Packed, not a plain parameter"
    assert_matches(f"model.layers.1.mlp.experts .MixtralExperts.: {reason}", refused_reason(model))


def test_what_to_do_where_nothing_can_be_patched() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        with_hook(layer.mlp)
    for strict in (True, False):
        message = refused_reason(model, strict=strict)
        assert_matches(r"LlamaForCausalLM with 2 MLP or experts blocks, none of which can be patched:\n", message)
        line = r"\n  model.layers.0-1.mlp .2 x LlamaMLP.: gate_proj is a linear layer with hooks.\nIf a reason names"
        assert_matches(line, message)
        assert_matches(r"strict=False does not help: no block would be left to patch\.$", message)
        assert not any(row.endswith(" ") for row in message.splitlines())
    excluded = refused_reason(tiny_model("llama"), exclude="*")
    assert_matches("leave nothing: make them match blocks such as 'model.layers.0.mlp'", excluded)
    assert_matches("Pass the model that holds such blocks", refused_reason(nn.Sequential(nn.Linear(2, 2))))


def test_equal_reasons_of_many_blocks_take_one_line() -> None:
    model = tiny_model("llama", num_hidden_layers=12)
    for number in (0, 1, 2, 5, 7, 8):
        with_hook(model.model.layers[number].mlp)
    model.model.layers[11].mlp.forward = F.gelu
    message = refused_reason(model)
    hooked, own = message.splitlines()[1:3]
    assert hooked == "  model.layers.0-2,5,7-8.mlp (6 x LlamaMLP): gate_proj is a linear layer with hooks"
    assert own == "  model.layers.11.mlp (LlamaMLP): its forward is overridden on the instance."
    assert "got 7 that cannot:\n" in message


def test_the_only_block_that_cannot_be_patched_is_spoken_of_alone() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    with_hook(model.model.layers[0].mlp)
    assert_matches("with 1 MLP or experts block, which cannot be patched:\n", refused_reason(model))


class OwnMLP(LlamaMLP):
    """What a user's subclass looks like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_forward_that_is_read_in_vain_is_answered_with_what_was_expected() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = OwnMLP(model.config)
    formula = r"down_proj\(act_fn\(gate_proj\(x\)\) \* up_proj\(x\)\), act_fn one of SiLU, .* and Swish\."
    expected = rf"OwnMLP.: its forward computes `super\(\).forward\(x\)`, expected {formula}"
    assert_matches(expected, refused_reason(model))


def test_a_model_in_the_place_of_the_configuration_is_not_written_out() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError) as caught:
        patch_model(NeuronMoEConfig(), model)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.endswith("got a LlamaForCausalLM. The model comes first: patch_model(model, config).")
    with refused(ConfigError, "include", got="a LlamaForCausalLM."):
        patch_model(model, include=model)  # type: ignore[arg-type]


def test_experts_with_another_forward_or_gate_are_refused() -> None:
    class OwnForward(MixtralExperts):
        def forward(self, *args: Any) -> torch.Tensor:
            return super().forward(*args) * 2

    class OwnGate(MixtralExperts):
        def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up_out.chunk(2, dim=-1)
            return self.act_fn(gate).clamp(max=7) * up

    config = tiny_config("mixtral")
    assert_matches("not the one that use_experts_implementation", refused_reason(boxed(OwnForward(config))))
    assert_matches("differs from the gate of its source", refused_reason(boxed(OwnGate(config))))


@pytest.mark.parametrize(
    ("hooked", "reason"),
    [
        (lambda mlp: mlp.gate_proj.weight.register_hook(lambda grad: grad), "gate_proj.weight has tensor hooks"),
        (lambda mlp: mlp.gate_proj.weight.requires_grad_(False), "only one is frozen"),
        (lambda mlp: mlp.register_state_dict_post_hook(lambda *args: None), "has state_dict hooks"),
    ],
)
def test_what_the_kernel_layout_cannot_keep_is_refused_there_only(hooked: Any, reason: str) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        hooked(layer.mlp)
    assert_matches(reason, refused_reason(model, config={"weights": "kernel"}))
    assert len(patch_model(model, {"weights": "stock"}).patched) == 2


def quantized(model: nn.Module) -> nn.Module:
    model.is_quantized = True
    return model


def fp8(model: nn.Module) -> nn.Module:
    weight = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def zero3(model: nn.Module) -> nn.Module:
    model.lm_head.weight.ds_id = 0
    return model


def of_deepspeed(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp = type("AutoEPMoELayer", (nn.Module,), {"__module__": "deepspeed.module_inject"})()
    return model


def offloaded(model: nn.Module) -> nn.Module:
    model.hf_device_map = {"model": 0, "lm_head": "disk"}
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantized, "got a quantized model"),
        (fp8, "down_proj.weight' of dtype torch.float8_e4m3fn"),
        (zero3, "'lm_head.weight' carries a ds_id"),
        (of_deepspeed, "AutoEPMoELayer of DeepSpeed at 'model.layers.1.mlp'.*before deepspeed.initialize"),
        (offloaded, "offloaded by accelerate .*disk"),
        (lambda model: torch.compile(model), "got OptimizedModule.*patch_model.model._orig_mod"),
        (nn.DataParallel, "got DataParallel"),
        (lambda model: "name/of-a-model", "got str"),
    ],
)
def test_models_refused_as_a_whole(change: Any, message: str) -> None:
    with refused(UnsupportedModelError, "model", message):
        patch_model(change(tiny_model("llama")))


def test_sharded_models_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = tiny_model("llama")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with refused(UnsupportedModelError, "model", "shard it afterwards", got="a model sharded by fully_shard"):
            patch_model(model)
        foreign = tiny_model("llama")
        parallelize_module(foreign.model.layers[0].mlp, init_device_mesh("cpu", (1,)), {"up_proj": ColwiseParallel()})
        with refused(
            UnsupportedModelError, "model", "distributed_config", got="a sharded model: 'model.layers.0.mlp.up"
        ):
            patch_model(foreign)
    finally:
        dist.destroy_process_group()


def test_a_backend_that_cannot_run_changes_nothing() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(BackendUnavailableError):
        patch_model(model, {"backend": "neuron"})
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("place", ["cpu", 0])
def test_a_device_map_of_one_place_is_no_offload(place: Any) -> None:
    model = tiny_model("llama")
    model.hf_device_map = {"": place}
    assert len(patch_model(model).patched) == 2


@pytest.mark.parametrize("activation", [nn.SiLU, nn.ReLU6])
def test_sizes_of_transposed_experts_are_read_as_they_lie(activation: type[nn.Module]) -> None:
    """Of experts that are refused, too: reports name their sizes."""
    experts = MixtralExperts(tiny_config("mixtral", num_local_experts=3))
    experts.act_fn = activation()
    assert discover(boxed(experts))[0].sizes == (3, 32, 48)
    experts.is_transposed = True
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach().transpose(1, 2).contiguous()))
    (found,) = discover(boxed(experts))
    assert found.sizes == (3, 32, 48) and found.reason is not None
