"""From counts and samples to the figures that are logged; a bf16 run shows what mxfp8 would do to its tensors.

Legend: E experts, H hidden size, I intermediate size, M tensors measured, W ranks, R rows, K contraction axis of the
matmul that the rows are an operand of.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.mx import dequantize_mx_natural, quantize_mx
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import unswizzle
from hf_neuron_moe.training.blocks import PROJECTIONS

MEASURES = ("amax", "flushed", "saturated", "sqnr_db")
"""The four figures of :func:`quantization_health`, in their order."""

SAMPLED_ROWS = 64
"""Rows taken of every tensor: the figures of a projection then rest on 64 K values, whatever its size."""

_MAGNITUDE, _LARGEST_CODE = 0x7F, 0x7E
"""Bits of an e4m3 code without its sign, and those of its largest finite value, 448."""

INPUT = "input"
TENSORS = (*PROJECTIONS, INPUT)
"""What the quantization health of a block is measured of."""


def load_figures(load: list[int], processes: int = 1, copies: int = 0, tokens: int = 0) -> dict[str, Any]:
    """Return the figures of one module's load, tokens per expert; `dead` counts experts without a token.

    ``entropy`` is 1 where all experts have the same. Without any token it and ``max_over_mean`` are NaN. Of experts
    that are divided over `processes`, to which the `tokens` went in so many `copies`, there are four figures. They are
    the pairs of each process, those of the busiest over the mean, processes without a token, and processes per token.
    """
    total, experts = sum(load), len(load)
    shares = [count / total for count in load if count]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(experts) if experts > 1 else 1.0
    figures: dict[str, Any] = {
        "entropy": entropy if total else math.nan,
        "max_over_mean": max(load) * experts / total if total else math.nan,
        "dead": load.count(0),
        "load": load,
    }
    if processes > 1:
        each = experts // processes
        per_process = [sum(load[start : start + each]) for start in range(0, experts, each)]
        figures["process_load"] = per_process
        figures["process_max_over_mean"] = max(per_process) * processes / total if total else math.nan
        figures["idle_processes"] = per_process.count(0)
        figures["processes_per_token"] = copies / tokens if tokens else math.nan
    return figures


def padding_overhead(
    sizes: Mapping[str, tuple[int, int, int]],
    positions: int,
    loads: Mapping[str, list[int]],
    padded_rows: Mapping[str, int],
) -> float:
    """Return the extra multiply-adds of the kernels as a fraction of the needed ones: 0.25 is 25 %.

    H and I are padded to multiples of 128, and every expert's tokens to whole blocks. `sizes` are E, H and I of every
    block, `positions` the rows that dense blocks multiplied. `loads` are the token-expert pairs per expert of the
    blocks with experts, `padded_rows` the same in whole blocks, summed over experts.
    """
    needed = done = 0.0
    for name, (_, H, I) in sizes.items():  # noqa: E741
        rows = sum(loads[name]) if name in loads else positions
        needed += rows * H * I
        done += padded_rows.get(name, rows) * padded_size(H) * padded_size(I)
    return done / needed - 1.0 if needed else 0.0


def peak_memory(device: torch.device) -> float:
    """Return the most bytes that were allocated on a GPU; on a CPU, that the process held. 0 where nothing tells."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def quantization_health(rows_RK: Tensor) -> Tensor:
    """Return what MXFP8 (e4m3, Neuron scale rule) along K does to `rows_RK`.

    The rows are rounded to bf16 and zero padded to a multiple of 128 first, as the kernels get them (nki-library 2.31
    ``mlp_fwd_mxfp8``); the padding does not count. They have any float dtype and device. The result is fp32 ``[4]`` on
    the same device, in the order of :data:`MEASURES`. Those are the largest magnitude, the share of elements that are
    not zero but become it, the share that gets the largest code, and the signal-to-quantization-noise ratio. That code
    is 448 times the scale: the Neuron rule leaves headroom, so anything but 0 means infinities. The ratio is
    ``10 log10(sum x^2 / sum (x - q)^2)`` in dB, infinite where nothing is lost. All NaN for no rows.
    """
    if rows_RK.numel() == 0:
        return torch.full((len(MEASURES),), torch.nan, dtype=torch.float32, device=rows_RK.device)
    K = rows_RK.shape[1]
    values = rows_RK.detach().float()
    quantized = quantize_mx(F.pad(values.to(torch.bfloat16), (0, padded_size(K) - K)))
    codes_RK = unswizzle(quantized.codes)
    restored = dequantize_mx_natural(codes_RK, quantized.scales)[:, :K]
    magnitude = codes_RK[:, :K].bitwise_and_(_MAGNITUDE)
    flushed = ((magnitude == 0) & (values != 0)).float().mean()
    saturated = (magnitude == _LARGEST_CODE).float().mean()
    noise = (values - restored).square().sum()
    sqnr = 10.0 * torch.log10(values.square().sum() / noise)
    return torch.stack([values.abs().amax(), flushed, saturated, sqnr])


