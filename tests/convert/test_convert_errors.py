"""A source that is damaged or does not fit is refused before anything is written."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.errors import ConversionError, SourceDamageError
from tests.refusals import refused
from tests.tiny_models import tiny_model

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = FILE) -> None:
    """Save a file's tensors again after a change."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def rewrite_header(folder: Path, change: Callable[[dict], None]) -> None:
    """Change a file's header and keep its data."""
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def truncate(folder: Path) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:-3])


def append_bytes(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"\0" * 16)


def cut_to_nothing(folder: Path) -> None:
    (folder / FILE).write_bytes(b"\x10\0\0")


def huge_header_length(folder: Path) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", 1 << 30) + raw[8:])


def flip_header_byte(folder: Path) -> None:
    raw = bytearray((folder / FILE).read_bytes())
    raw[8] ^= 0x40
    (folder / FILE).write_bytes(bytes(raw))


def not_utf8(folder: Path) -> None:
    raw = bytearray((folder / FILE).read_bytes())
    raw[12] = 0xFF
    (folder / FILE).write_bytes(bytes(raw))


def wrong_offsets(folder: Path) -> None:
    def change(header: dict) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name]["data_offsets"][1] += 2

    rewrite_header(folder, change)


def overlapping(folder: Path) -> None:
    def change(header: dict) -> None:
        first, second = [name for name in header if name != "__metadata__"][:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]
        header[second]["shape"] = header[first]["shape"]

    rewrite_header(folder, change)


def unknown_dtype(folder: Path) -> None:
    rewrite_header(folder, lambda header: header["lm_head.weight"].update(dtype="BF17"))


def negative_shape(folder: Path) -> None:
    rewrite_header(folder, lambda header: header["lm_head.weight"].update(shape=[-128, -64]))


def repeated_name(folder: Path) -> None:
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].rstrip()
    entry = b',"lm_head.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    new = header[:-1] + entry
    (folder / FILE).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))


def missing_norm(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))


def foreign_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.zeros(2)}))


def stored_twice(folder: Path) -> None:
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.experts.down_proj": torch.zeros(12, 64, 96, dtype=torch.bfloat16)}
        ),
    )


def wrong_shape(folder: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(97, 64, dtype=torch.bfloat16)}))


def quantized_expert(folder: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')


def quantized_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 13}))


def pickle_only(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def adapter_alone(folder: Path) -> None:
    empty_folder(folder)
    (folder / "adapter_config.json").write_text("{}")


def adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def codes_without_scales(folder: Path) -> None:
    rewrite(
        folder,
        lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if "q_proj" in n}),
    )


def experts_of_two_dtypes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items() if "experts.1.w1" in n}))


def link_outside(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / FILE).rename(outside)
    (folder / FILE).symlink_to(outside)


def single_and_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


SINGLE = [
    (truncate, SourceDamageError, "model.safetensors: data", "got 970365 bytes"),
    (append_bytes, SourceDamageError, "model.safetensors: data", "got 970384 bytes"),
    (cut_to_nothing, SourceDamageError, "model.safetensors", "got 3 bytes"),
    (huge_header_length, SourceDamageError, "model.safetensors: header length", ""),
    (flip_header_byte, SourceDamageError, "model.safetensors: header", "got Expecting value"),
    (not_utf8, SourceDamageError, "model.safetensors: header", "got 'utf-8' codec"),
    (wrong_offsets, SourceDamageError, "model.safetensors: lm_head.weight: data_offsets", ""),
    (overlapping, SourceDamageError, "model.safetensors: model.embed_tokens.weight: data_offsets", ""),
    (unknown_dtype, SourceDamageError, "model.safetensors: lm_head.weight: dtype", ""),
    (negative_shape, SourceDamageError, "model.safetensors: lm_head.weight: shape", ""),
    (repeated_name, SourceDamageError, "model.safetensors: header", "got 'lm_head.weight' appears twice"),
    (missing_tensor, ConversionError, "experts of model.layers.1.mlp.experts.down_proj (.experts.*.w2.weight)", ""),
    (missing_norm, ConversionError, "parameter model.norm.weight", ""),
    (foreign_tensor, ConversionError, "tensor model.layers.0.mlp.extra.weight", ""),
    (stored_twice, ConversionError, "parameter model.layers.0.mlp.experts.down_proj", ""),
    (
        wrong_shape,
        ConversionError,
        "model.safetensors: model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "got [97, 64]",
    ),
    (quantized_expert, ConversionError, "dtype of model.layers.0.mlp.experts.gate_up_proj", ""),
    (no_config, ConversionError, "{source}", "got a folder without it"),
    (broken_config, SourceDamageError, "{source}/config.json", "got JSONDecodeError"),
    (unknown_model, ConversionError, "{source}/config.json: model_type", "no_such_model"),
    (quantized_config, ConversionError, "{source}/config.json: quantization_config", ""),
    (other_sizes, ConversionError, "experts of model.layers.0.mlp.experts.gate_up_proj (.experts.*.w1.weight)", ""),
    (pickle_only, ConversionError, "{source}", "save_pretrained"),
    (empty_folder, ConversionError, "{source}", "got a folder without it"),
    (adapter_alone, ConversionError, "{source}", "got an adapter of peft. Merge it first: lora_merge"),
    (adapter_beside, ConversionError, "{source}", "got a model and adapter_config.json"),
    (
        codes_without_scales,
        ConversionError,
        "model.safetensors: model.layers.0.self_attn.q_proj.weight",
        "got F8_E4M3. Load the model with a dtype",
    ),
    (
        experts_of_two_dtypes,
        ConversionError,
        "dtype of model.layers.0.mlp.experts.gate_up_proj",
        "got BF16, F16. Load the model with a dtype",
    ),
    (link_outside, SourceDamageError, "model.safetensors", "got a link to"),
    (single_and_index, SourceDamageError, "{source}", "got both"),
]


