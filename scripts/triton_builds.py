"""Compile the Triton kernels for GPUs that are not here, and print registers, shared memory and spills.

    python scripts/triton_builds.py                         # every kernel, sm_90 and sm_100
    python scripts/triton_builds.py --arch 90 --match gate

A build says that Triton's compiler and ptxas take a kernel. It says nothing about speed, and nothing runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.saved import FP8Rows, fp8_storage
from hf_neuron_moe.backends.triton import expert_gemm, gate_epilogue, mx_both_ways

R, T, E, H, INNER, BLOCK = 8192, 1024, 128, 2048, 768, 512
"""Sizes of a block of Qwen3-30B-A3B with eight experts per token."""


class Build(NamedTuple):
    """One kernel for one architecture."""

    name: str
    arch: int
    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes of a program


def cases() -> dict[str, Callable[[], Any]]:
    """Return calls whose kernels are compiled: on the meta device nothing has memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ends, token = empty(E, dtype=torch.int32), empty(R, dtype=torch.int64)
    x, both, inter = empty(T, H), empty(R, 2 * INNER), empty(R, INNER)
    gate_up, sums = empty(E, 2 * INNER, H), empty(R, INNER, dtype=torch.float32)
    codes = mx_both_ways.Quantized(None, empty(T, H, dtype=torch.uint8), empty(T, H // 32, dtype=torch.uint8))
    weight = mx_both_ways.Quantized(
        None, empty(E * 2 * INNER, H, dtype=torch.uint8), empty(E * 2 * INNER, H // 32, dtype=torch.uint8)
    )
    places = mx_both_ways.scale_places(R, E)
    by_rows = mx_both_ways.Quantized(None, empty(R, INNER, dtype=torch.uint8), empty(places, INNER, dtype=torch.uint8))
    scale = empty(R, dtype=torch.float32)
    rows, into = Checkpoints(inter, inter), (both[:, :INNER], both[:, INNER:])
    codes_RI = FP8Rows(*fp8_storage(inter, (R,), INNER))
    fp8 = Checkpoints(codes_RI, codes_RI)
    limits = Gate("swish", 1.702, gate_max=7.0, up_max=7.0, up_min=-7.0, up_offset=1.0)
    forward, backward = gate_epilogue.gate_forward, gate_epilogue.gate_backward
    return {
        "grouped_product": lambda: expert_gemm.grouped_product(x, gate_up, ends, token_R=token),
        "grouped_product of few rows": lambda: expert_gemm.grouped_product(x, gate_up, ends, token_R=token[:T]),
        "grouped_product, transposed weight": lambda: expert_gemm.grouped_product(
            both, gate_up.transpose(1, 2), ends, dtype=torch.bfloat16
        ),
        "grouped_product of one expert": lambda: expert_gemm.grouped_product(x, gate_up[:1].float(), ends[:1]),
        "weight_gradient": lambda: expert_gemm.weight_gradient(both, x, ends, gate_up, tokens=(None, token)),
        "mx_product": lambda: expert_gemm.grouped_product(codes, weight, ends, token_R=token),
        "mx_weight_gradient": lambda: expert_gemm.weight_gradient(
            by_rows, by_rows, ends, empty(E, INNER, INNER), block_size=BLOCK
        ),
        "quantize columns": lambda: mx_both_ways.quantize(x, values=False),
        "quantize both": lambda: mx_both_ways.quantize(both, (ends, BLOCK), values=False),
        "quantize both, values": lambda: mx_both_ways.quantize(both, (ends, BLOCK), values=True),
        "quantize both of one group": lambda: mx_both_ways.quantize(x, (ends[:1], T), values=False),
        "gate_forward": lambda: forward(inter, inter, SWIGLU, scale_R=scale, saved=rows),
        "gate_forward, FP8": lambda: forward(sums, sums, limits, scale_R=scale, saved=fp8),
        "gate_backward": lambda: backward(sums, rows, SWIGLU, into, scale_R=scale),
        "gate_backward, mxfp8": lambda: backward(sums, rows, Gate("gelu"), into, rounding="mxfp8", scale_R=scale),
        "gate_backward, FP8": lambda: backward(sums, fp8, limits, into, rounding="fp8", scale_R=scale),
    }


def captured(call: Callable[[], Any]) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield what `call` launches: the kernel, its arguments and its constants."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any, grid: tuple[int, ...], anchor: torch.Tensor, *arguments: Any, **constants: Any) -> None:
        launches.append((kernel, arguments, constants))

    modules = (expert_gemm, gate_epilogue, mx_both_ways)
    own = [module.launch for module in modules]
    try:
        for module in modules:
            module.launch = record
        call()
    finally:
        for module, launch in zip(modules, own):
            module.launch = launch
    yield from launches


def build(name: str, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], arch: int) -> Build:
    """Compile one launch as Triton's JIT would: 1 and None are constants, multiples of 16 are known to be such."""
    options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
    known = {key: value for key, value in constants.items() if key not in options}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, (parameter, value) in enumerate(zip(kernel.arg_names, arguments)):
        if value is None or (isinstance(value, int) and value == 1):
            known[parameter] = value
            continue
        signature[parameter] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[position,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(known, "constexpr")
    ordered = {parameter: signature[parameter] for parameter in kernel.arg_names}
    source = ASTSource(kernel, ordered, constexprs=known, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Build(name, arch, *_ptxas(compiled.asm["ptx"], arch), compiled.metadata.shared)


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers per thread and bytes of spills, which ptxas of Triton's wheel prints."""
    program = get_ptxas(arch).path  # the one that knows the PTX version of this Triton
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernel.ptx"
        source.write_text(ptx)
        command = [program, "-v", f"--gpu-name=sm_{arch}a", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program} refused a kernel for sm_{arch}a ({done.returncode}): {done.stdout}{done.stderr}")
    text = done.stderr
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", text))
    return registers, sum(int(number) for number in re.findall(r"(\d+) bytes spill", text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--arch", type=int, action="append", choices=(80, 90, 100), help="compute capability times ten")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    print(f"triton {triton.__version__}")
    print(f"{'kernel':36} {'sm':>4} {'registers':>9} {'spills':>7} {'shared':>7}")
    for name, call in cases().items():
        for arch in options.arch or (90, 100):
            if options.match in name:
                for launch in captured(call):
                    row = build(name, *launch, arch)
                    print(f"{name:36} {arch:4} {row.registers:9} {row.spills:7} {row.shared:7}", flush=True)


if __name__ == "__main__":
    main()
