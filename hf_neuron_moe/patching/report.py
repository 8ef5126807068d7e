"""What patching did, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_neuron_moe.backends.gate import SWIGLU
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.formats.padding import overhead_percent, padded_size

PATCHED, SKIPPED, REFUSED = "patched", "skipped", "refused"


@dataclass(frozen=True)
class PatchEntry:
    """One candidate module."""

    name: str  # in the model; further names of the same module are its `aliases`
    kind: str  # ``"mlp"`` or ``"experts"``
    class_name: str
    status: str  # ``"patched"``, ``"skipped"`` (by the caller's choice) or ``"refused"``
    reason: str = ""  # why it is not patched; empty for patched modules
    aliases: tuple[str, ...] = ()
    experts: int | None = None  # E, None for a dense MLP or where unknown
    hidden_size: int | None = None  # H, None where unknown
    intermediate_size: int | None = None  # I, None where unknown
    # Of patched modules:
    weights: str | None = None  # their layout, ``"stock"`` or ``"kernel"``
    backend: str | None = None
    activations: str | None = None  # name of the block's own activation policy
    saved_bytes_per_token: float | None = None
    """What its operator keeps for backward, per token of its input, input and routing included; None where the model
    does not say how many experts a token has."""
    fallback: str = ""  # why PyTorch computes the block and not the kernels that were asked for; empty otherwise
    weight_copy_bytes: int = 0
    """Copies of the block's weights that its kernels read, in their orientation, sizes and dtype; made once per
    optimizer step, and under FSDP for every call."""
    notes: tuple[str, ...] = ()  # what holds for some calls only, or is worth knowing; sentences without full stop
    saved_bytes_per_call: float = 0.0
    """What every call keeps on top of that, whatever its tokens: kernels of experts keep whole blocks, as many as the
    worst routing needs."""
    kernel_sizes: tuple[int, int] | None = None
    """H and I as the Neuron kernels get them; None where PyTorch computes the block."""
    gated: bool = True  # False for a block without a gate, which stays stock and which ``strict`` does not count
    products: str = ""  # how PyTorch multiplies in the block, which its processor decides; empty where it does not
    precision: str | None = None  # the block's own; None where it is not patched
    one_by_one: str = ""  # the ModuleList that holds it, if all its modules are MLPs: experts of remote code
    gate: str | None = None  # how gate and up become the intermediate: `Gate.short`; None where it is not patched
    generation_bytes: int = 0  # quantized copies of the weights that PyTorch makes for generation and keeps

    @property
    def padded_sizes(self) -> tuple[int, int] | None:
        """H and I as the kernels get them, multiples of 128 where PyTorch stands in for them; None where unknown."""
        if self.kernel_sizes is not None:
            return self.kernel_sizes
        if self.hidden_size is None or self.intermediate_size is None:
            return None
        return padded_size(self.hidden_size), padded_size(self.intermediate_size)

    @property
    def padding_overhead_percent(self) -> float | None:
        """Extra multiply-adds of the kernels due to padding, in percent; None where unknown or of an empty block."""
        padded = self.padded_sizes
        if padded is None or not self.hidden_size or not self.intermediate_size:
            return None
        return overhead_percent(self.hidden_size, self.intermediate_size, padded)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values, padding included."""
        values = asdict(self) | {"aliases": list(self.aliases), "notes": list(self.notes)}
        del values["kernel_sizes"], values["generation_bytes"]
        padded = self.padded_sizes
        values["padded_sizes"] = None if padded is None else list(padded)
        values["padding_overhead_percent"] = self.padding_overhead_percent
        return values


