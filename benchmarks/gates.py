"""Time of a training step of experts with each gate, over that of plain SwiGLU with the same sizes.

    python benchmarks/gates.py                                     # every row, bf16
    python benchmarks/gates.py --isa avx2                          # as on a CPU without bf16 instructions
    python benchmarks/gates.py --json gates.json                   # medians and quartiles as JSON too
    python benchmarks/gates.py --gate gpt-oss --precision mxfp8    # one row beside SwiGLU
    python benchmarks/gates.py --tokens 512 --hidden 512 --inner 1024 --rounds 3

Contestants take turns in a random order. A ratio is the median over all rounds of a row's time over SwiGLU's in the
same round, which a processor that changes its speed disturbs least. The last column divides by SwiGLU with the same
biases and the same layout: what the gate itself costs. A gate without a gate projection has two thirds of the products.
With --cpu-time the processor's time is measured, which other processes disturb less: with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.setting import machine, restart_with_isa
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.modules import ops


class Row(NamedTuple):
    """A gate, and how its weights lie."""

    gate: Gate
    biased: bool = False
    interleaved: bool = False
    transposed: bool = False


_SWISH = Gate("swish", 1.702, gate_max=7.0, up_max=7.0, up_min=-7.0, up_offset=1.0)
ROWS = {
    "silu": Row(SWIGLU),
    "silu-biased": Row(SWIGLU, biased=True),
    "clamped": Row(Gate(gate_max=10.0, up_max=10.0, up_min=-10.0)),
    "clamped-after": Row(Gate(act_max=7.0, up_max=7.0, up_min=-7.0)),
    "gpt-oss": Row(_SWISH, biased=True, interleaved=True, transposed=True),
    "swish-concatenated": Row(_SWISH, biased=True),
    "gelu-tanh": Row(Gate("gelu_tanh")),
    "gelu": Row(Gate("gelu")),
    "softcapped": Row(Gate(gate_softcap=4.0, up_softcap=25.0)),
    "squared-relu": Row(Gate("squared_relu", gated=False)),
}


class Contestant:
    """Experts with one row's gate, and their step."""

    def __init__(self, row: Row, options: argparse.Namespace) -> None:
        self.row, self.options = row, options
        E, H, inner, T = options.experts, options.hidden, options.inner, options.tokens
        rows = (2 if row.gate.gated else 1) * inner
        dtype, generator = torch.bfloat16, torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

        weights = [draw(E, rows, H, scale=H**-0.5), draw(E, H, inner, scale=inner**-0.5)]
        if row.transposed:
            weights = [weight.detach().transpose(1, 2).contiguous().requires_grad_() for weight in weights]
        self.biases = (draw(E, rows), draw(E, H)) if row.biased else (None, None)
        index = torch.rand(T, E, generator=generator).topk(options.top_k).indices
        self.given = (draw(T, H), index, torch.rand(index.shape, generator=generator), *weights)
        self.dout = torch.ones(T, H, dtype=dtype)

    def step(self) -> float:
        """Return the seconds of a forward and a backward."""
        clock = time.process_time if self.options.cpu_time else time.perf_counter
        begin, row = clock(), self.row
        y = ops.experts(
            *self.given,
            transposed=row.transposed,
            precision=self.options.precision,
            block_size=512,
            backend="torch",
            activations=self.options.activations,
            gate=row.gate,
            interleaved=row.interleaved,
            biases=self.biases,
        )
        leaves = [tensor for tensor in (*self.given, *self.biases) if tensor is not None and tensor.requires_grad]
        torch.autograd.grad(y, leaves, self.dout)
        return clock() - begin


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gate", nargs="*", choices=ROWS, default=list(ROWS), help="rows; SwiGLU is always measured")
    parser.add_argument("--precision", choices=("bf16", "mxfp8", "fp32"), default="bf16")
    parser.add_argument("--activations", choices=("full", "minimal", "recompute", "fp8"), default="minimal")
    for name, value in (("tokens", 2048), ("hidden", 1024), ("inner", 1024), ("experts", 8), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each row")
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    parser.add_argument("--cpu-time", action="store_true", help="time of this process on the processor")
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def alike(row: Row) -> str:
    """Return the name of SwiGLU with the biases and the layout of `row`."""
    words = [word for word in ("biased", "interleaved", "transposed") if getattr(row, word)]
    name = "-".join(["silu", *words])
    ROWS.setdefault(name, row._replace(gate=SWIGLU))
    return name


def main() -> None:
    options = parse_arguments()
    if options.isa:
        restart_with_isa(options.isa)
    names = dict.fromkeys(["silu", *(alike(ROWS[name]) for name in options.gate), *options.gate])
    contestants = {name: Contestant(ROWS[name], options) for name in names}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds + 1):  # the first warms up
        for name in random.sample(list(contestants), len(contestants)):
            seconds = contestants[name].step()
            if number:
                times[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}

    def over(name: str, other: str) -> float:
        return statistics.median(own / base for own, base in zip(times[name], times[other], strict=True))

    print(f"{'':32} {'median':>9} {'quartiles':>17} {'of SwiGLU':>11} {'laid out alike':>16}")
    results = {}
    for name, seconds in times.items():
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        whole, own = over(name, "silu"), over(name, alike(ROWS[name]))
        quartiles = f"{1000 * low:.1f} to {1000 * high:.1f}"
        print(f"{name:32} {1000 * medians[name]:6.1f} ms {quartiles:>17} {whole:11.2f} {own:16.2f}")
        results[name] = {
            "median_s": medians[name],
            "quartiles_s": [low, high],
            "of_swiglu": whole,
            "laid_out_alike": own,
        }
    if options.json:
        sizes = {key: getattr(options, key) for key in ("tokens", "hidden", "inner", "experts", "top_k")}
        setting = machine() | sizes | {key: getattr(options, key) for key in ("precision", "activations", "cpu_time")}
        options.json.write_text(json.dumps({"setting": setting, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
