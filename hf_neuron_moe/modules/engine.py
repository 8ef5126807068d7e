"""What transformers' distributed engine did to a module: which forward it installed, and how its weights are cut.

The engine shards a model between its making and the loading of weights. It puts a forward into the instance, which
holds the module's own forward and the collectives around it (``DistributedConfig``; experts need transformers 5.23).

E experts, I intermediate size.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Installed(NamedTuple):
    """A forward that the engine installed around a module's own."""

    style: Any  # the engine's object that installed it, a row of ``ALL_PARALLEL_STYLES``
    mesh: DeviceMesh  # the processes that share the module
    experts: Any = None  # the ``EPImplementation`` that brings experts their tokens

    @property
    def same_tokens(self) -> torch.distributed.ProcessGroup | None:
        """The processes that call the module with the same tokens, or None where each has its own."""
        mesh = self.mesh if self.experts is None else self.experts.tp_mesh
        return group_of(mesh) if mesh.size() > 1 else None

    def again(self, module: nn.Module, implementation: str | None = None) -> None:
        """Install a forward of the same kind around the present forward of `module`.

        `implementation` is the name of that which brings experts their tokens.
        """
        if self.experts is None:
            self.style.install_forward(module, self.mesh)
        else:
            tp_mesh = self.experts.tp_mesh
            self.style.install_forward(module, self.mesh, tp_mesh=tp_mesh, ep_implementation=implementation)


def installed(module: nn.Module) -> Installed | None:
    """Return what the engine installed around the forward of the class of `module`; None for every other forward."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or not forward.__module__.startswith("transformers.distributed."):
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if forward.__name__ == "tp_forward" and held.keys() >= {"self", "mesh", "original_forward"}:
        found, inner = Installed(held["self"], held["mesh"]), held["original_forward"]
    elif forward.__name__ == "ep_forward" and held.keys() >= {"self", "ep_mesh", "implementation"}:
        experts = held["implementation"]
        found, inner = Installed(held["self"], held["ep_mesh"], experts), getattr(experts, "experts_forward", None)
    else:
        return None
    return found if getattr(inner, "__func__", None) is type(module).forward else None


def style_name(style: object) -> str:
    """Return the name under which the engine knows a style, or that of its class."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return next((name for name in ALL_PARALLEL_STYLES if ALL_PARALLEL_STYLES[name] is style), type(style).__name__)


def is_sharded_at_loading(model: nn.Module) -> bool:
    """Return whether ``from_pretrained(distributed_config=...)`` sharded `model` or a part of it."""
    each = (getattr(module, "is_distributed_loading_by_transformers", False) for module in model.modules())
    return any(found is True for found in each)


def sizes_asked(model: nn.Module) -> dict[str, int]:
    """Return the sizes with which the engine will shard a model that ``from_pretrained`` is making; empty if it won't.

    ``{"tp": 2, "ep": 1, "fsdp": 2}``, and those of ``pp`` and ``dp_replicate``.
    """
    asked = getattr(getattr(model, "config", None), "distributed_config", None)
    sizes = {name: getattr(asked, f"{name}_size", None) or 1 for name in ("tp", "ep", "fsdp", "pp", "dp_replicate")}
    return sizes if any(size > 1 for size in sizes.values()) else {}


def has_stages(model: nn.Module) -> bool:
    """Return whether `model` is one stage of a pipeline."""
    return sizes_asked(model).get("pp", 1) > 1


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether a parameter is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a parameter, with gradients; an ordinary tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of `module` below what FSDP2 puts in front of it."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


def axis_parts(parameter: Any, axis: int) -> tuple[int, int]:
    """Return into how many parts tensor and expert parallelism cut an axis of a parameter, and which one is here.

    FSDP's cuts do not count: a block computes with gathered weights.
    """
    parts, index = 1, 0
    if is_sharded(parameter):
        mesh = parameter.device_mesh
        for dim, (name, placement) in enumerate(zip(_names(mesh), parameter.placements, strict=True)):
            if name in ("tp", "ep") and getattr(placement, "dim", None) == axis:
                parts, index = parts * mesh.size(dim), mesh.get_local_rank(dim)
    return parts, index


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the axes of a mesh; accelerate's have none."""
    return mesh.mesh_dim_names or ("",) * mesh.ndim


def strided(parameter: Any, axis: int) -> bool | None:
    """Return whether each half of an axis is cut on its own, over tensor-parallel processes; None if it is not cut."""
    for name, placement in zip(_names(parameter.device_mesh), parameter.placements, strict=True):
        if name == "tp" and getattr(placement, "dim", None) == axis:
            return getattr(placement, "split_factor", 1) == 2
    return None


def uneven(inner: int, parts: int) -> str:
    """Return why an intermediate size cannot be cut in so many equal parts, and what could."""
    sizes = ", ".join(str(size) for size in range(2, parts) if inner % size == 0) or "none below"
    return f"its intermediate size {inner} is no multiple of tp_size={parts} (sizes that fit: {sizes})"


def group_of(mesh: DeviceMesh) -> torch.distributed.ProcessGroup:
    """Return the processes that share a tensor-parallel module."""
    found: torch.distributed.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return found
