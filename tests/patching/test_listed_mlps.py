"""MLPs of a ModuleList, as remote-code MoE models hold their experts: patched one by one, and the report says so."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_neuron_moe import patch_model
from tests.tiny_models import tiny_config, tiny_model


class RemoteMoE(nn.Module):
    """A router and a list of experts, as model files outside of transformers have them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        config = tiny_config("llama")
        self.gate = nn.Linear(config.hidden_size, experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Route every token to its best expert."""
        scores = self.gate(x).softmax(-1)
        best, out = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = best == number
            out[rows] = expert(x[rows]) * scores[rows, number, None]
        return out


def remote_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList([RemoteMoE(3), RemoteMoE(3)]), "mlp": LlamaMLP(tiny_config("llama"))})


def test_experts_in_a_list_are_named_as_computed_one_by_one() -> None:
    model = remote_model()
    stock = copy.deepcopy(model)
    report = patch_model(model, {"precision": "fp32"})
    noted = {entry.name: entry.notes for entry in report.patched}
    note = "one of 3 MLPs of a list: if these are experts, each is computed as a dense block: 3 calls in place of one"
    for layer in (0, 1):
        for expert in range(3):
            (found,) = noted[f"layers.{layer}.experts.{expert}"]
            assert found.startswith(note)
    assert noted["mlp"] == ()
    assert f"Note on layers.0.experts.0 and 5 more: {note}" in str(report)
    rows = [row for row in str(report).splitlines() if " LlamaMLP " in row]
    lists = ("layers.0.experts", "layers.1.experts")
    expected = [f"{each}.* (3 experts, computed one by one)  mlp " for each in lists]
    assert len(rows) == 3 and all(row.startswith(start) for row, start in zip(rows, expected))
    assert [entry.one_by_one for entry in report.entries] == [lists[0]] * 3 + [lists[1]] * 3 + [""]
    x = torch.randn(7, 32)
    torch.testing.assert_close(model["layers"][0](x), stock["layers"][0](x), rtol=1e-5, atol=1e-6)
    assert patch_model(model, {"precision": "fp32"}) is report


def test_a_list_of_layers_or_of_one_mlp_is_none_of_experts() -> None:
    model = tiny_model("llama")
    model.extra = nn.ModuleList([LlamaMLP(model.config)])
    model.mixed = nn.ModuleList([LlamaMLP(model.config), nn.Linear(4, 4)])
    assert all(entry.notes == () for entry in patch_model(model).patched)


def test_experts_of_other_processes_and_experts_that_pass_on_are_no_mlps() -> None:
    """Remote code keeps an expert's place: None for another process's, an Identity for one that computes nothing."""
    model = remote_model()
    model["layers"][0].experts.append(nn.Identity())
    model["layers"][1].experts = nn.ModuleDict({"0": LlamaMLP(tiny_config("llama"))})
    model["layers"][1].experts.register_module("1", None)
    entries = {entry.name: entry for entry in patch_model(model, {"precision": "fp32"}).patched}
    for name, count in (("layers.0.experts.2", 3), ("layers.1.experts.0", 1)):
        assert entries[name].one_by_one == name.rpartition(".")[0]
        assert entries[name].notes[0].startswith(f"one of {count} MLPs of a list")


def test_dense_mlps_next_to_experts_are_none() -> None:
    """A layer of LongCat-Flash has two dense MLPs in a list, and experts."""
    report = patch_model(tiny_model("longcat_flash"), {"precision": "fp32"})
    assert {entry.kind for entry in report.patched} == {"mlp", "experts"}
    assert all(entry.one_by_one == "" and not entry.notes for entry in report.patched)
    assert "one by one" not in str(report)


def test_lists_are_counted_at_the_root_and_next_to_layers_with_experts() -> None:
    config = tiny_config("llama")
    report = patch_model(nn.ModuleList([LlamaMLP(config) for _ in range(3)]), {"precision": "fp32"})
    assert all(entry.notes[0].startswith("one of 3 MLPs of a list") for entry in report.patched)
    model = tiny_model("mixtral")
    model.tail = nn.ModuleList([LlamaMLP(config) for _ in range(2)])
    entries = patch_model(model, {"precision": "fp32"}).patched
    assert [entry.one_by_one for entry in entries if entry.kind == "mlp"] == ["tail"] * 2