def health_record(blocks: Iterable[str], health_WM4: Tensor) -> dict[str, Any]:
    """Return the quantization health per block and tensor over all ranks, each of which saw its own inputs and shards.

    M are the blocks times :data:`TENSORS`, in their order; figures are NaN of tensors that a block does not have.
    """
    measured = [(name, tensor) for name in blocks for tensor in TENSORS]
    absent_WM = health_WM4[..., 1].isnan()  # a share is a number wherever there is an element, NaN or not
    largest = health_WM4[..., 0].masked_fill(absent_WM, -math.inf).amax(dim=0)
    rows = torch.cat([largest[:, None], health_WM4[..., 1:].nanmean(dim=0)], dim=1).tolist()
    record: dict[str, Any] = {}
    for (name, tensor), figures in zip(measured, rows, strict=True):
        module = record.setdefault(name, {"weights": {}})
        if figures[0] == -math.inf:
            continue
        home = module if tensor == INPUT else module["weights"]
        home[tensor] = dict(zip(MEASURES, figures, strict=True))
    return record


def logs_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return one number per key for ``Trainer.log``: means over modules, of ``amax`` the largest."""
    logs = {f"neuron/{key}": record[key] for key in ("tokens_per_second", "saved_bytes_per_token", "padding_overhead")}
    if "routing_kept" in record:
        logs["neuron/routing_kept"] = record["routing_kept"]
    experts = record["experts"].values()
    modules = record.get("health", {}).values()
    weights = [tensor for module in modules for tensor in module["weights"].values()]
    inputs = [module[INPUT] for module in modules if INPUT in module]
    divided = [figures for figures in experts if "process_load" in figures]
    for key, figures, measure in (
        ("load_entropy", experts, "entropy"),
        ("load_max_over_mean", experts, "max_over_mean"),
        ("dead_experts", experts, "dead"),
        ("process_load_max_over_mean", divided, "process_max_over_mean"),
        ("idle_processes", divided, "idle_processes"),
        ("processes_per_token", divided, "processes_per_token"),
        ("sqnr_weights_db", weights, "sqnr_db"),
        ("sqnr_inputs_db", inputs, "sqnr_db"),
        ("flushed", [*weights, *inputs], "flushed"),
        ("saturated", [*weights, *inputs], "saturated"),
    ):
        if figures:
            logs[f"neuron/{key}"] = _mean(figure[measure] for figure in figures)
    largest = [tensor["amax"] for tensor in (*weights, *inputs)]
    if largest:
        logs["neuron/amax"] = math.nan if any(map(math.isnan, largest)) else max(largest)
    return logs


def _mean(values: Iterable[float]) -> float:
    """Mean of the finite values: a tensor of zeros has no signal-to-noise ratio, an exact one an infinite one."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
