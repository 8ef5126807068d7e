"""What a conversion must hold, written down from the formats' functions and the stock weights, without the converter.

H hidden, I intermediate, E experts; gate_up [.., 2I, H], down [.., H, I].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.convert import ConvertOptions
from hf_neuron_moe.formats import (
    dequantize_moe_down,
    dequantize_moe_gate_up,
    fake_quantize_mx,
    pack_moe_scales,
    quantize_moe_down,
    quantize_moe_gate_up,
    quantize_mx,
    swizzle,
    to_oversized,
    to_packed,
    unswizzle,
)

FP4 = "e2m1"
FORMATS = {"mxfp8": "e4m3fn", "mxfp4": FP4}


class ImpossibleError(Exception):
    """The combination has no such form; the converter must refuse it."""


@dataclass
class Weights:
    """Gate [.., I, H], up [.., I, H] and down [.., H, I] of one module, and the name its weights have.

    Without a gate, that has no rows.
    """

    prefix: str
    suffix: str
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def has_experts(self) -> bool:
        return self.up.ndim == 3

    @property
    def first(self) -> str:
        return "gate_up_proj" if self.gate.shape[-2] else "up_proj"


class Written(NamedTuple):
    """Expected tensors by name, and the values that each fused weight comes back as (None: those it had)."""

    tensors: dict[str, Tensor]
    back: dict[str, Tensor]


def modules_of(state: dict[str, Tensor]) -> Iterator[Weights]:
    """The SwiGLU MLPs and experts of a stock model's state dict."""
    for name in state:
        if not name.endswith(("mlp.down_proj.weight", "shared_expert.down_proj.weight", "experts.down_proj")):
            continue
        prefix, suffix = name.split("down_proj")
        fused = state.get(f"{prefix}gate_up_proj{suffix}")
        if fused is None:
            up = state[f"{prefix}up_proj{suffix}"]
            gate = state.get(f"{prefix}gate_proj{suffix}", up[..., :0, :])
        else:
            gate, up = fused.chunk(2, dim=-2)
        yield Weights(prefix, suffix, gate, up, state[name])


def expected(weights: Weights, options: ConvertOptions) -> Written:
    """Everything that a module's weights become."""
    tensors: dict[str, Tensor] = {}
    parts = [_part(weights, options, rank) for rank in range(options.tp_degree)]
    back: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for rank, (gate, up, down) in enumerate(parts):
        matrices = {weights.first: torch.cat([gate, up], dim=-2), "down_proj": down}
        end = "" if options.tp_degree == 1 else f".tp{rank}"
        values = {}
        for role, matrix in matrices.items():
            name = weights.prefix + role + weights.suffix
            stored, values[role] = _stored(matrix, role, options)
            tensors |= {name + suffix + end: tensor for suffix, tensor in stored.items()}
        width, real = gate.shape[-2], _share(weights, options, rank)
        size = slice(0, real.stop - real.start)
        back["gate"].append(values[weights.first][..., :width, :][..., size, : weights.gate.shape[-1]])
        back["up"].append(values[weights.first][..., width:, :][..., size, : weights.gate.shape[-1]])
        back["down"].append(values["down_proj"][..., : weights.down.shape[-2], size])
    joined = {key: torch.cat(values, dim=-1 if key == "down" else -2) for key, values in back.items()}
    return Written(tensors, joined)


