"""Single findings about odd and hostile checkpoints, each with what it did before it was refused."""

from __future__ import annotations

import json
import re
import struct
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, plan_conversion
from hf_neuron_moe.convert.assign import build_meta_model, natural_key
from hf_neuron_moe.convert.io import bounded
from hf_neuron_moe.convert.io.source import read_header, read_source
from hf_neuron_moe.errors import ConversionError, SourceDamageError, naming, printable
from tests.convert.mutations import command, split_header, with_header
from tests.refusals import refused

INDEX = "model.safetensors.index.json"


def write_header(path: Path, entries: dict[str, Any], data: bytes = b"") -> Path:
    """A safetensors file with any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    """A header's entry of an empty tensor."""
    return {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} | changes


@pytest.mark.parametrize("count", [2, 250])
def test_dimensions_of_thousands_of_digits(count, tmp_path):
    dimensions = ", ".join(["9" * 4000] * count)
    text = f'{{"x": {{"dtype": "BF16", "shape": [{dimensions}], "data_offsets": [0, 0]}}}}'
    path = write_header(tmp_path / "model.safetensors", text.encode())
    start = time.process_time()
    with refused(SourceDamageError, "model.safetensors: header", got="a number of 4,000 digits"), naming("convert"):
        read_header(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"dtype": [[]]}, "model.safetensors: x: dtype", ""),
        ({"shape": [2**63, 0]}, "model.safetensors: x: shape", r"got \[9223372036854775808, 0\]"),
        ({"shape": [0] * 65}, "model.safetensors: x: shape", r"got \[0, 0, 0"),
        ({"data_offsets": [0, 2**64]}, "model.safetensors: x: data_offsets", r"got \[0, 18446744073709551616\]"),
        ({"data_offsets": [True, 0]}, "model.safetensors: x: data_offsets", r"got \[True, 0\]"),
    ],
)
def test_entries_that_are_none(changes, argument, says, tmp_path):
    path = write_header(tmp_path / "model.safetensors", {"x": entry(**changes)})
    with refused(SourceDamageError, argument, says), naming("convert"):
        read_header(path)


@pytest.mark.parametrize("name", ["", "\x1b[31mred", "a\nb", "\ud800", "n" * 1001, "\u202eabc"])
def test_names_that_cannot_be_shown(name, tmp_path):
    path = write_header(tmp_path / "model.safetensors", {name: entry()})
    with pytest.raises(SourceDamageError) as caught:
        read_header(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000


def test_numbers_of_other_scripts_in_names_are_text(checkpoint, tmp_path):
    assert natural_key("a.²") == [(1, "a"), (1, "²")] and natural_key("a.٣") == [(1, "a"), (1, "٣")]
    source = checkpoint("llama")
    path = source / "model.safetensors"
    for odd in ("²", "1" * 900):
        header, data = split_header(path.read_bytes())
        changed = {name.replace("layers.1.mlp.up", f"layers.{odd}.mlp.up"): value for name, value in header.items()}
        path.write_bytes(with_header(changed, data))
        with refused(ConversionError, printable(f"tensor model.layers.{odd}.mlp.up_proj.weight")):
            convert_checkpoint(source, tmp_path / "dst")
        path.write_bytes(with_header(header, data))


def test_a_repeated_name_is_found_in_linear_time(checkpoint):
    source = checkpoint("mixtral", shard="100KB")
    names = ", ".join(f'"model.x{number}": "a.safetensors"' for number in range(30_000))
    (source / INDEX).write_text(f'{{"weight_map": {{{names}, "model.x29999": "a.safetensors"}}}}')
    start = time.process_time()
    twice = refused(SourceDamageError, "model.safetensors.index.json", got="'model.x29999' appears twice")
    with twice, naming("convert"):
        read_source(source)
    assert time.process_time() - start < 2  # 19 s when every name was counted


@pytest.mark.parametrize(
    ("changes", "field", "shown"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "1000000"),
        ({"num_local_experts": 10**9}, "num_local_experts", "1000000000"),
        ({"num_experts_per_tok": 10**18}, "num_experts_per_tok", "1000000000000000000"),
        ({"vision_config": {"depth": 10**7}}, "vision_config.depth", "10000000"),
    ],
)
def test_counts_are_compared_with_the_weights_before_a_model_is_built(changes, field, shown, checkpoint):
    source = checkpoint("mixtral")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    start = time.process_time()
    with refused(ConversionError, f"{path}: {field}", got=shown):
        plan_conversion(source, ConvertOptions())
    with refused(ConversionError, f"{path}: {field}", got=shown, where="plan"), naming("plan"):
        build_meta_model(source)
    assert time.process_time() - start < 1


