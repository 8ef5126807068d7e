"""The file writer and the header reader against the safetensors library."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.convert.io.bounded import is_name
from hf_neuron_moe.convert.io.shard import Entry, ShardWriter
from hf_neuron_moe.convert.io.source import read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
names = st.text(st.characters(codec="utf-8"), min_size=1).filter(is_name)  # others are refused
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=6
)


@given(
    tensors, st.dictionaries(st.sampled_from(["format", "a", "b"]), st.text(st.characters(codec="utf-8")), max_size=1)
)
def test_files_are_the_bytes_that_the_library_writes(described, metadata):
    entries = [Entry(name, dtype, tuple(shape)) for name, (dtype, shape) in described.items()]
    content = {
        entry.name: torch.randint(0, 2, entry.shape, dtype=torch.uint8).to(DTYPES[entry.dtype]) for entry in entries
    }
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.safetensors", Path(folder) / "theirs.safetensors"
        with ShardWriter(ours, entries, metadata) as writer:
            for name in reversed(content):
                writer.write(name, content[name])
        save_file(content, theirs, metadata or None)
        back = load_file(ours)
        header, read_metadata = read_header(ours)
        assert ours.read_bytes() == theirs.read_bytes()
    assert read_metadata == metadata
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.items()} == {
        entry.name: (entry.dtype, entry.shape) for entry in entries
    }
    assert back.keys() == content.keys()
    for name, tensor in content.items():
        assert torch.equal(back[name].float(), tensor.float()), name


def test_models_built_by_several_threads_leave_the_default_dtype(checkpoint):
    """transformers sets torch's default dtype of the whole process while it builds a model."""
    source = checkpoint("llama")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(build_meta_model, [source] * 24))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # whatever happened, other tests are not concerned
    assert dtype == torch.float32
