"""What the shards of a converted checkpoint say about their tensors: layouts are read, never guessed from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import NATURAL, PERMUTED, SWIZZLED, WORDS, MXLayout
from hf_neuron_moe.convert.io.bounded import is_natural, parse_json, record
from hf_neuron_moe.convert.io.source import SourceTensor, damaged, read_header, read_indexed
from hf_neuron_moe.convert.layout.orientations import (
    BF16_LAYOUTS,
    MX_FUSED_CODES,
    MX_KERNEL_CODES,
    PERMUTED_WORDS,
    SCALES,
    SOURCE,
    WORD_LAYOUTS,
    Bf16Layout,
    bf16_layout,
)
from hf_neuron_moe.convert.layout.tensor_parallel import halves_in
from hf_neuron_moe.convert.manifest import INDEX_OUT
from hf_neuron_moe.convert.options import FORWARD
from hf_neuron_moe.errors import ConversionError, public
from hf_neuron_moe.formats.moe_mx import HIDDEN_SCHEME, INTERMEDIATE_SCHEME

LAYOUTS_KEY, TENSORS_KEY = "hf_neuron_moe.layouts", "hf_neuron_moe.tensors"
WHERE = "from_pretrained"

_INTEGERS = {"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "I16": torch.int16, "I32": torch.int32}
_DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, **_INTEGERS}
_ARRANGEMENTS = {MX_FUSED_CODES: NATURAL, MX_KERNEL_CODES: SWIZZLED}
_WORD_FORMATS = {layout: {"mxfp8": "e4m3fn", "mxfp4": "e2m1"}[kind] for layout, kind in WORD_LAYOUTS.items()}
_WORD_DTYPES = {"mxfp8": ("U32", "I32"), "mxfp4": ("U16", "I16")}
_FORMS: dict[str, tuple[tuple[str, ...], range]] = {
    **dict.fromkeys((MX_FUSED_CODES, MX_KERNEL_CODES), (("F8_E4M3",), range(2, 4))),
    **{layout: (_WORD_DTYPES[kind], range(4, 6)) for layout, kind in WORD_LAYOUTS.items()},
    **dict.fromkeys(SCALES, (("U8",), range(2, 6))),
}
"""Dtypes and numbers of axes of the layouts of codes, words and scales."""

_V1_SCALES = {MX_FUSED_CODES: "compact", MX_KERNEL_CODES: "packed"}
"""Where the scales of version 1 lie, which did not record it."""


@dataclass(frozen=True)
class StoredTensor:
    """One converted tensor of a shard."""

    name: str  # there
    layout: str  # a layout name of :mod:`hf_neuron_moe.convert.layout.orientations`
    tensor: Tensor  # its dtype and shape, on the meta device
    scale_layout: str | None = None  # where the scales lie, None for bf16
    orientation: str = FORWARD  # "forward" or "backward"
    padding: Mapping[str, int] = field(default_factory=dict)  # zeros at the end of its H and I axes
    file: str = ""
    tp_rank: int | None = None  # the tensor-parallel rank whose part it is; None for a whole one
    ep_rank: int | None = None  # the expert-parallel rank whose experts it has; None where it has those of all
    first_expert: int = 0
    parts: tuple[StoredTensor, ...] = ()  # of a tensor in parts: all of them, in the order of ranks

    @property
    def rank(self) -> str:
        """What its name ends in: ``.tp0``, ``.ep0``, nothing for a whole one."""
        found = {"tp": self.tp_rank, "ep": self.ep_rank}
        return "".join(f".{kind}{rank}" for kind, rank in found.items() if rank is not None)

    @property
    def experts(self) -> int:
        """Number of experts of the weight."""
        return sum(part.tensor.shape[0] for part in (self.all if self.ep_rank is not None else self.all[:1]))

    @property
    def all(self) -> tuple[StoredTensor, ...]:
        """Its parts, or itself."""
        return self.parts or (self,)

    @property
    def facts(self) -> tuple[object, ...]:
        """What has to be the same wherever it is read."""
        shape, zeros = tuple(self.tensor.shape), sorted(self.padding.items())
        return self.layout, self.scale_layout, shape, zeros, self.rank, self.first_expert

    @property
    def bf16_layout(self) -> Bf16Layout | None:
        """How its values lie; None for codes, words and scales."""
        return bf16_layout(self.layout, self.tensor.ndim == 3)

    @property
    def halves(self) -> int:
        """How often the rows of its matrix go through the I axis: 2 for gate and up, 1 for up alone, 0 for down."""
        return halves_in(self.name.removesuffix(self.rank))

    @property
    def sizes(self) -> tuple[int, int]:
        """The H and I of the network it belongs to, as it is stored; the tensor is one of values or codes."""
        first, second = self.tensor.shape[-2:]
        if self.bf16_layout is not None:
            rows, columns = self.bf16_layout.shape(first, second)
        else:
            rows, columns = self.mx_layout(gate_up=self.halves > 0).matrix_shape(self.tensor.shape)
        hidden, inner = (columns, rows // self.halves) if self.halves else (rows, columns)
        others = 0 if self.tp_rank is None else sum(part.sizes[1] for part in self.parts[1:])
        return hidden - self.padding.get("H", 0), inner - self.padding.get("I", 0) + others

    @property
    def width(self) -> int:
        """Intermediate values of one part of it, zeros included."""
        return (self.parts[0] if self.parts else self).sizes[1] + self.padding.get("I", 0)

    @public(WHERE)
    def mx_layout(self, *, gate_up: bool) -> MXLayout:
        """How the codes are stored; the tensor is one of codes."""
        scales = self.scale_layout or _V1_SCALES.get(self.layout, "")
        if self.layout in _ARRANGEMENTS:
            return MXLayout(arrangement=_ARRANGEMENTS[self.layout], scales=scales)
        if self.layout in _WORD_FORMATS:
            scheme = HIDDEN_SCHEME if gate_up else INTERMEDIATE_SCHEME
            order = PERMUTED if self.layout in PERMUTED_WORDS.values() else NATURAL
            return MXLayout(_WORD_FORMATS[self.layout], WORDS, scheme.value, scales, order)
        expected = (
            f"one of {', '.join((*dict.fromkeys(row.name for row in BF16_LAYOUTS), *_ARRANGEMENTS, *_WORD_FORMATS))}"
        )
        fix = "It was written by a later version of hf-neuron-moe; update the package."
        raise ConversionError.about(f"layout of {self.name}", expected, repr(self.layout), fix)


@dataclass(frozen=True)
class _Fact:
    """What a shard's header says about one tensor; version 1 said the layout only."""

    layout: str = SOURCE
    scale_layout: str | None = None
    orientation: str | None = None
    tp_rank: int | None = None
    padding: dict[str, int] | None = None
    weight: str = ""
    ep_rank: int | None = None
    first_expert: int = 0


