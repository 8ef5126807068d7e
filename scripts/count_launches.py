"""Count what one layer of experts asks of a device: operations, host synchronizations, bytes.

Every operation that torch dispatches, forward and backward, is counted on the CPU. Views and the allocation of memory
are none. On an accelerator each is at least one kernel launch. A host synchronization is a value that Python reads
from a tensor: an accelerator stands still until it is there. The stock experts are transformers' with ``grouped_mm``.
Where Triton is installed, the backend ``triton`` is counted too: its kernels are counted and not run. torch's profiler,
which measures the memory, writes lines of its own to stderr.

    python scripts/count_launches.py --policies minimal full recompute fp8
    python scripts/count_launches.py --experts 8 --top-k 2 --hidden 512 --inner 1792 --json counts.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.activation_policy import canonical_keep, parse_keep
from hf_neuron_moe.backends import get_backend, release_gradient_memory
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, Routing, Wants
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats import elements, group_fp8
from hf_neuron_moe.formats.constants import E4M3FN

READS = {"_local_scalar_dense", "equal", "nonzero", "bincount", "unique_consecutive", "_unique2", "masked_select"}
ALLOCATIONS = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
PRECISIONS = ("bf16", "mxfp8", "fp32")
QUESTIONS = {"_is_mkldnn_bf16_supported"}  # to the processor, once per process


class Launches(TorchDispatchMode):
    """Counts operations and reads while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._lists = _Lists(self)

    def __enter__(self) -> Launches:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation."""
        name = func._schema.name.partition("::")[2]
        if name in READS:
            self.reads[name] += 1
        elif name not in ALLOCATIONS | QUESTIONS and not _is_view(func):
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Counts what becomes a list, which torch does not dispatch on CPUs."""

    def __init__(self, counts: Launches) -> None:
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call of ``tolist``."""
        if func in (Tensor.tolist, Tensor.numpy):
            self.counts.reads["tolist"] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases) or func._schema.name == "aten::detach"


class Layer:
    """One layer of experts with random weights and a routing that leaves none out."""

    def __init__(self, experts: int, hidden: int, inner: int, tokens: int, top_k: int) -> None:
        draw = torch.Generator().manual_seed(0)
        E, H, T, K = experts, hidden, tokens, top_k
        self.x_TH = torch.randn(T, H, generator=draw).bfloat16()
        self.dout_TH = torch.randn(T, H, generator=draw).bfloat16()
        scores_TE = torch.randn(T, E, generator=draw)
        weight_TK, index_TK = scores_TE.softmax(1).topk(K)
        self.routing = Routing(index_TK, weight_TK)
        gate_up = torch.randn(E, 2 * inner, H, generator=draw).mul_(H**-0.5).bfloat16()
        down = torch.randn(E, H, inner, generator=draw).mul_(inner**-0.5).bfloat16()
        self.weights = ExpertWeights(gate_up, down)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, tokens and routing."""
        return sum(part.nbytes for part in (self.x_TH, self.dout_TH, *self.routing, *self.weights) if part is not None)

    def patched(self, backend: str, precision: str, policy: str) -> Callable[[], None]:
        """Return forward and backward of a patched block."""
        kernels, keep, spec = get_backend(backend), parse_keep(canonical_keep(policy, precision)), BlockSpec(precision)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        x_TH, dout_TH = self.x_TH.to(dtype), self.dout_TH.to(dtype)

        def step() -> None:
            _, saved = kernels.experts_forward(x_TH, self.routing, self.weights, spec, keep)
            call = BackwardCall(spec, keep, Wants())
            kernels.experts_backward(dout_TH, x_TH, self.routing, self.weights, saved, call)

        return step

    def stock(self) -> Callable[[], None]:
        """Return forward and backward of transformers' experts with ``grouped_mm``."""
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        E, hidden, inner = self.weights.down.shape
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=E)
        config._experts_implementation = "grouped_mm"
        experts = Qwen3MoeExperts(config)
        experts.gate_up_proj, experts.down_proj = map(torch.nn.Parameter, self.weights[:2])
        x_TH, (index_TK, weight_TK) = self.x_TH.clone().requires_grad_(), self.routing
        weight_TK = weight_TK.clone().requires_grad_()

        def step() -> None:
            experts.zero_grad()
            experts(x_TH, index_TK, weight_TK).backward(self.dout_TH)

        return step


