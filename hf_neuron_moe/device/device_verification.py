"""The first run on a machine: every patched block through the Neuron kernels and through PyTorch, layer by layer."""

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
from hf_neuron_moe.device.run_block import Inputs, random_inputs, run_block
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
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
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
        expected, got = "a checkpoint whose weights transformers can read", f"{type(error).__name__}: {error}"
        fix = "Repair it, or compare on random weights: --random-weights."
        raise SourceDamageError.about(str(folder), expected, got, fix) from error
    kinds = [type(module) for module in model.modules() if isinstance(module, NeuronBlock)]
    if kinds and not any(issubclass(kind, QuantizedBlock) for kind in kinds):
        unpatch_model(model)  # a conversion in bf16 comes patched; it is patched again as it is to be compared
    return model


def verify_device(
    model: nn.Module, *, progress: Callable[[BlockResult], None] | None = None, **options: Any
) -> DeviceReport:
    """Compare the Neuron backend with the torch backend, block by block, on random input.

    The model is patched for the time of the call. Blocks on the meta device get random weights, one at a time.

    Args:
        model: with stock blocks, or a converted checkpoint whose MX blocks are compared in inference.
        progress: called with every block's result.
        **options: the fields of :class:`~hf_neuron_moe.device.request.Request`.
    """
    request = Request(**options)
    place, precision = request.device_here(), request.precision_here()
    config = NeuronMoEConfig(precision=precision, backend=request.backend, block_size=request.block_size)
    results: list[BlockResult] = []
    failed: dict[Any, str] = {}
    with _patched(model, config) as refused:
        blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, NeuronBlock)]
        meta = any(param.is_meta for param in model.parameters())
        for number, (name, block) in enumerate(blocks[: request.layers]):
            inputs = random_inputs(block, request.tokens, request.seed + number)
            results.append(_verify_block(name, block, inputs, (request.backend, place), request.seed + number, failed))
            if progress is not None:
                progress(results[-1])
    return DeviceReport(
        backend=request.backend,
        device=str(place),
        target=versions.platform().name,
        lnc=versions.lnc(),
        precision=precision,
        tokens=request.tokens,
        block_size=request.block_size,
        seed=request.seed,
        weights="random" if meta else "checkpoint",
        blocks=(*results, *refused),
    )


@contextmanager
def _patched(model: nn.Module, config: NeuronMoEConfig) -> Iterator[list[BlockResult]]:
    """The model patched; yields the blocks that cannot be. Frozen blocks need no patching."""
    if any(isinstance(module, QuantizedBlock) for module in model.modules()):
        yield []
        return
    report = patch_model(model, config, strict=False)
    try:
        if not report.patched:
            got = "; ".join(sorted({entry.reason for entry in report.refused}))
            fix = "`hf-neuron-moe doctor MODEL_DIR` lists kernels and precisions."
            raise NothingToPatchError.about("model", "a block that the kernels compute here", got, fix).named(WHERE)
        yield [BlockResult(entry.name, entry.kind, NOT_RUN, note=entry.reason) for entry in report.refused]
    finally:
        unpatch_model(model)


def _verify_block(
    name: str, block: NeuronBlock, inputs: Inputs, place: tuple[str, torch.device], seed: int, failed: dict[Any, str]
) -> BlockResult:
    """Compare one block; where a like one raised before, it is not tried again: compilations take minutes."""
    frozen = isinstance(block, QuantizedBlock)
    kind = ("frozen " if frozen else "") + ("mlp" if block.neuron_shape.top_k is None else "experts")
    alike = (kind, block.neuron_shape)
    if alike in failed:
        return BlockResult(name, kind, NOT_RUN, note=f"like {failed[alike]}, not tried again")
    bounds = BOUNDS["mxfp8" if frozen else block.neuron_config.precision]
    try:
        with _with_values(block, seed):
            expected, _ = run_block(block, inputs, "torch", torch.device("cpu"))
            found, seconds = run_block(block, inputs, *place)
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
    """Random weights for a block on the meta device, as long as it is looked at."""
    if not any(param.is_meta for param in block.parameters()):
        yield
        return
    block.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in block.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * block.neuron_shape.hidden**-0.5)
    try:
        yield
    finally:
        block.to("meta")