def assert_refused(
    source: Path, destination: Path, kind: type[ConversionError], argument: str, fragment: str = ""
) -> None:
    """Converting is refused in one line with this fragment, and nothing is left beside the source."""
    beside = {path.name for path in destination.parent.iterdir()}
    with refused(kind, argument.format(source=source), re.escape(fragment)) as caught:
        convert_checkpoint(source, destination, ConvertOptions("bf16", "kernel"))
    assert "\n" not in str(caught.value)
    assert {path.name for path in destination.parent.iterdir()} == beside


@pytest.mark.parametrize(
    ("damage", "kind", "argument", "fragment"), SINGLE, ids=[damage.__name__ for damage, *_ in SINGLE]
)
def test_damaged_single_file(damage, kind, argument, fragment, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    damage(source)
    assert_refused(source, tmp_path / "dst", kind, argument, fragment)


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the index's weight map."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def first_file(folder: Path) -> Path:
    """First shard."""
    return min(folder.glob("*.safetensors"))


def missing_shard(folder: Path) -> None:
    first_file(folder).unlink()


def names_missing_tensor(folder: Path) -> None:
    edit_index(folder, lambda index: index.update({"model.ghost.weight": first_file(folder).name}))


def leaves_tensor_out(folder: Path) -> None:
    edit_index(folder, lambda index: index.pop("model.norm.weight"))


def duplicated_tensor(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    norm = torch.ones(64, dtype=torch.bfloat16)
    for file in files[:2]:
        rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": norm}), file.name)


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def index_is_a_list(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(b'{"weight_map": {"a": "\xff"}}')


@pytest.mark.parametrize(
    ("damage", "kind", "argument", "fragment"),
    [
        (missing_shard, SourceDamageError, "model-00001-of-00007.safetensors", "got no such file"),
        (names_missing_tensor, SourceDamageError, "tensor model.ghost.weight", ""),
        (leaves_tensor_out, SourceDamageError, "tensor model.norm.weight", "does not name it"),
        (duplicated_tensor, SourceDamageError, "tensor model.norm.weight", "got in model-00001-of-00007"),
        (empty_index, SourceDamageError, "model.safetensors.index.json: weight_map", "got {}"),
        (index_is_a_list, SourceDamageError, "model.safetensors.index.json: weight_map", "got None"),
        (broken_index, SourceDamageError, "model.safetensors.index.json", "got 'utf-8' codec"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_shards(damage, kind, argument, fragment, checkpoint, tmp_path):
    source = checkpoint("mixtral", shard="100KB")
    damage(source)
    assert_refused(source, tmp_path / "dst", kind, argument, fragment)


@pytest.mark.parametrize(
    "path",
    ["../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "C:x.safetensors",
     "weights.bin", "a\0.safetensors", 7, None],
)  # fmt: skip
def test_index_paths_that_lead_away(path, checkpoint, tmp_path):
    source = checkpoint("mixtral", shard="100KB")
    shutil.copy(first_file(source), tmp_path / "outside.safetensors")
    edit_index(source, lambda index: index.update({"model.norm.weight": path}))
    argument = "model.safetensors.index.json: file of model.norm.weight"
    assert_refused(source, tmp_path / "dst", SourceDamageError, argument, f"got {path!r}")


def test_hub_cache_links_are_followed(checkpoint, tmp_path, snapshot):
    plain = checkpoint("llama")
    hub = tmp_path / "models--org--tiny"
    commit = hub / "snapshots" / "0123"
    (hub / "blobs").mkdir(parents=True)
    commit.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy(path, hub / "blobs" / str(number))
        (commit / path.name).symlink_to(Path("../../blobs") / str(number))
    convert_checkpoint(commit, tmp_path / "dst")
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(plain)


def test_model_without_blocks_names_the_reason(tmp_path, checkpoint):
    source = checkpoint("llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "tanh"}))
    assert_refused(source, tmp_path / "dst", ConversionError, "{source}", "its activation is Tanh")


def test_mxfp8_needs_whole_blocks(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "src")
    with refused(ConversionError, "contraction size of model.layers.0.mlp.gate_up_proj.weight", got="48"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", ConvertOptions("mxfp8", "kernel"))
    assert not (tmp_path / "dst").exists()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_weights_without_values_are_refused(precision, tmp_path):
    tiny_model("llama", num_hidden_layers=1, intermediate_size=0).bfloat16().save_pretrained(tmp_path / "src")
    with refused(ConversionError, "shape of model.layers.0.mlp.gate_up_proj.weight", got="[0, 32]"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", ConvertOptions(precision))
