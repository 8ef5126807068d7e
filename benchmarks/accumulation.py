"""Errors of ``accumulation="convention"`` and ``"device"`` against float64, in one JSON object.

    python benchmarks/accumulation.py    # ten seconds on a CPU

An error is ``|result - float64| / |float64|`` (Frobenius norms) with bf16 operands: of the output of ``shard_on_i`` by
experts per token K, and of the down weights' gradient by blocks per expert. H = 512, I = 256, B = 128.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from hf_neuron_moe import kernels

H, I, B = 512, 256, 128  # noqa: E741
SPEC = kernels.MoECTESpec("shard_on_i", shard_on_I=kernels.ShardOnIConfig(checkpoint_activation=True))


def operands(T: int, E: int, K: int) -> dict[str, Any]:
    """Return a call with random operands, in which every expert has T * K / E tokens."""
    generator = torch.Generator().manual_seed(0)
    index = (torch.arange(T)[:, None] + torch.arange(K)) % E
    plan = kernels.build_block_plan(kernels.expert_mask(index, E), B, top_k=K)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    return {
        "hidden_states": torch.cat([draw(T, H), torch.zeros(1, H).bfloat16()]),
        "expert_affinities_masked": kernels.masked_affinities(index, torch.rand(T, K, generator=generator), E),
        "gate_up_proj_weight": draw(E, H, 2, I) * H**-0.5,
        "down_proj_weight": draw(E, I, H) * I**-0.5,
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
        "device_limits": False,
    }


def exact(given: dict[str, Any], dout_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the down weights in float64."""
    x_TH, dout_TH = given["hidden_states"].double(), dout_TH.double()
    gate_EKTI = torch.einsum("th,ehki->ekti", x_TH, given["gate_up_proj_weight"].double())
    inter_ETI = torch.nn.functional.silu(gate_EKTI[:, 0]) * gate_EKTI[:, 1]
    inter_ETI *= given["expert_affinities_masked"].double().view(len(x_TH), -1).T[..., None]
    output = torch.einsum("eti,eih->th", inter_ETI, given["down_proj_weight"].double())
    return output, torch.einsum("eti,th->eih", inter_ETI, dout_TH)


def errors(T: int, E: int, K: int) -> dict[str, list[float]]:
    """Return by accumulation the errors of output and gradient."""
    given, found = operands(T, E, K), {}
    dout_TH = torch.randn(T + 1, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    truth = exact(given, dout_TH)
    for way in ("convention", "device"):
        saved = kernels.moe_cte(**given, spec=SPEC, accumulation=way)
        names = {"gate_up_proj_act_checkpoint_T": saved.gate_up_activations_T, "output_hidden_states_grad": dout_TH}
        names["down_proj_act_checkpoint"] = saved.down_activations
        grads = kernels.blockwise_mm_bwd(**given, **names, accumulation=way)
        results = (saved.output, grads.down_proj_weight_grad)
        found[way] = [float((one.double() - other).norm() / other.norm()) for one, other in zip(results, truth)]
    return found


if __name__ == "__main__":
    by_experts = {f"T=512 E=8 K={K}": errors(512, 8, K) for K in (1, 2, 4, 8)}
    by_blocks = {f"T={T} E=1 K=1, {T // B} blocks": errors(T, 1, 1) for T in (128, 512, 2048, 8192)}
    print(json.dumps({"[output, down weight gradient]": by_experts | by_blocks}, indent=1))
