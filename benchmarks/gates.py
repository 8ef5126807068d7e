"""Time of a training step of experts with each gate, over that of plain SwiGLU with the same sizes.

    python benchmarks/gates.py                                     # every row, bf16
    python benchmarks/gates.py --gate gpt-oss --precision mxfp8    # one row beside SwiGLU
    python benchmarks/gates.py --tokens 512 --hidden 512 --inner 1024 --rounds 3

Contestants take turns in a random order, and ratios divide medians of one run. A gate without a gate projection has two
thirds of the products.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

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
        begin, row = time.perf_counter(), self.row
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
        return time.perf_counter() - begin


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gate", nargs="*", choices=ROWS, default=list(ROWS), help="rows; SwiGLU is always measured")
    parser.add_argument("--precision", choices=("bf16", "mxfp8", "fp32"), default="bf16")
    parser.add_argument("--activations", choices=("full", "minimal", "recompute", "fp8"), default="minimal")
    for name, value in (("tokens", 2048), ("hidden", 1024), ("inner", 1024), ("experts", 8), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each row")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    contestants = {name: Contestant(ROWS[name], options) for name in dict.fromkeys(["silu", *options.gate])}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds + 1):  # the first warms up
        for name in random.sample(list(contestants), len(contestants)):
            seconds = contestants[name].step()
            if number:
                times[name].append(seconds)
    plain = statistics.median(times["silu"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:20} {1000 * median:9.1f} ms {median / plain:6.2f} of SwiGLU")


if __name__ == "__main__":
    main()
