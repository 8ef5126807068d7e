"""``estimate --device``: the numbers against hand-computed ones, what is left out of the sum, what does not fit.

T tokens, H hidden, I intermediate, E experts, K of them per token, B slots per block.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.cli.estimate import GPU_NAMES
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.device.device_verification import load_for_verification
from hf_neuron_moe.device.kernel_support import BlockGroup, block_groups
from hf_neuron_moe.device.roofline import Roofline, Step, precisions_by_blocks, roofline, saved_by_blocks
from hf_neuron_moe.device.roofline_math import CHIPS, GPUS, Floor, assumptions_of
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed
from tests.tiny_models import tiny_model

DENSE = BlockGroup("mlp", ("a", "b"), None, None, 4096, 14336, None)
"""Llama-3-8B's."""
EXPERTS = BlockGroup("experts", ("a", "b"), 8, 2, 4096, 14336, None)
"""Mixtral-8x7B's."""

MATMUL = 481_036_337_152
"""2 * 4096 * 4096 * 14336: one of the dense block's nine, at 4,096 tokens."""
ROW, WIDE, WEIGHTS = 16_777_216, 58_720_256, 176_160_768
"""Values of x, of gate, and of the three weights, of the dense block at 4,096 tokens."""
CORE = {"trn2": 166.75e12, "trn3": 629.25e12}
"""A quarter of 667 TFLOP/s in bf16, and of 2,517 in MXFP8."""


def floor_of(group: BlockGroup, chip: str, precision: str, keep: str = "minimal", **options: object) -> Floor:
    step = Step(4096, **options)  # type: ignore[arg-type]
    (part,) = roofline([group], chip, precision, step, {"policy": dict.fromkeys(group.names, keep)}).groups
    assert part.floor is not None and part.reason is None and part.policies == {"policy": 2}
    return part.floor


