"""Patching where a trainer does it: before the optimizer exists, or not at all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError
from hf_neuron_moe.modules.experts import KernelLayoutExperts
from hf_neuron_moe.modules.in_place import named_blocks
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin
from hf_neuron_moe.modules.swiglu_mlp import KernelLayoutSwiGLUMLP
from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.patching.apply import states
from hf_neuron_moe.patching.lock import one_at_a_time


def is_patched(model: nn.Module) -> bool:
    """Return whether `model` has patched blocks, frozen ones included."""
    return any(True for _ in named_blocks(model))


def refuse_sharded_kernel_layout(model: nn.Module) -> None:
    """Raise for weights in the kernels' layout where FSDP is to shard them.

    torch's distributed state dicts go by the stock names and shapes of parameters: such a run may train, and fails or
    loads transposed weights when it saves and resumes.
    """
    for name in _kernel_layout(model):
        expected = "'stock' for sharded checkpoints, which go by the stock names and shapes ('auto': torch only)"
        fix = "Set neuron_weights='stock'; the numbers are the same."
        raise ConfigError.about("neuron_weights", expected, f"'kernel', for {name}", fix)


def refuse_mixed_layouts(model: nn.Module, callbacks: Iterable[object]) -> None:
    """Raise for callbacks of TRL that would mix weights in the kernels' layout with those of a model in another one.

    They go by the order of parameters. Where shapes agree, as with gpt-oss, the other model gets wrong weights.
    """
    blocks = _kernel_layout(model)
    for callback in callbacks if blocks else ():
        others = [getattr(callback, name) for name in ("ref_model", "running_model") if hasattr(callback, name)]
        if any(other is None or len(_kernel_layout(other)) != len(blocks) for other in others):
            expected = f"'stock' for {type(callback).__name__}, which writes the weights into a model in stock layout"
            fix = "Set neuron_weights='stock'; the numbers are the same. Or patch a ref_model of your own alike."
            raise ConfigError.about("neuron_weights", expected, f"'kernel', for {blocks[0]}", fix)


def _kernel_layout(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, KernelLayoutMixin)]


def refuse_unsavable_adapters(model: nn.Module) -> None:
    """Raise, before a step is lost, for adapters that cannot be saved: those on dense blocks in kernel layout.

    Likewise those on experts whose columns the kernel layout orders anew.
    """
    for name, module in model.named_modules():
        if isinstance(module, KernelLayoutSwiGLUMLP | KernelLayoutExperts):
            module.refuse_adapters(name)


_AS_FROZEN = {
    "precision": ("mxfp8",),
    "weights": ("auto", "stock"),
    "activations": ("minimal",),
    "include": (None,),
    "exclude": (None,),
}
"""Of options for patched blocks, the values that say what frozen MX blocks do."""


def refuse_for_frozen(
    config: NeuronMoEConfig | Mapping[str, Any],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    asked: Container[str] | None = None,
) -> None:
    """Raise ConfigError for options that ask of frozen MX blocks what they do not do.

    `asked` are those that somebody gave, whatever the value; None takes a default for one that nobody gave.
    """
    config = config if isinstance(config, NeuronMoEConfig) else NeuronMoEConfig.from_dict(config)
    given, default = {**vars(config), "include": include, "exclude": exclude}, vars(NeuronMoEConfig())
    for name, allowed in _AS_FROZEN.items():
        is_given = given[name] != default.get(name) if asked is None else name in asked
        if is_given and given[name] not in allowed:
            expected = "left out for a model whose blocks are frozen MX codes"
            fix = "They compute in mxfp8 and keep gate and up for the backward. For others, load the original model."
            raise ConfigError.about(f"neuron_{name}", expected, repr(given[name]), fix)


@one_at_a_time
def patch_for_training(
    model: nn.Module,
    config: NeuronMoEConfig | Mapping[str, Any],
    optimizer: Optimizer | None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
) -> None:
    """Patch `model` unless that would take parameters away from an `optimizer` that has them already.

    A model that is patched with the same arguments stays as it is. So does one that was loaded with frozen MX blocks,
    which computes with the codes it was loaded with. An error leaves the model as it was.
    """
    unpatched = not any(True for _ in states(model))
    if unpatched and any(isinstance(module, QuantizedBlock) for module in model.modules()):
        refuse_for_frozen(config, include, exclude)
        return
    before = {id(param) for param in model.parameters()}
    patch_model(model, config, include=include, exclude=exclude, strict=strict)
    if optimizer is None or not unpatched:
        return
    lost = before - {id(param) for param in model.parameters()}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if lost & held:
        unpatch_model(model)
        raise UnsupportedModelError.about(
            "model",
            "patched before its optimizer is made, since its weights move into another layout",
            f"an unpatched model and an optimizer with {len(lost & held)} of the parameters that would be replaced",
            "Call patch_model(model, config) before the optimizer and the Trainer are made, use "
            "NeuronMoETrainer, or keep the parameters with weights='stock'. Nothing was changed.",
        )
