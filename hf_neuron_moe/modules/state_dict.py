"""Weights in kernel layout behind a stock ``state_dict``.

Everything that goes through ``state_dict`` and ``load_state_dict`` has the original names and layouts: checkpoints stay
readable without this package.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightRule:
    """How one kernel-layout parameter is made of stock tensors."""

    kernel: str  # parameter name in the block
    stock: tuple[str, ...]  # state_dict names, relative to the module, of equally shaped tensors, stacked along dim 0
    transposed: bool = False  # whether the kernel layout exchanges the last two dimensions
    interleaved: bool = False  # whether columns of the stock tensor, as the kernels orient it, alternate: gate, up

    @property
    def keeps_layout(self) -> bool:
        """Whether the parameter is the stock tensor as it is, so that one ``nn.Parameter`` serves both layouts."""
        return len(self.stock) == 1 and not self.transposed and not self.interleaved

    def same_shape(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of `shape` has the shape of its one stock tensor, whose values it may order otherwise."""
        return len(self.stock) == 1 and (not self.transposed or shape[-1] == shape[-2])

    def to_kernel(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the contiguous kernel-layout tensor for `tensors` in the order of :attr:`stock`."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=0)
        whole = whole.transpose(-1, -2) if self.transposed else whole
        return (halves_together(whole) if self.interleaved else whole).contiguous()

    def to_stock(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the kernel-layout `tensor` in stock layout, in the order of :attr:`stock`; views, or interleaved."""
        whole = tensor.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.interleaved else tensor
        whole = whole.transpose(-1, -2) if self.transposed else whole
        return tuple(whole.chunk(len(self.stock), dim=0))


def halves_together(tensor: Tensor) -> Tensor:
    """Return `tensor` ``[..., 2I]``, whose last axis alternates between gate and up, with those of gate first."""
    return tensor.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_one_place(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one parameter on the first one's device, in a dtype that holds the values of all of them."""
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return [part.to(parts[0].device, dtype) for part in parts]


def kernel_layout_parameters() -> Iterator[tuple[str, nn.Parameter, WeightRule]]:
    """Yield every parameter alive that exists in kernel layout only, with its name in the model it was made for."""
    for module in list(_instances):
        for rule in module.__dict__.get("neuron_rules", ()):
            param = module._parameters.get(rule.kernel)
            if param is not None and not rule.keeps_layout:
                yield f"{module.neuron_name}.{rule.kernel}", param, rule


class KernelLayoutMixin(nn.Module):
    """Gives a module with parameters in kernel layout a ``state_dict`` of stock names and layouts, both ways."""

    neuron_rules: tuple[WeightRule, ...]
    neuron_stock_order: tuple[str, ...]

    def __new__(cls, *args: Any, **options: Any) -> KernelLayoutMixin:
        """Make an instance known to :func:`kernel_layout_parameters`; copying and unpickling come by here too."""
        _compare_with_stock_shapes()
        module = super().__new__(cls)
        _instances.add(module)
        return module

    def _stock_tensors(self, keep_vars: bool) -> dict[str, Tensor]:
        stock: dict[str, Tensor] = {}
        for rule in self.neuron_rules:
            param = self.get_parameter(rule.kernel)
            stock.update(zip(rule.stock, rule.to_stock(param if keep_vars else param.detach())))
        return stock

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, "", keep_vars)
        stock = self._stock_tensors(keep_vars)
        if not keep_vars:
            # Views of one storage would be taken for tied weights, and dropped, by accelerate and safetensors.
            changed = {name for rule in self.neuron_rules if not rule.keeps_layout for name in rule.stock}
            contiguous = torch.contiguous_format
            stock = {k: v.clone(memory_format=contiguous) if k in changed else v for k, v in stock.items()}
        for rule in self.neuron_rules:
            own.pop(rule.kernel, None)
        whose, of_layers = (
            {name: stock[name] for name in self.neuron_stock_order if ("." in name) is inside}
            for inside in (False, True)
        )
        destination.update({prefix + name: value for name, value in (whose | own | of_layers).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Called by torch once per module; children load themselves afterwards.
        stock_keys = {prefix + name for name in self.neuron_stock_order}
        kernel_keys = {prefix + rule.kernel for rule in self.neuron_rules}
        own = {k: v for k, v in state_dict.items() if k.startswith(prefix) and k not in stock_keys | kernel_keys}
        if strict:
            unexpected_keys.extend(key for key in kernel_keys - stock_keys if key in state_dict)
        current = self._stock_tensors(keep_vars=False)
        for rule in self.neuron_rules:
            given = {name: state_dict[prefix + name] for name in rule.stock if prefix + name in state_dict}
            param = self._parameters.get(rule.kernel)
            if any(value is param for value in given.values()):
                # set_model_state_dict of torch.distributed adds what a partial state dict lacks, from the parameters.
                own[prefix + rule.kernel] = param
                continue
            if strict:
                missing_keys.extend(prefix + name for name in rule.stock if name not in given)
            errors = [
                f"size mismatch for {prefix}{name}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {current[name].shape}."
                for name, value in given.items()
                if value.shape != current[name].shape
            ]
            error_msgs.extend(errors)
            if not given or errors:
                continue
            # A checkpoint with one half of a fused weight replaces that half, as it would in the stock module.
            parts = [given.get(name, current[name]) for name in rule.stock]
            if len({part.is_meta for part in parts}) > 1:
                absent = [prefix + name for name in rule.stock if name not in given]
                message = f"{prefix}{rule.kernel} is on the meta device and {absent} are not in the checkpoint."
                error_msgs.append(message)
                continue
            own[prefix + rule.kernel] = rule.to_kernel(in_one_place(parts))
        kernel_missing: list[str] = []
        super()._load_from_state_dict(own, prefix, local_metadata, strict, kernel_missing, unexpected_keys, error_msgs)
        missing_keys.extend(key for key in kernel_missing if key not in kernel_keys)


@functools.cache
def _compare_with_stock_shapes() -> None:
    """Let transformers see stock shapes where saving turns a tensor whose shape is not its parameter's.

    It would write Qwen3-VL-MoE's experts transposed. The operation itself is changed, once per process: which model
    around a patched part will be saved is not known when the part is patched.
    """
    from transformers.core_model_loading import Transpose

    operation: Any = Transpose
    convert = operation.convert

    @functools.wraps(convert)
    def with_stock_shapes(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "check_dims", False):
            kwargs["model"] = _StockShapes(kwargs["model"])
        return convert(self, *args, **kwargs)

    operation.convert = with_stock_shapes


@dataclass(frozen=True)
class _StockShapes:
    """Stands in for a model where the shape of a parameter is asked for."""

    model: Any

    def get_parameter(self, name: str) -> Tensor:
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        found: Tensor = (
            module._stock_tensors(keep_vars=True)[own]
            if isinstance(module, KernelLayoutMixin)
            else self.model.get_parameter(name)
        )
        return found


_instances: WeakSet[KernelLayoutMixin] = WeakSet()
