#!/usr/bin/env python3
"""Build a gpt-oss checkpoint with real weights by upcycling a Llama checkpoint; its experts are in MXFP4.

    python scripts/upcycle_gpt_oss.py --model .cache/smollm2-135m-instruct --layers 16 --out .cache/smollm2-gpt-oss

Attention, norms and embeddings are copied, every expert starts from its layer's MLP, the router is new
(``hf_neuron_moe/demo/upcycle.py``). gpt-oss's gate computes a Llama's MLP with other numbers: ``silu(g)`` is 1.702
times its ``x s(1.702 x)`` at ``x = g / 1.702``, and a bias of -1 takes its ``up + 1`` back. Attention's sinks are so
low that they take nothing. With ``noise=0`` the model computes what the Llama computes, as far as no value meets
gpt-oss's limits of 7.

``--bf16`` leaves the experts as they are; else each 32 weights are rounded to E2M1 with a common power of two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM
from upcycle_mixtral import upcycled

from hf_neuron_moe.demo.upcycle import ROUTER_STD, SHARED_OPTIONS, USUAL, Experts, perturbed_copies, with_new_layers

ALPHA = 1.702  # of gpt-oss's Swish
NO_SINK = -1e4  # a sink's logit that takes no attention
GROUP = 32  # weights that share a scale
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def upcycle(llama: LlamaForCausalLM, wanted: Experts = USUAL) -> GptOssForCausalLM:
    """Return a gpt-oss made from a Llama's weights, in its dtype and in eval mode.

    Experts are ``gate_up_proj [E, H, 2I]``, gate and up in turn,
    and ``down_proj [E, I, H]``.

    Raises:
        ValueError: the Llama has biases of its own or another activation than SiLU, or `top_k` is out of range.
    """
    if llama.config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"the Llama's hidden_act must be silu, which gpt-oss computes, got {llama.config.hidden_act}")
    if llama.config.attention_bias or llama.config.mlp_bias:
        raise ValueError("the Llama has attention_bias or mlp_bias; this script sets gpt-oss's biases itself")
    if not 1 <= wanted.top_k <= wanted.experts:
        raise ValueError(f"top_k must be 1..{wanted.experts} (the number of experts), got {wanted.top_k}")
    taken = wanted.taken_of(llama)
    shared = {name: getattr(llama.config, name) for name in SHARED_OPTIONS}
    config = GptOssConfig(
        **shared,
        num_hidden_layers=len(taken),
        num_local_experts=wanted.experts,
        num_experts_per_tok=wanted.top_k,
        layer_types=["full_attention"] * len(taken),
    )
    generator = torch.Generator().manual_seed(wanted.seed)
    gpt_oss = GptOssForCausalLM(config).to(llama.dtype)
    attention = gpt_oss.model.layers[0].self_attn.state_dict().items()
    inert = {
        f"self_attn.{key}": torch.full_like(value, NO_SINK if key == "sinks" else 0)
        for key, value in attention
        if key == "sinks" or key.endswith(".bias")
    }
    new = (inert | _mlp(llama, source, wanted, generator) for source in taken)
    gpt_oss.load_state_dict(with_new_layers(llama, taken, new))
    if llama.generation_config is not None:
        gpt_oss.generation_config = llama.generation_config
    return gpt_oss.eval()


def _mlp(llama: LlamaForCausalLM, layer: int, wanted: Experts, generator: torch.Generator) -> dict[str, Tensor]:
    """Return one layer's ``mlp.*``: experts from the Llama's MLP, and a new router."""
    mlp = llama.model.layers[layer].mlp
    gate_up_2IH = torch.stack([mlp.gate_proj.weight.detach() / ALPHA, mlp.up_proj.weight.detach()], dim=1).flatten(0, 1)
    down_HI = mlp.down_proj.weight.detach() * ALPHA
    (H, inner), dtype, E = down_HI.shape, down_HI.dtype, wanted.experts
    bias_E2I = torch.zeros(E, 2 * inner, dtype=dtype)
    bias_E2I[:, 1::2] = -1
    return {
        "mlp.router.weight": (torch.randn(E, H, generator=generator) * ROUTER_STD).to(dtype),
        "mlp.router.bias": torch.zeros(E, dtype=dtype),
        "mlp.experts.gate_up_proj": perturbed_copies(gate_up_2IH, wanted, generator).transpose(1, 2).contiguous(),
        "mlp.experts.gate_up_proj_bias": bias_E2I,
        "mlp.experts.down_proj": perturbed_copies(down_HI, wanted, generator).transpose(1, 2).contiguous(),
        "mlp.experts.down_proj_bias": torch.zeros(E, H, dtype=dtype),
    }


def to_mxfp4(weight_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to MXFP4: codes uint8 ``[E, N, K/32, 16]``, low nibble first, and scales uint8 ``[E, N, K/32]``.

    A group's scale is the power of two that brings its largest value to 4..8, as the OCP specification has it; what is
    then above 6 becomes 6. Other values go to the nearest, halfway ones to the even code.

    Raises:
        ValueError: K is no multiple of 32, or a weight is NaN or infinite.
    """
    if weight_ENK.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs sizes that are multiples of {GROUP}, got {weight_ENK.shape[-1]}; use --bf16")
    if not weight_ENK.isfinite().all():
        raise ValueError("MXFP4 needs finite weights, got NaN or infinite ones")
    groups = weight_ENK.float().contiguous().unflatten(-1, (-1, GROUP))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)).exponent - 3
    scaled = torch.ldexp(groups, -exponent)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    up = torch.bucketize(scaled.abs(), middles, right=True)
    down = torch.bucketize(scaled.abs(), middles)
    codes = torch.where(up % 2 == 0, up, down) | (scaled < 0).long() << 3
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, (exponent[..., 0] + 127).to(torch.uint8)


def save_mxfp4(model: GptOssForCausalLM, folder: Path) -> None:
    """Write a checkpoint as gpt-oss's are: experts as ``*_blocks`` and ``*_scales``, the rest in bf16."""
    tensors = {}
    for key, value in model.state_dict().items():
        if key.endswith((".gate_up_proj", ".down_proj")):
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = to_mxfp4(value.transpose(1, 2))
        elif key != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[key] = value.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = GptOssConfig(**model.config.to_dict())
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def main() -> None:
    """Load a Llama, upcycle it, save it with its tokenizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--bf16", action="store_true", help="do not round the experts to MXFP4")
    args, model = upcycled(parser, upcycle)
    if args.bf16:
        model.to(torch.bfloat16).save_pretrained(args.out)
    else:
        save_mxfp4(model, args.out)


if __name__ == "__main__":
    main()