def _share(weights: Weights, options: ConvertOptions, rank: int) -> slice:
    size = weights.up.shape[-2]
    if size % options.tp_degree and not options.pad:
        raise ImpossibleError
    share = -(-size // options.tp_degree)
    return slice(rank * share, min(size, (rank + 1) * share))


def _part(weights: Weights, options: ConvertOptions, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _share(weights, options, rank)
    gate, up, down = weights.gate[..., rows, :], weights.up[..., rows, :], weights.down[..., rows]
    if not options.pad:
        return gate, up, down
    H, width = gate.shape[-1], -(-weights.up.shape[-2] // options.tp_degree)
    words = weights.has_experts and options.quantized and options.purpose == "inference"
    if words:
        H, width = _up(H, 512), _up(width, 32) if width < 481 else _up(width, 512)
    elif weights.has_experts and not options.quantized:
        H, width = _up(H, 512), _up(width, 64)
    else:
        H, width = _up(H, 128), _up(width, 128)
        prepared = options.swizzle if options.precision == "bf16" else options.layout == "kernel"
        if prepared and options.precision != "mxfp4":
            # The forward kernel groups activations with K = 384 as one tile, prepared weights as two.
            H, width = (512 if size == 384 else size for size in (H, width))
    up = pad(up, (0, H - up.shape[-1], 0, width - up.shape[-2]))
    gate = pad(gate, (0, H - gate.shape[-1], 0, width - gate.shape[-2])) if gate.shape[-2] else up[..., :0, :]
    return gate, up, pad(down, (0, width - down.shape[-1], 0, H - down.shape[-2]))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _stored(matrix: Tensor, role: str, options: ConvertOptions) -> tuple[dict[str, Tensor], Tensor]:
    has_experts, kernel = matrix.ndim == 3, options.layout == "kernel"
    if not options.quantized or (options.precision == "mxfp4" and not has_experts):
        if options.swizzle and not options.quantized:
            if has_experts or matrix.shape[-1] % 32:
                raise ImpossibleError
            return {"": swizzle(matrix)}, matrix
        return {"": matrix.transpose(-1, -2) if kernel and has_experts else matrix}, matrix
    if has_experts and kernel and options.purpose == "inference":
        return _words(matrix, role, options)
    stored = _operands(matrix, "", options)
    if options.purpose != "inference":
        stored |= _operands(matrix.transpose(-1, -2), "_T", options)
    return stored, fake_quantize_mx(matrix, rule=options.rule).to(matrix.dtype)


def _operands(matrix: Tensor, suffix: str, options: ConvertOptions) -> dict[str, Tensor]:
    if matrix.shape[-1] % 32 or (options.layout == "kernel" and options.scales == "compact"):
        raise ImpossibleError
    codes, scales = [], []
    for matrix_FK in matrix if matrix.ndim == 3 else matrix[None]:
        mx = quantize_mx(matrix_FK, rule=options.rule)
        codes.append(mx.codes if options.layout == "kernel" else unswizzle(mx.codes))
        arrange = {"oversized": to_oversized, "packed": to_packed, None: to_packed, "compact": lambda compact: compact}
        scales.append(arrange[options.scales](mx.scales) if options.layout == "kernel" else mx.scales)
    both = {suffix: torch.stack(codes).view(torch.float8_e4m3fn), suffix + "_scale": torch.stack(scales)}
    return both if matrix.ndim == 3 else {name: tensor[0] for name, tensor in both.items()}


def _words(matrix: Tensor, role: str, options: ConvertOptions) -> tuple[dict[str, Tensor], Tensor]:
    halves = {"gate_up_proj": 2, "up_proj": 1}.get(role, 0)
    H, inner = matrix.shape[-1 if halves else -2], matrix.shape[-2] // halves if halves else matrix.shape[-1]
    if H % 512 or inner % 32 or options.scales == "oversized":
        raise ImpossibleError
    fmt = FORMATS[options.precision]
    if halves:
        mx = quantize_moe_gate_up(matrix.unflatten(1, (halves, inner)).permute(0, 3, 1, 2), fmt=fmt, rule=options.rule)
        values = dequantize_moe_gate_up(mx).permute(0, 2, 3, 1).flatten(1, 2)
    else:
        mx = quantize_moe_down(matrix.transpose(1, 2), fmt=fmt, rule=options.rule)
        values = dequantize_moe_down(mx).transpose(1, 2)[..., :inner]
    scales = pack_moe_scales(mx.scales) if options.scales == "packed" else mx.scales
    unsigned = torch.uint16 if fmt == FP4 else torch.uint32
    return {"": mx.words.view(unsigned), "_scale": scales}, values.to(matrix.dtype)
