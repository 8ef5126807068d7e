"""Write a Mixtral checkpoint of random weights and a wished size, tensor by tensor, for measurements.

    python scripts/make_synthetic_mixtral.py build/mixtral-2gb --gigabytes 2

All sizes have the same layers, only more of them: what depends on a layer stays, what depends on the checkpoint grows.
Names, index and configuration are those of the original Mixtral files. The model says nothing sensible.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import MixtralConfig

from hf_neuron_moe.convert.io.shard import Entry, ShardWriter
from hf_neuron_moe.convert.io.source import INDEX_FILE, nbytes_of

POOL = 1 << 24
"""Random values; every tensor repeats them from a place of its own. Drawing gigabytes would take minutes."""


def make_config(layers: int, hidden: int, intermediate: int, experts: int) -> MixtralConfig:
    return MixtralConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        num_local_experts=experts,
        vocab_size=8192,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )


def outer_shapes(config: MixtralConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    yield "lm_head.weight", (config.vocab_size, config.hidden_size)


def layer_shapes(config: MixtralConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, prefix = config.hidden_size, f"model.layers.{layer}."
    for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        yield f"{prefix}self_attn.{name}_proj.weight", (heads * config.head_dim, H)
    yield f"{prefix}self_attn.v_proj.weight", (config.num_key_value_heads * config.head_dim, H)
    yield f"{prefix}self_attn.o_proj.weight", (H, config.num_attention_heads * config.head_dim)
    yield f"{prefix}input_layernorm.weight", (H,)
    yield f"{prefix}post_attention_layernorm.weight", (H,)
    yield f"{prefix}block_sparse_moe.gate.weight", (config.num_local_experts, H)
    for expert in range(config.num_local_experts):
        for name in ("w1", "w3"):
            yield f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight", (config.intermediate_size, H)
        yield f"{prefix}block_sparse_moe.experts.{expert}.w2.weight", (H, config.intermediate_size)


def make_checkpoint(folder: Path, nbytes: int, *, hidden: int, intermediate: int, experts: int, shard: int) -> int:
    """Write the checkpoint and return its bytes of weights."""
    config = make_config(1, hidden, intermediate, experts)
    outer = sum(math.prod(shape) * 2 for _, shape in outer_shapes(config))
    layer = sum(math.prod(shape) * 2 for _, shape in layer_shapes(config, 0))
    config = make_config(max(1, round((nbytes - outer) / layer)), hidden, intermediate, experts)
    entries = [Entry(name, "BF16", shape) for name, shape in outer_shapes(config)]
    for index in range(config.num_hidden_layers):
        entries += [Entry(name, "BF16", shape) for name, shape in layer_shapes(config, index)]
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(nbytes_of(*other[1:]) for other in (*shards[-1], entry)) > shard:
            shards.append([])
        shards[-1].append(entry)
    folder.mkdir(parents=True)
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weight_map = {}
    for number, group in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with ShardWriter(folder / file, group, {"format": "pt"}) as writer:
            for entry in group:
                writer.write_parts(entry.name, parts_of(pool, math.prod(entry.shape), len(weight_map) * 7919))
                weight_map[entry.name] = file
    total = sum(nbytes_of(entry.dtype, entry.shape) for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(folder)
    return total


def parts_of(pool: torch.Tensor, count: int, start: int) -> Iterator[torch.Tensor]:
    """`count` values of the pool from `start` on, round and round."""
    while count:
        start %= len(pool)
        part = pool[start : start + count]
        yield part
        count -= len(part)
        start += len(part)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3584)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--shard-gigabytes", type=float, default=1.0)
    parser.add_argument("--force", action="store_true", help="replace the folder")
    given = parser.parse_args()
    if given.force:
        shutil.rmtree(given.folder, ignore_errors=True)
    total = make_checkpoint(
        given.folder,
        int(given.gigabytes * 1e9),
        hidden=given.hidden,
        intermediate=given.intermediate,
        experts=given.experts,
        shard=int(given.shard_gigabytes * 1e9),
    )
    print(f"{total:,} bytes of weights in {given.folder}")


if __name__ == "__main__":
    main()
