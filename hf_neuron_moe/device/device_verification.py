"""The first run on a machine: every patched block through the Neuron kernels and through PyTorch, layer by layer.

Nothing in this package has run on a device; this shows whether it works on yours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.device.device_report import ORDER, BlockResult, DeviceReport
from hf_neuron_moe.device.model_dir import check_model_dir
from hf_neuron_moe.device.request import WHERE, Request
from hf_neuron_moe.device.run_block import random_inputs, run_block
from hf_neuron_moe.device.tolerances import BOUNDS, ERROR, FAIL, MISSING, NOT_RUN, TensorResult, compare
from hf_neuron_moe.errors import (
    BackendUnavailableError,
    ConfigError,
    NeuronMoEError,
    NothingToPatchError,
    SourceDamageError,
    public,
)
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import FrozenBlock
from hf_neuron_moe.patching import patch_model, unpatch_model


@public(WHERE)
def load_for_verification(folder: Path, *, random_weights: bool = False) -> nn.Module:
    """Return the model in a folder on the CPU, or on the meta device where its weights are not wanted.

    The folder is a checkpoint or a conversion; with `random_weights` one with ``config.json`` is enough.
    """
    check_model_dir(folder, random_weights=random_weights)
    if random_weights:
        model = build_meta_model(folder)
        dtype = model.config.dtype
        return nn.Module.to(model, dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)
    import hf_neuron_moe.quantizers  # noqa: F401 - makes transformers know converted checkpoints

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise SourceDamageError.about(
            str(folder),
            "a checkpoint whose weights transformers can read",
            f"{type(error).__name__}: {error}",
            "Repair it, or compare on random weights: --random-weights.",
        ) from error
    kinds = [type(module) for module in model.modules() if isinstance(module, NeuronBlock)]
    if kinds and not any(issubclass(kind, FrozenBlock) for kind in kinds):
        unpatch_model(model)  # a conversion in bf16 comes patched; it is patched again as it is to be compared
    return model


def verify_device(
    model: nn.Module,
    *,
    backend: str = "neuron",
    precision: str | None = None,
    tokens: int = 256,
    block_size: int = 512,
    seed: int = 0,
    layers: int | None = None,
    device: str | None = None,
    progress: Callable[[BlockResult], None] | None = None,
) -> DeviceReport:
    """Compare the Neuron backend with the torch backend, block by block, on random input.

    The model is patched for the time of the call. Blocks on the meta device get random weights, one at a time.

    Args:
        model: with stock blocks, or a converted checkpoint whose frozen blocks are compared in inference.
        backend: ``"neuron"``, or ``"nki-sim"`` for NKI's simulator (then take few tokens and a tiny model).
        precision: of the blocks; None for the one that the chip has kernels for, bf16 on Trn2 and mxfp8 on Trn3.
        tokens: rows of the random input.
        block_size: tokens per block of experts.
        seed: of inputs and random weights.
        layers: only the first so many blocks; None for all.
        device: where the kernels run, see :meth:`~hf_neuron_moe.device.request.Request.device_here`.
        progress: called with every block's result.
    """
    request = Request(backend, precision, tokens, block_size, seed, layers, device)
    place, precision = request.device_here(), request.precision_here()
    config = NeuronMoEConfig(precision=precision, backend=backend, block_size=block_size)
    with _patched(model, config) as refused:
        blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, NeuronBlock)]
        meta = any(param.is_meta for param in model.parameters())
        results: list[BlockResult] = []
        failed: dict[Any, str] = {}
        for number, (name, block) in enumerate(blocks[:layers]):
            result = _verify_block(name, block, place, backend, tokens, seed + number, failed)
            results.append(result)
            if progress is not None:
                progress(result)
    return DeviceReport(
        backend=backend,
        device=str(place),
        target=versions.platform().name,
        lnc=versions.lnc(),
        precision=precision,
        tokens=tokens,
        block_size=block_size,
        seed=seed,
        weights="random" if meta else "checkpoint",
        blocks=(*results, *refused),
    )


@contextmanager
def _patched(model: nn.Module, config: NeuronMoEConfig) -> Iterator[list[BlockResult]]:
    """The model patched; yields the blocks that cannot be. Frozen blocks need no patching."""
    if any(isinstance(module, FrozenBlock) for module in model.modules()):
        yield []
        return
    report = patch_model(model, config, strict=False)
    try:
        if not report.patched:
            raise NothingToPatchError.about(
                "model",
                "a block that the kernels compute here",
                "; ".join(sorted({entry.reason for entry in report.refused})),
                "`hf-neuron-moe doctor MODEL_DIR` lists kernels and precisions.",
            ).named(WHERE)
        yield [BlockResult(entry.name, entry.kind, NOT_RUN, note=entry.reason) for entry in report.refused]
    finally:
        unpatch_model(model)


def _verify_block(
    name: str, block: NeuronBlock, device: torch.device, backend: str, tokens: int, seed: int, failed: dict[Any, str]
) -> BlockResult:
    """Compare one block; where a like one raised before, it is not tried again: compilations take minutes."""
    frozen = isinstance(block, FrozenBlock)
    kind = ("frozen " if frozen else "") + ("mlp" if block.neuron_shape.top_k is None else "experts")
    alike = (kind, block.neuron_shape)
    if alike in failed:
        return BlockResult(name, kind, NOT_RUN, note=f"like {failed[alike]}, not tried again")
    inputs = random_inputs(block, tokens, seed)
    bounds = BOUNDS["mxfp8" if frozen else block.neuron_config.precision]
    try:
        with _with_values(block, seed):
            expected, _ = run_block(block, inputs, "torch", torch.device("cpu"))
            found, seconds = run_block(block, inputs, backend, device)
    except (NeuronMoEError, RuntimeError) as error:  # what the compiler and the runtime raise
        failed[alike] = name
        unsupported = isinstance(error, ConfigError | BackendUnavailableError)
        return BlockResult(name, kind, NOT_RUN if unsupported else ERROR, note=" ".join(str(error).split()))
    tensors = tuple(
        compare(key, found[key], expected[key], bounds)
        if key in found
        else TensorResult(key, None, None, FAIL, "was not computed", MISSING)
        for key in expected
    )
    worst = max((tensor.verdict for tensor in tensors), key=ORDER.index)
    return BlockResult(name, kind, worst, tensors, seconds)


@contextmanager
def _with_values(block: NeuronBlock, seed: int) -> Iterator[None]:
    """Random weights for a block on the meta device, as long as it is looked at; others have theirs."""
    if not any(param.is_meta for param in block.parameters()):
        yield
        return
    block.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in block.parameters():
            hidden = block.neuron_shape.hidden
            param.copy_(torch.randn(param.shape, generator=generator) * hidden**-0.5)
    try:
        yield
    finally:
        block.to("meta")
