"""Speed of the kernel functions against the bare fp32 matrix products inside them, and of the MX format.

    python benchmarks/kernels.py --json out.json       # everything; a few minutes
    python benchmarks/kernels.py --only moe --cases c   # a part of it
    python benchmarks/kernels.py --isa avx2             # as on a CPU without bf16 instructions

Every ratio divides medians measured in one run, contestants taking turns. ``gemm`` is the time of the same matrix
products alone, in fp32, operands and results allocated before. The format is measured on one core, against torchao's
``to_mx`` (eager) where torchao is installed. Every row shows its goal and whether it was met; a missed goal is no
error, since a busy machine can cause it.

Legend: H hidden, I intermediate, E experts, K experts per token, T or S tokens, B tokens per block.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A script's folder is searched first, and transformers takes this file for the package "kernels" that it looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.blocks import CASES, Case, Progress, make_inputs, time_in_turns
from benchmarks.setting import machine, restart_with_isa
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.formats.mx import quantize_mx
from hf_neuron_moe.kernels import mlp_backward_mxfp8, mlp_forward_mxfp8
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import MoECTEImplementation, MoECTESpec, ShardOnIConfig

BLOCK = 256
MLP = Case("mlp", 1024, 4096, 2048)
WEIGHT = (4096, 4096)
GOALS = {
    "format_MB_per_s": 150.0,
    "format_over_torchao": 1.0,
    "mlp_forward": 1.6,
    "mlp_backward": 1.8,
    "moe_cte": 1.5,
    "blockwise_mm_bwd": 1.5,
}
Steps = dict[str, Callable[[], Any]]


def gemm_forward(rows: list[int], hidden: int, inner: int) -> Callable[[], None]:
    """Return a step of each expert's two products: gate and up as one, and down."""
    most, experts = max(rows), len(rows)
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    x, h = torch.randn(most, hidden), torch.randn(most, inner)
    out_2I, out_H = torch.empty(most, 2 * inner), torch.empty(most, hidden)

    def step() -> None:
        for expert, count in enumerate(rows):
            torch.mm(x[:count], gate_up[expert].t(), out=out_2I[:count])
            torch.mm(h[:count], down[expert].t(), out=out_H[:count])

    return step


def gemm_backward(rows: list[int], hidden: int, inner: int) -> Callable[[], None]:
    """Return a step of each expert's four products: d intermediate, dX, and both weight gradients."""
    most, experts = max(rows), len(rows)
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    x, h, both = torch.randn(most, hidden), torch.randn(most, inner), torch.randn(most, 2 * inner)
    out_H, out_I = torch.empty_like(x), torch.empty_like(h)

    def step() -> None:
        for expert, count in enumerate(rows):
            torch.mm(x[:count], down[expert], out=out_I[:count])
            torch.mm(both[:count], gate_up[expert], out=out_H[:count])
            torch.mm(both[:count].t(), x[:count], out=d_gate_up[expert])
            torch.mm(x[:count].t(), h[:count], out=d_down[expert])

    return step


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def torchao_step(weight: Tensor) -> Callable[[], Any] | None:
    """Return torchao's quantization of `weight`, or None where torchao is not installed."""
    try:
        module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    except ImportError:
        return None
    return lambda: module.to_mx(weight, torch.float8_e4m3fn, 32)


