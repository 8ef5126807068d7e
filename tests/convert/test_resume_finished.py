"""``--resume`` and ``finalize`` where the conversion is finished: is it, still?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_neuron_moe.convert import MANIFEST_FILE, ConvertOptions, convert_checkpoint, finalize_checkpoint
from hf_neuron_moe.errors import DestinationError, SourceDamageError
from tests.refusals import refused

OPTIONS = ConvertOptions("mxfp8", "kernel", 60_000)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "neuron-00001-of": Path.unlink,
    "neuron-00002-of": flip,
    "neuron-00003-of": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "tokenizer.json": Path.unlink,
    "config.json": flip,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", DAMAGES)
def test_a_damaged_result_is_named_and_can_be_replaced(start, checkpoint, snapshot, tmp_path):
    source, target = checkpoint("llama"), tmp_path / "dst"
    convert_checkpoint(source, target, OPTIONS)
    right = snapshot(target)
    (name,) = [name for name in right if name.startswith(start)]
    DAMAGES[start](target / name)
    wrong = snapshot(target)
    shown = rf"1 missing or altered files, such as {name}\. .*--force"
    with refused(DestinationError, target, shown, where="convert"):
        convert_checkpoint(source, target, OPTIONS, resume=True)
    with refused(DestinationError, target, shown, where="finalize"):
        finalize_checkpoint(source, target)
    assert snapshot(target) == wrong
    convert_checkpoint(source, target, OPTIONS, resume=True, force=True)
    assert snapshot(target) == right
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "dst"}


def test_a_damaged_manifest_is_named_and_can_be_replaced(checkpoint, snapshot, tmp_path):
    source, target = checkpoint("llama"), tmp_path / "dst"
    convert_checkpoint(source, target, OPTIONS)
    right = snapshot(target)
    (target / MANIFEST_FILE).write_bytes(right[MANIFEST_FILE][:-9])
    with refused(DestinationError, target, f"{MANIFEST_FILE}.*--force"):
        convert_checkpoint(source, target, OPTIONS, resume=True)
    with refused(SourceDamageError, target / MANIFEST_FILE, where="finalize"):
        finalize_checkpoint(source, target)
    convert_checkpoint(source, target, OPTIONS, resume=True, force=True)
    assert snapshot(target) == right