@public(WHERE)
def read_stored(files: Iterable[str]) -> dict[str, StoredTensor]:
    """Describe the converted tensors of some shards, by name; copied tensors are left out."""
    stored: dict[str, StoredTensor] = {}
    for path in files:
        tensors, metadata = read_header(Path(path))
        facts = {name: fact for name, fact in _facts(path, metadata).items() if fact.layout != SOURCE}
        stored |= {name: _stored(path, tensor, facts[name]) for name, tensor in tensors.items() if name in facts}
    return stored


def joined(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by the names that whole ones have, with the parts of those that ranks share."""
    whole = {name: tensor for name, tensor in stored.items() if not tensor.rank}
    shared: dict[str, list[StoredTensor]] = {}
    for name, tensor in stored.items():
        if tensor.rank:
            shared.setdefault(name.removesuffix(tensor.rank), []).append(tensor)
    for name, parts in shared.items():
        kind = "ep" if parts[0].tp_rank is None else "tp"
        parts.sort(key=lambda part: (part.ep_rank if part.tp_rank is None else part.tp_rank) or 0)
        found, firsts = [part.rank for part in parts], [part.first_expert for part in parts]
        counts = [part.tensor.shape[0] if kind == "ep" else 0 for part in parts]
        follow = firsts == [sum(counts[:number]) for number in range(len(parts))]
        if found != [f".{kind}{rank}" for rank in range(len(parts))] or not follow:
            raise damaged(f"tensor {name}", "parts of consecutive ranks, from 0 on", f"those of {', '.join(found)}")
        whole[name] = replace(parts[0], name=name, parts=tuple(parts))
    return whole


@public(WHERE)
def check_folder(directory: Path) -> None:
    """Check the index and the headers of a conversion before transformers follows them."""
    found = read_indexed(directory, INDEX_OUT)
    if found.index_metadata is None:
        raise damaged(f"{INDEX_OUT}: metadata", "an object", "none")
    read_stored(str(directory / file) for file in found.files)


def _facts(path: str, metadata: Mapping[str, str]) -> dict[str, _Fact]:
    for key in (key for key in (TENSORS_KEY, LAYOUTS_KEY) if key in metadata):
        try:
            content = parse_json(metadata[key].encode())
            if not isinstance(content, dict):
                raise ValueError(f"{type(content).__name__} instead of an object")
            if key == LAYOUTS_KEY:
                content = {name: {"layout": layout} for name, layout in content.items()}
            return {name: record(_Fact, fact) for name, fact in content.items()}
        except ValueError as error:
            raise damaged(f"{path}: {key}", "layouts of tensors by name", error) from error
    expected = "a shard that `hf-neuron-moe convert` wrote, with its layouts in the header"
    fix = "The folder's files do not belong together, or were saved by another tool: convert the original again."
    raise ConversionError.about(path, expected, "one without them", fix)


def _stored(path: str, tensor: SourceTensor, fact: _Fact) -> StoredTensor:
    plain = bf16_layout(fact.layout, len(tensor.shape) == 3) is not None
    allowed, axes = (("BF16",), range(2, 4)) if plain else _FORMS.get(fact.layout, (tuple(_DTYPES), range(2, 7)))
    if tensor.dtype not in allowed:
        expected = f"of the dtype of {fact.layout}, {' or '.join(allowed)}"
        raise damaged(f"tensor {tensor.name}", expected, tensor.dtype)
    padding = fact.padding or {}
    numbers = (*padding.values(), fact.tp_rank or 0, fact.ep_rank or 0, fact.first_expert)
    if len(tensor.shape) not in axes or 0 in tensor.shape or not all(map(is_natural, numbers)):
        got = f"shape {list(tensor.shape)} with {padding or 'no'} zeros"
        raise damaged(f"tensor {tensor.name}", f"of the form of {fact.layout}", got)
    described = torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype], device="meta")
    place = (padding, path, fact.tp_rank, fact.ep_rank, fact.first_expert)
    return StoredTensor(tensor.name, fact.layout, described, fact.scale_layout, fact.orientation or FORWARD, *place)
