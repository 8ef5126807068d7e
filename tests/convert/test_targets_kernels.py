"""The kernels take converted tensors as they lie in the files, and compute with them what they do with the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.kernels import mlp_backward_mxfp8, mlp_forward_mxfp8, moe_cte
from hf_neuron_moe.reference.moe_types import ActFnType, MoECTEImplementation, MoECTESpec, ShardOnBlockConfig
from tests.tiny_models import tiny_model

TOKENS = 128


def make(
    family: str, folder: Path, options: ConvertOptions, **sizes: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stock weights and converted tensors of the first layer's block, by the names' last parts."""
    model = tiny_model(family, num_hidden_layers=1, **sizes).to(torch.bfloat16)
    model.save_pretrained(folder / "src")
    convert_checkpoint(folder / "src", folder / "dst", options)
    converted = {
        name: tensor for path in (folder / "dst").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    prefix = "model.layers.0.mlp."
    stock = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return tuple(
        {n.removeprefix(prefix): t for n, t in part.items() if n.startswith(prefix)} for part in (stock, converted)
    )


def rows_of(columns: int) -> Tensor:
    return torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(3)).bfloat16()


def equal(left: tuple, right: tuple) -> bool:
    pairs = list(zip(left, right, strict=True))
    assert any(value is not None for value, _ in pairs)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("scales", ["packed", "oversized"])
def test_the_mlp_kernels_compute_with_converted_operands_what_they_compute_with_the_weights(scales, tmp_path):
    options = ConvertOptions("mxfp8", scales=scales, purpose="training")
    stock, converted = make("llama", tmp_path, options, hidden_size=256, intermediate_size=640)
    gate_up = torch.cat([stock["gate_proj.weight"], stock["up_proj.weight"]])
    down = stock["down_proj.weight"]
    x, dy, packed = rows_of(256), rows_of(256).roll(1), scales == "packed"
    names = {
        key: f"{role}_proj.weight{end}"
        for role in ("gate_up", "down")
        for key, end in ((role, ""), (role + "_T", "_T"))
    }
    codes = {key: converted[name] for key, name in names.items()}
    bytes_ = {key: converted[name + "_scale"] for key, name in names.items()}
    forward = {"gate_up_scales": bytes_["gate_up"], "down_scales": bytes_["down"], "use_scale_packing": packed}
    assert equal(mlp_forward_mxfp8(x, codes["gate_up"], codes["down"], **forward), mlp_forward_mxfp8(x, gate_up, down))
    backward = {
        "gate_up_weights_scales": bytes_["gate_up"],
        "gate_up_weight_T": codes["gate_up_T"],
        "gate_up_weight_T_scales": bytes_["gate_up_T"],
        "down_weight_T": codes["down_T"],
        "down_weight_T_scales": bytes_["down_T"],
        "use_scale_packing": packed,
    }
    assert equal(mlp_backward_mxfp8(dy, x, codes["gate_up"], **backward), mlp_backward_mxfp8(dy, x, gate_up, down))


def test_the_mlp_forward_takes_swizzled_bf16_weights(tmp_path):
    options = ConvertOptions("bf16", swizzle=True)
    stock, converted = make("llama", tmp_path, options, hidden_size=128, intermediate_size=640)
    gate_up = torch.cat([stock["gate_proj.weight"], stock["up_proj.weight"]])
    swizzled = {"gate_up_is_swizzled": True, "down_is_swizzled": True}
    result = mlp_forward_mxfp8(rows_of(128), *(converted[f"{r}_proj.weight"] for r in ("gate_up", "down")), **swizzled)
    assert equal(result, mlp_forward_mxfp8(rows_of(128), gate_up, stock["down_proj.weight"]))


def test_ranks_and_padding_fit_the_mlp_kernels_and_add_up(tmp_path):
    options = ConvertOptions("mxfp8", purpose="inference", tp_degree=2, pad=True)
    stock, converted = make("llama", tmp_path, options, hidden_size=96, intermediate_size=600)
    x = torch.nn.functional.pad(rows_of(96), (0, 32))
    total = torch.zeros(TOKENS, 128)
    # 300 intermediate values for each rank would be padded to 384, which the kernel does not take prepared.
    for rank in range(2):
        codes, scales = (
            [converted[f"{role}_proj.weight{end}.tp{rank}"] for role in ("gate_up", "down")] for end in ("", "_scale")
        )
        assert codes[0].shape == (32, 4 * 2 * 512) and codes[1].shape == (128, 4 * 128)
        result = mlp_forward_mxfp8(x, *codes, gate_up_scales=scales[0], down_scales=scales[1], dtype=torch.float32)
        total += result.output
    gate, up, down = (stock[f"{role}_proj.weight"].double() for role in ("gate", "up", "down"))
    exact = (torch.nn.functional.silu(x[:, :96].double() @ gate.T) * (x[:, :96].double() @ up.T)) @ down.T
    assert not total[:, 96:].any()
    # Three quantized operands in a row; a wrong place of one value in a few costs tens of decibels.
    assert sqnr(total[:, :96], exact) > 22


def sqnr(values: Tensor, exact: Tensor) -> float:
    """Signal to noise in decibels."""
    return float(10 * torch.log10(exact.square().sum() / (values.double() - exact).square().sum()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "scales", "floor"),
    [("bf16", None, 45), ("mxfp8", None, 22), ("mxfp8", "packed", 22), ("mxfp4", None, 12), ("mxfp4", "packed", 12)],
)
def test_moe_cte_takes_converted_experts(precision, scales, floor, tmp_path):
    """SQNR floors: MXFP8 operands have about 30 dB each and FP4 ones 18, of which three follow each other."""
    options = ConvertOptions(precision, scales=scales, purpose="inference")
    sizes = {"hidden_size": 1024, "intermediate_size": 512}
    stock, converted = make("mixtral", tmp_path, options, **sizes)
    gate_up, down = (stock[f"experts.{role}_proj"].double() for role in ("gate_up", "down"))
    E, hidden = len(down), rows_of(1024)
    index = torch.arange(2 * TOKENS).view(TOKENS, 2) % E
    affinity = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(5))
    plan = build_block_plan(expert_mask(index, E), 128, top_k=2)
    kind = MoECTEImplementation.shard_on_block if precision == "bf16" else MoECTEImplementation.shard_on_block_mx
    arguments = {
        "hidden_states": torch.cat([hidden, hidden.new_zeros(1, 1024)]),
        "expert_affinities_masked": masked_affinities(index, affinity, E),
        "gate_up_proj_weight": converted["experts.gate_up_proj"],
        "down_proj_weight": converted["experts.down_proj"],
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": 128,
        "spec": MoECTESpec(kind, ShardOnBlockConfig(use_packed_scales=scales == "packed")),
        "activation_function": ActFnType.SiLU,
    }
    if precision == "bf16":
        arguments["gate_up_proj_weight"] = arguments["gate_up_proj_weight"].unflatten(-1, (2, 512))
    else:
        arguments |= {f"{role}_proj_scale": converted[f"experts.{role}_proj_scale"] for role in ("gate_up", "down")}
    result = moe_cte(**arguments)
    output = (result[0] if isinstance(result, tuple) else result)[:TOKENS]
    exact = torch.zeros(TOKENS, 1024, dtype=torch.float64)
    for token in range(TOKENS):
        for expert, weight in zip(index[token].tolist(), affinity[token].double()):
            gate, up = (gate_up[expert] @ hidden[token].double()).chunk(2)
            exact[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert sqnr(output, exact) > floor
