"""``execute="tiles"`` really multiplies tile by tile: the sizes of every product are those of the tensor engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe.reference import block_walk, blockwise_walk
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.tiled_product import tiled_product
from tests.kernels.test_blockwise_walk import whole_call as backward_call
from tests.kernels.test_upstream_bugs import call


def products(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[int, int, int]]:
    """Rows and columns of the tiles, and the most of K that is multiplied at once, of every product to come."""
    seen: list[tuple[int, int, int]] = []

    def spy(left_MK: Any, right_KN: Any, *, rows: int, columns: int, contraction: Any = None) -> Any:
        parts = [slice(0, 128)] if contraction is None else contraction
        seen.append((rows, columns, max(len(left_MK[0, part]) for part in parts)))
        return tiled_product(left_MK, right_KN, rows=rows, columns=columns, contraction=contraction)

    monkeypatch.setattr(module, "tiled_product", spy)
    return seen


@pytest.mark.parametrize(("kind", "cores"), [("shard_on_i", 2), ("shard_on_block", 1)])
def test_the_forward(kind: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, given = products(monkeypatch, block_walk), call(kind, 40)
    given |= {"gate_up_proj_weight": torch.zeros(3, 32, 2, 512), "down_proj_weight": torch.zeros(3, 512, 32)}
    given |= {"gate_and_up_proj_bias": None, "down_proj_bias": None}
    moe_cte(**given)
    assert seen == []
    moe_cte(**given, execute="tiles")
    blocks = len(given["block_to_expert"])
    gate_up, down = [each for each in seen if each[:2] == (512, 128)], [each for each in seen if each[:2] == (128, 512)]
    assert (len(gate_up), len(down)) == (2 * blocks * cores, blocks * cores)
    assert len(seen) == len(gate_up) + len(down) and max(part for *_, part in seen) <= 128


def test_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, given = products(monkeypatch, blockwise_walk), backward_call(torch.float32)
    blockwise_mm_bwd(**given)
    assert seen == []
    blockwise_mm_bwd(**given, execute="tiles")
    assert len(seen) >= 5 * len(given["block_to_expert"])
    assert all(each[:2] == (128, 512) and each[2] <= 128 for each in seen)
