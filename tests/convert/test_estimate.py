"""A dry run tells the exact bytes, nearly the memory, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, estimate, plan_conversion
from hf_neuron_moe.convert.estimate import estimate_conversion
from hf_neuron_moe.convert.io.encoded import read_values
from hf_neuron_moe.errors import ConversionError, DestinationError
from tests.convert.quantized_sources import to_fp8
from tests.refusals import refused


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        ConvertOptions("bf16", "fused"),
        ConvertOptions("bf16", "kernel", 50_000, tp_degree=2),
        ConvertOptions("mxfp8", "kernel", 80_000),
        ConvertOptions("mxfp8", "kernel", purpose="inference", pad=True, tp_degree=2),
        ConvertOptions("mxfp4", "kernel", pad=True),
    ],
)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "nemotron_h"])
def test_bytes_are_exact_file_by_file(family, options, checkpoint, tmp_path):
    source = checkpoint(family)
    estimate = estimate_conversion(source, tmp_path / "dst", options)
    assert {path.name for path in tmp_path.iterdir()} == {source.name}
    convert_checkpoint(source, tmp_path / "dst", options)
    assert estimate.files == {path.name: path.stat().st_size for path in (tmp_path / "dst").iterdir()}
    assert estimate.exact and estimate.output_bytes == sum(estimate.files.values())
    assert estimate.compute_seconds > 0 and estimate.disk_seconds > 0
    assert f"{estimate.output_bytes:,} bytes" in str(estimate)
    assert json.loads(json.dumps(estimate.to_dict()))["output_bytes"] == estimate.output_bytes


def test_wider_sources_leave_the_count_of_rounded_values_open(checkpoint, tmp_path):
    estimate = estimate_conversion(checkpoint("llama", torch.float32), tmp_path / "dst")
    assert not estimate.exact and "rounded values" in str(estimate)


@pytest.mark.parametrize("quantized", [False, True])
def test_decoding_is_part_of_the_time(quantized, checkpoint, tmp_path, monkeypatch):
    source, calls = checkpoint("llama"), []
    if quantized:
        to_fp8(source)

    def slow(*arguments):
        calls.append(arguments)
        time.sleep(0.1)
        return read_values(*arguments)

    monkeypatch.setattr(estimate, "read_values", slow)
    found = estimate_conversion(source, tmp_path / "dst", workers=1)
    # Two layers of gate, up, down and four attention matrices, each decoded in one read.
    assert len(calls) > 0 if quantized else not calls
    assert (found.compute_seconds > 14 * 0.1) is quantized


def test_parts_add_up_to_the_shards(checkpoint, tmp_path):
    source, options = checkpoint("mixtral"), ConvertOptions("bf16", "kernel", 50_000)
    whole = estimate_conversion(source, tmp_path / "dst", options).files
    parts = [estimate_conversion(source, tmp_path / "dst", options, part=(index, 3)).files for index in (1, 2, 3)]
    shards = plan_conversion(source, options).shards
    assert sum(len(part) for part in parts) == len(shards)
    assert {name: size for part in parts for name, size in part.items()} == {name: whole[name] for name in shards}


def test_what_a_conversion_refuses_is_refused(checkpoint, tmp_path):
    source = checkpoint("llama")
    (tmp_path / "dst").mkdir()
    with refused(DestinationError, tmp_path / "dst", "--force"):
        estimate_conversion(source, tmp_path / "dst")
    with refused(ConversionError, "precision mxfp4", got="a model without any"):
        estimate_conversion(source, tmp_path / "new", ConvertOptions("mxfp4", "kernel"))


MEASURE = """
import json, os, shutil, sys
from pathlib import Path
from hf_neuron_moe.cli.progress_line import watching
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.estimate import estimate_conversion

source, destination = Path(sys.argv[1]), Path(sys.argv[2])

def measured(what, options, workers):
    # In a fork that has imported everything and done nothing.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(what(ConvertOptions(**options), workers)).encode())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = lines.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the measured process failed")
    shutil.rmtree(destination, ignore_errors=True)
    return int(found)

def estimated(options, workers):
    return estimate_conversion(source, destination, options, workers=workers).peak_memory_bytes

def converted(options, workers):
    with watching("") as (watch, progress):
        convert_checkpoint(source, destination, options, workers=workers, progress=progress)
    return watch.peak

for options, workers in json.loads(sys.argv[3]):
    estimate, peak = measured(estimated, options, workers), 0
    # A look at the memory every 20 ms can miss the peak, the more the busier the machine, and two workers need not be
    # at their largest at once: of up to five runs the highest counts.
    for _ in range(5):
        peak = max(peak, measured(converted, options, workers))
        if estimate <= 1.1 * peak:
            break
    print(json.dumps([options, workers, estimate, peak]))
"""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("model", ["mixtral", "llama"])
def test_memory_is_right_within_ten_per_cent(model, repo_root, tmp_path):
    common = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256}
    config = (
        MixtralConfig(hidden_size=1024, intermediate_size=1792, num_local_experts=8, **common)
        if model == "mixtral"
        else LlamaConfig(hidden_size=2048, intermediate_size=6144, **common)
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    runs = [({}, 1), ({"precision": "mxfp8"}, 1), ({"precision": "mxfp8", "purpose": "inference"}, 2)]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "dst"), json.dumps(runs)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=True).stdout
    found = [json.loads(line) for line in shown.splitlines()]
    assert len(found) == len(runs)
    for options, workers, estimated, peak in found:
        assert abs(estimated / peak - 1) <= 0.1, (options, workers, estimated, peak)


def test_where_nobody_may_write_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate._free_bytes(tmp_path / "dst") > 0
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert estimate._free_bytes(tmp_path / "dst") == 0


def test_of_two_runs_the_faster_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(clock))
    assert estimate._fastest(lambda: None) == 2.0


def test_sources_are_read_twice_and_shards_once_more(checkpoint, monkeypatch):
    """To be hashed and to be converted; what was written is read to be hashed."""
    monkeypatch.setattr(estimate, "_read_cost", lambda plan: 2.0)
    monkeypatch.setattr(estimate, "_fastest", lambda work: 3.0 * estimate.SAMPLE_BYTES)
    plan = plan_conversion(checkpoint("llama"), ConvertOptions())
    assert estimate._compute_seconds(plan, [], 10, 0, 1) == 10 * (2 * 2 + 3)
    assert estimate._compute_seconds(plan, [], 0, 10, 1) == 10 * (2 + 3)


def test_workers_hold_different_experts_of_a_weight(checkpoint) -> None:
    plan = plan_conversion(checkpoint("mixtral"), ConvertOptions("bf16", "kernel"))
    name = min(plan.weights)
    tensors = [tensor for group in plan.shards.values() for tensor in group if tensor.weight == name]
    assert plan.weights[name].shape[0] >= 3
    one, two, three = (estimate._held_bytes(plan, tensors, count) for count in (1, 2, 3))
    assert (two, three) == (2 * one, 3 * one)


def test_a_disk_with_exactly_the_bytes_is_large_enough(checkpoint, tmp_path) -> None:
    found = estimate_conversion(checkpoint("llama"), tmp_path / "dst")
    assert "would fail" not in str(replace(found, free_bytes=found.output_bytes))
    assert "would fail" in str(replace(found, free_bytes=found.output_bytes - 1))


def test_a_disk_that_cannot_be_measured_costs_nothing(tmp_path) -> None:
    assert estimate._write_cost(tmp_path / "missing") == 0.0 < estimate._write_cost(tmp_path)
