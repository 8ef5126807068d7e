"""One conversion on several machines: each makes a part of the shards, and one of them puts the parts together.

They share DST's parent folder, or their ``DST.partial`` folders are copied into one. Who makes a shard changes no byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hf_neuron_moe.errors import ConfigError, public

ValueT = TypeVar("ValueT")


@public("convert")
def check_part(part: tuple[int, int] | None) -> None:
    """Refuse what is no part."""
    if part is not None and not 1 <= part[0] <= part[1]:
        got = f"{part[0]} of {part[1]}"
        raise ConfigError.about("part", "i of n with 1 <= i <= n", got, "Number the parts from 1.")


def part_of_shards(shards: dict[str, ValueT], part: tuple[int, int] | None) -> dict[str, ValueT]:
    """The shards of one part: neighbors, since they mostly lie in the same source files. None takes all."""
    index, count = part or (1, 1)
    files = list(shards)
    return {file: shards[file] for file in files[len(files) * (index - 1) // count : len(files) * index // count]}


def parts_to_repeat(shards: Iterable[str], missing: Iterable[str], count: int) -> list[int]:
    """Which of `count` parts make the missing shards."""
    files, wanted = dict.fromkeys(shards, ""), set(missing)
    return [index for index in range(1, count + 1) if wanted & part_of_shards(files, (index, count)).keys()]
