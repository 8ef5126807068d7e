"""What becomes of a plan with refused blocks, or without any to patch; the reasons, equal ones in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError, pattern_of, spelled_together
from hf_neuron_moe.patching.report import PatchEntry, PatchReport

_PATCH_FIRST = (
    "Patch the model before adapters are put on its MLPs: patch_model(model), then get_peft_model(model, ...). "
    "Adapters on attention may be there already."
)


def check_outcome(model: nn.Module, report: PatchReport, strict: bool) -> None:
    """Refuse a plan that patches nothing, or not everything although it has to.

    Args:
        model: what was to be patched.
        report: what the plan says of every block.
        strict: every gated block that is not excluded has to be patched.

    Raises:
        NothingToPatchError: no block would be patched.
        UnsupportedModelError: `strict`, and a block would not be.
    """
    listed = "".join(f"\n  {line}" for line in _lines(report.refused))
    if not report.patched:
        raise NothingToPatchError.about(
            "model",
            "a model with SwiGLU MLPs or experts that the kernels can compute",
            f"a {type(model).__name__} {_counted(report)}{':' + listed if listed else ''}",
            ("\n" if listed else "") + _what_to_do(report),
        )
    counted = [entry for entry in report.refused if entry.gated]
    if strict and counted:
        raise UnsupportedModelError.about(
            "model",
            "a model whose gated MLP and experts blocks can all be patched (strict=True)",
            f"{len(counted)} that cannot:" + "".join(f"\n  {line}" for line in _lines(counted)),
            f"\n{_PATCH_FIRST} Or name them in exclude=...; strict=False leaves them stock."
            if _has_adapters(report)
            else "\nName them in exclude=..., or pass strict=False to leave them stock.",
        )


def _lines(entries: Iterable[PatchEntry]) -> list[str]:
    """The reasons, each once for all blocks of a class whose names differ in their numbers only."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in entries:
        groups[pattern_of(entry.name), entry.class_name, entry.reason].append(entry.name or "the model")
    return [
        f"{spelled_together(names)} ({f'{len(names)} x ' if len(names) > 1 else ''}{class_name}): {reason}"
        for (_, class_name, reason), names in groups.items()
    ]


def _counted(report: PatchReport) -> str:
    """How many blocks the model has, and that none of them can be patched."""
    count = len(report.entries)
    if not count:
        return "without MLP or experts blocks"
    blocks = f"with {count} MLP or experts block{'s' if count > 1 else ''}"
    if report.skipped:
        return f"{blocks}, {len(report.skipped)} of them skipped and {len(report.refused)} refused"
    return f"{blocks}, {'none of which' if count > 1 else 'which'} can{'' if count > 1 else 'not'} be patched"


def _has_adapters(report: PatchReport) -> bool:
    return any("peft." in entry.reason for entry in report.refused)


def _what_to_do(report: PatchReport) -> str:
    """The remedy where nothing is left to patch."""
    if report.skipped:
        return f"include and exclude leave nothing: make them match blocks such as {report.skipped[0].name!r}."
    if _has_adapters(report):
        return _PATCH_FIRST
    if report.refused:
        return (
            "If a reason names something you added (hooks, adapters, an option, ...), remove it and patch again; "
            "otherwise train this model as it is. strict=False does not help: no block would be left to patch."
        )
    return (
        "Pass the model that holds such blocks, before it is compiled or wrapped; a model without any is trained as "
        "it is."
    )
