"""Frozen MX experts with biases, interleaved weights and other gates, and those that hold a source's own codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_neuron_moe import patch_model, set_activations
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.errors import ConversionError, UnsupportedModelError
from hf_neuron_moe.modules.quantized_blocks import QuantizedExperts
from hf_neuron_moe.quantizers.shard_layouts import TENSORS_KEY
from tests.convert.quantized_sources import MXFP4, rewrite, to_fp8
from tests.convert.test_kept_codes import gpt_oss
from tests.convert.test_quantized_sources import aria, as_mxfp4
from tests.quantized_oracle import oracle
from tests.quantizers.conftest import load, patched, wide_range_
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens

SIZES: dict[str, dict[str, int]] = {
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 256},
    "gemma4": {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128},
    "nemotron_h": {"hidden_size": 128, "moe_intermediate_size": 256},
}
UNEVEN = {"hidden_size": 64, "intermediate_size": 96}
PLAIN = ("lm_head", "embed", "norm", "mixer.gate.")  # not of FP8 sources
UNGATED = {"hidden_size": 64, "moe_intermediate_size": 96}
# As in test_quantized_network: results, pre-activations and gradients are rounded to bf16, and a rounded product that
# crosses a border of the MXFP8 grid moves one value among many by 2^-4.
BOUND = 2**-6


def made(folder: Path, family: str, sizes: dict[str, int], *, coded: bool = False, **options: Any) -> tuple[Any, Any]:
    """A converted tiny model, loaded, and the checkpoint of its values in stock transformers, both in fp32."""
    if coded and family == "aria":
        aria(folder / "src", sizes["hidden_size"], sizes["intermediate_size"])
    else:
        wide_range_(tiny_model(family, **sizes)).bfloat16().save_pretrained(folder / "src")
        if coded and family == "nemotron_h":
            to_fp8(folder / "src", block=(1, 32), scale_dtype=torch.uint8, plain=PLAIN)
        elif coded:
            rewrite(folder / "src", MXFP4, lambda tensors: as_mxfp4(tensors)[0])
    convert_checkpoint(folder / "src", folder / "dst", ConvertOptions(**options))
    export_checkpoint(folder / "dst", folder / "back", allow_inexact=not coded)
    return tuple(load(folder / name, dtype=torch.float32).eval() for name in ("dst", "back"))


def experts(model: Any) -> QuantizedExperts:
    return next(module for module in model.modules() if isinstance(module, QuantizedExperts))


def expected(block: QuantizedExperts, stock: Any, schemes: tuple[str, str], inputs: tuple[Tensor, ...], after: bool):
    """The sum of each token's experts on the values of `stock`, its weights, in float64."""
    x, index, weights = inputs
    first = stock.gate_up_proj if block.neuron_gate.gated else stock.up_proj
    gate_up, down = (param.detach().double() for param in (first, stock.down_proj))
    if stock.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    biases = [getattr(stock, name, None) for name in ("gate_up_proj_bias", "down_proj_bias")]
    if not stock.is_concatenated and block.neuron_gate.gated:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
        biases[0] = None if biases[0] is None else torch.cat([biases[0][:, 0::2], biases[0][:, 1::2]], 1)
    width = block.neuron_stack.down.shape[1]
    rows = []
    for token in range(len(x)):
        total = 0
        for chosen, weight in zip(index[token].tolist(), weights[token], strict=True):
            pair = None if biases[0] is None else tuple(bias.detach()[chosen] for bias in biases)
            one = (x[token : token + 1], gate_up[chosen], down[chosen], schemes, width, weight[None])
            total = total + oracle(*one, after=after, gate=block.neuron_gate, biases=pair)
        rows.append(total)
    return torch.cat(rows)