def counted(
    step: Callable[[], None], *, accelerator: bool = False, triton: bool = False, memory: bool = False
) -> dict[str, int]:
    """Return what `step` asks of a device; with `memory` also :func:`peak_bytes` of another call.

    With `accelerator`, FP8 activations are packed and unpacked as there, not as on a CPU. With `triton` its kernels are
    not run, so results hold anything.
    """
    if accelerator:
        elements.decode_table(E4M3FN, torch.device("cpu"))  # made by the first call of a process
    counts = Launches()
    with ExitStack() as stack:
        if accelerator:
            stack.enter_context(mock.patch.object(group_fp8, "CPU_CHUNK", group_fp8.DEVICE_CHUNK))
            stack.enter_context(mock.patch.object(elements, "_decode_through_half", elements.decode_by_table))
        if triton:
            from hf_neuron_moe.backends.triton import expert_gemm, gate_epilogue, mx_both_ways

            def launch(kernel: Any, grid: tuple[int, ...], *_: Any, **__: Any) -> None:
                counts.operations["triton"] += 0 not in grid

            for module in (expert_gemm, gate_epilogue, mx_both_ways):
                stack.enter_context(mock.patch.object(module, "launch", launch))
        with counts:
            step()
        found = {
            "operations": counts.operations.total(),
            "host_synchronizations": counts.reads.total(),
            "triton_kernels": counts.operations["triton"],
        }
        return {**found, "peak_bytes": peak_bytes(step)} if memory else found


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes that `step` holds, also within an operation and in buffers that are kept for later calls.

    Seen are torch's allocations, and not what the matmul libraries allocate. What an earlier call left for this one to
    free, such as gradients, counts as less: take a new step.
    """
    release_gradient_memory()
    with ThreadPoolExecutor(1) as fresh:  # a thread without buffers of earlier calls
        return fresh.submit(_peak_bytes, step).result()


def _peak_bytes(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()
    assert seen.profiler is not None
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=_Raw)
    for name, default in (("experts", 128), ("top-k", 8), ("hidden", 128), ("inner", 128), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policies", nargs="+", default=["minimal"], help="activation policies (minimal)")
    parser.add_argument("--json", type=Path, help="also write the counts there")
    chosen = parser.parse_args(given)
    if min(chosen.experts, chosen.top_k, chosen.hidden, chosen.inner, chosen.tokens) < 1:
        parser.error("sizes are numbers of 1 or more")
    if chosen.hidden % 8 or chosen.inner % 8:
        parser.error("--hidden and --inner are multiples of 8, as the stock experts' product needs them")
    if chosen.json is not None and not chosen.json.parent.is_dir():
        parser.error(f"--json: there is no folder {chosen.json.parent}")
    if chosen.top_k > chosen.experts:
        parser.error(f"a token can have at most all {chosen.experts} experts, not {chosen.top_k}")
    for policy in chosen.policies:
        try:
            for precision in PRECISIONS:
                canonical_keep(policy, precision)
        except ConfigError as error:
            parser.error(str(error))
    return chosen


class _Raw(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the commands of the description on their lines."""


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    chosen = _arguments(arguments)
    os.environ.setdefault("HF_NEURON_MOE_GROUPED", "0")  # ``torch`` computes one expert after the other
    layer, rows = Layer(chosen.experts, chosen.hidden, chosen.inner, chosen.tokens, chosen.top_k), []
    rows.append(
        {"experts": "stock grouped_mm", "precision": "bf16", "policy": "", **counted(layer.stock(), memory=True)}
    )
    backends = ("torch", "torch-grouped", *(("triton",) if importlib.util.find_spec("triton") else ()))
    for backend in backends:
        for precision in PRECISIONS:
            for policy in chosen.policies:
                kinds = {"accelerator": backend != "torch", "triton": backend == "triton", "memory": True}
                found = counted(layer.patched(backend, precision, policy), **kinds)
                rows.append({"experts": backend, "precision": precision, "policy": policy, **found})
    counts = f"{'operations':>10} {'host reads':>10} {'peak MiB':>9} {'Triton':>6}"
    print(f"{'experts':18} {'precision':9} {'policy':10} {counts}")
    for row in rows:
        where = f"{row['experts']:18} {row['precision']:9} {row['policy']:10}"
        mib = (row["peak_bytes"] + layer.nbytes) / 2**20
        counts = f"{row['operations']:10,} {row['host_synchronizations']:10,} {mib:9.1f} {row['triton_kernels']:6}"
        print(f"{where} {counts}")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
