"""Rows of an evaluation under tensor parallelism, where each process of a group has the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor


def gather_rows_once(accelerator: Accelerator, copies: int, gather_function: Callable[[Any], Any], data: Any) -> Any:
    """Gather with ``accelerator.gather_for_metrics``, each row once of so many successive processes with the same ones.

    accelerate 1.15 gathers a row of every process, and cuts the last batch as if no process had another's rows.
    """
    gather = accelerator.gather

    def once(gathered: Tensor) -> Tensor:
        return gathered.unflatten(0, (accelerator.num_processes, -1))[::copies].flatten(0, 1)

    accelerator.gather = lambda tensor: recursively_apply(once, gather(tensor))
    try:
        return gather_function(data)
    finally:
        accelerator.gather = gather
