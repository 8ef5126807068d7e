"""The file that an alarm leaves, at most 1 MB, and its replay: ``python -m ...guard.reproduction FILE``.

It holds rows of both operands of the product and what was observed of the result, or rows of the operand alone. The
replay computes the product in float64 from the operands as the kernel sees them, and from the unquantized ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_neuron_moe.errors import ReportError, public
from hf_neuron_moe.training.figures import MEASURES, quantization_health
from hf_neuron_moe.training.guard.findings import Evidence
from hf_neuron_moe.training.guard.second import Product
from hf_neuron_moe.training.run_files import environment

MOST_BYTES = 950_000
_SHOWN = 8  # values that the replay prints
_METADATA = "hf_neuron_moe.guard"


@dataclass
class Reproduction:
    """An alarm with the rows that show it."""

    alarm: dict[str, Any]
    observed_RC: Tensor
    product: Product | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # seed and versions

    @classmethod
    def of(cls, alarm: dict[str, Any], evidence: Evidence) -> Reproduction:
        """Cut the evidence to what a file may hold: the columns that are farthest off, or the first rows."""
        observed, product = evidence.observed_RC.detach().cpu(), evidence.product
        if product is not None:
            return cls(alarm, *_cut(observed, product))
        rows = max(1, MOST_BYTES // max(1, observed[:1].nbytes))
        return cls(alarm, observed[:rows, : MOST_BYTES // observed.element_size()].contiguous())

    def save(self, path: Path, seed: int) -> None:
        """Write the file."""
        tensors, options = {"observed": self.observed_RC}, None
        if self.product is not None:
            for side, parts in (("left", self.product.left_RK), ("right", self.product.right_CK)):
                tensors |= {f"{side}.{number}": part.contiguous() for number, part in enumerate(parts)}
            options = {name: getattr(self.product, name) for name in ("precision", "width", "lone_384", "scheme")}
        facts = {"seed": seed, **environment()}
        content = {"alarm": self.alarm, "product": options, "facts": facts}
        save_file(tensors, path, {_METADATA: json.dumps(content)})

    @classmethod
    @public("guard.reproduction")
    def load(cls, path: Path) -> Reproduction:
        """Read a file; ReportError for another one."""
        fix = "Give a guard_step*.safetensors of a run's neuron_moe folder."
        try:
            with safe_open(path, "pt") as file:
                content = json.loads((file.metadata() or {})[_METADATA])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ReportError.about(str(path), "a reproduction of the guard", str(error), fix) from error
        product: Product | None = None
        if content["product"] is not None:
            segments = range(len(tensors) // 2)  # of both operands, next to what was observed
            left, right = ([tensors[f"{side}.{number}"] for number in segments] for side in ("left", "right"))
            product = Product(left, right, **content["product"])
        return cls(content["alarm"], tensors["observed"], product, content["facts"])


def _cut(observed_RC: Tensor, product: Product) -> tuple[Tensor, Product]:
    """Keep the columns with the largest differences, as many as there is room for, in the operands' own precision."""
    dtype = torch.float64 if product.precision == "fp32" else torch.bfloat16
    error_C = (observed_RC - product.value().cpu()).abs().amax(0).nan_to_num(nan=torch.inf)
    inner = sum(part.shape[1] for part in product.left_RK)
    room = MOST_BYTES // (dtype.itemsize * max(inner, 1)) - len(observed_RC)
    columns = error_C.topk(min(max(room, 1), len(error_C))).indices.sort().values
    left = [part.to("cpu", dtype) for part in product.left_RK]
    right = [part[columns.to(part.device)].to("cpu", dtype) for part in product.right_CK]
    return observed_RC[:, columns].contiguous(), product._replace(left_RK=left, right_CK=right)


def replay(found: Reproduction) -> Iterator[str]:
    """Yield the lines of a replay."""
    alarm, observed_RC = found.alarm, found.observed_RC.double()
    expert = "" if alarm["expert"] == -1 else f", expert {alarm['expert']}"
    what = alarm["operand"] if alarm["result"] is None else f"result {alarm['result']}"
    value = "not finite" if alarm["value"] is None else f"{alarm['value']:.4g}"
    yield f"step {alarm['step']}: {alarm['block']}, {alarm['product']}, {what}{expert}"
    yield f"{alarm['figure']} was {value}, its band {_bound(alarm['low'])} to {_bound(alarm['high'])}"
    yield f"seed {found.facts['seed']}, " + ", ".join(f"{k} {v}" for k, v in found.facts["packages"].items())
    if found.product is None:
        wrong = int((~observed_RC.isfinite()).sum())
        yield f"{len(observed_RC)} rows of {observed_RC.shape[1]} values, {wrong} not finite"
        figures = dict(zip(MEASURES, quantization_health(found.observed_RC).tolist(), strict=True))
        yield "as MXFP8: " + ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())
        return
    expected_RC, plain_RC = found.product.value(), found.product.value(quantized=False)
    for name, reference_RC in (("the kernel's operands", expected_RC), ("unquantized operands", plain_RC)):
        error_R = (observed_RC - reference_RC).norm(dim=1) / reference_RC.norm(dim=1)
        errors = ", ".join(f"{error:.3g}" for error in error_R.tolist())
        yield f"relative error against float64 of {name}: {errors}"
    yield f"{'row':>5} {'column':>6} {'observed':>14} {'float64':>14} {'difference':>12}"
    difference = (observed_RC - expected_RC).abs().nan_to_num(nan=torch.inf).flatten()
    for place in difference.topk(min(_SHOWN, len(difference))).indices.tolist():
        row, column = divmod(place, observed_RC.shape[1])
        seen, expected = float(observed_RC[row, column]), float(expected_RC[row, column])
        yield f"{row:5} {column:6} {seen:14.7g} {expected:14.7g} {seen - expected:12.3g}"


def _bound(limit: float | None) -> str:
    return "any" if limit is None else f"{limit:.4g}"


def main(argv: list[str] | None = None) -> int:
    """Print the replay of a file."""
    parser = argparse.ArgumentParser(description="Replay what the guard of a training run found, in float64.")
    parser.add_argument("file", type=Path, help="guard_step*.safetensors of a run's neuron_moe folder")
    try:
        lines = list(replay(Reproduction.load(parser.parse_args(argv).file)))
    except ReportError as error:
        parser.error(str(error))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
