"""Converted bf16 weights of a model that transformers' engine shards: each process reads its own ranges of the files.

The engine cuts parameters before weights are loaded, so the model's own modules stay, with the model's own plans.
transformers loads everything else; a converted weight looks to its loader like a stock one that is sliced
(:class:`StockWeight`), whatever layout, zeros and parts of ranks the files have.

E experts, F rows and K columns of a matrix (gate_up ``[2I, H]``, down ``[H, I]``), H hidden, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from hf_neuron_moe.errors import ConversionError
from hf_neuron_moe.formats.swizzle import unswizzle
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.modules.engine import is_sharded
from hf_neuron_moe.modules.quantized_blocks import DOWN, GATE_UP
from hf_neuron_moe.modules.sharded_mlp import rules_for
from hf_neuron_moe.patching.discovery import Candidate
from hf_neuron_moe.quantizers.shard_layouts import StoredTensor

Slices = Callable[[StoredTensor], Any]
"""Gives a tensor of the files as safetensors' slices."""


@dataclass
class Reading:
    """A module whose weights are read once transformers has loaded the rest of the model."""

    candidate: Candidate
    stored: Mapping[str, StoredTensor]  # by role
    hook: Any = field(init=False)

    def __post_init__(self) -> None:
        self.hook = hidden(self.candidate.module, list(stock_rows(self.candidate)))

    @property
    def rules(self) -> dict[str, str]:
        """Tensor-parallel rules of a dense MLP's layers, by the names of plans."""
        roles, name = self.candidate.roles, re.sub(r"\.\d+(?=\.|$)", ".*", self.candidate.name)
        return {} if roles is None else {f"{name}.{layer}": style for layer, style in rules_for(roles).items()}

    def finish(self, slices: Slices, device: torch.device) -> None:
        """Read this process's part of each weight, and show them to ``state_dict`` again."""
        self.hook.remove()
        candidate = self.candidate
        for name, (role, rows_F) in stock_rows(candidate).items():
            owner, leaf = stock_slot(candidate.module, name)
            param: Any = owner._parameters[leaf]
            transposed = candidate.form is not None and candidate.form.transposed
            weight: Any = StockWeight(self.stored[role], tuple(param.shape), rows_F, transposed, slices)
            if is_sharded(param):
                from transformers.distributed.sharding_utils import DtensorShardOperation, _dtensor_from_local_like

                part: Any = DtensorShardOperation(param).shard_tensor(weight, device=device, dtype=param.dtype)
                value: Tensor = _dtensor_from_local_like(part, param)
            else:
                value = weight[...].to(device=device, dtype=param.dtype).contiguous()
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=param.requires_grad)