@pytest.mark.parametrize(
    ("keep", "options", "matmuls", "again", "values"),
    [
        # Forward: x, y, weights, intermediate out and in, gate and up out. Backward: dout, x, dx, weights and their
        # gradients, gate and up in.
        ("minimal", {}, 9, 0, 5 * ROW + 3 * WEIGHTS + 6 * WIDE),
        # No gradients of the weights: they are not written, and x is not read for them.
        ("minimal", {"trained": False}, 6, 0, 4 * ROW + 2 * WEIGHTS + 6 * WIDE),
        # Gate and up are made again: two matmuls, x and two weights in, both out and in; not written in the forward.
        ("recompute", {}, 11, 2, 6 * ROW + 3 * WEIGHTS + 2 * WEIGHTS // 3 + 6 * WIDE),
        ("recompute", {"trained": False}, 8, 2, 5 * ROW + 2 * WEIGHTS + 2 * WEIGHTS // 3 + 6 * WIDE),
        # The whole forward once more.
        ("minimal", {"checkpointing": True}, 12, 3, 7 * ROW + 4 * WEIGHTS + 10 * WIDE),
        # All four kept: the products read and write 5, the backward reads 4.
        ("gate_pre+gate_act+up+intermediate", {}, 9, 0, 5 * ROW + 3 * WEIGHTS + 13 * WIDE),
    ],
)
def test_a_dense_block_by_hand(keep, options, matmuls, again, values):
    floor = floor_of(DENSE, "trn3", "mxfp8", keep, **options)
    assert floor.padded_flops == matmuls * MATMUL
    assert floor.recomputed_flops == again * MATMUL
    assert floor.bytes == 2 * values
    assert floor.compute_seconds == pytest.approx(matmuls * MATMUL / CORE["trn3"], rel=1e-12)
    assert floor.memory_seconds == pytest.approx(2 * values / 1.225e12, rel=1e-12)
    assert floor.bound == "compute" and floor.seconds == pytest.approx(floor.compute_seconds)


def test_a_dense_block_in_milliseconds():
    """Written out: nine matmuls of 481,036,337,152 operations at 629.25 TFLOP/s; 1,929,379,840 bytes at 1.225 TB/s."""
    floor = floor_of(DENSE, "trn3", "mxfp8")
    assert 1e3 * floor.compute_seconds == pytest.approx(6.8801, abs=1e-4)
    assert floor.bytes == 1_929_379_840
    assert 1e3 * floor.memory_seconds == pytest.approx(1.5750, abs=1e-4)


def test_experts_by_hand():
    """4,096 tokens in 8 experts, 2 each: 16 full blocks of 512 and 7 more in the worst case are 11,776 slots."""
    slots_hi, ckpt = 691_489_734_656, 337_641_472  # 11776 * 4096 * 14336, and 2 * 11776 * 14336
    row, weights = 33_554_432, 4_051_697_664  # 8192 * 4096, and 23 * 3 * 4096 * 14336
    floor = floor_of(EXPERTS, "trn2", "bf16")
    assert floor.padded_flops == 18 * slots_hi and floor.recomputed_flops == 0
    assert floor.bytes == 2 * (7 * row + 4 * weights + 2 * ckpt) == 34_233_909_248
    assert 1e3 * floor.compute_seconds == pytest.approx(74.6436, abs=1e-4)
    assert 1e3 * floor.memory_seconds == pytest.approx(47.2192, abs=1e-4)
    assert floor.seconds == pytest.approx(floor.compute_seconds), "both passes are bound by compute"
    frozen = floor_of(EXPERTS, "trn2", "bf16", trained=False)
    assert frozen.padded_flops == 12 * slots_hi
    assert frozen.bytes == 2 * (6 * row + 2 * weights + 2 * ckpt)
    again = floor_of(EXPERTS, "trn2", "bf16", "recompute")
    assert again.recomputed_flops == 6 * slots_hi and again.padded_flops == 24 * slots_hi
    assert again.bytes == 2 * (10 * row + 5 * weights + 2 * ckpt)
    both = floor_of(EXPERTS, "trn2", "bf16", "recompute", checkpointing=True)
    assert both.recomputed_flops == 12 * slots_hi and both.padded_flops == 30 * slots_hi
    fp8 = floor_of(EXPERTS, "trn2", "bf16", "fp8")
    # Codes and scales, 33/64 of bf16: written and read of the checkpoint and of x; the checkpoint through bf16 twice.
    assert fp8.bytes == floor.bytes + 2 * (2 * ckpt + 2 * ROW + 2 * 33 * (ckpt + ROW) // 64)


def test_frozen_blocks_tell_what_the_kernels_compute_for_nothing():
    frozen = roofline([DENSE], "trn3", "mxfp8", Step(4096, trained=False))
    trained = roofline([DENSE], "trn3", "mxfp8", Step(4096))
    assert trained.discarded_seconds == {"minimal": 0.0}
    assert frozen.seconds["minimal"] + frozen.discarded_seconds["minimal"] == pytest.approx(trained.seconds["minimal"])
    assert frozen.seconds["minimal"] == pytest.approx(2 * 6 * MATMUL / CORE["trn3"]), "two blocks of six matmuls"
    assert frozen.groups[0].padding_overhead_percent == 0.0


def test_each_pass_takes_the_longer_of_its_operations_and_its_bytes():
    """Of a small block the forward is bound by memory (x, y, weights, four of I), the backward by operations."""
    group, row, weights = BlockGroup("mlp", ("a",), None, None, 896, 896, None), 8192 * 896, 3 * 896 * 896
    floor = roofline([group], "trn3", "mxfp8", Step(8192), {"policy": {}}).groups[0].floor
    forward, backward = 2 * (6 * row + weights) / 1.225e12, 6 * 2 * row * 896 / CORE["trn3"]
    assert floor is not None and floor.seconds == pytest.approx(forward + backward, rel=1e-12)
    assert floor.seconds > 1.05 * max(floor.compute_seconds, floor.memory_seconds)


def test_few_tokens_are_bound_by_memory_and_padded_to_a_tile():
    few = roofline([DENSE], "trn3", "mxfp8", Step(1)).groups[0]
    assert few.floor is not None and few.floor.bound == "memory"
    assert few.padding_overhead_percent == pytest.approx(12700.0), "one row of a tile of 128"


def test_block_sizes_trade_padding_against_weights():
    group = BlockGroup("experts", ("a",), 128, 8, 2048, 768, None)
    few, many = (roofline([group], "trn2", "bf16", Step(tokens, 256)).groups[0] for tokens in (512, 32768))
    assert [choice.block_size for choice in few.choices] == [256, 512, 1024, 2048, 4096]
    assert few.best_block_size == 256
    assert many.best_block_size is not None and many.best_block_size > 256
    padded = [choice.padded_flops for choice in few.choices]
    assert padded == sorted(padded)
    # 4,096 pairs fill 16 blocks of 256; the worst routing opens 127 more.
    assert few.padding_overhead_percent == pytest.approx(100 * (143 * 256 / 4096 - 1))


def left_out(line: Roofline) -> list[str]:
    assert not line.computed and set(line.seconds.values()) == {0.0}
    return [str(part.reason) for part in line.groups]


def test_blocks_without_kernels_are_outside_of_the_sum_with_their_reason():
    both = roofline([replace(DENSE, gate=Gate("gelu")), EXPERTS], "trn2", "bf16", Step(4096))
    (computed,) = both.computed
    assert computed.group is EXPERTS and computed.floor is not None
    assert both.seconds == {"minimal": pytest.approx(2 * computed.floor.seconds)}
    assert list(both.left_out) == [DENSE.label] and "unwritten" in both.left_out[DENSE.label]
    assert both.groups[-1].floor is not None, "what another way would take is told apart"
    (reason,) = left_out(roofline([DENSE], "trn2", "mxfp8", Step(64)))
    assert "Trn3 only" in reason
    unknown = BlockGroup("experts", ("a",), 8, 0, 512, 512, None)
    assert "how many experts" in left_out(roofline([unknown], "trn2", "bf16", Step(64)))[0]
    odd = BlockGroup("mlp", ("a",), None, None, None, None, "its activation is GELU")
    assert left_out(roofline([odd], "trn2", "bf16", Step(64))) == [odd.reason]
    json.dumps(roofline([DENSE, unknown, odd], "trn3", "fp32", Step(64)).to_dict(), allow_nan=False)


def test_the_longest_call_of_bf16_experts():
    assert roofline([EXPERTS], "trn2", "bf16", Step(32768)).computed
    (reason,) = left_out(roofline([EXPERTS], "trn2", "bf16", Step(32769)))
    assert "at most 32,768 tokens per call, and a step has 32,769" in reason
    assert roofline([EXPERTS], "trn3", "mxfp8", Step(65536)).computed, "the limit is the bf16 kernel's"


def test_blocks_of_mx_codes_have_no_kernels_in_training(tmp_path):
    tiny_model("llama", num_hidden_layers=2, intermediate_size=64).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    (group,) = block_groups(load_for_verification(tmp_path / "mx"))
    assert group.codes and len(group.names) == 2
    line = roofline([group], "trn3", "mxfp8", Step(4096))
    assert "pre-quantized weights" in left_out(line)[0]
    assert line.groups[0].flops == 12 * 4096 * group.hidden * group.inner, "no gradients of the weights"


def test_policies_are_resolved_block_by_block():
    with torch.device("meta"):
        model = tiny_model("llama", num_hidden_layers=3)
    exception = {"keep": "minimal", "modules": {"model.layers.1.*": "recompute"}}
    configs = {name: NeuronMoEConfig(activations=value) for name, value in {"full": "full", "mixed": exception}.items()}
    kept = {name: saved_by_blocks(model, config) for name, config in configs.items()}
    assert list(kept["mixed"].values()) == ["minimal", "recompute", "minimal"]
    line = roofline(block_groups(model), "trn3", "mxfp8", Step(256), kept)
    counts = {part.keep: dict(part.policies) for part in line.groups}
    assert counts == {"gate_pre+up": {"full": 3}, "minimal": {"mixed": 2}, "recompute": {"mixed": 1}}
    seconds = {part.keep: part.floor.seconds for part in line.groups if part.floor}
    assert line.seconds["mixed"] == pytest.approx(2 * seconds["minimal"] + seconds["recompute"])
    assert not any(hasattr(module, "neuron_keep") for module in model.modules()), "unpatched again"


def test_blocks_of_several_precisions_are_counted_by_their_own():
    with torch.device("meta"):
        model = tiny_model("llama", num_hidden_layers=3, hidden_size=512, intermediate_size=512)
    model.model.layers[2].mlp = model.model.layers[1].mlp  # matched by its second name
    config = NeuronMoEConfig(precision={"*": "bf16", "model.layers.2.*": "mxfp8"})
    own = precisions_by_blocks(model, config)
    assert own == {"model.layers.0.mlp": "bf16", "model.layers.1.mlp": "mxfp8"}
    groups, step, kept = block_groups(model), Step(512), {"policy": saved_by_blocks(model, config)}
    line = roofline(groups, "trn3", config.precision, step, kept, own)
    assert {part.precision: part.group.names for part in line.groups} == {
        "mxfp8": ("model.layers.1.mlp",),
        "bf16": ("model.layers.0.mlp",),
    }
    by_precision = {part.precision: part for part in line.groups}
    for precision, part in by_precision.items():
        (alone,) = roofline(groups, "trn3", precision, step, kept).groups
        assert (part.reason, part.floor, part.flops) == (alone.reason, alone.floor, alone.flops)
    assert line.seconds == {"policy": sum(part.floor.seconds for part in by_precision.values() if not part.reason)}
    by_name = roofline(groups, "trn3", NeuronMoEConfig(precision={"*": "mxfp8", "*.1.*": "bf16"}).precision, step)
    assert {part.group.names[0]: part.precision for part in by_name.groups} == {
        "model.layers.0.mlp": "mxfp8",
        "model.layers.1.mlp": "bf16",
    }
    assert not any(hasattr(module, "neuron_keep") for module in model.modules()), "unpatched again"


OLMOE = BlockGroup("experts", tuple(map(str, range(16))), 64, 8, 2048, 1024, None)
LLAMA = BlockGroup("mlp", tuple(map(str, range(32))), None, None, 4096, 14336, None)
MIXTRAL = BlockGroup("experts", tuple(map(str, range(32))), 8, 2, 4096, 14336, None)


@pytest.mark.parametrize(
    ("group", "chip", "precision", "kernel", "stock"),
    [
        # All weights of the blocks: OLMoE's are 16 * 64 * 3 * 2048 * 1024 * 2 bytes = 12 GiB. In the kernels' order
        # bf16 needs none. The MXFP8 forward reads both weights in another order than the backward, so one copy of
        # all; of stock weights gate_up (8 GiB) is copied for either, down (4 GiB) for the backward.
        (OLMOE, "trn2", "bf16", 0, 12),
        (OLMOE, "trn3", "mxfp8", 12, 20),
        (MIXTRAL, "trn3", "mxfp8", 84, 140),
        # Gate and up are two parameters in the stock model: 32 * 2 * 4096 * 14336 * 2 bytes.
        (LLAMA, "trn3", "mxfp8", 0, 7),
    ],
)
def test_weight_copies_are_counted_before_a_machine_is_there(group, chip, precision, kernel, stock):
    line = roofline([group], chip, precision, Step(4096), {"minimal": {}})
    blocks = len(group.names)
    for home, gib in (("kernel", kernel), ("stock", stock)):
        copies = line.copies[home]
        assert (copies.total, copies.largest_block) == (gib * 2**30, gib * 2**30 // blocks)
    line = replace(line, memory={"minimal": line.core.memory - 10 * 2**30, "stock": line.core.memory})
    assert line.held("minimal") == line.memory["minimal"] + kernel * 2**30
    assert line.held("stock") == line.memory["stock"], "the unpatched model has none"
    assert list(line.too_large()) == (["minimal"] if kernel > 10 else [])
    assert list(line.too_large("stock")) == (["minimal"] if stock > 10 else [])
    shown = line.to_dict()
    assert shown["memory"]["weight_copies"]["stock"]["total"] == stock * 2**30
    assert shown["memory"]["policies"]["minimal"]["fits"] is (kernel <= 10)
    assert shown["memory"]["policies"]["stock"]["fits"], "all of the memory is enough"
    assert shown["blocks"][0]["weight_copy_bytes"] == {
        "kernel": kernel * 2**30 // blocks,
        "stock": stock * 2**30 // blocks,
    }
    fp32 = roofline([replace(group, dtype=torch.float32)], chip, precision, Step(4096), {"minimal": {}})
    assert fp32.copies["kernel"].total > kernel * 2**30, "the kernels read bf16"


def test_the_largest_block_is_that_with_most_copies():
    small = replace(LLAMA, names=("b",), inner=512)
    assert roofline([small, LLAMA], "trn3", "mxfp8", Step(64)).copies["stock"].largest_block == 7 * 2**30 // 32


def test_a_token_has_no_more_experts_than_there_are():
    few, all_of_them = (
        roofline([replace(EXPERTS, experts=2, top_k=each)], "trn2", "bf16", Step(4096)).groups[0] for each in (8, 2)
    )
    assert (few.flops, few.floor) == (all_of_them.flops, all_of_them.floor)
    again = roofline([EXPERTS], "trn2", "bf16", Step(4096, checkpointing=True)).groups[0]
    assert again.padding_overhead_percent == 43.75, "what is computed again is no padding"


def test_what_policies_share_is_copied_once():
    line = roofline([LLAMA], "trn3", "mxfp8", Step(64), {"a": {}, "b": dict.fromkeys(LLAMA.names, "recompute")})
    assert len(line.computed) == 2 and line.copies["stock"].total == 7 * 2**30
    assert not roofline([LLAMA], "trn2", "mxfp8", Step(64)).copies, "no kernel reads them"
    # One expert's weights [1, H, 2, I] and [1, I, H]: a copy of each, whatever the parameters' layout.
    copies = roofline([LLAMA], "trn2", "bf16", Step(64)).copies
    assert {found.total for found in copies.values()} == {32 * 3 * 4096 * 14336 * 2}


def test_a_dense_block_in_bf16_counts_as_one_expert():
    dense, expert = (replace(DENSE, kind=kind, experts=count, top_k=count) for kind, count in _ONE)
    parts = [roofline([group], "trn2", "bf16", Step(4096)).groups[0] for group in (dense, expert)]
    assert parts[0].floor.seconds == parts[1].floor.seconds and parts[0].floor.block_size is None


_ONE = (("mlp", None), ("experts", 1))


@pytest.mark.slow
def test_the_copies_are_those_of_the_patch_report(run, tmp_path):
    """Before a machine is there, and by the backend on the contract double."""
    model = tiny_model("mixtral", num_hidden_layers=2, hidden_size=512, intermediate_size=64).bfloat16()
    model.config.save_pretrained(tmp_path)
    command = ["estimate", tmp_path, "--length", 64, "--dtype", "bf16", "--device", "trn2", "--activations", "minimal"]
    memory = json.loads(run(*command, "--json").out)["roofline"]["memory"]
    text = run(*command).out
    with installed(tmp_path / "site", Double(target="trn2")):
        for home in ("kernel", "stock"):
            report = patch_model(model, NeuronMoEConfig(backend="neuron", weights=home))
            sizes = [entry.weight_copy_bytes for entry in report.patched]
            unpatch_model(model)
            assert memory["weight_copies"][home] == {"total": sum(sizes), "largest_block": max(sizes)}
    assert memory["weight_copies"]["stock"]["total"] > 0
    assert "weights=kernel" in text and "Under FSDP2" in text and "with the copies of weights=kernel" in text


def test_blocks_without_a_kernel_are_padded_as_pytorch_pads_them(run, tmp_path):
    """64 x 96 to 128 x 128, not to the 512 of another block's kernel: 166.7 %, as the patch report says."""
    group = BlockGroup("mlp", ("a",), None, None, 64, 96, None)
    (part,) = roofline([group], "trn3", "bf16", Step(128)).groups
    assert part.padding_overhead_percent == pytest.approx(100 * (128 * 128 / (64 * 96) - 1))
    assert part.best_block_size is None and not part.copy_bytes
    tiny_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=96).config.save_pretrained(tmp_path)
    text = run("estimate", tmp_path, "--length", 128, "--device", "trn3", "--precision", "bf16").out
    assert "166.7 %" in text and 'With fallback="torch" PyTorch computes them, padded to multiples of 128' in text
    odd = BlockGroup("mlp", ("a",), None, None, 64, 96, "its activation is GELU")
    assert roofline([odd], "trn2", "bf16", Step(128)).groups[0].floor is None, "nobody pads what is not patched"


def test_the_numbers_can_be_checked_by_hand_from_the_assumptions(repo_root):
    """MXFP8 rounds the blocks up to an even number: 16 + 7 = 23 of Mixtral's become 24, 50 % more than the 16."""
    mxfp8, bf16 = (roofline([MIXTRAL], *where, Step(4096)).groups[0] for where in (("trn3", "mxfp8"), ("trn2", "bf16")))
    assert (mxfp8.padding_overhead_percent, bf16.padding_overhead_percent) == (50.0, 43.75)
    shown = " ".join(assumptions_of("trn3"))
    for words in ("2 bytes per value, in MXFP8 too", "up to an even number", "3 P H", "6 N H I", "it may exceed both"):
        assert words in shown
    page = " ".join((repo_root / "docs" / "neuron.md").read_text(encoding="utf-8").split())
    for words in ("2 bytes per value", "even number", "24 blocks", "best B"):
        assert words in page


def test_a_logical_core_is_a_quarter_of_a_chip():
    core = CHIPS["trn2"].core()
    assert (core.flops["bf16"], core.bandwidth, core.memory) == (166.75e12, 0.725e12, 24 * 2**30)
    assert CHIPS["trn3"].core().memory == 36 * 2**30
    assert CHIPS["trn3"].core(1).memory == 18 * 2**30


def test_the_command_tells_the_least_time(run, mixtral_dir):
    options = ["--length", 2048, "--activations", "minimal", "--activations", "recompute"]
    text = run("estimate", mixtral_dir, *options, "--device", "trn2")
    assert text.code == 0, text.err
    assert "An ESTIMATE from published figures; nothing was measured" in text.out
    assert "2 x experts 4 x (512, 96)" in text.out and "All blocks with kernels, at least, per step: min" in text.out
    assert "fits into the 24.00 GiB of a logical core of trn2" in text.out
    shown = json.loads(run("estimate", mixtral_dir, *options, "--device", "trn3", "--precision", "mxfp8", "--json").out)
    floor = shown["roofline"]
    assert (floor["device"], floor["tokens"], floor["block_size"]) == ("trn3", 2048, 512)
    assert "estimate" in floor["kind"] and "AWS Neuron documentation" in floor["source"] and floor["assumptions"]
    minimal, recompute = floor["blocks"]
    assert minimal["flops"] == recompute["flops"] == 18 * 4096 * 512 * 96
    assert minimal["floor"]["recomputed_flops"] == 0 < recompute["floor"]["recomputed_flops"]
    assert floor["seconds"]["minimal"] < floor["seconds"]["recompute"]
    assert [choice["block_size"] for choice in minimal["block_sizes"]] == [128, 256, 512, 1024, 2048, 4096]
    assert "roofline" not in json.loads(run("estimate", mixtral_dir, *options, "--json").out)
    assert run("estimate", mixtral_dir, *options, "--device", "trn4").code == 2
    assert run("estimate", mixtral_dir, *options, "--block-size", 384).code == 2


def test_a_gpu_computes_blocks_that_no_kernel_does(run, tmp_path):
    """Sizes of 64 x 96, which no Neuron kernel takes, are in the sum: nine products, and nothing is padded."""
    assert tuple(GPUS) == GPU_NAMES
    tiny_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=96).config.save_pretrained(tmp_path)
    options = ["--length", 100, "--precision", "bf16", "--activations", "minimal", "--device"]
    text = run("estimate", tmp_path, *options, "h100").out
    assert "on one h100:" in text and "fits into the 74.51 GiB of one h100" in text
    last = text.partition("Least time")[2]
    assert "All patched blocks, at least" in last and not any(word in last for word in ("kernel", "best B", "padding "))
    for chip, peak, size in (("h100", 989e12, 80), ("b200", 2250e12, 180)):
        floor = json.loads(run("estimate", tmp_path, *options, chip, "--json").out)["roofline"]
        (block,) = floor["blocks"]
        assert block["floor"]["compute_seconds"] == pytest.approx(9 * 2 * 100 * 64 * 96 / peak, rel=1e-12)
        assert block["kernel"] == {"usable": True, "reason": None} and floor["seconds"]["minimal"] > 0
        assert (floor["gpu"]["memory"], floor["memory"]["of_a_gpu"]) == (size * 10**9, size * 10**9)
        assert "logical_core" not in floor and "NVIDIA" in floor["source"]
        assert "one GPU" in floor["assumptions"][0] and "worst case" not in str(floor["assumptions"])
    odd = BlockGroup("mlp", ("a",), None, None, 64, 96, "its activation is GELU")
    found = roofline([odd], "h100", "bf16", Step(128))
    assert found.left_out == {odd.label: odd.reason} and not found.computed


def test_a_gpu_writes_kept_products_where_they_are_made():
    """x and y, weights, the intermediate out and in, all four kept; what they read and write is no pass of its own."""
    every, two = (
        roofline([DENSE], "h100", "bf16", Step(4096), {"policy": dict.fromkeys("ab", keep)}).groups[0].floor
        for keep in ("gate_pre+gate_act+up+intermediate", "gate_pre+up")
    )
    assert every is not None and two is not None
    assert every.bytes - two.bytes == 2 * (2 + 2) * WIDE, "written by the forward, read by the backward"


@pytest.mark.parametrize(
    ("keep", "matmuls", "values"),
    [
        # Rows of the experts, as a dense block's: x, y, weights, intermediate out and in, gate and up out; dy, dx, x,
        # weights and their gradients, gate and up in.
        ("minimal", 9, lambda row, wide, weights: 5 * row + 3 * weights + 6 * wide),
        ("recompute", 11, lambda row, wide, weights: 6 * row + (3 + 2 / 3) * weights + 6 * wide),
    ],
)
def test_experts_on_a_gpu_by_hand(keep, matmuls, values):
    """Two experts of 4,096 tokens are 8,192 rows; the weights of all eight are read once, whatever the block size."""
    group, rows = BlockGroup("experts", ("a",), 8, 2, 200, 300, None), 8192
    for size in (128, 512):
        (part,) = roofline([group], "h100", "bf16", Step(4096, size), {"policy": {"a": keep}}).groups
        floor = part.floor
        assert floor is not None and part.best_block_size is None and floor.block_size is None
        assert floor.padded_flops == matmuls * 2 * rows * 200 * 300
        assert floor.bytes == pytest.approx(2 * values(rows * 200, rows * 300, 8 * 3 * 200 * 300))
    few = roofline([group], "h100", "bf16", Step(1), {"policy": {"a": keep}}).groups[0].floor
    assert few is not None and few.bytes == pytest.approx(2 * values(2 * 200, 2 * 300, 2 * 3 * 200 * 300))


@pytest.mark.slow
def test_the_command_knows_frozen_blocks_long_calls_and_the_memory(run, mixtral_dir):
    options = ["--activations", "minimal", "--device", "trn2"]
    lora = run("estimate", mixtral_dir, "--length", 2048, "--lora-rank", 4, *options)
    assert lora.code == 0 and "blocks frozen (no gradients of their weights)" in lora.out
    assert "also make the gradients of frozen weights" in lora.out
    shown = json.loads(run("estimate", mixtral_dir, "--length", 2048, "--lora-rank", 4, *options, "--json").out)
    assert shown["roofline"]["blocks"][0]["flops"] == 12 * 4096 * 512 * 96
    long = run("estimate", mixtral_dir, "--batch", 4096, "--length", 1024, *options)
    assert long.code == 0, long.err
    assert "at most 32,768 tokens per call, and a step has 4,194,304" in long.out
    assert "No kernel computes a block" in long.out and "Memory: more than the 24.00 GiB" in long.out
    shown = json.loads(run("estimate", mixtral_dir, "--batch", 4096, "--length", 1024, *options, "--json").out)
    memory = shown["roofline"]["memory"]
    assert memory["of_a_logical_core"] == 24 * 2**30
    totals = {policy["name"]: policy["total"] for policy in shown["policies"]}
    total = totals["minimal"]
    assert memory["policies"]["minimal"] == {
        "bytes": total,
        "with_copies": {"kernel": total, "stock": total},
        "fits": False,
    }, "no kernel, no copies"
    assert math.isclose(sum(shown["roofline"]["seconds"].values()), 0.0)


@pytest.mark.parametrize(
    ("family", "ordered", "biased"),
    [
        ("llama", (True, False), (False, False)),
        ("llama_biased", (True, False), (True, True)),
        ("phi3", (True, True), (False, False)),
        ("llama4", (True, True), (False, False)),
        ("gpt_oss", (True, False), (True, True)),
    ],
)
def test_groups_know_the_order_of_rows_and_biases(family, ordered, biased):
    groups = [group for group in block_groups(tiny_model(family)) if group.reason is None]
    assert (groups[0].ordered, groups[0].biased) == (ordered, biased)
    assert groups[0].block("bf16", 512).biased == biased
    model = nn.ModuleDict({"mlp": UpFirst()})
    assert block_groups(model)[0].reason is None and block_groups(model)[0].ordered == (False, False)


class UpFirst(nn.Module):
    """A fused layer with up's rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)
