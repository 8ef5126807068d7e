"""MX blocks of experts that are called in other ways or have no gate, and of dense MLPs with other gates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from tests.convert.test_every_family import made, opened, output

FAMILIES = ("gemma3", "muse_spark", "llama4", "longcat_flash", "dbrx", "jetmoe", "nemotron_h")


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_compute_what_the_patched_original_does(family: str, tmp_path: Path) -> None:
    """Bit for bit; and the codes' values are those of the export and of a dequantized model."""
    source = made(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", pad=True))
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok and report.probes, str(report)
    stock, model = opened(family, source), opened(family, tmp_path / "dst")
    patched = {entry.name for entry in patch_model(stock, {"precision": "mxfp8"}, strict=False).patched}
    assert {name for name, module in model.named_modules() if isinstance(module, QuantizedBlock)} == patched
    assert torch.equal(output(model), output(stock))
    export_checkpoint(tmp_path / "dst", tmp_path / "values", allow_inexact=True)
    values = opened(family, tmp_path / "values").state_dict()
    found = model.dequantize().state_dict()
    assert found.keys() == values.keys()
    for name, value in values.items():
        # Of longcat_flash, rows of experts without a down projection become zeros, which nothing reads.
        rows = 4 if name.endswith("experts.gate_up_proj") and family == "longcat_flash" else len(value)
        assert torch.equal(found[name][:rows], value[:rows]), name


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(
    ("family", "glob"),
    [("dbrx", "transformer.blocks.0.*"), ("llama4", "*.experts"), ("nemotron_h", "model.layers.2.*")],
)
def test_codes_next_to_bf16_blocks(family: str, glob: str, tmp_path: Path) -> None:
    source, precision = made(family, tmp_path / "source"), {"*": "mxfp8", glob: "bf16"}
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions(precision, pad=True))
    stock, model = opened(family, source), opened(family, tmp_path / "dst")
    patch_model(stock, {"precision": precision}, strict=False)
    assert torch.equal(output(model), output(stock))
