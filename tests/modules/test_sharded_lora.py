"""What the first of two processes makes of adapters; tests/distributed/test_lora_layouts.py runs both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.engine import local
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.training import prepare_adapters
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens

distributed = pytest.importorskip("transformers.distributed", reason="this transformers cannot shard while loading")
pytestmark = pytest.mark.skipif(
    "dp_replicate_size" not in inspect.signature(distributed.DistributedConfig).parameters,
    reason="the sizes of this transformers' distributed_config are others",
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def _first_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of two processes, or as many as the test's parameter says, whose collectives do nothing."""
    count = getattr(request, "param", 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": str(count), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    yield
    dist.destroy_process_group()


def sharded(family: str, folder: Path, sizes: dict[str, int], **options: Any) -> Any:
    tiny_model(family, num_hidden_layers=1).save_pretrained(folder)
    config = distributed.DistributedConfig(**sizes, **options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def adapted(model: Any, **targets: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **targets))


PARTS: dict[str, tuple[dict[str, int], Any, Any]] = {
    "tp2": ({"tp_size": 2}, lambda w: torch.cat([w[:, :24], w[:, 48:72]], dim=1), lambda w: w[:, :, :24]),
    "ep2-tp2": ({"tp_size": 2, "ep_size": 2}, lambda w: w[:2], lambda w: w[:2]),
    "ep2-fsdp2": ({"fsdp_size": 2, "ep_size": 2}, lambda w: w[:2], lambda w: w[:2]),
}


@pytest.mark.parametrize("layout", PARTS)
def test_a_block_computes_with_its_part_of_the_changed_weights(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, *cuts = PARTS[layout]
    model = sharded("mixtral", tmp_path, sizes)
    plan, hooks = dict(model.tp_plan), list(model._forward_pre_hooks.values())
    patch_model(model, {"precision": "fp32"})
    wrapped = adapted(model, target_modules=["o_proj"], target_parameters=EXPERTS)
    seen: dict[str, torch.Tensor] = {}
    operator = "hf_neuron_moe.modules.ops.experts"

    def record(x: torch.Tensor, ids: Any, weights: Any, gate_up: Any, down: Any, **options: Any) -> torch.Tensor:
        seen.update(gate_up_proj=gate_up.detach().clone(), down_proj=down.detach().clone())
        return x

    monkeypatch.setattr(operator, record)
    wrapped(tokens())
    whole = tiny_model("mixtral", num_hidden_layers=1)
    experts = wrapped.get_base_model().model.layers[0].mlp.experts
    for wrapper, cut in zip((experts.base_layer, experts), cuts, strict=True):
        weight = whole.model.layers[0].mlp.experts.get_parameter(wrapper.parameter_name).detach()
        left, right, scaling = wrapper.get_delta_factors("default")
        expected = cut(weight + scaling * left @ right).detach()
        assert torch.allclose(seen[wrapper.parameter_name], expected, atol=1e-6), "one rounding or two"
        assert not torch.allclose(seen[wrapper.parameter_name], cut(weight), atol=1e-2)
    with wrapped.disable_adapter():
        wrapped(tokens())
    assert torch.equal(seen["down_proj"], cuts[1](whole.model.layers[0].mlp.experts.down_proj))

    block = block_of(experts.get_base_layer())
    assert block is not None and not block.neuron_factors
    unpatch_model(model)
    assert model.tp_plan == plan and list(model._forward_pre_hooks.values()) == hooks
    assert "_activate_lora" not in experts.__dict__


def test_adapters_that_were_there_before_patching_are_found(tmp_path: Path) -> None:
    wrapped = adapted(sharded("mixtral", tmp_path, {"fsdp_size": 2, "ep_size": 2}), target_parameters=EXPERTS)
    patch_model(wrapped, {"precision": "fp32"})
    wrapped(tokens(), labels=tokens()).loss.backward()
    grads = [param.grad for param in wrapped.parameters() if param.requires_grad]
    assert len(grads) == 4 and all(grad is not None and bool(grad.any()) for grad in grads)


def test_a_second_adapter_is_prepared_as_the_first(tmp_path: Path) -> None:
    model = sharded("llama", tmp_path, {"tp_size": 2})
    patch_model(model, {"precision": "fp32"})
    wrapped = adapted(model, target_modules=["down_proj", "o_proj"])
    wrapped(tokens())
    wrapped.add_adapter("other", LoraConfig(r=2, target_modules=["down_proj", "o_proj"]))
    prepare_adapters(wrapped)
    layer = wrapped.get_base_model().model.layers[0]
    assert [layer.mlp.down_proj.lora_A[name].in_features for name in ("default", "other")] == [48, 48]
    wrapped.set_adapter("other")
    assert wrapped(tokens()).logits.shape == (2, 9, 64)
    assert layer.mlp.neuron_shape.intermediate == 24


def test_adapters_on_biases_of_experts_are_refused(tmp_path: Path) -> None:
    model = sharded("gpt_oss", tmp_path, {"fsdp_size": 2, "ep_size": 2})
    patch_model(model, {"precision": "fp32"})
    wrapped = adapted(model, target_parameters=["mlp.experts.gate_up_proj_bias"])
    with refused(UnsupportedModelError, "the target parameter", "gate_up_proj and down_proj", got="gate_up_proj_bias"):
        wrapped(tokens())


def test_adapters_on_layers_that_are_cut_otherwise_are_refused(tmp_path: Path) -> None:
    layer = "model.layers.*.mlp"
    plan = {f"{layer}.gate_up_proj": "packed_colwise", f"{layer}.down_proj": "rowwise"}
    model = sharded("phi3", tmp_path, {"tp_size": 2}, tp_plan=plan)
    patch_model(model, {"precision": "fp32"})
    with pytest.warns(UserWarning, match="not supported for LoRA"):
        wrapped = adapted(model, target_modules=["gate_up_proj"])
    with refused(UnsupportedModelError, "the adapter", "target_modules"):
        wrapped(tokens())


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_copies_of_cut_layers_which_would_not_be_trained_are_refused(name: str, tmp_path: Path) -> None:
    model = sharded("llama", tmp_path, {"tp_size": 2})
    patch_model(model, {"precision": "fp32"})
    wrapped = adapted(model, target_modules=["q_proj"], modules_to_save=[name])
    with refused(UnsupportedModelError, "the module to save", "Leave it out of modules_to_save", got="a cut one"):
        wrapped(tokens())


def test_copies_of_whole_layers_are_trained(tmp_path: Path) -> None:
    model = sharded("llama", tmp_path, {"tp_size": 2})
    patch_model(model, {"precision": "fp32"})
    wrapped = adapted(model, target_modules=["q_proj"], modules_to_save=["norm"])
    wrapped(tokens(), labels=tokens()).loss.backward()
    assert wrapped.get_base_model().model.norm.modules_to_save["default"].weight.grad.any()


@pytest.mark.parametrize("_first_process", [4], indirect=True)
@pytest.mark.parametrize("second", ["tp_size", "dp_replicate_size"])
def test_adapters_on_layers_that_fsdp_cuts_too_are_sized_by_whole_layers(tmp_path: Path, second: str) -> None:
    model = sharded("llama", tmp_path, {second: 2, "fsdp_size": 2})
    attention = model.model.layers[0].self_attn
    outputs, inputs = attention.o_proj.weight.shape
    patch_model(model, {"precision": "fp32"})
    adapted(model, target_modules=["q_proj", "o_proj"])
    parts = 2 if second == "tp_size" else 1
    q_b, o_a = attention.q_proj.lora_B["default"].weight, attention.o_proj.lora_A["default"].weight
    assert q_b.shape == (attention.q_proj.out_features, 4) and len(local(q_b)) == len(q_b) // parts
    assert o_a.shape == (4, inputs) and local(o_a).shape == (4, inputs // parts)
    assert attention.o_proj.lora_B["default"].weight.shape == (outputs, 4)


@pytest.mark.parametrize("_first_process", [4], indirect=True)
def test_adapters_that_peft_sized_alone_are_refused(tmp_path: Path) -> None:
    model = sharded("llama", tmp_path, {"tp_size": 2, "fsdp_size": 2})
    patch_model(model, {"precision": "fp32"})
    unpatch_model(model)  # from here on peft's own sizes hold again
    wrapped = adapted(model, target_modules=["q_proj"])
    with refused(UnsupportedModelError, "the adapter", "Call patch_model before get_peft_model", got="8"):
        patch_model(wrapped, {"precision": "fp32"})
    assert not any(block_of(module) for module in wrapped.modules())
