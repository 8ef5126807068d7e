"""Folding: an outlier channel made ordinary by powers of two in the weights around it, which bf16 does not notice.

An input channel of the down projection is scaled by its row of the up projection, and back by its column of down. An
input channel of gate and up is scaled by the norm before them, and back by the columns of all modules that read it.

Legend: H hidden, I intermediate, E experts, L tokens.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.errors import DestinationError, UnsupportedModelError, public
from hf_neuron_moe.explore.explain import Outlier
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.experts import ExpertsBlock
from hf_neuron_moe.modules.experts_form import parameter_of
from hf_neuron_moe.modules.swiglu_mlp import NeuronSwiGLUMLP
from hf_neuron_moe.training.block_calls import Projections
from hf_neuron_moe.training.blocks import patched_blocks

BF16_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Fold:
    """One channel that was made ordinary."""

    block: str
    outlier: Outlier
    power: int  # the channel's values are 2**power of what they were
    through: str  # the module that scales it

    @property
    def text(self) -> str:
        """What was done, in words."""
        where = f"{self.block}, expert {self.outlier.expert}" if "experts" in self.block else self.block
        channel = f"input channel {self.outlier.channel} of {self.outlier.product}"
        return f"{where}: {channel} times 2**{self.power}, in {self.through}"


@public("fold")
def fold(model: Any, name: str, outliers: Sequence[Outlier], row_L: Tensor) -> list[Fold]:
    """Fold a power of two into the weights around each outlier of a block of a patched model, in place.

    The model's logits of `row_L` are the same afterwards, bit for bit or within one bf16 rounding of their largest.

    Raises:
        UnsupportedModelError: the block's weights do not allow it, or the logits differ; the weights are as they were.
    """
    before = _logits(model, row_L)
    block, done = patched_blocks(model)[name], []
    changes: list[tuple[Tensor, int]] = []
    try:
        for outlier in outliers:
            power = -round(math.log2(outlier.ratio))
            if outlier.product == "down":
                through, scaled = "up_proj", list(_around_down(name, block, outlier, power))
            else:
                through, scaled = _around_input(model, name, outlier, power, row_L)
            for weight, exponent in scaled:
                _scale(name, weight, exponent)
                changes.append((weight, exponent))
            done.append(Fold(name, outlier, power, through))
        after = _logits(model, row_L)
        if not (after - before).abs().max() <= BF16_ROUNDING * before.abs().max():
            got = f"logits that differ by up to {(after - before).abs().max():.3g}"
            fix = "Leave it in bf16: something between the norm and the block is not linear in the channel."
            raise UnsupportedModelError.about(f"{name}, folded,", "equal to the original within a rounding", got, fix)
    except BaseException:
        for weight, exponent in reversed(changes):
            weight.mul_(2.0**-exponent)
        raise
    return done


def _logits(model: Any, row_L: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=row_L.unsqueeze(0), use_cache=False).logits
        return logits.float()


def _scale(name: str, weight: Tensor, exponent: int) -> None:
    """Multiply by ``2**exponent`` in place, where that loses nothing."""
    with torch.no_grad():
        scaled = weight * 2.0**exponent
        if not torch.equal(scaled * 2.0**-exponent, weight):
            got = f"{weight.dtype} values that leave its range at 2**{exponent}"
            raise UnsupportedModelError.about(name, "with weights that can be scaled", got, "Leave it in bf16.")
        weight.copy_(scaled)


def projections_of(block: NeuronBlock) -> Projections:
    """Return views of a patched block's own weights in ``nn.Linear`` orientation, with a first axis of experts."""
    if isinstance(block, NeuronSwiGLUMLP):
        return Projections(*(weight.detach().unsqueeze(0) for weight in block._weights()[:3]))
    if not isinstance(block, ExpertsBlock) or not block.neuron_form.routed:
        fix = "Leave it in bf16."
        raise UnsupportedModelError.about(block.neuron_name, "a dense MLP or routed experts", type(block).__name__, fix)
    form = block.neuron_form
    gate_up, down = (parameter_of(block, name).detach() for name in (form.gate_up, form.down))
    if form.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not form.gate.gated:
        return Projections(None, gate_up, down)
    if form.interleaved:
        return Projections(gate_up[:, ::2], gate_up[:, 1::2], down)
    gate, up = gate_up.chunk(2, dim=1)
    return Projections(gate, up, down)


