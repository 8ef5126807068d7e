from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from hf_neuron_moe.demo.upcycle import Experts, choose_layers, upcycle

VOCAB = 97


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    options: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Deliberately none of the defaults of either family, so that a value left behind shows in the logits.
        "head_dim": 16,
        "rms_norm_eps": 3e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids_BS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids_BS).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts", [4, 8])
def test_identical_experts_compute_the_llama(tied: bool, experts: int) -> None:
    llama = tiny_llama(tie_word_embeddings=tied)
    mixtral = upcycle(llama, Experts(experts=experts, noise=0.0))
    expected = logits(llama)
    # The two top-k weights sum to 1 within one rounding and the two equal expert outputs are added in fp32, so the
    # logits (of order 1) agree to a few units in the last place of three layers.
    torch.testing.assert_close(logits(mixtral), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.5


def test_options_are_carried_over() -> None:
    llama = tiny_llama()
    config = upcycle(llama, Experts(layers=[0, 2], experts=4, top_k=3)).config
    assert (config.num_hidden_layers, config.num_local_experts, config.num_experts_per_tok) == (2, 4, 3)
    assert config.rope_parameters["rope_theta"] == 777.0
    assert config.rms_norm_eps == 3e-3
    assert config.head_dim == 16
    assert config.tie_word_embeddings is True
    assert config.sliding_window is None


def test_part_of_the_layers() -> None:
    llama = tiny_llama()
    mixtral = upcycle(llama, Experts(layers=[0, 2], noise=0.0))
    kept = [llama.model.layers[0], llama.model.layers[2]]
    for position, layer in enumerate(kept):
        layer.self_attn.layer_idx = position  # the index of its slot in the key-value cache
    llama.model.layers = torch.nn.ModuleList(kept)
    # Same rule as above, two layers.
    torch.testing.assert_close(logits(mixtral), logits(llama), rtol=1e-5, atol=1e-5)


def test_choice_of_layers() -> None:
    assert choose_layers(30, None) == list(range(30))
    assert choose_layers(30, 5) == [0, 1, 2, 28, 29]
    assert choose_layers(30, 4, "first") == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"layers must be 1\.\.30, got 31"):
        choose_layers(30, 31)
    with pytest.raises(ValueError, match="ends, first"):
        choose_layers(30, 3, "last")


def test_noise_is_relative_and_different_per_expert() -> None:
    llama = tiny_llama()
    mixtral = upcycle(llama, Experts(noise=0.1))
    original = llama.model.layers[1].mlp.down_proj.weight
    experts = mixtral.model.layers[1].mlp.experts.down_proj
    relative = ((experts - original).square().mean(dim=(1, 2)) / original.square().mean()).sqrt()
    # 1536 normal samples per expert: their RMS is within 10 % of the requested one (5 standard deviations).
    torch.testing.assert_close(relative, torch.full((4,), 0.1), rtol=0.1, atol=0.0)
    assert not torch.equal(experts[0], experts[1])


def test_the_model_is_in_the_llamas_dtype_with_its_generation_settings_and_a_small_router() -> None:
    llama = tiny_llama().bfloat16()
    assert llama.generation_config is not None
    llama.generation_config.max_new_tokens = 7
    mixtral = upcycle(llama)
    assert {param.dtype for param in mixtral.parameters()} == {torch.bfloat16} and not mixtral.training
    assert mixtral.generation_config.max_new_tokens == 7
    deviation = mixtral.model.layers[0].mlp.gate.weight.float().std().item()
    assert deviation == pytest.approx(0.02, rel=0.3)  # of 128 values


def test_seed_decides_everything() -> None:
    llama = tiny_llama()
    first, same, other = (upcycle(llama, Experts(seed=seed)).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], same[key]) for key in first)
    for name in ("gate.weight", "experts.gate_up_proj"):
        assert not torch.equal(first[f"model.layers.0.mlp.{name}"], other[f"model.layers.0.mlp.{name}"])


def test_saved_checkpoint_is_a_stock_one(tmp_path) -> None:
    mixtral = upcycle(tiny_llama())
    mixtral.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, MixtralForCausalLM)
    assert torch.equal(logits(loaded), logits(mixtral))


def test_llama_is_left_alone() -> None:
    llama = tiny_llama()
    before = {key: value.clone() for key, value in llama.state_dict().items()}
    upcycle(llama).model.embed_tokens.weight.data.zero_()
    assert all(torch.equal(before[key], value) for key, value in llama.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({"attention_bias": True}, {}, "attention_bias"),
        ({"mlp_bias": True}, {}, "mlp_bias"),
        ({}, {"experts": 4, "top_k": 5}, r"top_k must be 1\.\.4"),
        ({}, {"experts": 4, "top_k": 0}, r"top_k must be 1\.\.4"),
    ],
)
def test_refusals(changes: dict[str, object], options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        upcycle(tiny_llama(**changes), Experts(**options))
