"""peft before and after patching, and the layers of a patched MLP being wrapped later."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM

from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.errors import NeuronMoEWarning, NothingToPatchError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model, tokens


def lora(model: nn.Module, **options: object) -> nn.Module:
    """Wrap `model`; the adapters get the same values in every copy, and ones that matter (peft starts at zero)."""
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, **options))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for name, param in sorted(wrapped.named_parameters()):
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return wrapped


def gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradients of whatever is trained."""
    logits = model(tokens()).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same_training(actual: nn.Module, expected: nn.Module) -> None:
    """Equal logits and gradients up to fp32 summation order; see tests/modules/test_equals_stock.py."""
    (logits, mine), (stock_logits, theirs) = gradients(actual), gradients(expected)
    torch.testing.assert_close(logits, stock_logits, rtol=1e-5, atol=2e-6 * stock_logits.abs().max().item())
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=2e-6 * value.abs().max().item())


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_adapters_on_attention_only(family: str, when: str, home: str) -> None:
    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    target = ["q_proj", "v_proj"]
    config = {"precision": "fp32", "weights": home}
    if when == "before":
        patch_model(model, config)
        wrapped = lora(model, target_modules=target)
    else:
        wrapped = lora(model, target_modules=target)
        report = patch_model(wrapped, config)
        assert report.patched[0].name.startswith("base_model.model.model.layers.0.mlp")
    assert_same_training(wrapped, lora(stock, target_modules=target))


@pytest.mark.parametrize("target", [["gate_proj"], ["up_proj", "down_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_adapters_put_on_a_patched_mlp_are_honoured(target: list[str]) -> None:
    stock = tiny_model("llama")
    model = copy.deepcopy(stock)
    patch_model(model, {"precision": "fp32"})
    wrapped = lora(model, target_modules=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        assert_same_training(wrapped, lora(stock, target_modules=target))
        merged = wrapped.merge_and_unload()
        merged(tokens())
    assert all(type(layer.mlp.gate_proj) is nn.Linear for layer in merged.model.layers)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "a LoRA layer of the variant DoraLinearVariant"),
        ({"hooked": True}, "a LoRA layer with hooks"),
        ({"lora_bias": True}, "a LoRA layer with a bias"),
    ],
)
def test_adapters_that_the_operator_does_not_know_are_honoured_and_announced_once(
    options: dict[str, bool], reason: str
) -> None:
    stock = tiny_model("llama")
    model = copy.deepcopy(stock)
    patch_model(model, {"precision": "fp32"})
    hooked = options.pop("hooked", False)
    pair = [lora(one, target_modules=["gate_proj", "up_proj"], **options) for one in (model, stock)]
    for one in pair if hooked else ():
        for name, module in one.named_modules():
            if name.endswith("gate_proj"):
                module.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(
        NeuronMoEWarning, match=rf"model.layers.\d.mlp: gate_proj is {reason}.*stock\s+precision"
    ) as seen:
        assert_same_training(*pair)
    assert len([warning for warning in seen if warning.category is NeuronMoEWarning]) == 2, "one per block"
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        pair[0](tokens())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_hooks_and_parametrizations_put_on_later_are_honoured(family: str) -> None:
    model = tiny_model(family)
    patch_model(model, {"precision": "fp32"})
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 32)
    plain = mlp(x)
    handle = mlp.down_proj.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(NeuronMoEWarning, match="model.layers.0.mlp: down_proj is a linear layer with hooks"):
        doubled = mlp(x)
    torch.testing.assert_close(doubled, 2 * plain, rtol=1e-5, atol=1e-5)
    handle.remove()
    assert torch.equal(mlp(x), plain)

    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            """Double the weight."""
            return weight * 2

    parametrize.register_parametrization(mlp.down_proj, "weight", Twice())
    torch.testing.assert_close(mlp(x), 2 * plain, rtol=1e-5, atol=1e-5)


def test_patching_a_model_whose_mlp_has_adapters_is_refused() -> None:
    wrapped = lora(tiny_model("llama"), target_modules=["gate_proj"])
    before = snapshot(wrapped)
    with refused(
        NothingToPatchError, "model", "gate_proj is a peft.tuners.lora.layer.Linear, not a plain torch.nn.Linear"
    ):
        patch_model(wrapped)
    assert_same_snapshot(snapshot(wrapped), before)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_on_expert_parameters(when: str, home: str) -> None:
    stock = tiny_model("mixtral")
    model = copy.deepcopy(stock)
    target = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = {"precision": "fp32", "weights": home}
    if when == "before":
        patch_model(model, config)
        wrapped = lora(model, **target)
    else:
        wrapped = lora(model, **target)
        if home == "kernel":
            with refused(NothingToPatchError, "model", "adapter"):
                patch_model(wrapped, config)
            return
        patch_model(wrapped, config)
    reference = lora(stock, **target)
    assert_same_training(wrapped, reference)
    if home == "kernel":
        with refused(UnsupportedModelError, "model.layers.0.mlp.experts", "merge_and_unload"):
            unpatch_model(wrapped)
        merged = wrapped.merge_and_unload()
        expected = merged(tokens()).logits
        unpatch_model(merged)
        torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
        return
    unpatch_model(wrapped)
    assert torch.equal(wrapped(tokens()).logits, reference(tokens()).logits)


