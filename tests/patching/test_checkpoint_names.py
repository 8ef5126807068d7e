"""load_state_dict reads checkpoint files under their on-disk names, whole or in shards."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.trainer_utils import load_sharded_checkpoint

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.patching import checkpoint_names
from hf_neuron_moe.training import disable_moe_resume, enable_moe_resume
from tests.convert.test_every_family import QWEN3_VL
from tests.refusals import refused
from tests.tiny_models import FAMILIES, MOE, SOME_SLOW_LAYOUTS, WEIGHT_LAYOUTS, tiny_config, tiny_model, tokens


def saved(family: str, folder: Path, **options: object) -> nn.Module:
    """Save a tiny model under its on-disk names; return it."""
    model = tiny_model(family).eval()
    model.save_pretrained(folder, **options)
    return model


def other(family: str, home: str | None, seed: int = 99) -> nn.Module:
    """A model of the same shape with other weights, patched or only prepared for resuming."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    if home is None:
        enable_moe_resume(model)
    else:
        patch_model(model, {"precision": "fp32", "weights": home})
    return model


def assert_equal_weights(actual: nn.Module, expected: nn.Module) -> None:
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", [*WEIGHT_LAYOUTS, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_file_loads_strictly(family: str, home: str | None, tmp_path: Path) -> None:
    source = saved(family, tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert (set(on_disk) != set(source.state_dict())) == (family in MOE)
    model = other(family, home)
    result = model.load_state_dict(on_disk, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal_weights(model, source)


def test_stock_transformers_leaves_the_experts_as_they_are(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    before = model.model.layers[0].mlp.experts.gate_up_proj.clone()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    # If this fails, transformers has learned to do it itself and the pre-hook can go.
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, before)


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("home", [*WEIGHT_LAYOUTS, None])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("order", range(3))
def test_shards_that_split_one_layers_experts(family: str, home: str | None, order: int, tmp_path: Path) -> None:
    source = saved(family, tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    groups = [{key for key in load_file(shard) if ".layers.0." in key and "expert" in key} for shard in shards]
    assert sum(bool(group) for group in groups) > 2, "the experts of a layer are meant to be spread over shards"
    random.Random(order).shuffle(shards)
    model = other(family, home)
    for shard in shards:
        model.load_state_dict(load_file(shard), strict=False)
    assert_equal_weights(model, source)


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
def test_load_sharded_checkpoint_of_transformers(home: str, tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path, max_shard_size="60KB")
    model = other("mixtral", home)
    load_sharded_checkpoint(model, str(tmp_path), strict=False)
    assert_equal_weights(model, source)


def test_a_checkpoint_without_some_experts_names_them(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    missing = on_disk.pop(name)
    model = other("mixtral", "stock")
    kept = model.model.layers[1].mlp.experts.gate_up_proj[2, :48].clone()
    assert not torch.equal(kept, missing)
    with pytest.raises(RuntimeError, match=f'Missing key.s. in state_dict: "{name}"'):
        model.load_state_dict(on_disk, strict=True)
    result = model.load_state_dict(on_disk, strict=False)
    assert result.missing_keys == [name]
    experts, expected = model.model.layers[1].mlp.experts, source.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj[2, :48], kept)
    assert torch.equal(experts.gate_up_proj[2, 48:], expected.gate_up_proj[2, 48:])
    assert torch.equal(experts.gate_up_proj[3], expected.gate_up_proj[3])


@pytest.mark.parametrize("home", [*WEIGHT_LAYOUTS, None])
def test_pieces_of_another_dtype_leave_the_other_pieces_as_they_are(home: str | None, tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    on_disk = {name: value.bfloat16() for name, value in load_file(tmp_path / "model.safetensors").items()}
    absent, exact = (f"model.layers.0.block_sparse_moe.experts.{number}.w1.weight" for number in (1, 2))
    del on_disk[absent]
    on_disk[exact] = torch.full((48, 32), 1 + 2.0**-20)  # bf16 would make it 1
    model = other("mixtral", home)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    kept = model.state_dict()[name][1, :48].clone()
    model.load_state_dict(on_disk, strict=False)
    loaded = model.state_dict()[name]
    assert torch.equal(loaded[1, :48], kept)
    assert torch.equal(loaded[2, :48], on_disk[exact])
    other_piece = on_disk["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    assert torch.equal(loaded[1, 48:], other_piece.float())


def test_wrong_shapes_and_strays_are_named(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    on_disk[name] = on_disk[name].T.contiguous()
    on_disk["model.layers.0.block_sparse_moe.experts.9.w2.weight"] = torch.zeros(32, 48)
    with pytest.raises(RuntimeError) as caught:
        other("mixtral", "kernel").load_state_dict(on_disk)
    message = str(caught.value)
    assert f"size mismatch for {name}: copying a param with shape torch.Size([48, 32])" in message
    assert 'Unexpected key(s) in state_dict: "model.layers.0.block_sparse_moe.experts.9.w2.weight"' in message


@pytest.mark.parametrize("home", [*WEIGHT_LAYOUTS, None])
def test_a_model_from_disk_and_one_in_a_wrapper(home: str | None, tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    wrapper = nn.ModuleDict({"policy": loaded})
    if home is None:
        enable_moe_resume(wrapper)
    else:
        patch_model(wrapper, {"weights": home})
    with torch.no_grad():
        for param in wrapper.parameters():
            param.zero_()
    on_disk = load_file(tmp_path / "model.safetensors")
    wrapper.load_state_dict({f"policy.{key}": value for key, value in on_disk.items()})
    assert_equal_weights(loaded, source)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_meta_models_are_filled_from_a_checkpoint_file(home: str, tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path)
    model = other("mixtral", home).to("meta")
    on_disk = load_file(tmp_path / "model.safetensors")
    some = {key: value for key, value in on_disk.items() if "experts.1.w3" not in key}
    with pytest.raises(RuntimeError, match=r"meta device and .*experts.1.w3.* are not in the checkpoint"):
        model.load_state_dict(some, strict=False, assign=True)
    model.load_state_dict(on_disk, assign=True)
    assert_equal_weights(model, source)


def test_in_memory_names_still_load_and_the_hook_comes_and_goes() -> None:
    model, source = other("mixtral", None), tiny_model("mixtral")
    enable_moe_resume(model)
    assert len(model._load_state_dict_pre_hooks) == 1
    model.load_state_dict(source.state_dict(), strict=True)
    assert_equal_weights(model, source)
    patch_model(model)
    unpatch_model(model)
    assert len(model._load_state_dict_pre_hooks) == 1, "patching removes only what it installed"
    disable_moe_resume(model)
    assert len(model._load_state_dict_pre_hooks) == 0
    disable_moe_resume(model)
    patch_model(model)
    assert len(model._load_state_dict_pre_hooks) == 1
    unpatch_model(model)
    assert len(model._load_state_dict_pre_hooks) == 0


def test_copies_of_a_model_have_their_own_hook(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path)
    model = other("mixtral", None)
    twin = copy.deepcopy(model)
    disable_moe_resume(model)
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal_weights(twin, source)


class Reordered:
    """A conversion that keeps names and shapes and changes the tensors: rows in reverse order."""

    def convert(self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], target_patterns: list[str], **_):
        (values,) = input_dict.values()
        value = values[0] if isinstance(values, list) else values
        return {target_patterns[0]: value.flip(0)}

    @property
    def reverse_op(self) -> Reordered:
        return self


@pytest.mark.parametrize("extra", [False, True], ids=["same names only", "with a name of its own"])
def test_same_name_and_shape_but_another_order_is_never_guessed(extra: bool) -> None:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    model = tiny_model("llama")
    model._weight_conversions = [WeightConverter("q_proj.weight", "q_proj.weight", [Reordered()])]
    if extra:
        model._weight_conversions.append(WeightRenaming("old_norm.weight", "model.norm.weight"))
    enable_moe_resume(model)
    in_memory = model.state_dict()
    query = "model.layers.0.self_attn.q_proj.weight"
    expected = in_memory[query].clone()
    model.load_state_dict(in_memory)
    assert torch.equal(model.state_dict()[query], expected)
    plain = {key: value.clone() for key, value in in_memory.items()}
    if not extra:
        with refused(UnsupportedModelError, query, where="load_state_dict"):
            model.load_state_dict(plain)
        return
    plain["old_norm.weight"] = plain.pop("model.norm.weight")
    model.load_state_dict(plain)
    assert torch.equal(model.state_dict()[query], expected.flip(0))


def test_nothing_is_converted_where_the_model_has_no_conversion() -> None:
    assert checkpoint_names.weight_conversions(tiny_model("llama")) == []
    assert len(checkpoint_names.weight_conversions(tiny_model("mixtral"))) == 1
    assert tiny_model("llama")(tokens()).logits.shape == (2, 9, 64)


@pytest.mark.parametrize("part", ["", "model", "model.language_model", "model.language_model.layers.0"])
@pytest.mark.parametrize("from_files", [True, False])
def test_tensors_that_transformers_turns_by_shape_are_saved_as_stock(
    from_files: bool, part: str, tmp_path: Path
) -> None:
    """Its experts are square here: a tensor that is written transposed comes back as another one of the same shape."""
    text = {**QWEN3_VL["text_config"], "moe_intermediate_size": 16}
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**{**QWEN3_VL, "text_config": text}))
    model.save_pretrained(tmp_path / "stock")
    if from_files:
        model = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "stock")
    before = model.__dict__.get("_weight_conversions")
    patch_model(model.get_submodule(part), {"precision": "bf16", "weights": "kernel"})
    stock = load_file(tmp_path / "stock" / "model.safetensors")
    for whole, prefix in ((model, ""), (model.model, "model."), (pickle.loads(pickle.dumps(model)), "")):
        whole.save_pretrained(tmp_path / "patched")
        saved = load_file(tmp_path / "patched" / "model.safetensors")
        patched = {f"{prefix}{name}": value for name, value in saved.items()}
        assert patched.keys() == {name for name in stock if name.startswith(prefix)}
        assert all(torch.equal(value, stock[name]) for name, value in patched.items())
    if part:
        return
    transposed = {name: value.mT if name.endswith("experts.down_proj") else value for name, value in stock.items()}
    model.load_state_dict(transposed)
    assert torch.equal(model.state_dict()[_DOWN], stock[_DOWN])  # turned by its shape
    unpatch_model(model)
    assert model.__dict__.get("_weight_conversions") is before


_DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
