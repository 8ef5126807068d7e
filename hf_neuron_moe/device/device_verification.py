"""The first run on a machine: every patched block through the Neuron kernels and through PyTorch, layer by layer.

T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.device.device_report import ORDER, BlockResult, DeviceReport
from hf_neuron_moe.device.emulation import emulated, explanation
from hf_neuron_moe.device.model_dir import check_model_dir
from hf_neuron_moe.device.request import WHERE, Request
from hf_neuron_moe.device.tolerances import (
    BOUNDS,
    CLOSE,
    EMULATED,
    EQUAL,
    ERROR,
    FAIL,
    MISSING,
    NOT_RUN,
    PASS,
    Bounds,
    TensorResult,
    compare,
)
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

    `model` has stock blocks and is patched for the time of the call, or is a converted checkpoint whose MX blocks are
    compared in inference. Blocks on the meta device get random weights, one at a time. `progress` is called with every
    block's result. `options` are the fields of :class:`~hf_neuron_moe.device.request.Request`.
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
            run = _Run(name, block, inputs, request, place)
            results.append(_verify_block(run, request.seed + number, failed))
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


class _Run(NamedTuple):
    """One block to be compared."""

    name: str
    block: NeuronBlock
    inputs: Inputs
    request: Request
    place: torch.device

    @property
    def kind(self) -> str:
        """As in :class:`~hf_neuron_moe.device.device_report.BlockResult`."""
        frozen = "frozen " if isinstance(self.block, QuantizedBlock) else ""
        return frozen + ("mlp" if self.block.neuron_shape.top_k is None else "experts")

    @property
    def precision(self) -> str:
        """Of the kernels."""
        return "mxfp8" if isinstance(self.block, QuantizedBlock) else self.block.neuron_config.precision

    @property
    def has_emulation(self) -> bool:
        """Whether the block's kernels are also computed here, as the device accumulates."""
        return self.precision == "bf16"

    def on_device(self) -> tuple[dict[str, Tensor], float]:
        """Results of the kernels, and seconds."""
        return run_block(self.block, self.inputs, self.request.backend, self.place)

    def here(self) -> dict[str, Tensor]:
        """Results of the backend's calls on the CPU, for :mod:`~hf_neuron_moe.device.emulation`."""
        return run_block(self.block, self.inputs, self.request.backend, torch.device("cpu"))[0]

    def compare(self, found: dict[str, Tensor]) -> tuple[TensorResult, ...]:
        """Compare with PyTorch or, as requested, with the kernels' own accumulation."""
        if self.has_emulation and self.request.accumulation == "device":
            with emulated():
                return _compared(found, self.here(), EMULATED)
        expected, _ = run_block(self.block, self.inputs, "torch", torch.device("cpu"))
        return _compared(found, expected, BOUNDS[self.precision])


def _verify_block(run: _Run, seed: int, failed: dict[Any, str]) -> BlockResult:
    """Compare one block; where a like one raised before, it is not tried again: compilations take minutes."""
    alike, explained, note = (run.kind, run.block.neuron_shape), "", ""
    if alike in failed:
        return BlockResult(run.name, run.kind, NOT_RUN, note=f"like {failed[alike]}, not tried again")
    try:
        with _with_values(run.block, seed):
            found, seconds = run.on_device()
            tensors = run.compare(found)
            worst = max((tensor.verdict for tensor in tensors), key=ORDER.index)
            if run.has_emulation and worst in (CLOSE, FAIL):
                explained, note = _explained(run, found)
    except (NeuronMoEError, RuntimeError) as error:  # what the compiler and the runtime raise
        failed[alike] = run.name
        unsupported = isinstance(error, ConfigError | BackendUnavailableError)
        verdict = NOT_RUN if unsupported else ERROR
        return BlockResult(run.name, run.kind, verdict, note=" ".join(str(error).split()))
    return BlockResult(run.name, run.kind, worst, tensors, seconds, note, explained)


