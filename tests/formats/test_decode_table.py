"""The table of a format's values, which devices gather from, is what CPUs compute from the codes."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.formats.constants import E2M1, E4M3FN, E5M2, ElementFormat
from hf_neuron_moe.formats.elements import decode, decode_table


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
def test_every_code_of_fp8(fmt: ElementFormat) -> None:
    table, values = decode_table(fmt, torch.device("cpu")), decode(torch.arange(256, dtype=torch.uint8), fmt)
    assert torch.equal(table.isnan(), values.isnan())
    assert torch.equal(table.nan_to_num(7.0), values.nan_to_num(7.0))


def test_every_code_of_fp4() -> None:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # OCP MX v1.0, section 5.3.3
    assert torch.equal(decode_table(E2M1, torch.device("cpu")), torch.cat([magnitudes, -magnitudes]))
