#!/usr/bin/env python3
"""Check a run of run_trn2.sh or run_trn3.sh before it starts: its options, its model's blocks and the chip.

    python scripts/neuron_check.py trn2 4 --dry CONFIG.yaml [--option value ...]
    python scripts/neuron_check.py trn2 4 --here CONFIG.yaml [--option value ...]

``--dry`` works on any machine and judges by the documents of Neuron's SDK; ``--here`` asks this machine. Exit code 2
and one line where something does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import Device
from hf_neuron_moe.device.installed import Installation, inspect_installation
from hf_neuron_moe.device.kernel_support import DOCUMENTED_SDK, DocumentedAdapter
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, SourceDamageError
from hf_neuron_moe.finetune.early_checks import check_files, check_run, check_training
from hf_neuron_moe.finetune.kernels import asks_for_kernels, check_kernels
from hf_neuron_moe.finetune.mistakes import located, pass_all
from hf_neuron_moe.finetune.model_files import check_weights, folder_of, read_config
from hf_neuron_moe.finetune.reading import read_options
from hf_neuron_moe.finetune.resumed import check_resume
from hf_neuron_moe.finetune.train_options import Options
from hf_neuron_moe.precision_map import spelled

CORES_PER_CHIP = 8
"""Physical NeuronCores on a Trn2 and on a Trn3 chip."""

MOST_CHIPS = {"trn2": 16}
"""Of one machine (trn2.48xlarge); Trn3's are not told here, since its UltraServers are of several sizes."""


def main(argv: Sequence[str]) -> int:
    """Check and tell; return the exit code."""
    chip, processes, mode, *words = argv
    try:
        lines = check_dry(chip, processes, words) if mode == "--dry" else check_here(chip, processes, words)
    except NeuronMoEError as error:
        for text in (error, *getattr(error, "__notes__", ())):
            print(f"error: {text}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def check_dry(chip: str, processes: str, words: Sequence[str]) -> list[str]:
    """Return what is found by the options, the documents and the files here.

    Raises:
        NeuronMoEError: something that the run would stop at.
    """
    check_variables(chip)
    lnc = versions.lnc()
    lines = process_lines(chip, lnc, count_processes(processes, chip, lnc))
    # TrainingArguments ask the device whether it has bf16; there is none here.
    options = read_options([*words, "--use_cpu", "true"])
    with located(options.places):
        lines += check_options(options)
        pass_all(options.places, partial(check_resume, options), partial(check_files, options))
        config, note = config_here(options)
        lines += note
        check_training(options, config)
        if asks_for_kernels(options):
            found = check_kernels(options, config, Device(chip, lnc), DocumentedAdapter())
            lines += [f"kernels on {chip}, by the documents of SDK {DOCUMENTED_SDK}:", *(f"  {line}" for line in found)]
    return lines


def config_here(options: Options) -> tuple[bytes | str, list[str]]:
    """Return the model's configuration as far as it is here or on the hub, and what the run needs in addition."""
    name = options.model.model
    try:
        folder = folder_of("model", name, options.model.revision)
    except SourceDamageError:
        return f"the blocks of {name} cannot be looked at here", [f"model: {name} is not here, and the run needs it"]
    if not Path(name).is_dir():
        return read_config(folder), []
    if not any(folder.glob("*.safetensors*")):
        return read_config(folder), [f"model: {name} has no weights here, and the run needs them"]
    check_weights(folder)
    return read_config(folder), []


def check_here(chip: str, processes: str, words: Sequence[str]) -> list[str]:
    """Return what is found on this machine.

    Raises:
        NeuronMoEError: something that the run would stop at.
    """
    check_variables(chip)
    found = inspect_installation()
    if found.target[0] != chip:
        raise _bad(
            "the chip", chip, f"{found.target[0] or 'unknown'} ({found.target[1]})", f"Take run_{chip}.sh there."
        )
    lnc = versions.lnc()
    count = count_processes(processes, chip, lnc)
    check_devices(found, count)
    options = read_options(words)
    with located(options.places):
        lines = process_lines(chip, lnc, count) + check_options(options)
        if (
            asks_for_kernels(options)
            and options.training.neuron_backend == "neuron"
            and found.unsupported_reason is not None
        ):
            remedy = found.first_steps[0]
            raise _bad("neuron_backend", "one that can run here", f"neuron, and {found.unsupported_reason}", remedy)
        config = check_run(options)
        if asks_for_kernels(options):
            lines += check_kernels(options, config, Device(chip, lnc), Adapter())
    return lines


def check_options(options: Options) -> list[str]:
    """Refuse a backend that is not named, and tell which options count."""
    training = options.training
    if not training.neuron_patch:
        return [f"options: nothing is patched (neuron_patch: false), to {training.output_dir}"]
    if training.neuron_backend == "auto":
        remedy = "Set neuron_backend: neuron. auto decides while the model is still on the CPU, and takes torch."
        raise _bad("neuron_backend", "named: neuron, or torch to compare with", "auto", remedy)
    precision, folder = spelled(training.neuron_precision), training.output_dir
    lines = f"options: {precision} blocks, backend {training.neuron_backend}, to {folder}"
    return [lines if training.neuron_backend in NEURON_BACKENDS else f"{lines}; PyTorch computes the blocks, no kernel"]


def check_variables(chip: str) -> None:
    """Refuse environment variables that contradict each other, or the chip.

    Raises:
        ConfigError: they do, or one has no value that is known.
    """
    for source, name in versions.platforms_asked_for().items():
        if name != chip:
            place = f"--target in {source}" if source == "NEURON_CC_FLAGS" else source
            raise _bad(place, f"{chip} (or unset) with run_{chip}.sh", name, "Unset it, or take the chip's own script.")
    versions.lnc()


def count_processes(processes: str, chip: str, lnc: int) -> int:
    """Return NPROC as a number.

    Raises:
        ConfigError: it is no number of logical cores that one machine has.
    """
    per_chip = CORES_PER_CHIP // lnc
    most = MOST_CHIPS[chip] * per_chip if chip in MOST_CHIPS else None
    expected = f"a number of logical cores: {per_chip} for one {chip} chip at LNC {lnc}, 1 for a trial"
    if not processes.isascii() or not processes.isdigit() or int(processes) < 1:
        raise _bad("NPROC", expected, repr(processes), "Correct or unset it.")
    if most is not None and int(processes) > most:
        remedy = f"One machine has at most {MOST_CHIPS[chip]} chips, {most} logical cores at LNC {lnc}."
        raise _bad("NPROC", expected, processes, remedy)
    return int(processes)


def process_lines(chip: str, lnc: int, count: int) -> list[str]:
    """Say how many chips the processes fill."""
    per_chip = CORES_PER_CHIP // lnc
    chips = -(-count // per_chip)
    have = f"the {chips * per_chip} logical cores of {chips} {chip} chip{'s' if chips > 1 else ''}"
    return [f"processes: {count}, on {'all' if count % per_chip == 0 else 'a part'} of {have} (LNC {lnc})"]


def check_devices(found: Installation, count: int) -> None:
    """Refuse more processes than this machine has logical cores."""
    if found.devices is not None and count > found.devices:
        expected = f"at most {found.devices}, the logical cores that the runtime offers at LNC {found.lnc[0]}"
        raise _bad("NPROC", expected, count, "Lower it, or free the cores: `neuron-ls` shows who holds them.")


def _bad(argument: str, expected: str, got: object, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("neuron_run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
