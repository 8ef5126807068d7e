"""20,000 seeded mutations of headers, indexes, configurations and manifests through the command line.

Whatever a file says, the command ends with a documented code and a short printable line, in less than a second, and
writes nothing outside its destination. A part of them runs in the fast suite.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from tests.convert.mutations import SEED, check_case, command, mutate_any, mutate_header, mutate_json, mutate_text
from tests.unsynced import rewrite

INDEX = "model.safetensors.index.json"
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Work = Callable[[random.Random], tuple[int, str]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sharded checkpoint, one with dense, shared and routed experts, and conversions of it."""
    home = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    folders = {"mixtral": home / "mixtral", "qwen": home / "qwen"}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**TINY, num_local_experts=2)).bfloat16()
    model.save_pretrained(folders["mixtral"], max_shard_size="15KB")
    routed = {"num_experts": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    AutoModelForCausalLM.from_config(Qwen2MoeConfig(**TINY, **routed)).bfloat16().save_pretrained(folders["qwen"])
    for name, options in {
        "bf16": ConvertOptions(),
        "mx": ConvertOptions("mxfp8"),
        "ranks": ConvertOptions("mxfp8", tp_degree=2, pad=True, purpose="inference"),
    }.items():
        folders[name] = home / name
        convert_checkpoint(folders["qwen"], folders[name], options)
    return folders


def changed(path: Path, mutate: Callable[[bytes, random.Random], bytes], chance: random.Random) -> bytes:
    """Mutate a file in place and return what it was."""
    before = path.read_bytes()
    rewrite(path, mutate(before, chance))
    return before


def reseal(raw: bytes, chance: random.Random) -> bytes:
    """Change a manifest and give it the checksum of what it then says, as somebody would who knows the format."""
    content = mutate_json(json.loads(raw), chance)
    return json.dumps(sealed(content) if isinstance(content, dict) else content).encode()


def reading(folder: Path, pick: Callable[[random.Random], Path], mutate: Any, commands: Any) -> Work:
    """A case: one file of a folder is changed, and one of the commands reads the folder."""

    def work(chance: random.Random) -> tuple[int, str]:
        path = pick(chance)
        before = changed(path, mutate, chance)
        made = folder.parent / "made"
        try:
            return command(*chance.choice(commands)(folder, made))
        finally:
            rewrite(path, before)
            if made.exists():
                shutil.rmtree(made)

    return work


INSPECT = [lambda folder, made: ("inspect", folder), lambda folder, made: ("inspect", folder, "--tensors", "--json")]
CONVERT = [lambda folder, made: ("convert", folder, made)]


def works(kind: str, tiny: dict[str, Path], home: Path) -> list[Work]:
    """The cases of a kind, on copies of the checkpoints."""
    copies = {}
    for name, original in tiny.items():
        copies[name] = home / name
        shutil.copytree(original, copies[name])
    mixtral = copies["mixtral"]
    if kind == "headers":
        shards = sorted(mixtral.glob("*.safetensors"))
        return [reading(mixtral, lambda chance: chance.choice(shards), mutate_header, [*INSPECT * 2, *CONVERT])]
    if kind == "index":
        return [reading(mixtral, lambda chance: mixtral / INDEX, mutate_text, [*INSPECT * 2, *CONVERT])]
    if kind == "config":
        plan = [lambda folder, made: ("plan", folder), *CONVERT]
        return [
            reading(copies[name], lambda chance, name=name: copies[name] / "config.json", mutate_text, plan)
            for name in ("mixtral", "qwen")
        ]
    source = copies["qwen"]
    read = [
        lambda folder, made: ("verify", folder, "--source", source, "--probes", 1),
        lambda folder, made: ("verify", folder, "--json"),
        lambda folder, made: ("export", folder, made, "--allow-inexact"),
        lambda folder, made: ("inspect", folder, "--source", source),
        lambda folder, made: ("inspect", folder, "--tensors"),
    ]
    names = ("bf16", "mx", "ranks")
    if kind == "manifest":
        return [
            reading(copies[name], lambda chance, name=name: copies[name] / MANIFEST_FILE, mutate, read)
            for name in names
            for mutate in (reseal, reseal, reseal, mutate_text)
        ]
    assert kind == "converted"
    return [
        reading(
            copies[name],
            lambda chance, name=name: chance.choice(sorted(copies[name].iterdir())),
            mutate_any,
            read,
        )
        for name in names
    ]


BATCHES = 5
FAST = {"headers": 350, "index": 200, "config": 100, "manifest": 250, "converted": 125}
MORE = {"headers": 3650, "index": 2300, "config": 400, "manifest": 1750, "converted": 625}


def run_cases(kind: str, numbers: range, seed: int, tiny: dict[str, Path], home: Path) -> None:
    """Run cases of a kind; they do not all end alike."""
    cases = works(kind, tiny, home)
    print(f"seed {seed}")
    codes: Counter[int] = Counter()
    for number in numbers:
        work = partial(cases[number % len(cases)], random.Random(f"{seed}-{kind}-{number}"))
        codes[check_case(work, home, f"{kind} {number}")] += 1
    assert len(codes) > 1 or kind == "headers", codes  # few changes of a header leave it whole


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("kind", FAST)
def test_mutations(kind, batch, tiny, tmp_path):
    run_cases(kind, range(batch, FAST[kind], BATCHES), SEED, tiny, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_many_mutations(kind, tiny, tmp_path):
    run_cases(kind, range(MORE[kind]), SEED + 1, tiny, tmp_path)
