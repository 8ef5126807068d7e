"""Makes quantized checkpoints of plain ones: FP8 in blocks and MXFP4, as their publishers lay them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL = "model.safetensors"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def rewrite(
    folder: Path, settings: Mapping[str, Any] | None, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Change a folder's tensors in place and set its ``quantization_config``; return the new tensors."""
    tensors = change(load_file(folder / MODEL))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / MODEL, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def fp8_of(weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix ``[N, K]``, one scale per block, chosen so that no code saturates."""
    N, K = weight.shape
    rows, columns = block
    codes = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-N // rows), -(-K // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scale = weight[part].float().abs().amax().clamp(min=1e-12) / 448
            if scale_dtype != torch.float32:  # a power of two, rounded up
                scale = torch.exp2(torch.log2(scale).ceil())
            scales[row, column] = scale
            codes[part] = (weight[part].float() / scale).to(torch.float8_e4m3fn)
    if scale_dtype == torch.uint8:
        return codes, (torch.log2(scales) + 127).to(torch.uint8)
    return codes, scales.to(scale_dtype)


def to_fp8(
    folder: Path,
    *,
    block: tuple[int, int] = (128, 128),
    scale_dtype: torch.dtype = torch.float32,
    scale_name: str = ".weight_scale_inv",
    plain: tuple[str, ...] = ("lm_head", "embed_tokens", "norm", "mlp.gate."),
    **settings: Any,
) -> dict[str, Tensor]:
    """Turn a folder's matrices into FP8 codes, but those whose names contain one of `plain`."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or any(part in name for part in plain):
                changed[name] = tensor
                continue
            codes, scales = fp8_of(tensor, block, scale_dtype)
            changed |= {name: codes, name.removesuffix(".weight") + scale_name: scales}
        return changed

    return rewrite(folder, {**FP8, "weight_block_size": list(block), **settings}, change)


def random_mxfp4(E: int, N: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random codes ``[E, N, K/32, 16]`` and scale bytes ``[E, N, K/32]`` of sizes that weights have."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (E, N, K // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(117, 124, (E, N, K // 32), generator=generator, dtype=torch.uint8)
