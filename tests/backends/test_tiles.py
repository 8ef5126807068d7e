"""How tiles of weights are laid as operands of fp32 products.

I intermediate size, H hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.tiles import tile_loader


@pytest.mark.parametrize("step", [1, 2], ids=["alone", "alternating"])
@pytest.mark.parametrize("by_column", [False, True], ids=["I_H", "H_I"])
def test_an_operand_runs_as_its_weight_does(step: int, by_column: bool) -> None:
    """A copy that transposes takes six times as long as a straight one."""
    both = torch.arange(6.0 * 4 * step).bfloat16()
    source_IH: Tensor = both.view(4, -1).t()[::step] if by_column else both.view(-1, 4)[::step]
    operand_IH = tile_loader("bf16", torch.device("cpu")).load("gate", source_IH, (6, 4))
    assert operand_IH.dtype == torch.float32
    assert torch.equal(operand_IH, source_IH.float())
    assert operand_IH.stride() == ((1, 6) if by_column else (4, 1))


@pytest.mark.parametrize("by_column", [False, True], ids=["I_H", "H_I"])
def test_a_weight_that_is_rounded_runs_so_too(by_column: bool) -> None:
    source_IH = torch.randn(4, 6).t() if by_column else torch.randn(6, 4)
    loader = tile_loader("bf16", torch.device("cpu"))
    operand_IH = loader.load("gate", source_IH, (6, 4))
    assert torch.equal(operand_IH, source_IH.bfloat16().float())
    assert operand_IH.stride() == source_IH.stride()
