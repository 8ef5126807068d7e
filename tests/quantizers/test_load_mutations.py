"""Loading of folders whose index, headers or options were changed: the package's own errors, and nothing else.

What transformers itself reads before this package is asked (the rest of ``config.json``, the tokenizer) is its matter.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.manifest import INDEX_OUT
from hf_neuron_moe.errors import NeuronMoEError
from tests.convert.mutations import (
    MOST_SECONDS,
    SEED,
    mutate_header,
    mutate_json,
    mutate_text,
    split_header,
    with_header,
)
from tests.quantizers.conftest import load
from tests.unsynced import rewrite

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "vocab_size": 16,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Conversions of one tiny model; each is put right again after a case."""
    home = tmp_path_factory.mktemp("load")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(Qwen2MoeConfig(**SIZES)).bfloat16().save_pretrained(home / "source")
    made = []
    for name, options in {
        "bf16": ConvertOptions("bf16", "kernel", 30_000),
        "mx": ConvertOptions("mxfp8", "kernel", 30_000),
        "fused": ConvertOptions("mxfp8", "fused", 30_000, purpose="inference"),
    }.items():
        convert_checkpoint(home / "source", home / name, options)
        made.append(home / name)
    return made


def mutate(path: Path, chance: random.Random) -> bytes:
    """Change a shard's header or what it says of layouts, the index, or the options in ``config.json``."""
    before = path.read_bytes()
    if path.suffix == ".json" and path.name != INDEX_OUT:
        content = json.loads(before)
        options = content["quantization_config"]
        mutated = mutate_json({name: value for name, value in options.items() if name != "quant_method"}, chance, 50)
        content["quantization_config"] = {**mutated, "quant_method": options["quant_method"]}
        rewrite(path, json.dumps(content).encode())
    elif path.name == INDEX_OUT:
        rewrite(path, mutate_text(before, chance))
    elif chance.randrange(2):
        rewrite(path, mutate_header(before, chance))
    else:
        header, data = split_header(before)
        key = chance.choice(["hf_neuron_moe.tensors", "hf_neuron_moe.layouts"])
        header["__metadata__"][key] = json.dumps(mutate_json(json.loads(header["__metadata__"][key]), chance))
        rewrite(path, with_header(header, data))
    return before


def run_cases(folders: list[Path], count: int, seed: int) -> None:
    """Load changed folders: each gives a model or an error of the package, in a second."""
    print(f"seed {seed}")
    ends: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"{seed}-load-{number}")
        folder = folders[number % len(folders)]
        path = chance.choice([*sorted(folder.glob("*.safetensors")), folder / INDEX_OUT, folder / "config.json"])
        print(f"case {number}: {path.name} of {folder.name}")
        before = mutate(path, chance)
        start = time.process_time()
        try:
            load(folder)
            ends["loaded"] += 1
        except NeuronMoEError as error:
            ends["refused"] += 1
            assert all(len(line) <= 2000 for line in str(error).splitlines()), f"{number}: {str(error)[:300]}"
            assert str(error).replace("\n", "").isprintable(), f"{number}: {str(error)[:300]!r}"
        finally:
            rewrite(path, before)
        assert time.process_time() - start < MOST_SECONDS, f"case {number}"
    assert ends["loaded"] and ends["refused"], ends


def test_changed_folders(folders):
    run_cases(folders, 100, SEED)


@pytest.mark.slow
def test_many_changed_folders(folders):
    run_cases(folders, 1000, SEED + 1)
