"""Checkpoints of a patched model are stock checkpoints, in both directions and by every way of saving."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hf_neuron_moe import patch_model, unpatch_model
from tests.tiny_models import FAMILIES, WEIGHT_LAYOUTS, tiny_model, tokens


def patched_and_stock(family: str, home: str) -> tuple[nn.Module, nn.Module]:
    stock = tiny_model(family).eval()
    patched = copy.deepcopy(stock)
    patch_model(patched, {"precision": "fp32", "weights": home})
    return patched, stock


def scrambled(model: nn.Module) -> nn.Module:
    """The same model with other weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_are_equal_and_load_strictly_both_ways(family: str, home: str) -> None:
    patched, stock = patched_and_stock(family, home)
    expected, actual = stock.state_dict(), patched.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(actual[name].shape == expected[name].shape for name in expected)
    scrambled(patched).load_state_dict(expected, strict=True)
    assert all(torch.equal(value, expected[name]) for name, value in patched.state_dict().items())
    scrambled(stock).load_state_dict(actual, strict=True)
    unpatch_model(patched)
    assert torch.equal(patched(tokens()).logits, stock(tokens()).logits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen2_moe"])
def test_save_pretrained_writes_stock_files(family: str, home: str, tmp_path: Path) -> None:
    patched, stock = patched_and_stock(family, home)
    patched.save_pretrained(tmp_path / "patched")
    stock.save_pretrained(tmp_path / "stock")
    assert (tmp_path / "patched" / "config.json").read_text() == (tmp_path / "stock" / "config.json").read_text()
    with (
        safe_open(tmp_path / "patched" / "model.safetensors", "pt") as mine,
        safe_open(tmp_path / "stock" / "model.safetensors", "pt") as theirs,
    ):
        assert sorted(mine.keys()) == sorted(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118 -- safe_open is not iterable
            assert torch.equal(mine.get_tensor(name), theirs.get_tensor(name)), name
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(reloaded(tokens()).logits, stock(tokens()).logits)
    # And once more through a model that came from disk, which carries its own conversion list.
    patch_model(reloaded, {"precision": "fp32", "weights": home})
    reloaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(tokens()).logits, stock(tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_a_state_dict_share_no_memory_and_are_contiguous(family: str, tmp_path: Path) -> None:
    """As in the stock model: views of one storage would pass for tied weights, of which savers drop all but one."""
    patched, stock = patched_and_stock(family, "kernel")
    values = patched.state_dict()
    places = {value.untyped_storage().data_ptr() for value in values.values()}
    assert len(places) == len(values) == len(stock.state_dict())
    assert all(value.is_contiguous() for value in values.values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in values.values())
    save_file(values, tmp_path / "weights.safetensors")  # refuses shared memory and strides
    written = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(written[name], value) for name, value in stock.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_messages_about_bad_state_dicts_are_stock(family: str) -> None:
    patched, stock = patched_and_stock(family, "kernel")
    names = [name for name in stock.state_dict() if "mlp" in name]
    bad = dict(stock.state_dict())
    del bad[names[0]]
    bad[names[-1]] = bad[names[-1]][..., :-1]
    bad["model.layers.0.mlp.stray"] = torch.zeros(1)
    assert refused_lines(stock, bad) == refused_lines(patched, bad)
    results = [
        model.load_state_dict({k: v for k, v in bad.items() if k != names[-1]}, False) for model in (stock, patched)
    ]
    assert set(results[0].missing_keys) == set(results[1].missing_keys) == {names[0], names[-1]}
    assert results[0].unexpected_keys == results[1].unexpected_keys == ["model.layers.0.mlp.stray"]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_transposed_weights_and_missing_biases_are_told_as_in_stock(family: str) -> None:
    patched, stock = patched_and_stock(family, "kernel")
    names = [name for name in stock.state_dict() if "mlp" in name and ".layers.1." in name]
    bad = dict(stock.state_dict())
    bad[names[-1]] = bad[names[-1]].transpose(-1, -2)
    biases = [name for name in names if "experts" in name and name.endswith("bias")]
    for name in biases:
        del bad[name]
    assert refused_lines(stock, bad) == refused_lines(patched, bad)
    assert all(
        name in str(refused_lines(patched, bad)) for name in [*biases, names[-1]] if "bias" not in names[-1] or biases
    )


@pytest.mark.parametrize("strict", [False, True])
def test_a_block_that_is_not_loaded_strictly_tells_nothing(strict: bool) -> None:
    """nn.Module.load_state_dict always asks its modules to be strict; others may not."""
    patched, _ = patched_and_stock("llama", "kernel")
    missing: list[str] = []
    unexpected: list[str] = []
    weights = {"mlp.gate_up_proj": torch.zeros(96, 32)}
    block = patched.get_submodule("model.layers.0.mlp")
    block._load_from_state_dict(weights, "mlp.", {}, strict, missing, unexpected, [])  # type: ignore[arg-type]
    assert (len(missing), unexpected) == ((3, ["mlp.gate_up_proj"]) if strict else (0, []))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_names_are_in_the_order_of_stock_and_tensors_kept_are_part_of_the_graph(family: str) -> None:
    patched, stock = patched_and_stock(family, "kernel")
    assert list(patched.state_dict()) == list(stock.state_dict())
    kept = patched.state_dict(keep_vars=True)
    assert all(value.requires_grad for value in kept.values())
    sum(value.sum() for value in kept.values()).backward()
    assert all(param.grad is not None and bool((param.grad == 1).all()) for param in patched.parameters())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_buffer_that_somebody_adds_to_a_block_is_where_it_is_in_stock(family: str) -> None:
    place = "model.layers.0.mlp" + (".experts" if family == "mixtral" else "")
    patched, stock = patched_and_stock(family, "kernel")
    for model in (patched, stock):
        model.get_submodule(place).register_buffer("extra", torch.ones(2))
    values = stock.state_dict()
    assert list(patched.state_dict()) == list(values)
    del values[f"{place}.extra"]
    assert patched.load_state_dict(values, strict=False).missing_keys == [f"{place}.extra"]


def refused_lines(model: nn.Module, bad: dict[str, torch.Tensor]) -> list[str]:
    """What a model says of tensors that it does not take, sorted."""
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(bad)
    return sorted(lines(caught.value))


def lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines()]


def test_kernel_names_in_a_state_dict_are_unexpected() -> None:
    patched, stock = patched_and_stock("llama", "kernel")
    extra = {"model.layers.0.mlp.gate_up_proj": torch.zeros(96, 32)}
    result = patched.load_state_dict({**stock.state_dict(), **extra}, strict=False)
    assert result.unexpected_keys == list(extra)
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in patched.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", ["gate_proj", "up_proj"])
def test_one_half_of_a_fused_weight_replaces_that_half(half: str, dtype: torch.dtype) -> None:
    patched, stock = patched_and_stock("llama", "kernel")
    names = [f"model.layers.0.mlp.{part}.weight" for part in ("gate_proj", "up_proj")]
    (name,) = (key for key in names if half in key)
    (other,) = (key for key in names if half not in key)
    result = patched.load_state_dict({name: torch.ones(48, 32, dtype=dtype)}, strict=False)
    assert name not in result.missing_keys
    assert other in result.missing_keys
    values = patched.state_dict()
    assert torch.equal(values[name], torch.ones(48, 32))
    assert torch.equal(values[other], stock.state_dict()[other])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_assign_takes_the_dtype_of_the_checkpoint(family: str) -> None:
    patched, stock = patched_and_stock(family, "kernel")
    patched.load_state_dict(stock.to(torch.bfloat16).state_dict(), assign=True)
    assert {param.dtype for param in patched.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in patched.state_dict().items())


def test_half_a_checkpoint_cannot_fill_a_meta_parameter() -> None:
    patched, stock = patched_and_stock("llama", "kernel")
    patched.to("meta")
    half = {name: value for name, value in stock.state_dict().items() if "up_proj" not in name}
    with pytest.raises(RuntimeError, match=r"meta device and .*up_proj.* are not in the checkpoint"):
        patched.load_state_dict(half, strict=False, assign=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_optimizer_states_have_the_stock_shapes_in_the_stock_home(family: str) -> None:
    patched, stock = patched_and_stock(family, "stock")
    shapes = []
    for model in (patched.train(), stock.train()):
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        by_name = {name: optimizer.state[param] for name, param in model.named_parameters()}
        shapes.append({name: state["exp_avg"].shape for name, state in by_name.items()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_kernel_home_parameters_have_the_documented_layout(family: str) -> None:
    patched, stock = patched_and_stock(family, "kernel")
    values = stock.state_dict()
    params = dict(patched.named_parameters())
    if family == "mixtral":
        prefix = "model.layers.0.mlp.experts"
        assert params[f"{prefix}.gate_up_proj"].shape == (4, 32, 96)
        assert params[f"{prefix}.down_proj"].shape == (4, 48, 32)
        assert torch.equal(params[f"{prefix}.gate_up_proj"], values[f"{prefix}.gate_up_proj"].transpose(1, 2))
        assert all(param.is_contiguous() for param in params.values())
        return
    prefix = "model.layers.0.mlp"
    assert params[f"{prefix}.gate_up_proj"].shape == (96, 32)
    assert params[f"{prefix}.down_proj"].shape == (32, 48)
    if family == "llama":
        halves = [values[f"{prefix}.{name}.weight"] for name in ("gate_proj", "up_proj")]
        assert torch.equal(params[f"{prefix}.gate_up_proj"], torch.cat(halves))
