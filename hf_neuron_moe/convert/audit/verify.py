"""Is a converted checkpoint what its manifest, its format and its source say?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.audit import verify_files
from hf_neuron_moe.convert.audit.against_plan import check_plan, check_rounded
from hf_neuron_moe.convert.audit.compare import LayerProbe, probe_layers
from hf_neuron_moe.convert.io.folder import check_checkpoint, check_conversion
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, Manifest, read_manifest
from hf_neuron_moe.convert.notes import left_facts, left_notes
from hf_neuron_moe.convert.workers import Progress, counting
from hf_neuron_moe.errors import ConversionError, counted, printable, public

CHECKS = ("manifest", "files", "coverage", "finite", "source", "probe")  # In the order in which they run


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be: which check saw it, where, and what it is."""

    check: str
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.subject}: {self.message}"


@dataclass
class VerifyReport:
    """What was checked and what was found."""

    directory: Path
    done: dict[str, str] = field(default_factory=dict)  # What each check covered, by its name
    skipped: dict[str, str] = field(default_factory=dict)  # Why a check did not run, by its name
    findings: list[Finding] = field(default_factory=list)  # Everything that is wrong
    notes: list[str] = field(default_factory=list)  # What was seen and allowed
    probes: list[LayerProbe] = field(default_factory=list)  # Layers that were compared with the source
    left: dict[str, LeftModule] | None = None  # What the conversion left in its source form; None where it is unknown

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def add(self, check: str, found: Iterable[tuple[str, str]]) -> None:
        """Take note of a check's findings: subjects and messages."""
        self.findings += [Finding(check, printable(subject), printable(message)) for subject, message in found]

    def _states(self) -> Iterator[tuple[str, str, str]]:
        """Each check, ``"ok"``, ``"FAILED"`` or ``"skipped"``, and what it covered or why it did not run."""
        failed = {finding.check for finding in self.findings}
        for check in CHECKS:
            state = "FAILED" if check in failed else "ok" if check in self.done else "skipped"
            yield check, state, self.done.get(check) or self.skipped.get(check, "")

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "ok": self.ok,
            "directory": str(self.directory),
            "checks": {check: {"state": state, "detail": detail} for check, state, detail in self._states()},
            "findings": [vars(finding) for finding in self.findings],
            "notes": self.notes,
            "left": left_facts(self.left),
            "probes": [probe.to_dict() for probe in self.probes],
        }

    def __str__(self) -> str:
        width = max(map(len, CHECKS))
        lines = [f"{self.directory}: {'ok' if self.ok else 'NOT OK'}"]
        lines += [f"  {check:<{width}}  {state:<7}  {detail}".rstrip() for check, state, detail in self._states()]
        lines += [f"  probe {probe}" for probe in self.probes]
        lines += [f"FAILED {finding}" for finding in self.findings]
        lines += [f"note: {note}" for note in (*self.notes, *left_notes(self.left))]
        return "\n".join(lines)


@public("verify")
def verify_checkpoint(
    converted: Path,
    source: Path | None = None,
    *,
    probes: int = 8,
    seed: int = 0,
    on_nonfinite: str = "error",
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a converted checkpoint.

    Without the source: checksums of all files, agreement of manifest, index, configuration and file headers, complete
    coverage of every weight, and finite values. Others are only noted with `on_nonfinite` ``"keep"``. With it also: the
    source's own checksums, and whether a new plan of its conversion and its rounded values are what the manifest says.
    Then the stored matrices and outputs for random inputs of `probes` layers that `seed` chooses. Of experts that is
    one in each layer, for 0 every expert of every layer. What is wrong with the conversion
    is no exception: it is in the report. `progress` is called with bytes done and bytes in all.
    """
    check_conversion(converted, "verify")
    if source is not None:
        check_checkpoint(source)
    report = VerifyReport(converted)
    try:
        manifest = read_manifest(converted, "verify")
    except ConversionError as error:
        report.add("manifest", [(MANIFEST_FILE, str(error))])
        report.skipped = dict.fromkeys(CHECKS[1:], "no manifest")
        return report
    sizes = [path.stat().st_size for path in converted.iterdir() if path.is_file()]
    total = 2 * sum(sizes)
    if source is not None:
        wider = (piece.nbytes for piece in manifest.pieces if piece.dtype != "BF16")  # their values are counted
        total += sum(manifest.source_files.values()) + sum(wider)
    step = counting(progress, total)
    _check_conversion(report, manifest, on_nonfinite, step)
    if source is None:
        report.skipped["source"] = report.skipped["probe"] = "no --source given"
    else:
        found, report.done["source"] = verify_files.check_source(source, manifest, step)
        report.add("source", found)
        if not found and "coverage" not in {finding.check for finding in report.findings}:
            wrong, otherwise = check_plan(source, manifest)
            report.add("source", wrong + check_rounded(source, manifest, step))
            report.notes += [
                f"{printable(name)}: {message} with this version; {printable(manifest.tool_version)} converted it"
                for name, message in otherwise
            ]
        if report.findings:
            others = all(finding.check == "source" for finding in report.findings)
            what = "the source is not the one that was converted" if others else "the files are damaged already"
            report.skipped["probe"] = what
        else:
            _probe(report, manifest, source, probes, seed)
    step(total)
    return report


def _check_conversion(report: VerifyReport, manifest: Manifest, on_nonfinite: str, step: verify_files.Step) -> None:
    """Do the checks that need no source."""
    converted, options = report.directory, manifest.options
    headers = verify_files.header_differences(converted, manifest)
    stored = len(manifest.tensors)
    readable = sum(not headers[tensor.file] for tensor in manifest.tensors)
    report.left = manifest.left
    report.done = {
        "manifest": f"precision {options.precision}, layout {options.layout}, {counted(stored, 'tensor')}",
        "files": f"checksums of {counted(len(manifest.file_sha256 or headers), 'file')}",
        "coverage": f"{counted(len(manifest.pieces), 'source tensor')} in {counted(len(manifest.weights), 'weight')}, "
        f"{counted(stored, 'stored tensor')}",
        "finite": counted(readable, "tensor"),
    }
    report.add("files", verify_files.check_files(converted, manifest, headers, step))
    strays = verify_files.strays_in(converted, manifest)
    hidden = [name for name in strays if name.startswith(".")]  # such as .gitattributes, which no loader reads
    report.add("files", ((name, "not part of the conversion") for name in strays if name not in hidden))
    report.notes += [f"{printable(name)}: not part of the conversion, and hidden" for name in hidden]
    report.add("coverage", verify_files.check_coverage(converted, manifest, headers))
    found = verify_files.check_finite(converted, manifest, headers, step)
    if on_nonfinite == "keep":
        report.notes += [f"{subject}: {message}" for subject, message in found]
    else:
        report.add("finite", found)


def _probe(report: VerifyReport, manifest: Manifest, source: Path, probes: int, seed: int) -> None:
    with open_tensors(source, manifest.encodings) as original, open_tensors(report.directory) as stored:
        report.probes = probe_layers(manifest, original, stored, probes, seed)
    report.add("probe", [(probe.layer, fault) for probe in report.probes for fault in probe.faults])
    layers = len({probe.layer for probe in report.probes})
    count = sum(probe.expert is not None for probe in report.probes)
    experts = f", all their {count} experts" if count and not probes else ""
    report.done["probe"] = f"{counted(layers, 'layer')} compared with the source{experts} (seed {seed})"
