"""Time and memory of a Qwen3-MoE step on an NVIDIA GPU: patched, stock ``grouped_mm``, Liger, SonicMoE.

    python benchmarks/gpu.py --json out.json              # block and model; contestants that are installed
    python benchmarks/gpu.py --kernels                    # the Triton kernels, every row of tile_sizes.json
    python benchmarks/gpu.py --dry-run                    # tiny, on a CPU: which contestants run; no times

A step is forward and backward. Times are medians of CUDA events, contestants taking turns. The block is the sparse MoE
block of the model's first layer, with its router. Launches are kernels that the profiler saw on the device. Saved bytes
are those that the block saves for its backward; peak bytes are what the step allocates beyond what was there before.
TFLOP/s count the nine products of the experts only. No GPU has run this file.

Liger needs ``pip install liger-kernel``; SonicMoE is transformers' ``experts_implementation="sonicmoe"``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.setting import Shape, machine
from hf_neuron_moe import patch_model
from hf_neuron_moe.training import measure_saved_bytes

QWEN3_30B = Shape("Qwen3-30B-A3B", 2048, 768, 8192, 128, 8)
TINY = Shape("tiny", 64, 32, 24, 4, 2)
CONTESTANTS = ("grouped_mm", "sonicmoe", "liger", "patched bf16", "patched mxfp8")
NO_GPU = """benchmarks/gpu.py needs an NVIDIA GPU that torch can use, and there is none here.
On a CPU, run benchmarks/blocks.py for times, or this file with --dry-run to see which contestants would run."""
Step = Callable[[], Any]


def make_model(name: str, shape: Shape, layers: int, device: str, options: dict[str, Any]) -> Qwen3MoeForCausalLM:
    """Return a contestant in bf16; raise ImportError where its package is missing."""
    torch.manual_seed(0)
    own = "sonicmoe" if name == "sonicmoe" else "grouped_mm"
    config = Qwen3MoeConfig(
        hidden_size=shape.H,
        intermediate_size=shape.I,
        moe_intermediate_size=shape.I,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
        num_hidden_layers=layers,
        num_attention_heads=shape.H // 64,
        num_key_value_heads=max(shape.H // 512, 1),
        head_dim=64,
        vocab_size=512,
        experts_implementation=own,
    )
    if name == "sonicmoe":
        from transformers.integrations.sonicmoe import is_sonicmoe_loadable

        is_sonicmoe_loadable(raise_error=True)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
    if name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(model=model)
    if name.startswith("patched"):
        patch_model(model, {"precision": name.removeprefix("patched "), **options})
    return model


def block_step(model: nn.Module, shape: Shape) -> Step:
    """Return forward and backward of the first layer's MoE block."""
    block = model.model.layers[0].mlp
    x = torch.randn(1, shape.T, shape.H, device=model.device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        block.zero_grad(set_to_none=True)
        out = block(x)
        (out[0] if isinstance(out, tuple) else out).backward(gradient)

    return step


def model_step(model: nn.Module, shape: Shape) -> Step:
    """Return forward and backward of the whole model."""
    tokens = torch.randint(0, 512, (1, shape.T), device=model.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def milliseconds(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Return the median time of each, by CUDA events, in turns whose order is drawn anew."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, draw = list(steps), random.Random(0)
    for turn in range(repeats + 3):
        draw.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            steps[name]()
            end.record()
            end.synchronize()
            if turn >= 3:  # compiled and warm
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


def launches(step: Step) -> int:
    """Return the number of kernels and copies that the profiler saw on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events())


def peak_bytes(step: Step) -> int:
    """Return what a step allocates beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(model: nn.Module, step: Step) -> int:
    """Return what the first layer's MoE block saves for its backward."""
    with measure_saved_bytes({"mlp": model.model.layers[0].mlp}) as saved:
        step()
    return saved.total_bytes


def contest(shape: Shape, layers: int, device: str, options: dict[str, Any], repeats: int) -> dict[str, dict[str, Any]]:
    """Measure every contestant's block (`layers` 0) or model; what cannot run has a reason. Times on GPUs only."""
    results: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name in CONTESTANTS:
        try:
            model = make_model(name, shape, max(layers, 1), device, options)
        except ImportError as error:
            results[name] = {"missing": str(error).splitlines()[0]}
            continue
        step = model_step(model, shape) if layers else block_step(model, shape)
        results[name] = {"saved_bytes": saved_bytes(model, step)}
        if device == "cuda":
            results[name] |= {"launches": launches(step), "peak_bytes": peak_bytes(step)}
            steps[name] = step
    flops = 18 * shape.T * shape.K * shape.H * shape.I * max(layers, 1)
    for name, time in milliseconds(steps, repeats).items() if steps else ():
        results[name] |= {"ms": time, "tflops": flops / time / 1e9}
    return results


def kernel_steps(shape: Shape, device: str = "cuda", block: int = 512) -> dict[str, Step]:
    """Return the Triton kernels on one layer's operands, one step per row of ``tile_sizes.json``."""
    from hf_neuron_moe.backends.gate import SWIGLU
    from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
    from hf_neuron_moe.backends.triton import expert_gemm, gate_epilogue, launch_grid, mx_both_ways

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    rows = shape.T * shape.K
    expert = torch.randint(0, shape.E, (rows,), device=device).sort().values
    ends = torch.bincount(expert, minlength=shape.E).cumsum(0).int()
    token = torch.randint(0, shape.T, (rows,), device=device)
    x, gate, up, both = draw(shape.T, shape.H), draw(rows, shape.I), draw(rows, shape.I), draw(rows, 2 * shape.I)
    weight, d_int = draw(shape.E, 2 * shape.I, shape.H), draw(rows, shape.I).float()
    codes, codes_W = (mx_both_ways.quantize(part, values=False)[0] for part in (x, weight.flatten(0, 1)))
    (_, left), (_, right) = (
        mx_both_ways.quantize(part, (ends, block), values=False, columns=False, token_R=index)
        for part, index in ((both, None), (x, token))
    )
    d_weight, into, saved = torch.empty_like(weight), both.chunk(2, 1), Checkpoints(gate, up)
    quantize, product, gradient = mx_both_ways.quantize, expert_gemm.grouped_product, expert_gemm.weight_gradient
    calls: dict[str, Callable[..., Any]] = {
        "quantize_columns": lambda **tiles: quantize(x, values=False, **tiles),
        "quantize_both": lambda **tiles: quantize(both, (ends, block), values=False, **tiles),
        "grouped_product": lambda **tiles: product(x, weight, ends, token_R=token, **tiles),
        "mx_product": lambda **tiles: product(codes, codes_W, ends, token_R=token, **tiles),
        "weight_gradient": lambda **tiles: gradient(both, x, ends, d_weight, tokens=(None, token), **tiles),
        "mx_weight_gradient": lambda **tiles: gradient(left, right, ends, d_weight, block_size=block, **tiles),
        "gate_forward": lambda **tiles: gate_epilogue.gate_forward(gate, up, SWIGLU, saved=saved, **tiles),
        "gate_backward": lambda **tiles: gate_epilogue.gate_backward(d_int, saved, SWIGLU, into, **tiles),
    }
    steps = {}
    for name, call in calls.items():
        for row in launch_grid.candidates(name):
            tiles = {key: value for key, value in row.items() if key != "rows"}
            steps[f"{name} {json.dumps(row)}"] = lambda call=call, tiles=tiles: call(tiles=tiles)
    return steps


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    """Print one line per contestant."""
    print(f"\n{title}")
    for name, row in results.items():
        numbers = {key: value for key, value in row.items() if key != "missing"}
        words = [
            f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value:,}" for key, value in numbers.items()
        ]
        words += [f"not measured: {row['missing']}"] if "missing" in row else []
        print(f"  {name:14} {', '.join(words)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=QWEN3_30B.T)
    parser.add_argument("--layers", type=int, default=4, help="of the model whose whole step is measured")
    parser.add_argument("--backend", help="of the patched contestants; default: triton, in a dry run torch-grouped")
    parser.add_argument(
        "--activations",
        default="minimal",
        choices=("full", "minimal", "fp8", "recompute"),
        help="what the patched contestants save",
    )
    parser.add_argument("--kernels", action="store_true", help="time the Triton kernels instead")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; prints no times")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        sys.exit(NO_GPU)
    backend = arguments.backend or ("torch-grouped" if arguments.dry_run else "triton")
    options = {"backend": backend, "activations": arguments.activations}
    report: dict[str, Any] = {"machine": machine(), "options": options, "dry_run": arguments.dry_run}
    if arguments.dry_run:
        print("Dry run on the CPU: tiny sizes, no times.")
        shape, device, layers = TINY, "cpu", 2
    else:
        report["gpu"] = torch.cuda.get_device_name()
        print(report["gpu"])
        sizes = QWEN3_30B
        shape, device = Shape(sizes.name, sizes.H, sizes.I, arguments.tokens, sizes.E, sizes.K), "cuda"
        layers = arguments.layers
    if arguments.kernels and not arguments.dry_run:
        report["kernels"] = milliseconds(kernel_steps(shape), arguments.repeats)
        for name, time in report["kernels"].items():
            print(f"{time:9.3f} ms  {name}")
    else:
        for title, count in (("block", 0), ("model", layers)):
            report[title] = contest(shape, count, device, options, arguments.repeats)
            show(f"{title}, {shape.sizes} T={shape.T}" + (f" layers={count}" if count else ""), report[title])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