def test_adapters_on_the_fused_weight_of_the_kernel_home() -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    wrapped = lora(model, target_modules=["q_proj"], target_parameters=["mlp.gate_up_proj", "mlp.down_proj"])
    names = [name for name, param in wrapped.named_parameters() if param.requires_grad and "mlp" in name]
    assert len(names) == 2 * 2 * 2, "two layers, two weights, two factors"
    _, trained = gradients(wrapped)
    assert all(value is not None and value.abs().max() > 0 for value in trained.values())


FULL_LIST = ["q_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "target", "block", "layer"),
    [
        ("llama", "all-linear", "mlp", "gate_proj"),
        ("llama", FULL_LIST, "mlp", "gate_proj"),
        ("llama", ["q_proj", "down_proj"], "mlp", "down_proj"),
        ("phi3", "all-linear", "mlp", "gate_up_proj"),
        ("phi3", ["qkv_proj", "gate_up_proj"], "mlp", "gate_up_proj"),
        ("qwen2_moe", "all-linear", "shared_expert", "gate_proj"),
    ],
)
def test_adapters_on_layers_that_the_kernel_home_replaced_are_refused(
    family: str, target: object, block: str, layer: str
) -> None:
    model = tiny_model(family)
    patch_model(model, {"weights": "kernel"})
    says = rf"weights='stock'.*target_parameters=\['{block}\.gate_up_proj', '{block}\.down_proj'\]"
    with refused(UnsupportedModelError, layer, says, got="a peft."):
        get_peft_model(model, LoraConfig(r=4, target_modules=target))


