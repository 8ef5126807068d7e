"""What ``verify_device`` found, block by block, what it means as a whole, and what to do about it."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_neuron_moe.device.tolerances import BOUNDS, CLOSE, EQUAL, ERROR, FAIL, NOT_RUN, PASS, TensorResult

ORDER = (EQUAL, PASS, CLOSE, NOT_RUN, FAIL, ERROR)
"""Verdicts, the worst last; a block has that of its worst tensor."""

_TEXTS = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))
_CAUSES: dict[str, str] = _TEXTS["cause"]
_ADVICE = {verdict: tuple(texts["advice"]) for verdict, texts in _TEXTS["verdict"].items()}
_MEANING = {verdict: texts["meaning"] for verdict, texts in _TEXTS["verdict"].items() if "meaning" in texts}


@dataclass(frozen=True)
class BlockResult:
    """One block."""

    name: str  # in the model
    kind: str  # "mlp" or "experts", "frozen mlp" or "frozen experts"
    verdict: str  # the worst of its tensors; ERROR where a call raised; NOT_RUN where no kernel computes it
    tensors: tuple[TensorResult, ...] = ()  # output and gradients; empty where it did not run
    seconds: float = 0.0  # of the call on the device, compilation included
    note: str = ""  # why it did not run, what was raised, or why it has no explanation
    explanation: str = ""  # what its results agree with where they disagree with PyTorch's: see device/emulation.py

    @property
    def first_off(self) -> TensorResult | None:
        """The first of its tensors that rounding does not explain."""
        return next((tensor for tensor in self.tensors if tensor.verdict in (CLOSE, FAIL)), None)

    @property
    def finding(self) -> str:
        """What was found at :attr:`first_off`, or why the block did not run."""
        tensor = self.first_off
        if tensor is None:
            return f"{self.verdict}: {self.note}"
        level = "" if tensor.sqnr_db is None else f" at {tensor.sqnr_db:.1f} dB"
        return f"{tensor.name} {tensor.verdict}{level}: {tensor.note}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"tensors": [tensor.to_dict() for tensor in self.tensors]}


@dataclass(frozen=True)
class DeviceReport:
    """Result of :func:`~hf_neuron_moe.device.device_verification.verify_device`."""

    backend: str  # "neuron" or "nki-sim"
    device: str  # where the kernels' tensors were
    target: str  # the chip
    lnc: int  # physical cores per logical core
    precision: str  # of the blocks
    tokens: int  # rows of the random input
    block_size: int  # tokens per block of experts
    seed: int  # of the inputs
    weights: str  # "checkpoint" or "random"
    blocks: tuple[BlockResult, ...]  # in model order; those without kernels last

    @property
    def verdicts(self) -> dict[str, int]:
        """Number of blocks by verdict, the worst last."""
        return {verdict: sum(block.verdict == verdict for block in self.blocks) for verdict in ORDER}

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"close"`` or ``"fail"``, the worst of the blocks that ran; ``"not run"`` where none did."""
        number = self.verdicts
        if number[FAIL] or number[ERROR]:
            return FAIL
        return CLOSE if number[CLOSE] else PASS if number[EQUAL] or number[PASS] else NOT_RUN

    @property
    def ok(self) -> bool:
        """Whether at least one block ran, and rounding explains every difference."""
        return self.verdict == PASS

    @property
    def first_off(self) -> BlockResult | None:
        """The first block in model order that raised or that rounding does not explain."""
        return next((block for block in self.blocks if block.verdict in (CLOSE, FAIL, ERROR)), None)

    @property
    def advice(self) -> tuple[str, ...]:
        """What the first fault looks like, and what to do next."""
        block = self.first_off
        if block is None:
            return _ADVICE[self.verdict]
        tensor = block.first_off
        if tensor is None:
            return _ADVICE[ERROR]
        cause = (f"Looks like: {_CAUSES[tensor.fault]}.",) if tensor.fault in _CAUSES else ()
        return cause + _ADVICE[self.verdict]

    def summary(self) -> str:
        """Return the outcome in a few lines: how many blocks, what it means, where it begins, what to do."""
        ran = sum(bool(block.tensors) for block in self.blocks)
        place = f"{self.backend} on {self.device} ({self.target}, LNC {self.lnc})"
        how = f"{self.precision}, {self.tokens} tokens, {self.weights} weights"
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items() if count)
        lines = [f"{ran} of {len(self.blocks)} blocks compared ({counted}): {_MEANING[self.verdict]} ({place}; {how})"]
        block = self.first_off
        if block is not None:
            lines.append(f"First: {block.name}: {block.finding}")
            if block.explanation:
                lines.append(f"Its results agree with {block.explanation}.")
        return "\n".join([*lines, *self.advice])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        first = self.first_off
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "meaning": _MEANING[self.verdict],
            "first_off": None if first is None else {"name": first.name, "what": first.finding},
            "advice": list(self.advice),
            "bounds": {precision: bounds._asdict() for precision, bounds in BOUNDS.items()},
            **asdict(self),
            "verdicts": self.verdicts,
            "blocks": [block.to_dict() for block in self.blocks],
        }