@dataclass(frozen=True)
class PatchReport:
    """Result of :func:`hf_neuron_moe.patch_model`."""

    config: NeuronMoEConfig  # the configuration as asked for; the first part's where there are parts
    entries: tuple[PatchEntry, ...]  # every candidate module, in model order
    parts: tuple[tuple[str, PatchReport], ...] = ()
    """Only in what ``unpatch_model`` returns for a module that held several separately patched models: the name of each
    in that module and its own report."""

    @property
    def patched(self) -> tuple[PatchEntry, ...]:
        """Entries of the modules that were replaced."""
        return tuple(entry for entry in self.entries if entry.status == PATCHED)

    @property
    def skipped(self) -> tuple[PatchEntry, ...]:
        """Entries left alone because the caller asked for it."""
        return tuple(entry for entry in self.entries if entry.status == SKIPPED)

    @property
    def refused(self) -> tuple[PatchEntry, ...]:
        """Entries that the kernels cannot compute, with the reason."""
        return tuple(entry for entry in self.entries if entry.status == REFUSED)

    @property
    def saved_bytes_per_token(self) -> float:
        """What all patched blocks together keep for backward, per token; those of unknown size are left out."""
        return sum(entry.saved_bytes_per_token or 0.0 for entry in self.patched)

    @property
    def saved_bytes_per_call(self) -> float:
        """What all patched blocks together keep of every call on top of :attr:`saved_bytes_per_token`."""
        return sum(entry.saved_bytes_per_call for entry in self.patched)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that ``json.dumps`` accepts."""
        values: dict[str, Any] = {
            "config": self.config.to_dict(),
            "entries": [entry.to_dict() for entry in self.entries],
            "saved_bytes_per_token": self.saved_bytes_per_token,
            "saved_bytes_per_call": self.saved_bytes_per_call,
        }
        if self.parts:
            values["parts"] = {name: part.to_dict() for name, part in self.parts}
        return values

    def __str__(self) -> str:
        if self.parts:
            return "\n\n".join(f"{name or 'the model itself'}: {part}" for name, part in self.parts)
        config = self.config
        ungated = f", {count} of them without a gate" if (count := len(_ungated(self))) else ""
        head = (
            f"{len(self.patched)} patched, {len(self.skipped)} skipped, {len(self.refused)} refused{ungated} "
            f"(precision {config.precision}, activations {config.activations}, block size {config.block_size})"
        )
        listed = [entry for entry in self.entries if entry not in _ungated(self)]
        return "\n".join([head, *_table(listed), *_remarks(self)])


def merged(parts: Mapping[str, PatchReport]) -> PatchReport:
    """Return one report over separately patched parts of a module, by their names in it, which its entries get too."""

    def within(part: str, name: str) -> str:
        return ".".join(filter(None, (part, name)))

    entries = tuple(
        replace(entry, name=within(part, entry.name), aliases=tuple(within(part, alias) for alias in entry.aliases))
        for part, report in parts.items()
        for entry in report.entries
    )
    return PatchReport(next(iter(parts.values())).config, entries, tuple(parts.items()))


_TOKENS = 4096  # of the call for which the text says what is saved in all

_COLUMNS: dict[str, Callable[[PatchEntry], object]] = {
    "module": lambda entry: " = ".join((entry.name, *entry.aliases)),
    "kind": lambda entry: entry.kind,
    "class": lambda entry: entry.class_name,
    "status": lambda entry: entry.status,
    "E": lambda entry: entry.experts,
    "H": lambda entry: entry.hidden_size,
    "I": lambda entry: entry.intermediate_size,
    "gate": lambda entry: entry.gate,
    "padded H x I": lambda entry: entry.padded_sizes and "{} x {}".format(*entry.padded_sizes),
    "padding overhead": lambda entry: _formatted("{:.1f} %", entry.padding_overhead_percent),
    "precision": lambda entry: entry.precision,
    "weights": lambda entry: entry.weights,
    "backend": lambda entry: entry.backend,
    "activations": lambda entry: entry.activations,
    "KiB/token": lambda entry: _formatted("{:.2f}", entry.saved_bytes_per_token, 1024),
    "reason": lambda entry: f"PyTorch instead of kernels: {entry.fallback}" if entry.fallback else entry.reason,
}


def _formatted(form: str, value: float | None, unit: int = 1) -> str | None:
    return None if value is None else form.format(value / unit)


def _table(entries: Sequence[PatchEntry]) -> list[str]:
    """A header and a line per entry, or per list of equal MLPs; what is unknown or does not apply is a dash.

    One precision of all is no column, and neither are gates that are all SiLU.
    """
    usual = {"precision"} if len({entry.precision for entry in entries if entry.precision}) < 2 else set()
    usual |= {"gate"} if all(entry.gate in (None, SWIGLU.short) for entry in entries) else set()
    columns = {name: column for name, column in _COLUMNS.items() if name not in usual}
    names: dict[tuple[object, ...], list[str]] = {}
    for entry in entries:
        name, *others = (column(entry) for column in columns.values())
        names.setdefault((entry.one_by_one or name, *others), []).append(str(name))
    values = [
        [found[0] if len(found) == 1 else f"{of}.* ({len(found)} experts, computed one by one)", *others]
        for (of, *others), found in names.items()
    ]
    rows = [list(columns), *(["-" if value is None else str(value) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _remarks(report: PatchReport) -> Iterator[str]:
    """Lines below the table."""
    if any(entry.padding_overhead_percent for entry in report.entries):
        yield (
            "Padding overhead: extra multiply-adds of the Neuron kernels, which pad H and I to multiples of 128 or "
            "more. The torch backend pads neither in bf16 and fp32, and in mxfp8 only where the blocks of scales need "
            "it."
        )
    yield from _saved_remarks(report)
    products = Counter(entry.products for entry in report.patched if entry.products)
    if products:
        used = [f"{name} ({count} block{'s' if count > 1 else ''})" for name, count in products.items()]
        yield f"PyTorch multiplies by {', '.join(used)}."
    if held := sum(entry.generation_bytes for entry in report.patched):
        yield (
            f"Generation holds quantized copies of the weights: {held / 2**20:.1f} MiB, made by the first call in "
            "evaluation mode without gradients, dropped when the weights change or training goes on (after a "
            "write through .data, call refresh_weights)."
        )
    copies = [entry.weight_copy_bytes for entry in report.patched]
    if any(copies):
        total, largest = (f"{count / 2**20:.1f} MiB" for count in (sum(copies), max(copies)))
        yield (
            f"Weight copies in the kernels' orientation and dtype: {total}, kept until the optimizer's step; under "
            f"FSDP none are kept, and those of one block exist at a time: at most {largest}."
        )
    noted: dict[str, list[str]] = {}
    for entry in report.patched:
        for note in entry.notes:
            noted.setdefault(note, []).append(entry.name)
    for note, names in noted.items():
        yield f"Note on {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}."
    ungated = Counter(entry.class_name for entry in _ungated(report))
    if ungated:
        classes = ", ".join(f"{count} x {name}" for name, count in ungated.items())
        yield f"Not gated MLPs, left stock: {classes}."
    if len(report.refused) > ungated.total():
        yield "Refused blocks stay stock. Fix the reason, or name them in exclude=... to skip them."


def _ungated(report: PatchReport) -> list[PatchEntry]:
    """Refused blocks without a gate, which a line below the table sums up."""
    return [entry for entry in report.refused if not entry.gated]


def _saved_remarks(report: PatchReport) -> Iterator[str]:
    """What is saved for the backward, by groups of equal blocks."""
    groups = Counter(
        (entry.kind, entry.activations, entry.saved_bytes_per_token)
        for entry in report.patched
        if entry.saved_bytes_per_token is not None
    )
    parts = [
        f"{count} {kind} block{'s' if count > 1 else ''} x {saved / 1024:.2f} ({policy})"
        for (kind, policy, saved), count in groups.items()
    ]
    if parts:
        total, fixed = report.saved_bytes_per_token / 1024, report.saved_bytes_per_call / 1024
        yield f"Saved for backward: {total:.2f} KiB per token = {' + '.join(parts)}"
        if fixed:
            yield (
                f"On top, per call: {fixed:,.0f} KiB of blocks that the worst routing could fill; so at {_TOKENS:,} "
                f"tokens {total + fixed / _TOKENS:.2f} KiB per token"
            )
