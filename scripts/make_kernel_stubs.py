"""Write hf_neuron_moe/reference/moe_cte_direct.pyi: the signatures of the table's kernels for editors and mypy.

python scripts/make_kernel_stubs.py            # writes the file
python scripts/make_kernel_stubs.py --check    # fails if it would change
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from hf_neuron_moe.reference.moe_cte_table import KERNELS, signature_of

STUB = Path(__file__).resolve().parent.parent / "hf_neuron_moe" / "reference" / "moe_cte_direct.pyi"
HEAD = """# Written by scripts/make_kernel_stubs.py from moe_cte_table.py.
import torch
from torch import Tensor

from hf_neuron_moe.reference.moe_cte import MoEForward
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    QuantizationType,
    SkipMode,
)

"""


def render() -> str:
    """Return the whole file."""
    return HEAD + "".join(f"def {name}(\n{parameters(name)}) -> MoEForward: ...\n" for name in KERNELS)


def parameters(name: str) -> str:
    """Return a kernel's parameters, one a line."""
    lines, keywords = [], False
    for parameter in signature_of(KERNELS[name]).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            lines.append("    *,\n")
        default = "" if parameter.default is inspect.Parameter.empty else " = ..."
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},\n")
    return "".join(lines)


def main() -> int:
    """Write the file, or compare it."""
    if "--check" in sys.argv[1:]:
        same = STUB.read_text(encoding="utf-8") == render()
        print(f"{STUB.name} is {'up to date' if same else 'out of date: run scripts/make_kernel_stubs.py'}")
        return int(not same)
    STUB.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