def _around_down(name: str, block: NeuronBlock, outlier: Outlier, power: int) -> Iterator[tuple[Tensor, int]]:
    """The row of up, its bias and the column of down that belong to an input channel of down."""
    if not block.neuron_gate.reads_up_as_it_is:
        got = f"{block.neuron_gate.short}, which is not linear in up"
        raise UnsupportedModelError.about(name, "a block whose gate multiplies up", got, "Leave it in bf16.")
    if isinstance(block, ExpertsBlock) and block.neuron_form.biased:
        fix = "Leave it in bf16."
        raise UnsupportedModelError.about(name, "a block without biases", "experts with biases", fix)
    _, up_EIH, down_EHI = projections_of(block)
    yield up_EIH[outlier.expert, outlier.channel], power
    yield down_EHI[outlier.expert, :, outlier.channel], -power
    bias = block._weights().up_bias_I if isinstance(block, NeuronSwiGLUMLP) else None
    if bias is not None:
        yield bias.detach()[outlier.channel : outlier.channel + 1], power


def _around_input(
    model: nn.Module, name: str, outlier: Outlier, power: int, row_L: Tensor
) -> tuple[str, list[tuple[Tensor, int]]]:
    """The norm before a block and the columns of everything that reads its output, for one channel."""
    norm, readers = _norm_and_readers(model, name, row_L)
    channel = slice(outlier.channel, outlier.channel + 1)
    weights: list[tuple[Tensor, int]] = []
    for own in ("weight", "bias"):
        values = getattr(model.get_submodule(norm), own, None)
        if values is not None:
            weights.append((values.detach()[channel], power))
    for reader in readers:
        module = model.get_submodule(reader)
        if isinstance(module, NeuronBlock):
            weights += [
                (weight[:, :, outlier.channel], -power) for weight in projections_of(module)[:2] if weight is not None
            ]
            continue
        matrix = getattr(module, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.dim() != 2:
            fix = "Leave the block in bf16."
            raise UnsupportedModelError.about(
                name, f"read by linear layers behind {norm}", f"{reader}, which is none", fix
            )
        weights.append((matrix.detach()[:, outlier.channel], -power))
    return norm, weights


def _norm_and_readers(model: nn.Module, name: str, row_L: Tensor) -> tuple[str, list[str]]:
    """Return the module whose output a block reads, and all modules with parameters that read it too."""
    outputs: dict[int, tuple[str, Tensor]] = {}  # kept, so that their memory is not used again
    read: dict[str, list[str]] = {}
    handles = []

    def produced(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: object) -> None:
            if isinstance(output, Tensor):
                outputs[output.untyped_storage().data_ptr()] = path, output

        return hook

    def consumed(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and (found := outputs.get(value.untyped_storage().data_ptr())):
                    read.setdefault(found[0], []).append(path)

        return hook

    blocks = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, NeuronBlock))
    for path, module in model.named_modules():
        if path.startswith(blocks):  # which the block computes itself
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 1:
            handles.append(module.register_forward_hook(produced(path)))
        elif module._parameters or isinstance(module, NeuronBlock):
            handles.append(module.register_forward_pre_hook(consumed(path), with_kwargs=True))
    try:
        _logits(model, row_L)
    finally:
        for handle in handles:
            handle.remove()
    for norm, readers in read.items():
        if name in readers:
            return norm, sorted(set(readers))
    fix = "Leave it in bf16."
    raise UnsupportedModelError.about(name, "a block that reads a norm's output", "one that does not", fix)


def save_folded(model: Any, tokenizer: Any, destination: Path) -> None:
    """Write the folded model as an ordinary checkpoint, whole or not at all."""
    check_destination(destination)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_destination(destination: Path) -> None:
    """Raise DestinationError for a folder that exists, or whose parent does not."""
    fix = "Name a new folder."
    if destination.exists():
        raise DestinationError.about("fold", "a folder that does not exist", str(destination), fix)
    if not destination.absolute().parent.is_dir():
        raise DestinationError.about("fold", "a name in a folder that exists", str(destination), fix)