def hidden(module: nn.Module, names: Collection[str]) -> Any:
    """Take tensors out of the sight of transformers' loader; the handle's ``remove`` brings them back."""

    def hide(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        for name in names:
            state.pop(prefix + name, None)

    for owner in (module, *(stock_slot(module, name)[0] for name in names)):
        owner._is_hf_initialized = True  # type: ignore[assignment] # else its weights get random values
    return module.register_state_dict_post_hook(hide)


def stock_rows(candidate: Candidate) -> dict[str, tuple[str, Tensor]]:
    """Return by parameter which role it has, and which rows of the fused weight are its, in their order.

    Of a transposed parameter it is the columns. Raise ConversionError where a parameter has more than one matrix below
    another, which cannot be cut like one.
    """
    (_, hidden, inner), roles, form = candidate.sizes, candidate.roles, candidate.form
    assert hidden is not None and inner is not None
    if form is not None and form.stacked:
        expected = "of parameters with an axis of experts, where the engine shards the model"
        fix = "Load the original checkpoint instead, and patch the model."
        raise ConversionError.about(f"converted weights of {candidate.name}", expected, "stacked matrices", fix)
    rows_F = torch.arange(2 * inner if candidate.gate.gated else inner)
    if roles is not None:
        rows_F = rows_F if roles.gate_first else roles.fused(*rows_F.chunk(2))
        inputs, down = [f"{name}.weight" for name in roles.inputs], f"{roles.down}.weight"
    else:
        assert form is not None, "a module that can be patched has roles or a form"
        inputs, down = list(form.inputs), form.down
        rows_F = rows_F.unflatten(0, (2, -1)).T.flatten() if form.interleaved else rows_F
    first = zip(inputs, rows_F.chunk(len(inputs)), strict=True)
    return {name: (GATE_UP, rows) for name, rows in first} | {down: (DOWN, torch.arange(hidden))}


@dataclass(frozen=True)
class StockWeight:
    """A stock parameter that is read from a converted weight, slice by slice."""

    stored: StoredTensor
    shape: tuple[int, ...]
    rows_F: Tensor  # the row of the fused weight of each of its rows
    transposed: bool  # whether its last two axes are those of the fused weight, exchanged
    slices: Slices

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def __getitem__(self, key: Any) -> Tensor:
        """Return a part, given by a slice per axis, or all."""
        bounds = (slice(None),) * len(self.shape) if key is ... else key
        *experts, first, second = (range(size)[part] for size, part in zip(self.shape, bounds, strict=True))
        rows, columns = (second, first) if self.transposed else (first, second)
        found = self._read(experts[0] if experts else None, self.rows_F[rows.start : rows.stop], columns)
        return found.mT if self.transposed else found

    def _read(self, experts: range | None, rows_R: Tensor, columns: range) -> Tensor:
        """Rows and columns of the forward matrix, of a range of experts."""
        if not self.stored.parts:
            return _rows(self.stored, experts, self._stored_rows(self.stored, 0, rows_R)[1], columns, self.slices)
        leading = () if experts is None else (len(experts),)
        result = torch.zeros(*leading, len(rows_R), len(columns), dtype=torch.bfloat16)
        for part, first in _parts(self.stored):
            own, here, at_C = experts, columns, slice(None)
            if experts is not None and part.ep_rank is not None:
                own = overlap(experts, part.first_expert, len(part.tensor))
            if not self.stored.halves:
                here = overlap(columns, first, part.sizes[1])
                at_C = slice(here.start + first - columns.start, here.stop + first - columns.start)
            at_R, stored_R = self._stored_rows(part, first, rows_R)
            if (own is None or own) and here and len(stored_R):
                target = result
                if own is not None and experts is not None:
                    target = result[own.start + part.first_expert - experts.start :][: len(own)]
                target[..., at_R, at_C] = _rows(part, own, stored_R, here, self.slices)
        return result

    def _stored_rows(self, part: StoredTensor, first: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these rows a part has, and where; its intermediate values begin with `first`."""
        if not self.stored.halves:
            return torch.arange(len(rows_R)), rows_R
        inner = self.stored.sizes[1]
        half_R = torch.div(rows_R, inner, rounding_mode="floor")
        place_R = rows_R - half_R * inner - first
        (at_R,) = ((place_R >= 0) & (place_R < part.sizes[1])).nonzero(as_tuple=True)
        return at_R, (place_R + half_R * part.width)[at_R]


def overlap(wanted: range, first: int, count: int) -> range:
    """What of a range a part has that begins at `first`, counted from there."""
    start = max(wanted.start, first)
    return range(start - first, max(start, min(wanted.stop, first + count)) - first)


def _parts(stored: StoredTensor) -> Iterator[tuple[StoredTensor, int]]:
    """The parts of a weight, or the weight alone, each with its first intermediate value."""
    first = 0
    for part in stored.all:
        yield part, first
        first += part.sizes[1] if part.ep_rank is None else 0


def _rows(part: StoredTensor, experts: range | None, rows_R: Tensor, columns: range, slices: Slices) -> Tensor:
    """Some rows of a part's matrices, read in as few ranges as there are halves; the columns are a range."""
    if not len(rows_R):
        return torch.empty(*(() if experts is None else (len(experts),)), 0, len(columns), dtype=part.tensor.dtype)
    low, high = int(rows_R.min()), int(rows_R.max()) + 1
    if high - low == len(rows_R) or not part.halves:
        found = _box(part, experts, range(low, high), columns, slices)
        return found if torch.equal(rows_R, torch.arange(low, high)) else found[..., rows_R - low, :]
    halves: Tensor | None = None
    for half in range(part.halves):
        (at_R,) = (torch.div(rows_R, part.width, rounding_mode="floor") == half).nonzero(as_tuple=True)
        if len(at_R):
            own = rows_R[at_R]
            ranged = range(int(own.min()), int(own.max()) + 1)
            box = _box(part, experts, ranged, columns, slices)[..., own - ranged.start, :]
            halves = box.new_empty(*box.shape[:-2], len(rows_R), len(columns)) if halves is None else halves
            halves[..., at_R, :] = box
    assert halves is not None
    return halves


def _box(part: StoredTensor, experts: range | None, rows: range, columns: range, slices: Slices) -> Tensor:
    row = part.bf16_layout
    assert row is not None, "codes are read as they are stored"
    source = slices(part)
    if row.view is None:
        swizzled: Tensor = unswizzle(source[...])
        return swizzled[..., rows.start : rows.stop, columns.start : columns.stop]
    leading = () if experts is None else (slice(experts.start, experts.stop),)
    exchanged = row.shape(1, 2) == (2, 1)
    key = [slice(each.start, each.stop) for each in ((columns, rows) if exchanged else (rows, columns))]
    return row.view(source[(*leading, *key)])


class OpenFiles:
    """Context in which tensors of the files are sliced; a file is opened when it is first needed."""

    def __enter__(self) -> Slices:
        self._stack, self._files = ExitStack(), dict[str, Any]()
        return self._slices

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _slices(self, stored: StoredTensor) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="pt"))
        return self._files[stored.file].get_slice(stored.name)
