"""What one rank of a distributed model holds and sends, without processes: transformers' own engine on shapes alone.

The engine cuts the model as it does in ``from_pretrained(distributed_config=...)``. Here that is on the meta device and
in a process group of which this process is the only member (torch's fake group). Nothing in this file knows a plan's
rules.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, counted
from hf_neuron_moe.modules.block import put_parameter
from hf_neuron_moe.modules.engine import axis_parts
from hf_neuron_moe.modules.sharded_lora import size_by_layers
from hf_neuron_moe.training.fake_forward import SavedActivations, fake_saved_activations
from hf_neuron_moe.training.other_ranks import Exchange, Routing, Traffic
from hf_neuron_moe.training.saved_tensors import local_part

_MESHES = (("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep"))
"""Axes of the engine's meshes, of all weights and of experts'."""

_AXES = {"colwise": -2, "packed_colwise": -2, "rowwise": -1}
"""The axis that a style cuts, of styles after which no activation is gathered."""

Prepared = Callable[[Any], nn.Module]


@dataclass(frozen=True)
class Layout:
    """Sizes of transformers' ``DistributedConfig``, which checks them."""

    tp: int = 1
    ep: int = 1
    fsdp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    rank: int | None = None  # the rank that is estimated; None: the one that holds the most

    def __post_init__(self) -> None:
        self.engine_config()

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.tp * self.fsdp * self.pp * self.dp_replicate

    def engine_config(self) -> Any:
        """Return the ``DistributedConfig`` of these sizes."""
        sizes = {f"{name}_size": size for name, size in asdict(self).items() if name != "rank"}
        try:
            return _engine("configuration_utils").DistributedConfig(**sizes)
        except ValueError as error:
            raise refused_layout(self, str(error)) from error
        except TypeError as error:
            raise _too_old("DistributedConfig without all of these sizes") from error

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in asdict(self).items() if name != "rank" and size > 1]
        return ", ".join(sizes) or "one device"


@dataclass(frozen=True)
class Held:
    """What one rank holds, in bytes."""

    parameters: int  # and buffers
    gradients: int
    trained: tuple[Tensor, ...]  # this rank's parts of the trained parameters, on the meta device
    numbers: tuple[int, int]  # of parameters, and of trained ones, of the model
    gathered: int = 0  # of two groups that follow each other: the one in use, and the one that FSDP fetches ahead
    sent: int = 0  # in a step, to gather weights in both passes and to reduce gradients


@dataclass(frozen=True)
class RankEstimate:
    """What is particular to one rank of a layout, in bytes."""

    layout: Mapping[str, int | None]  # the fields of :class:`Layout`
    devices: int
    gathered_bytes: int  # weights that FSDP has gathered at one time: of two groups that follow each other
    exchanged_bytes: int  # what one layer's experts send and receive of tokens in a forward, there and back
    sent_bytes: int  # what the rank sends in a step of the stock model


class LayoutError(ConfigError):
    """A layout that cannot be had, for a `reason`."""

    reason: str


def refused_layout(layout: Layout, reason: str) -> LayoutError:
    """Return the error for a layout that transformers does not accept."""
    fix = "Change the sizes; `hf-neuron-moe estimate MODEL --fit 24GiB --devices N` finds some that work."
    error = LayoutError.about("the layout", "one that transformers can run", f"{layout} ({reason.rstrip('.')})", fix)
    error.reason = reason
    return error


def _engine(module: str) -> Any:
    try:
        return importlib.import_module(f"transformers.distributed.{module}")
    except ImportError as error:
        raise _too_old(f"no transformers.distributed.{module}") from error


def _too_old(got: str) -> BackendUnavailableError:
    expected, fix = "left out with this transformers", "pip install 'transformers>=5.23'"
    return BackendUnavailableError.about("layout", expected, got, fix)


