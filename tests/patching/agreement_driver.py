"""One of two processes that compare what they are about to do.

    python -m tests.patching.agreement_driver FOLDER RANK

What each cell raised goes to FOLDER/rank-N.json. In the last cell rank 1 ends without a word.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from hf_neuron_moe import environment
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import DTypeError, NeuronMoEError
from hf_neuron_moe.patching import ranks
from hf_neuron_moe.patching.report import PATCHED, PatchEntry, PatchReport

SECONDS = 8.0
APART = 1.0
DYING = 2.0
ENTRY = PatchEntry("model.layers.0.mlp", "mlp", "LlamaMLP", PATCHED, hidden_size=64, intermediate_size=96,
                   backend="torch", precision="bf16", products="bf16 products")  # fmt: skip
GATHERS: list[object] = []
_gather = dist.all_gather_object


def counted(everyones: list[Any], mine: object, group: dist.ProcessGroup) -> None:
    """Gather, and remember what this rank sent."""
    GATHERS.append(mine)
    _gather(everyones, mine, group)


def facts(precision: str = "bf16", **changed: object) -> dict[str, str]:
    """Return the facts of a model of one block."""
    return ranks.facts_of(PatchReport(NeuronMoEConfig(precision=precision), (replace(ENTRY, **changed),)))


def agree(mine: dict[str, str]) -> None:
    """Plan without an error."""
    with ranks.OneAnswer(timeout=SECONDS) as answer:
        answer |= mine


def equal(rank: int) -> None:
    """All alike, twenty times."""
    for _ in range(20):
        agree(facts())


def own_group(rank: int) -> None:
    """In a group of the caller's; rank 1 is not in it."""
    group = dist.new_group([0], backend="gloo")
    ranks.same_on_all_ranks({"size": str(rank)}, group if rank == 0 else dist.GroupMember.NON_GROUP_MEMBER)
    ranks.same_on_all_ranks({"size": "1"}, dist.group.WORLD)


def precision(rank: int) -> None:
    """Rank 1 has another precision."""
    agree(facts("mxfp8" if rank else "bf16"))


def version(rank: int) -> None:
    """Rank 1 has another release of this package."""
    ranks.__version__ = "0.2.0" if rank else "0.1.0"
    try:
        agree(facts())
    finally:
        ranks.__version__ = "0.1.0"


def switch(rank: int) -> None:
    """Rank 1 has another environment."""
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = "12"[rank]
    mine = facts()
    del os.environ["NEURON_LOGICAL_NC_CONFIG"]
    agree(mine)


def processor(rank: int) -> None:
    """Rank 1 has a processor without bf16 instructions."""
    agree(facts(products="fp32 products of bf16 values" if rank else "bf16 products"))


def block(rank: int) -> None:
    """Rank 1 has a block more, and the first one in another size."""
    agree(facts(intermediate_size=96 + 32 * rank) | ({"plan of model.layers.1.mlp": "LlamaMLP"} if rank else {}))


def raising(rank: int) -> None:
    """Rank 1 cannot plan."""
    with ranks.OneAnswer(timeout=SECONDS) as answer:
        if rank:
            raise DTypeError.about("weight", "bf16", "int8", "Cast it.")
        answer |= facts()


def both(rank: int) -> None:
    """Each fails by itself."""
    with ranks.OneAnswer(timeout=SECONDS):
        raise MemoryError(f"of rank {rank}")


def apart(rank: int) -> None:
    """Rank 1 patches a model of its own while rank 0 waits with a sharded one, and comes too late."""
    if rank:
        ranks.stand_apart()
        time.sleep(3 * APART)
    try:
        with ranks.OneAnswer(SECONDS, apart=APART) as answer:
            answer |= facts()
    except NeuronMoEError:
        store = ranks._store()
        store.set(f"apart {rank}", "")
        store.wait([f"apart {other}" for other in (0, 1)])
        raise


def late_in_patch_model(rank: int) -> None:
    """The same, and rank 1 hears of it when it patches the next model of its own."""
    if rank == 0:
        with ranks.OneAnswer(SECONDS, apart=APART) as answer:
            answer |= facts()
    ranks.stand_apart()
    time.sleep(3 * APART)
    ranks.stand_apart()


def reference(rank: int) -> None:
    """Rank 1 patches a model of its own before both load a sharded one, and takes its time; groups are made then."""
    if rank:
        ranks.stand_apart()
    dist.new_group([0, 1], backend="gloo")
    time.sleep(3 * APART * rank)
    with ranks.OneAnswer(SECONDS, apart=APART) as answer:
        answer |= facts()


def whole(rank: int) -> None:
    """Rank 1 trains a whole model, rank 0 patches one that was sharded while loading."""
    report = PatchReport(NeuronMoEConfig(), (ENTRY,))
    agree(ranks.facts_of(report, sharded=not rank))


def stock(rank: int) -> None:
    """Rank 1 has not patched its model."""
    agree(ranks.facts_of(None) if rank else facts())


def dying(rank: int) -> None:
    """Rank 1 is gone before it has planned; the environment says how long the other waits."""
    if rank:
        os._exit(3)
    os.environ[environment.RANK_TIMEOUT] = str(DYING)
    with ranks.OneAnswer() as answer:
        answer |= facts()


CELLS: tuple[Callable[[int], None], ...] = (
    equal, own_group, precision, version, switch, processor, block, raising, both, reference, apart,
    late_in_patch_model, whole, stock, dying,
)  # fmt: skip


def main(folder: Path, rank: int) -> None:
    """Run the cells, each of which leaves the process group in order for the next."""
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/meeting", limit, world_size=2, rank=rank)
    dist.all_gather_object = counted
    result = {}
    for cell in CELLS:
        GATHERS.clear()
        start, error = time.monotonic(), None
        try:
            cell(rank)
        except (NeuronMoEError, MemoryError) as raised:
            error = [type(raised).__name__, str(raised)]
        took = time.monotonic() - start
        result[cell.__name__] = {"error": error, "gathers": len(GATHERS), "seconds": took}
        (folder / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)  # the group cannot be taken down in order: rank 1 is gone


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