def test_sizes_that_overflow_or_are_nothing(checkpoint):
    source = checkpoint("mixtral")
    path = source / "config.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"intermediate_size": 10**18}))
    code, printed = command("plan", source)
    assert (
        code == 1 and "config.json: intermediate_size must be an integer" in printed and "000000000000000000" in printed
    )
    path.write_text(json.dumps(json.loads(text) | {"intermediate_size": 0}))
    assert command("plan", source)[0] == 0


def test_a_file_name_that_no_file_system_takes(checkpoint):
    source = checkpoint("mixtral", shard="100KB")
    content = json.loads((source / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = "x" * 250 + ".safetensors"
    (source / INDEX).write_text(json.dumps(content))
    with refused(SourceDamageError, "model.safetensors.index.json: file of lm_head.weight"), naming("convert"):
        read_source(source)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "experts_implementation"])
def test_implementations_that_a_checkpoint_names_are_not_followed(key, checkpoint):
    source = checkpoint("mixtral")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "some-org/kernel"}))
    model = build_meta_model(source)
    assert model.config._attn_implementation == "eager" and model.config._experts_implementation != "some-org/kernel"
    assert len(plan_conversion(source, ConvertOptions()).weights) == 4


def test_nothing_of_a_file_reaches_the_terminal_as_it_is(checkpoint, tmp_path):
    source = checkpoint("llama")
    path = source / "model.safetensors"
    header, data = split_header(path.read_bytes())
    path.write_bytes(with_header({**header, "\x1b]0;title\x07": entry()}, data))
    for name in ("convert", "inspect"):
        code, printed = command(name, source, *([tmp_path / "dst"] if name == "convert" else []))
        assert code == 3 and "\x1b" not in printed and "\\x1b]0;title\\x07" in printed
    path.write_bytes(with_header({**header, "__metadata__": {"format": ["x" * 2_000_000]}}, data))
    code, printed = command("inspect", source)
    assert code == 3 and len(printed) < 2000 and re.search(r"\.\.\. [\d,]+ characters \.\.\.", printed)


def test_messages_are_cut_and_printable():
    error = ConversionError.about("a\x1bb", "x", "y" * 10**6, "Do\nthis.").named("here")
    assert len(str(error)) < 1000 and "a\\x1bb" in str(error) and str(error).endswith("Do\nthis.")
    assert printable("fine: ä, 漢") == "fine: ä, 漢"
    assert printable("\ud800\u202e") == "\\ud800\\u202e"


def test_a_configuration_that_cannot_be_written_again_is_refused_at_once(checkpoint, tmp_path):
    source = checkpoint("llama")
    path = source / "config.json"
    text = path.read_text().rstrip().removesuffix("}")
    for more in ('"note": "\\ud800"}', f'"note": {"[" * 500}{"]" * 500}}}'):
        path.write_text(f"{text}, {more}")
        with refused(SourceDamageError, path):
            convert_checkpoint(source, tmp_path / "dst")
    assert not (tmp_path / "dst.partial").exists()


def test_json_is_read_up_to_its_bounds(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[1, 2]")
    assert bounded.read_json(file, 6) == [1, 2]
    with pytest.raises(ValueError, match="6 bytes, more than the 5 "):
        bounded.read_json(file, 5)
    for depth, fits in ((bounded.MAX_DEPTH, True), (bounded.MAX_DEPTH + 1, False)):
        file.write_text("[" * depth + "]" * depth)
        with nullcontext() if fits else pytest.raises(ValueError, match="nested too deeply"):
            bounded.read_json(file, 1000)
    assert bounded.parse_json(b"9" * 100) == 10**100 - 1
    with pytest.raises(ValueError, match="a number of 101 digits"):
        bounded.parse_json(b"9" * 101)
    assert bounded.is_natural(2**63 - 1) and not any(map(bounded.is_natural, (True, -1, 2**63, 1.0)))