NATURAL, WORDS, ADJACENT = ("wrapX", "wrapX"), ("one_tile", "wrapX_single"), ("1x32", "1x32")
CASES = [
    ("gpt_oss", SIZES["gpt_oss"], {"precision": "mxfp8"}, NATURAL),
    ("gpt_oss", UNEVEN, {"precision": "mxfp8", "purpose": "inference", "pad": True}, WORDS),
    ("gpt_oss", UNEVEN, {"precision": "mxfp4", "pad": True}, WORDS),
    ("gemma4", SIZES["gemma4"], {"precision": "mxfp8"}, NATURAL),
    ("nemotron_h", SIZES["nemotron_h"], {"precision": "mxfp8"}, NATURAL),
    ("nemotron_h", UNGATED, {"precision": "mxfp8", "purpose": "inference", "pad": True}, WORDS),
    ("nemotron_h", UNGATED, {"precision": "mxfp4", "pad": True, "scales": "packed"}, WORDS),
    ("gpt_oss", UNEVEN, {"precision": "mxfp4", "pad": True}, ADJACENT),
    pytest.param(
        "gpt_oss",
        {"hidden_size": 576, "intermediate_size": 576},
        {"precision": "mxfp4", "pad": True},
        ADJACENT,
        marks=pytest.mark.slow,
    ),
    ("aria", {"hidden_size": 96, "intermediate_size": 64}, {"precision": "mxfp4", "pad": True}, ADJACENT),
    (
        "nemotron_h",
        {"hidden_size": 96, "moe_intermediate_size": 64},
        {"precision": "mxfp8", "purpose": "inference", "pad": True},
        ADJACENT,
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(("family", "sizes", "options", "schemes"), CASES)
def test_experts_compute_with_the_stored_values(
    family: str, sizes: dict[str, int], options: dict[str, Any], schemes: tuple[str, str], tmp_path: Path
) -> None:
    """Values and gradients are those of the network on the exported weights, whose activations are rounded to MXFP8.

    Where the source's codes are kept, these are the source's weights, and 32 adjacent activations are a group.
    """
    model, stock = made(tmp_path, family, sizes, coded=schemes == ADJACENT, **options)
    block = experts(model)
    assert block.permuted == (schemes == ADJACENT)
    assert (block.neuron_gate != Gate()) == (family != "aria")
    generator = torch.Generator().manual_seed(1)
    hidden = stock.config.hidden_size
    x = torch.randn(23, hidden, generator=generator).bfloat16().float().requires_grad_()
    scores = torch.rand(23, 3, generator=generator)
    weights, index = scores.topk(2, -1)
    weights = weights.requires_grad_()
    names = [name for name, module in model.named_modules() if module is block]
    y = block(x, index, weights)
    wide = (x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_())
    wanted = expected(block, stock.get_submodule(names[0]), schemes, wide, schemes != NATURAL)
    dout = torch.randn(y.shape, generator=generator).bfloat16()
    y.backward(dout.to(y.dtype))
    wanted.backward(dout.double())
    # A pre-activation next to a limit, whose sum fp32 rounds to its other side, has a gradient on one side only.
    clamped = 2 * BOUND if block.neuron_gate.clamped else BOUND
    for found, right, bound in (
        (y, wanted, BOUND),
        (x.grad, wide[0].grad, clamped),
        (weights.grad, wide[2].grad, BOUND),
    ):
        assert found is not None and right is not None and right.abs().max() > 0
        assert (found.double() - right).norm() < bound * right.norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["kernel", "fused"])
@pytest.mark.parametrize("precision", ["mxfp8", {"*": "mxfp8", "model.layers.0.*": "bf16"}], ids=["mxfp8", "mixed"])
def test_logits_are_those_of_the_patched_original(precision: Any, layout: str, tmp_path: Path) -> None:
    """Codes in matrices have the groups of the training kernels: the same values, bit for bit."""
    wide_range_(tiny_model("gpt_oss", **SIZES["gpt_oss"])).bfloat16().save_pretrained(tmp_path / "src")
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", ConvertOptions(precision, layout))
    models = (load(tmp_path / "dst"), patched(tmp_path / "src", precision))
    found, wanted = (model.eval()(tokens()).logits for model in models)
    assert torch.equal(found, wanted)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(
    ("family", "sizes", "coded", "router", "adapted_layers"),
    [
        ("gpt_oss", UNEVEN, False, "mlp.router", 4),
        ("gpt_oss", UNEVEN, True, "mlp.router", 4),
        ("nemotron_h", UNGATED, False, "mixer.gate", 3),
    ],
)
@pytest.mark.slow
def test_a_model_s_life(
    family: str, sizes: dict[str, int], coded: bool, router: str, adapted_layers: int, tmp_path: Path
) -> None:
    """Generation, copies, adapters next to the experts and on the router, their files, and ordinary weights again."""
    model, stock = made(tmp_path, family, sizes, coded=coded, precision="mxfp4", pad=True)
    logits = model(tokens()).logits
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, logits)
    again = load(tmp_path / "dst", dtype=torch.float32).eval()
    assert not any(again.load_state_dict(model.state_dict())) and torch.equal(again(tokens()).logits, logits)
    ids = model.generate(tokens()[:, :4], max_new_tokens=4, do_sample=False)
    assert ids.shape == (2, 8)
    with refused(UnsupportedModelError, "model", "dequantize"):
        model.save_pretrained(tmp_path / "saved")
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[f"{router}.weight"], init_lora_weights=False)
    adapted = get_peft_model(again, config).train()
    losses = []
    for policy in ("minimal", "recompute"):
        set_activations(adapted, policy)
        adapted.zero_grad()
        loss = adapted(tokens(), labels=tokens()).loss
        loss.backward()
        losses.append([loss.detach(), *(param.grad.clone() for param in adapted.parameters() if param.requires_grad)])
    assert len(losses[0]) == 1 + 2 * adapted_layers and all(
        torch.equal(one, two) for one, two in zip(*losses, strict=True)
    )
    assert all(value.abs().max() > 0 for value in losses[0])
    adapted.save_pretrained(tmp_path / "adapters")
    other = PeftModel.from_pretrained(load(tmp_path / "dst", dtype=torch.float32), tmp_path / "adapters").eval()
    assert torch.equal(other(tokens()).logits, adapted.eval()(tokens()).logits)
    model.dequantize()
    state = stock.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    patch_model(model, {"precision": "mxfp8"})
    model.save_pretrained(tmp_path / "ordinary")
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path / "ordinary").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ordinary.items())


def test_a_changed_constant_is_an_error(tmp_path: Path) -> None:
    model, _ = made(tmp_path, "gpt_oss", SIZES["gpt_oss"], precision="mxfp8")
    experts(model).limit = 3.0
    with refused(UnsupportedModelError, "limit", "unpatch", got="3.0"):
        model(tokens())


def test_weights_of_one_block_are_permuted_together(tmp_path: Path) -> None:
    source, _ = gpt_oss(tmp_path / "src", 512, 64)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4"))
    path = tmp_path / "dst" / "neuron-00001-of-00001.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    facts = json.loads(header["__metadata__"][TENSORS_KEY])
    facts["model.layers.0.mlp.experts.down_proj"]["layout"] = "mxfp4_moe_words"
    header["__metadata__"][TENSORS_KEY] = json.dumps(facts)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
    with refused(ConversionError, "converted weights of model.layers.0.mlp.experts", "belong together"):
        load(tmp_path / "dst")