@pytest.mark.parametrize("load", [PeftModel.from_pretrained, lambda model, folder: model.load_adapter(folder)])
def test_an_adapter_of_all_linear_layers_of_the_stock_model_is_not_loaded_in_part(
    load: Callable[[nn.Module, Path], object], tmp_path: Path
) -> None:
    adapter = get_peft_model(tiny_model("llama"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapter.save_pretrained(tmp_path)
    assert "model.layers.1.mlp.up_proj" in json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    with refused(UnsupportedModelError, "gate_proj", r"^model\.layers\.0\.mlp: .*weights='stock'", got="a peft."):
        load(model, tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q|up)_proj"},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    ],
)
def test_adapters_that_no_stand_in_meets_are_refused_when_they_are_loaded(
    target: dict[str, object], tmp_path: Path
) -> None:
    get_peft_model(tiny_model("llama"), LoraConfig(**target)).save_pretrained(tmp_path)
    model = tiny_model("llama")
    patch_model(model, {"weights": "kernel"})
    with refused(UnsupportedModelError, "up_proj", "weights='stock'", got="up_proj.lora_"):
        PeftModel.from_pretrained(model, tmp_path)


@pytest.mark.parametrize("target", ["layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", "mlp.up_proj"])
def test_longer_names_of_layers_that_the_kernel_home_replaced_are_refused(target: str) -> None:
    model = tiny_model("llama")
    patch_model(model, {"weights": "kernel"})
    with refused(UnsupportedModelError, "up_proj", "weights='stock'", got="a peft."):
        get_peft_model(model, LoraConfig(target_modules=["q_proj", target]))


@pytest.mark.parametrize("pattern", [r".*\.layers\.1\.mlp\.(gate|up)_proj", r"model\.layers\.\d+\..*(q|up|gate)_proj"])
def test_patterns_over_layers_that_the_kernel_home_replaced_are_refused(pattern: str) -> None:
    model = tiny_model("llama")
    patch_model(model, {"weights": "kernel"})
    with refused(UnsupportedModelError, "gate_proj", "weights='stock'", got="a peft."):
        get_peft_model(model, LoraConfig(target_modules=pattern))


@pytest.mark.parametrize("target", ["all-linear", ["gate_proj"]])
@pytest.mark.parametrize("kind", [LoHaConfig, LoKrConfig, OFTConfig, IA3Config])
def test_other_adapters_on_replaced_layers_are_refused_alike(kind: type[PeftConfig], target: object) -> None:
    model = tiny_model("llama")
    patch_model(model, {"weights": "kernel"})
    options = {"feedforward_modules": []} if kind is IA3Config else {}
    with refused(UnsupportedModelError, "gate_proj", "weights='stock'", got="a peft."):
        get_peft_model(model, kind(target_modules=target, **options))


@pytest.mark.parametrize("name", ["mlp", "layers.1.mlp"])
def test_a_whole_block_is_trained_beside_adapters(name: str, tmp_path: Path) -> None:
    found = []
    for patched in (True, False):
        model = tiny_model("llama")
        if patched:
            patch_model(model, {"precision": "fp32", "weights": "kernel"})
        torch.manual_seed(1)
        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[name])).train()
        optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
        wrapped(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        wrapped.save_pretrained(tmp_path / str(patched))
        found.append(wrapped.eval()(tokens()).logits)
        found.append(PeftModel.from_pretrained(tiny_model("llama"), tmp_path / str(patched)).eval()(tokens()).logits)
    for other in found[:3]:  # sums of fp32 in another order
        torch.testing.assert_close(other, found[3], rtol=1e-4, atol=1e-5)
    assert not found[3].allclose(tiny_model("llama").eval()(tokens()).logits, rtol=1e-3)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_on_all_linear_layers_of_experts_fit_the_stock_model(family: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    wrapped = lora(model, target_modules="all-linear").eval()
    wrapped.save_pretrained(tmp_path)
    expected = PeftModel.from_pretrained(stock, tmp_path).eval()(tokens()).logits
    # Sums of fp32 in another order: the weights are transposed.
    torch.testing.assert_close(wrapped(tokens()).logits, expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


def test_stand_ins_of_replaced_layers_hold_nothing() -> None:
    model = tiny_model("llama")
    names = list(model.state_dict())
    patch_model(model, {"weights": "kernel"})
    stand_ins = [m for n, m in model.named_modules() if ".replaced_layers." in n and isinstance(m, nn.Linear)]
    assert [(m.out_features, m.in_features) for m in stand_ins[:3]] == [(48, 32), (48, 32), (32, 48)]
    assert not [p for m in stand_ins for p in m.parameters()] and list(model.state_dict()) == names
    unpatch_model(model)
    assert not any("replaced_layers" in name for name, _ in model.named_modules())


def test_adapters_that_stock_models_would_ignore_are_not_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    wrapped = lora(model, target_modules=["q_proj"], target_parameters=["mlp.gate_up_proj", "mlp.down_proj"])
    expected = wrapped.eval()(tokens()).logits
    with pytest.raises(
        UnsupportedModelError, match=r"^model\.layers\.0\.mlp: .*merge_and_unload\(\).*gate_proj, up_proj"
    ):
        wrapped.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").rglob("*.safetensors"))
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


class _OneBlock(nn.Module):
    """The first MLP or MoE block of a tiny model, so that what is trained sees one block's roundings."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.mlp = tiny_model(family).model.layers[0].mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("backend", ["torch-grouped", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_adapters_train_on_other_ways_of_computing_as_on_torch(family: str, backend: str, precision: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    block = _OneBlock(family).to(torch.float32 if precision == "fp32" else torch.bfloat16)
    parts = [name for name, _ in block.named_parameters() if name.endswith("_proj")]
    target = {"target_modules": ["gate_proj", "down_proj"]}
    if family == "mixtral":
        target = {"target_modules": [], "target_parameters": parts}
    x = torch.randn(1, 5, 32, dtype=next(block.parameters()).dtype)
    results = []
    for name in ("torch", backend):
        own, inputs = copy.deepcopy(block), x.clone().requires_grad_()
        report = patch_model(own, {"precision": precision, "backend": name, "block_size": 128})
        assert {entry.backend for entry in report.patched} == {name}
        wrapped = lora(own, **target)
        assert [key for key, p in wrapped.named_parameters() if p.requires_grad and "lora_" not in key] == []
        y = wrapped(inputs)
        y.square().sum().backward()
        found = {key: p.grad for key, p in wrapped.named_parameters() if "lora_" in key}
        assert len(found) == 4 and all(p.grad is None for key, p in wrapped.named_parameters() if key not in found)
        results.append({"output": y.detach(), "input": inputs.grad, **found})
    assert results[0].keys() == results[1].keys()
    # A dense block is one group, and the same code. Experts have other sums, each rounded to bf16 once or twice.
    # In mxfp8 a value that rounds to another bf16 may take the next code, up to 2**-3 away.
    bound = {"fp32": 1e-6, "bf16": 2**-7, "mxfp8": 2**-5}[precision] if family == "mixtral" else 0.0
    for key, expected in results[0].items():
        assert expected.norm() > 0, key
        distance = (results[1][key].double() - expected.double()).norm() / expected.double().norm()
        assert distance <= bound, (key, distance.item())


@pytest.mark.parametrize("method", ["pissa", "olora", "prune"])
def test_what_reads_the_weight_of_a_replaced_layer_gets_the_same_error(method: str) -> None:
    model = tiny_model("llama")
    patch_model(model, NeuronMoEConfig(weights="kernel"))
    copied = copy.deepcopy(model)
    layer = next(each for name, each in copied.named_modules() if name.endswith(".gate_proj"))
    assert (layer.weight.shape, layer.weight.device.type) == ((layer.out_features, layer.in_features), "meta")
    for read in (lambda w: w.detach().sum(), lambda w: w.data.zero_(), lambda w: torch.stack([w, w])):
        with refused(UnsupportedModelError, "gate_proj", got="a call of ", where="model.layers.0.mlp"):
            read(layer.weight)
    with refused(UnsupportedModelError, "gate_proj", got="a call of ", where="model.layers.0.mlp"):
        if method == "prune":
            prune.l1_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-untyped-call]
        else:
            get_peft_model(copied, LoraConfig(target_modules=["gate_proj"], init_lora_weights=method))