def bench_format(repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """Quantize and swizzle a weight on one core."""
    threads, weight = torch.get_num_threads(), bf16(*WEIGHT)
    steps: Steps = {"quantize_mx": lambda: quantize_mx(weight)}
    theirs = torchao_step(weight)
    if theirs is not None:
        steps["torchao"] = theirs
    torch.set_num_threads(1)
    try:
        times = time_in_turns(steps, repeats, 10.0, "format", progress)
    finally:
        torch.set_num_threads(threads)
    size = weight.numel() * weight.element_size() / 1e6
    speeds = {name: size / entry["median_s"] for name, entry in times.items()}
    shape = f"[{WEIGHT[0]}, {WEIGHT[1]}] bf16, one core"
    rows = [row("quantize + swizzle MB/s", shape, times, speeds["quantize_mx"], "format_MB_per_s", higher=True)]
    if theirs is None:
        return [*rows, {"name": "speed over torchao to_mx", "shape": shape, "value": None, "note": "torchao missing"}]
    ratio = speeds["quantize_mx"] / speeds["torchao"]
    return [*rows, row("speed over torchao to_mx", shape, times, ratio, "format_over_torchao", higher=True)]


def row(
    name: str, shape: str, times: dict[str, dict[str, float]], value: float, goal: str, *, higher: bool = False
) -> dict[str, Any]:
    """Return one line of the report; `higher` values are the better ones."""
    met = value >= GOALS[goal] if higher else value <= GOALS[goal]
    return {"name": name, "shape": shape, "times": times, "value": value, "goal": GOALS[goal], "met": met}


def over_gemm(
    name: str, shape: str, steps: Steps, gemm: Callable[[], None], goal: str, repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Time `steps` in turns with the products and return a line for each."""
    times = time_in_turns({"gemm": gemm, **steps}, repeats, 10.0, name, progress)
    base = times["gemm"]["median_s"]
    return [
        row(step, shape, {step: times[step], "gemm": times["gemm"]}, times[step]["median_s"] / base, goal)
        for step in steps
    ]


def bench_mlp(repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """MX forward and backward of the dense MLP from raw bf16 operands."""
    tokens, hidden, inner = MLP.T, MLP.H, MLP.I
    x, dout = bf16(tokens, hidden), bf16(tokens, hidden)
    gate_up, down = bf16(2 * inner, hidden, scale=hidden**-0.5), bf16(hidden, inner, scale=inner**-0.5)
    kept = mlp_forward_mxfp8(x, gate_up, down, save_gate_pre=True, save_up=True)

    def forward() -> Any:
        return mlp_forward_mxfp8(x, gate_up, down, save_gate_pre=True, save_up=True)

    def backward() -> Any:
        return mlp_backward_mxfp8(dout, x, gate_up, down, gate_pre=kept.gate_pre, up=kept.up)

    shape = f"S={tokens} H={hidden} I={inner}"
    forward_gemm, backward_gemm = (make([tokens], hidden, inner) for make in (gemm_forward, gemm_backward))
    return [
        *over_gemm("mlp", shape, {"mlp_forward_mxfp8": forward}, forward_gemm, "mlp_forward", repeats, progress),
        *over_gemm("mlp", shape, {"mlp_backward_mxfp8": backward}, backward_gemm, "mlp_backward", repeats, progress),
    ]


def bench_moe(case: Case, repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """The blockwise forward and backward in bf16 at one shape."""
    x, index, weights = make_inputs(case, case.T, torch.bfloat16)
    sink = torch.zeros(1, case.H, dtype=torch.bfloat16)
    plan = build_block_plan(expert_mask(index, case.E), BLOCK, top_k=case.K)
    operands = {
        "hidden_states": torch.cat([x, sink]),
        "expert_affinities_masked": masked_affinities(index, weights, case.E),
        "gate_up_proj_weight": bf16(case.E, case.H, 2, case.I, scale=case.H**-0.5),
        "down_proj_weight": bf16(case.E, case.I, case.H, scale=case.I**-0.5),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": BLOCK,
    }
    plain = MoECTESpec(MoECTEImplementation.shard_on_i)
    keeping = MoECTESpec(MoECTEImplementation.shard_on_i, shard_on_I=ShardOnIConfig(checkpoint_activation=True))
    kept = moe_cte(**operands, spec=keeping)
    backward = operands | {
        "gate_up_proj_act_checkpoint_T": kept.gate_up_activations_T,
        "down_proj_act_checkpoint": kept.down_activations,
        "output_hidden_states_grad": torch.cat([torch.randn_like(x), sink]),
    }
    forward_steps: Steps = {
        "moe_cte": lambda: moe_cte(**operands, spec=plain),
        "moe_cte with activations": lambda: moe_cte(**operands, spec=keeping),
    }
    backward_steps: Steps = {
        "blockwise_mm_bwd ON_H": lambda: blockwise_mm_bwd(**backward),
        "blockwise_mm_bwd ON_I": lambda: blockwise_mm_bwd(**backward, affinity_option="AFFINITY_ON_I"),
    }
    rows = torch.bincount(index.reshape(-1), minlength=case.E).tolist()
    shape = f"{case.title} B={BLOCK}"
    forward_gemm, backward_gemm = (make(rows, case.H, case.I) for make in (gemm_forward, gemm_backward))
    return [
        *over_gemm(case.title, shape, forward_steps, forward_gemm, "moe_cte", repeats, progress),
        *over_gemm(case.title, shape, backward_steps, backward_gemm, "blockwise_mm_bwd", repeats, progress),
    ]


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    console.print(report["machine"])
    table = Table("what", "shape", "median ms", "quartiles ms", "against ms", "value", "goal", "met")
    for line in report["rows"]:
        if line["value"] is None:
            table.add_row(line["name"], line["shape"], "", "", "", line["note"], "", "")
            continue
        ours, *other = line["times"].values()
        spread = f"{ours['q1_s'] * 1e3:.1f} .. {ours['q3_s'] * 1e3:.1f}"
        against = f"{other[0]['median_s'] * 1e3:.1f}" if other else ""
        sign = ">=" if line["name"].startswith(("quantize", "speed")) else "<="
        value, goal = f"{line['value']:.2f}", f"{sign} {line['goal']:g}"
        met = "yes" if line["met"] else "no"
        table.add_row(line["name"], line["shape"], f"{ours['median_s'] * 1e3:.1f}", spread, against, value, goal, met)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--cases", nargs="+", choices=("a", "c"), default=("a", "c"), help="shapes of the experts")
    parser.add_argument("--only", choices=("format", "mlp", "moe"), help="run one part of the benchmark")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    arguments = parser.parse_args()
    if arguments.isa:
        restart_with_isa(arguments.isa)
    console = Console(width=160)
    progress = Progress(console)
    torch.manual_seed(0)
    parts: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
        ("format", lambda: bench_format(arguments.repeats, progress)),
        ("mlp", lambda: bench_mlp(arguments.repeats, progress)),
        *(("moe", lambda case=CASES[name]: bench_moe(case, arguments.repeats, progress)) for name in arguments.cases),
    ]
    report: dict[str, Any] = {"machine": machine(), "block_size": BLOCK, "rows": []}
    for number, (name, run) in enumerate(parts, 1):
        if arguments.only in (None, name):
            console.print(f"part {number} of {len(parts)}: {name} ...")
            report["rows"] += run()
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)
    if arguments.json:
        console.print(f"report: {arguments.json}")


if __name__ == "__main__":
    main()