def _explained(run: _Run, found: dict[str, Tensor]) -> tuple[str, str]:
    """Return what the results agree with, and an error of looking for it, which changes no verdict."""
    try:
        return explanation(run.here, lambda other: _agrees(_compared(found, other, EMULATED))), ""
    except (NeuronMoEError, RuntimeError) as error:
        return "", f"the reference that rounds like the kernels could not be computed: {' '.join(str(error).split())}"


def _agrees(tensors: tuple[TensorResult, ...]) -> bool:
    return all(tensor.verdict in (EQUAL, PASS) for tensor in tensors)


def _compared(found: dict[str, Tensor], expected: dict[str, Tensor], bounds: Bounds) -> tuple[TensorResult, ...]:
    return tuple(
        compare(key, found[key], expected[key], bounds)
        if key in found
        else TensorResult(key, None, None, FAIL, "was not computed", MISSING)
        for key in expected
    )


@contextmanager
def _with_values(block: NeuronBlock, seed: int) -> Iterator[None]:
    """Random weights for a block on the meta device, as long as it is looked at."""
    meta = any(param.is_meta for param in block.parameters())
    if meta:
        block.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in block.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * block.neuron_shape.hidden**-0.5)
    try:
        yield
    finally:
        if meta:
            block.to("meta")


class Inputs(NamedTuple):
    """Random operands of one call: normal rows as a norm layer makes them, and a routing for experts."""

    x: Tensor  # [T, H] bf16
    routing: tuple[Tensor, ...]  # ids int64 [T, K] and weights fp32 [T, K] that sum to 1; empty for a dense MLP
    grad: Tensor  # [T, H] bf16, the gradient that arrives


def random_inputs(block: NeuronBlock, tokens: int, seed: int) -> Inputs:
    """Make the operands of a call, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = block.neuron_shape
    x, grad = (torch.randn(tokens, shape.hidden, generator=generator).bfloat16() for _ in range(2))
    if shape.top_k is None or shape.experts is None:
        return Inputs(x, (), grad)
    scores = torch.rand(tokens, shape.experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(min(max(shape.top_k, 1), shape.experts), -1)
    return Inputs(x, (ids, weights / weights.sum(-1, keepdim=True)), grad)


def run_block(
    block: NeuronBlock, inputs: Inputs, backend: str, device: torch.device
) -> tuple[dict[str, Tensor], float]:
    """Return a block's output and, unless its weights are frozen codes, every gradient, by name and on the CPU.

    The block is moved to `device` for the time of the call. Also returns its seconds, compilation included.
    """
    trained = not isinstance(block, QuantizedBlock)
    with _as(block, backend, device, training=trained), torch.set_grad_enabled(trained):
        x = inputs.x.to(device).requires_grad_(trained)
        routing = [tensor.to(device) for tensor in inputs.routing]
        wanted = {"input": x}
        if routing:
            wanted["routing weights"] = routing[1].requires_grad_(trained)
        begin = time.perf_counter()
        y = block(x, *routing)
        results = {"output": y}
        if trained:
            wanted |= dict(block.named_parameters())
            grads = torch.autograd.grad(y, list(wanted.values()), inputs.grad.to(device), allow_unused=True)
            results |= {f"grad {name}": grad for name, grad in zip(wanted, grads) if grad is not None}
        done = {name: tensor.detach().to("cpu") for name, tensor in results.items()}
        return done, time.perf_counter() - begin


@contextmanager
def _as(block: NeuronBlock, backend: str, device: torch.device, *, training: bool) -> Iterator[None]:
    """The block with another backend, mode and device, and no other one in its place; all as before afterwards."""
    config, mode, home = block.neuron_config, block.training, next(block.buffers(), next(block.parameters(), None))
    block.neuron_config = replace(config, backend=backend, fallback="refuse")
    block.train(training)
    try:
        block.to(device)
        yield
    finally:
        block.neuron_config = config
        block.train(mode)
        if home is not None:
            block.to(home.device)
