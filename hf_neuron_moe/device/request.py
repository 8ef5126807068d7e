"""What ``verify_device`` is asked for, and whether this machine can do it; no model is needed to tell."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_neuron_moe.backends import NEURON_BACKENDS, resolve_backend
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.generations import KERNEL_PRECISIONS
from hf_neuron_moe.backends.neuron.limits import BF16_TOKENS, Block, Device, unsupported_reason
from hf_neuron_moe.config import ACCUMULATIONS, BLOCK_SIZES
from hf_neuron_moe.device.installed import inspect_installation
from hf_neuron_moe.device.kernel_support import DOCUMENTED_LNC, DocumentedAdapter
from hf_neuron_moe.device.smoke import DEVICE_NAME
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, not_one_of, public

WHERE = "verify_device"
_USUAL_SIZES = (4096, 2048)
"""H and I that every kernel takes."""


@dataclass(frozen=True)
class Request:
    """The options of :func:`~hf_neuron_moe.device.device_verification.verify_device`; checked without a machine."""

    backend: str = "neuron"  # or "nki-sim" for NKI's simulator (then take few tokens and a tiny model)
    precision: str | None = None  # of the blocks; None for the one that the chip has kernels for
    tokens: int = 256  # rows of the random input
    block_size: int = 512  # tokens per block of experts
    seed: int = 0  # of inputs and random weights
    layers: int | None = None  # only the first so many blocks; None for all
    device: str | None = None  # where the kernels run; None as :meth:`device_here` chooses
    accumulation: str = ACCUMULATIONS[0]  # "device": bf16 experts beside the kernels' own rounding of running sums

    @public(WHERE)
    def __post_init__(self) -> None:
        if self.backend not in NEURON_BACKENDS:
            raise not_one_of("backend", self.backend, NEURON_BACKENDS)
        if self.precision not in (None, *KERNEL_PRECISIONS):
            raise not_one_of("precision", self.precision, KERNEL_PRECISIONS)
        if self.accumulation not in ACCUMULATIONS:
            raise not_one_of("accumulation", self.accumulation, ACCUMULATIONS)
        seed, layers, sizes = self.seed, self.layers, ", ".join(map(str, BLOCK_SIZES))
        known = self.device is None or DEVICE_NAME.fullmatch(self.device) is not None
        rules = (
            ("tokens", _is_count(self.tokens), "a positive integer", "Correct it."),
            ("layers", layers is None or _is_count(layers), "a positive integer", "Correct it."),
            ("seed", type(seed) is int and -(2**63) <= seed < 2**63, "an integer of 64 bits", "Correct it."),
            ("block_size", self.block_size in BLOCK_SIZES, f"one of {sizes}", "Choose one of these."),
            ("device", known, "a device such as neuron:0", "`hf-neuron-moe doctor` tells how many there are."),
        )
        for argument, holds, expected, fix in rules:
            if not holds:
                raise ConfigError.about(argument, expected, repr(getattr(self, argument)), fix)
        self._check_tokens(self.precision)

    def _check_tokens(self, precision: str | None) -> None:
        if precision == "bf16" and self.tokens > BF16_TOKENS:  # only experts have kernels in bf16
            fix, expected = "Take fewer; a run splits its batches likewise.", f"at most {BF16_TOKENS:,} in bf16"
            raise ConfigError.about("tokens", f"{expected}, as moe_cte takes", f"{self.tokens:,}", fix)

    @public(WHERE)
    def device_here(self) -> torch.device:
        """Return where the kernels' tensors belong, after a first sum there: the device that was asked for.

        Without one it is the first Neuron device, or the CPU for the simulator. Raises where ``doctor`` says no. On
        ``"cpu"``, which a plugin without devices of its own takes, no runtime is needed.
        """
        simulated, found = self.backend != "neuron", inspect_installation()
        if self.device == "cpu":
            found = replace(found, devices=max(found.devices or 0, 1))
        reason = found.simulator_reason if simulated else found.unsupported_reason
        name = self.device if self.device is not None else "cpu" if simulated else "neuron:0"
        expected, fix = f"one where backend={self.backend!r} can run", "`hf-neuron-moe doctor` shows what is here."
        if reason is None:
            resolve_backend(self.backend, torch.device("cpu"))
            expected, reason = "one whose Neuron device works", _device_trouble(name)
            fix = "Check the driver with `neuron-ls`, and that no other process holds the cores."
        elif not simulated:
            fix = f"{found.first_steps[0]} {fix}"
        if reason is not None:
            raise BackendUnavailableError.about("this machine", expected, f"one where {reason}", fix)
        return torch.device(name)

    @public(WHERE)
    def precision_here(self) -> str:
        """Return the precision that was asked for, or the one that this machine's chip has kernels for."""
        platform = versions.platform()
        chip = Device(platform.name, DOCUMENTED_LNC, assumed=platform.source == versions.ASSUMED)
        precision = self.precision or ("mxfp8" if platform.name == "trn3" else "bf16")
        blocks = (Block(kind, precision, *_USUAL_SIZES) for kind in ("experts", "mlp"))
        reasons = [unsupported_reason(block, chip, DocumentedAdapter()) for block in blocks]
        if None not in reasons:
            got = f"{precision!r}: {reasons[0]} (known from {platform.source})"
            raise ConfigError.about("precision", "one that this chip has kernels for", got, "Leave it out.")
        self._check_tokens(precision)
        return precision


def _device_trouble(name: str) -> str | None:
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"torch knows no device {name}: the plugin is not loaded"
    numbers = torch.arange(4, dtype=torch.float32)
    try:
        there = (numbers.to(device) + 1).cpu()
    except (RuntimeError, NotImplementedError, AttributeError) as error:  # of a device that torch does not know, too
        return f"{device} fails at a sum: {' '.join(str(error).split())[:200]}"
    return None if torch.equal(there, numbers + 1) else f"0 1 2 3 plus 1 is {there.tolist()} on {device}"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
