"""Lets ``load_state_dict`` read checkpoints under their on-disk names.

transformers 5 stores many models under other names and shapes than it holds in memory (Mixtral: ``experts.0.w1.weight``
on disk, one 3-D ``experts.gate_up_proj`` in memory). ``Trainer`` resumes with a plain ``load_state_dict``, which does
not convert as ``from_pretrained`` does, so that routers and experts keep whatever values they have. The pre-hook here
does. Of a state dict with only a part of the pieces of one parameter (a shard of a large checkpoint), the pieces
replace their part of the parameter's present value.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.errors import UnsupportedModelError, public
from hf_neuron_moe.modules.state_dict import in_one_place


@dataclass
class Group:
    """On-disk tensors that are converted together."""

    target: str  # in-memory name of the (first) result
    converter: Any  # transformers' converter, None where the tensor is only renamed
    sources: dict[str, str | None] = field(default_factory=dict)
    """On-disk name to the converter's pattern that matched it, in conversion order."""

    @property
    def checks_shapes(self) -> bool:
        """Whether transformers itself decides by shape if the tensor needs converting."""
        converter = self.converter
        return converter is not None and all(getattr(op, "check_dims", False) for op in converter.operations)


class StockView:
    """Stands in for the model where transformers' conversion asks for shapes: stock ones, whatever the layout is."""

    def __init__(self, model: Any, in_memory: dict[str, Tensor], conversions: list[Any]) -> None:
        self._model = model
        self._in_memory = in_memory
        self._weight_conversions = conversions
        self.config = model.config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look these up before __init__ has run
            raise AttributeError(name)
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        """Return a meta tensor of the stock shape of parameter `name`."""
        return self._in_memory[name]


