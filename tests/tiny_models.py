"""Tiny models of the families that are patched, in one place: names, configurations, and what each must report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 64
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "phi3": (Phi3Config, {}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 8}),
    "llama_biased": (LlamaConfig, {"mlp_bias": True}),
    "mixtral": (MixtralConfig, _LOCAL),
    "qwen2_moe": (Qwen2MoeConfig, {**_ROUTED, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": (Qwen3MoeConfig, {**_ROUTED, "moe_intermediate_size": 24, "head_dim": 8}),
    "olmoe": (OlmoeConfig, _ROUTED),
    "gpt_oss": (GptOssConfig, {**_LOCAL, "head_dim": 8, "swiglu_limit": 0.75}),
    "deepseek_v4": (
        DeepseekV4Config,
        {
            **_LOCAL,
            "head_dim": 8,
            "qk_rope_head_dim": 4,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "mlp_layer_types": ["moe", "moe"],
            "swiglu_limit": 0.5,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "head_dim": 8,
            "global_head_dim": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "llama4": (
        Llama4TextConfig,
        {
            **_LOCAL,
            "head_dim": 8,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "longcat_flash": (
        LongcatFlashConfig,
        {
            "num_layers": 1,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
        },
    ),
    "dbrx": (
        DbrxConfig,
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "jetmoe": (
        JetMoeConfig,
        {**_LOCAL, "kv_channels": 8, "num_key_value_heads": 2, "activation_function": "silu"},
    ),
    "nemotron_h": (
        NemotronHConfig,
        {
            "layers_block_type": ["moe", "attention", "moe"],
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
    ),
}
MUSE_SPARK: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "moe_intermediate_size": 24,
    "moe_hidden_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "mlp_layer_types": ["sparse", "dense"],
}
"""Of a tiny muse_spark_text, which has no class for language modelling of its own."""
_LATER: dict[str, dict[str, Any]] = {
    "hy_v4": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_layer_types": ["sparse", "sparse"],
        "swiglu_limit": 0.5,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
    },
    "minimax_m3_vl_text": {
        **_LOCAL,
        "head_dim": 8,
        "rotary_dim": 4,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "swiglu_limit": 0.75,
    },
    "inkling2_text": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "mlp_gate_softcap": 0.5,
        "mlp_up_softcap": 1.0,
        "unpadded_vocab_size": 64,
    },
}
LATER_GATES = tuple(family for family in _LATER if family in CONFIG_MAPPING)
"""Families with other gates that the oldest supported transformers lacks."""
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
FAMILIES = (*DENSE, *MOE)
OTHER_GATES = ("gpt_oss", "deepseek_v4", "gemma4", "nemotron_h")
OTHER_CALLS = ("llama4", "longcat_flash", "dbrx", "jetmoe")
"""Families whose experts have no flags and are called in other ways."""
"""Families whose experts have another gate than ``silu(gate) * up``, biases, or another layout."""
WEIGHT_LAYOUTS = ("stock", "kernel")
SOME_SLOW_LAYOUTS = ["stock", pytest.param("kernel", marks=pytest.mark.slow)]
"""Both, one of them in the fast run."""


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a tiny model."""
    if family in _LATER:
        return AutoConfig.for_model(family, **{**_BASE, **_LATER[family], **changes})
    kind, own = _FAMILIES[family]
    return kind(**{**_BASE, **own, **changes})


def tiny_model(family: str, **changes: Any) -> nn.Module:
    """Return a tiny causal language model with weights large enough for the blocks to matter."""
    torch.default_generator.manual_seed(7)  # the one of all devices takes a tenth of the whole
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if any(part in name for part in ("mlp", "experts", "feed_forward")):
                param.normal_(std=0.2)
    return model.train()


def tokens(batch: int = 2, length: int = 9, seed: int = 3) -> Tensor:
    """Return random token ids ``[batch, length]``."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything patching may touch: module identities and types, attributes, hooks, parameter identities and bytes."""
    shot: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        shot[f"module {name}"] = (id(module), type(module))
        shot[f"children {name}"] = [(key, id(child)) for key, child in module._modules.items()]
        shot[f"attributes {name}"] = list(module.__dict__)
        shot[f"training {name}"] = module.training
        for key, value in module.__dict__.items():
            if key.endswith("_hooks"):
                shot[f"hooks {name} {key}"] = list(value.items())
        for key, param in module._parameters.items():
            if param is not None:
                values = None if param.is_meta else param.detach().clone()
                gradient = None if param.grad is None else param.grad.clone()
                facts = (id(param), param.requires_grad, param.dtype, param.device, tuple(param.shape))
                shot[f"parameter {name}.{key}"] = (facts, values, gradient)
    return shot


def assert_same_snapshot(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two snapshots exactly; tensors bit for bit."""
    assert actual.keys() == expected.keys()
    for key, before in expected.items():
        after = actual[key]
        if not key.startswith("parameter "):
            assert after == before, key
            continue
        assert after[0] == before[0], key
        for mine, theirs in zip(after[1:], before[1:], strict=True):
            assert (mine is None) == (theirs is None), key
            # Bytes, not values: memory that nobody initialized may hold NaN.
            assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), key