def uneven(model: PreTrainedModel, layout: Layout) -> str | None:
    """Return what of the model the layout does not divide: heads, an intermediate size, the number of experts."""
    config, shapes = model.config.get_text_config(), {name: param.shape for name, param in model.named_parameters()}
    cut, experts = (
        model._expand_parallel_plan(dict(plan or {})) if size > 1 else {}
        for plan, size in ((model.tp_plan, layout.tp), (model.ep_plan, layout.ep))
    )
    heads = config.num_attention_heads
    if cut and heads % layout.tp:
        return f"tp does not divide {heads} attention heads"
    heads = getattr(config, "num_key_value_heads", heads)
    if cut and _engine("tensor_parallel").get_kv_heads_per_rank(model.tp_plan, heads, layout.tp) is None:
        return f"tp does not divide {heads} key-value heads"
    for name, style in cut.items():
        if style in _AXES and len(shapes.get(name, ())) > 1 and name not in experts:
            size = shapes[name][_AXES[style]] // (2 if style.startswith("packed") else 1)
            if size % layout.tp:
                return f"tp does not divide the {size} columns or rows of {name.rpartition('.')[2]}"
    copies = layout.fsdp * layout.tp // layout.ep if layout.ep > 1 else layout.fsdp
    for count in set(_experts_of(model).values()):
        own = count // layout.ep
        if count % layout.ep:
            return f"ep does not divide {count} experts"
        if own <= -(-own // copies) * (copies - 1):
            return f"{copies} ranks share {counted(own, 'expert')}, and transformers cannot load a rank without any"
    return None


@contextmanager
def as_rank(layout: Layout, rank: int) -> Iterator[Any]:
    """Act as one rank of `layout`; gives transformers' meshes. No collective in the block waits for anybody."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    importlib.import_module("torch.distributed._tools.fake_collectives")  # the shapes that c10d's operators return
    if dist.is_initialized():
        expected, fix = "estimated outside of a process group", "Estimate before torch.distributed is initialized."
        raise ConfigError.about("layout", expected, f"a group of {dist.get_world_size()}", fix)
    sizes = asdict(layout) | {"efsdp": layout.fsdp * layout.tp // layout.ep}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.devices)
    try:
        meshes = (init_device_mesh("cpu", tuple(sizes[n] for n in names), mesh_dim_names=names) for names in _MESHES)
        yield _engine("utils").TransformersDeviceMesh(*meshes)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which holds the group's names, and takes equal meshes for the same


@contextmanager
def _errors_of_the_engine(layout: Layout) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:  # the latter for weights that another pipeline stage has
        raise refused_layout(layout, f"{type(error).__name__}: {error}") from error


class OneRank:
    """A rank's share of the memory: of `layout.rank`, or of the rank that holds the most.

    `model` stays as it is; `prepared` may put adapters on a part of it. Within the context, `home` is what the rank
    computes with, to be patched as it is after loading.
    """

    def __init__(
        self, model: Any, prepared: Prepared, shape: Mapping[str, Any], layout: Layout, held: Held | None = None
    ) -> None:
        self.home, self._prepared, self._shape, self._layout = model, prepared, shape, layout
        self._held = what_a_rank_holds(model, layout, prepared) if held is None else held
        self.exchanges = layout.ep > 1
        self._group = ExitStack()

    def __enter__(self) -> OneRank:
        if self._layout.pp == 1:  # a stage runs no pass
            meshes = self._group.enter_context(as_rank(self._layout, self._layout.rank or 0))
            self.home = without_fsdp(self.home, self._layout, meshes)
            self._whole = self._prepared(self.home)
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()

    @cached_property
    def exchange(self) -> Exchange:
        """What the stock model's collectives move; read first while the model is not patched."""
        traffic = Traffic(self._layout.tp, self._layout.ep)
        if self._layout.pp == 1:
            routing = Routing(self._layout.tp, self._layout.ep)
            self._run(routing, (), traffic)
            traffic.seen.all_to_all //= max(len(routing.watched), 1)
        return traffic.seen

    @cached_property
    def held(self) -> Held:
        """What the rank holds; without FSDP, which cuts them, gradients are as the backward makes them."""
        whole = self._layout.fsdp * self._layout.dp_replicate == 1
        return replace(self._held, gradients=self.exchange.gradients) if whole else self._held

    @cached_property
    def estimate(self) -> RankEstimate:
        """What is particular to the rank."""
        sent, exchanged = self._held.sent + round(self.exchange.sent), self.exchange.all_to_all
        return RankEstimate(asdict(self._layout), self._layout.devices, self._held.gathered, exchanged, sent)

    @property
    def full(self) -> tuple[int, int]:
        """Bytes of the stock weights that the rank computes with: those of experts last, the others first."""
        weights = {name: local_part(param).nbytes for name, param in self.home.named_parameters()}
        experts = sum(weights[name] for name in _experts_of(self.home) if name in weights)
        return sum(weights.values()) - experts, experts

    @property
    def moved(self) -> int:
        """Bytes of weights and tokens on their way."""
        return self.estimate.gathered_bytes + self.estimate.exchanged_bytes

    def saved(self, names: Sequence[str], *, worst: bool = False) -> SavedActivations:
        """Count what a forward saves, as `home` is patched at present; `worst` is the routing to this rank alone."""
        if self._layout.pp > 1:
            return SavedActivations(0, 0, 0, 0, 0)
        return self._run(Routing(self._layout.tp, self._layout.ep, worst=worst), names)

    def _run(self, routing: Routing, names: Sequence[str], traffic: Traffic | None = None) -> SavedActivations:
        blocks = [self.home.get_submodule(name) for name in names]
        with routing.watching(self.home):
            return fake_saved_activations(self._whole, blocks, **self._shape, around=[routing], traffic=traffic)


def what_a_rank_holds(model: PreTrainedModel, layout: Layout, prepared: Prepared) -> Held:
    """Return what a rank holds: the one of the layout, or the one that holds the most.

    `prepared` may put adapters on the distributed model. Of several pipeline stages the largest is taken; within a
    stage the first rank has the largest parts.
    """
    if reason := uneven(model, layout):
        raise refused_layout(layout, reason)
    stages = range(0, layout.devices, layout.devices // layout.pp) if layout.rank is None else [layout.rank]
    return max((_held(model, layout, rank, prepared) for rank in stages), key=lambda held: held.parameters)


def _held(model: PreTrainedModel, layout: Layout, rank: int, prepared: Prepared) -> Held:
    with as_rank(layout, rank) as meshes:
        computing = without_fsdp(model, layout, meshes)
        full = {name: local_part(param).nbytes for name, param in computing.named_parameters(remove_duplicate=False)}
        mine = _untied(model)
        with _errors_of_the_engine(layout):
            type(mine).maybe_distribute_model(mine, layout.engine_config(), meshes)
        cut = dict(mine.named_parameters())
        mine.tie_weights(recompute_mapping=False)
        tied = [(param, mine.get_parameter(name)) for name, param in cut.items()]
        size_by_layers(mine)
        whole = prepared(mine)
        if _trained_shapes(whole) != _trained_shapes(prepared(computing)):
            raise refused_layout(layout, "peft gives adapters the shape of FSDP's parts of a weight")
        held = _padded({id(each): each for each in (*whole.parameters(), *whole.buffers())}.values())
        trained = {id(each): each for each in whole.parameters() if each.requires_grad and layout.pp == 1}
        # FSDP takes tied weights for two, and reduces a gradient for each.
        twice = [param for param, used in tied if used is not param and id(used) in trained]
        gradients = _padded([*trained.values(), *twice])
        parts = tuple(local_part(each) for each in trained.values())
        gathered, sent = _gathered(mine, cut, full)
        sent += 2 * gradients * (layout.dp_replicate - 1) // layout.dp_replicate
        return Held(held, gradients, parts, numbers_of(prepared(copy.deepcopy(model))), gathered, sent)


def _trained_shapes(model: nn.Module) -> list[list[int]]:
    """Shapes that a rank computes with, FSDP's cuts apart."""
    trained = (param for param in model.parameters() if param.requires_grad)
    return [[size // axis_parts(each, axis)[0] for axis, size in enumerate(each.shape)] for each in trained]


def _experts_of(model: Any) -> dict[str, int]:
    """Number of experts of each weight that expert parallelism cuts, by its name."""
    plan = model._expand_parallel_plan(dict(model.ep_plan or {}))
    return {name: len(model.get_parameter(name)) for name, style in plan.items() if style == "grouped_gemm"}


def numbers_of(model: nn.Module) -> tuple[int, int]:
    """Return how many parameters there are, and how many of them are trained."""
    parameters = list(model.parameters())
    return sum(each.numel() for each in parameters), sum(each.numel() for each in parameters if each.requires_grad)


def _padded(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts, of FSDP's with the padding that makes them equal on all ranks."""
    return sum(local_part(each).untyped_storage().nbytes() for each in tensors)


def _gathered(mine: nn.Module, cut: Mapping[str, Tensor], full: Mapping[str, int]) -> tuple[int, int]:
    """What FSDP holds of gathered weights at one time, and what a rank sends to gather and to reduce."""
    from torch.distributed.fsdp import FSDPModule

    groups = {name: 0 for name, module in mine.named_modules() if isinstance(module, FSDPModule)}
    sent = 0
    for name, param in cut.items() if groups else ():
        groups[max((group for group in groups if not group or name.startswith(f"{group}.")), key=len)] += full[name]
        sent += (full[name] - _padded([param])) * (3 if param.requires_grad else 2)
    ordered = [groups.pop("", 0), *groups.values(), 0]
    return max(first + second for first, second in pairwise(ordered)), sent


def without_fsdp(model: PreTrainedModel, layout: Layout, meshes: Any) -> Any:
    """Return a copy of the model, cut as a rank computes with it: FSDP has gathered its weights."""
    mine = _untied(model)
    config = layout.engine_config()
    with _errors_of_the_engine(layout):
        cut, experts, _ = mine._resolve_parallel_plans(config)
        if layout.pp > 1:
            mine = _engine("pipeline_parallel").apply_pipeline_parallelism(mine, meshes.get_mesh("pp"))
        if layout.tp > 1:
            _engine("tensor_parallel").apply_tensor_parallelism(mine, meshes.get_mesh("tp"), cut)
        if layout.ep > 1:
            both = (meshes.get_mesh("ep"), meshes.get_mesh("tp"))
            _engine("expert_parallel").apply_expert_parallelism(mine, *both, experts, config.ep_implementation)
    mine.tie_weights(recompute_mapping=False)
    mine.config.distributed_config, mine._is_distributed_loading_by_transformers = config, True
    return mine


def _untied(model: Any) -> Any:
    """Return a copy of the model with its weights apart, as they are when ``from_pretrained`` cuts them."""
    mine = copy.deepcopy(model)
    for name in mine.all_tied_weights_keys:
        put_parameter(mine, name, nn.Parameter(mine.get_parameter(name).detach().clone()))
    return mine