@dataclass
class NameMap:
    """Between a model's in-memory state dict and its on-disk form."""

    view: StockView  # what conversions see of the model
    in_memory: dict[str, Tensor]  # in-memory name to meta tensor
    on_disk: dict[str, Tensor]  # on-disk name to meta tensor
    groups: list[Group]  # the conversions that change a name or a tensor

    @classmethod
    def of(cls, model: Any, in_memory: dict[str, Tensor], conversions: list[Any]) -> NameMap:
        """Derive the on-disk form by reverting the conversion, and the groups by matching it forwards again."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
            revert_weight_conversion,
        )

        transforms = deepcopy(conversions)
        view = StockView(model, in_memory, transforms)
        on_disk = revert_weight_conversion(view, in_memory)  # type: ignore[arg-type] # quacks like the model
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, Group] = {}
        for key in sorted(on_disk, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, in_memory)
            if target in in_memory and (target != key or pattern is not None):
                group = groups.setdefault(target, Group(target, None if pattern is None else by_pattern[pattern]))
                group.sources[key] = pattern
        return cls(view, in_memory, on_disk, list(groups.values()))

    def convert(self, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the in-memory tensors of `group` made from all of its on-disk `tensors`."""
        if group.converter is None:
            (key,) = group.sources
            return {group.target: tensors[key]}
        converter = deepcopy(group.converter)
        for key, pattern in group.sources.items():
            converter.add_tensor(group.target, key, pattern, tensors[key])
        made = converter.convert(group.target, model=self.view, config=self.view.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def complete(self, group: Group, given: dict[str, Tensor], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fill `given` up with the present values of the group's other pieces."""
        from transformers.core_model_loading import revert_weight_conversion

        targets = self.convert(group, self.on_disk)
        present = {name: current[name] for name in targets}
        pieces = revert_weight_conversion(self.view, present)  # type: ignore[arg-type] # quacks like the model
        return given | {key: pieces[key] for key in group.sources if key not in given}


def weight_conversions(model: Any) -> list[list[Any]]:
    """Return the conversion lists under which `model`'s checkpoints may have been written, the likeliest first."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded = getattr(model, "_weight_conversions", None)
    known = get_model_conversion_mapping(model, add_legacy=False)
    default = [transform for transform in known if not isinstance(transform, PrefixChange)]
    return [conversions for conversions in (loaded, default) if conversions]


def convert_checkpoint_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *hooked: Any) -> None:
    """``load_state_dict`` pre-hook: turn on-disk names and tensors in `state_dict` into in-memory ones, in place."""
    _metadata, _strict, missing_keys, _unexpected_keys, error_msgs = hooked
    current = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    in_memory = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in current.items()}
    for conversions in weight_conversions(module):
        names = NameMap.of(module, in_memory, conversions)
        incoming = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        from_disk = any(key in incoming and key not in in_memory for group in names.groups for key in group.sources)
        for group in names.groups:
            given = {key: incoming[key] for key in group.sources if key in incoming}
            if not given or not _is_on_disk_form(names, group, given, from_disk, state_dict):
                continue
            for key in given:
                del state_dict[prefix + key]
            if problems := _problems(names, group, given, current, prefix):
                error_msgs.extend(problems)
                continue
            missing_keys.extend(prefix + key for key in group.sources if key not in given)
            whole = given if len(given) == len(group.sources) else names.complete(group, given, current)
            whole = dict(zip(whole, in_one_place(list(whole.values())), strict=True))
            made = names.convert(group, whole)
            state_dict.update({prefix + key: value for key, value in made.items()})
        if from_disk:
            return


@public("load_state_dict")
def _is_on_disk_form(
    names: NameMap, group: Group, given: Mapping[str, Tensor], from_disk: bool, state_dict: Mapping[str, Any]
) -> bool:
    """Whether `given` is what a checkpoint file holds, where a name alone does not tell."""
    same_named = [key for key in given if key in names.in_memory]
    if len(same_named) < len(given) or (from_disk and group.converter is None):
        return True
    if any(given[key].shape != names.in_memory[key].shape for key in same_named):
        return True
    if group.checks_shapes or any(names.on_disk[key].shape != names.in_memory[key].shape for key in same_named):
        return False
    if from_disk:
        return True
    if hasattr(state_dict, "_metadata"):  # set by Module.state_dict, absent from a dict read from a file
        return False
    expected = "recognizable as on-disk or in-memory form, which have the same names and shapes in this model"
    fix = "Pass the result of model.state_dict() itself, or load the checkpoint with from_pretrained."
    raise UnsupportedModelError.about(", ".join(given), expected, "a plain dict of tensors", fix)


def _problems(
    names: NameMap, group: Group, given: Mapping[str, Tensor], current: Mapping[str, Tensor], prefix: str
) -> list[str]:
    if group.checks_shapes:
        return []
    problems = [
        f"size mismatch for {prefix}{key}: copying a param with shape {value.shape} from checkpoint, the shape "
        f"in current model is {names.on_disk[key].shape}."
        for key, value in given.items()
        if value.shape != names.on_disk[key].shape
    ]
    absent = [key for key in group.sources if key not in given]
    if absent and current[group.target].is_meta and not all(value.is_meta for value in given.values()):
        problems.append(f"{prefix}{group.target} is on the meta device and {absent} are not in the checkpoint.")
    return problems


def forget_decoding(model: nn.Module) -> list[tuple[nn.Module, list[Any]]]:
    """Drop the conversions with which transformers decoded a quantized checkpoint; :func:`remember` puts them back.

    ``save_pretrained`` reverts the conversions of loading, and those that decode have no way back. With them
    transformers up to 5.23 writes gpt-oss's weights under the names of their codes, and fails for FP8 experts. Later
    releases drop them too. Without them a model is saved under its own on-disk names.
    """
    dropped = []
    for module in _roots(model):
        loaded = module.__dict__.get("_weight_conversions") or []
        if any(hasattr(operation, "hf_quantizer") for each in loaded for operation in getattr(each, "operations", ())):
            dropped.append((module, module.__dict__.pop("_weight_conversions")))
    return dropped


def remember(dropped: list[tuple[nn.Module, list[Any]]]) -> None:
    """Undo :func:`forget_decoding`."""
    for module, conversions in dropped:
        module.__dict__["_weight_conversions"] = conversions


def install(model: nn.Module, installed: list[nn.Module]) -> None:
    """Register the pre-hook on the outermost transformers models in `model` that lack it; `installed` gets these."""
    for module in _roots(model):
        if not _hook_ids(module):
            installed.append(module)
            module.register_load_state_dict_pre_hook(convert_checkpoint_names)


def remove(modules: list[nn.Module]) -> None:
    """Remove the pre-hook from `modules`; one that does not have it is left as it is."""
    for module in modules:
        for key in _hook_ids(module):
            del module._load_state_dict_pre_hooks[key]


def _roots(model: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def _hook_ids(module: nn.Module) -> list[int]:
    hooks = module._load_state_dict_pre_hooks.items()
    return [key for key, wrapped in hooks if getattr(wrapped, "hook", None) is convert_checkpoint_names]


def enable_moe_resume(model: nn.Module) -> None:
    """Make ``load_state_dict`` of the transformers models in `model` read their checkpoint files, as resuming does.

    ``patch_model`` does this; here it is for models that are not patched, or not yet. Keys under in-memory names load
    as before. Calling it again changes nothing.
    """
    install(model, [])


def disable_moe_resume(model: nn.Module) -> None:
    """Undo :func:`enable_moe_resume` on the model given to it; one without the hook is left as it is."""
    remove(_roots(model))
