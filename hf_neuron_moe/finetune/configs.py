"""The configurations inside the package."""

from __future__ import annotations

from pathlib import Path

from hf_neuron_moe.errors import ConfigError, nearest

FOLDER = Path(__file__).resolve().parents[1] / "configs"
TINY_FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss")
"""What ``hf-neuron-moe tiny-model`` makes; configurations name its folders ``tiny-mixtral`` and so on."""

LAUNCHER = "accelerate"
"""Subfolder whose files are for ``accelerate launch --config_file``, not for ``train``."""


def names() -> list[str]:
    """Return the names of all configurations: paths below the folder without suffix."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find(name: str) -> Path:
    """Return the file of a configuration: `name` itself, or a file of the package by its path or last part."""
    if Path(name).is_file():
        return Path(name)
    wanted = name.removesuffix(".yaml")
    for known in names():
        if wanted in (known, known.rpartition("/")[2]):
            return FOLDER / f"{known}.yaml"
    last = [known.rpartition("/")[2] for known in names()]
    fix = f"`hf-neuron-moe train --list-configs` shows the package's.{nearest(wanted, last)}"
    expected = "an existing YAML file, or a name that the package has"
    raise ConfigError.about("CONFIG", expected, repr(name), fix).named("train")


def summary_of(name: str) -> str:
    """Return the first sentence of a configuration's comment."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:4] if line.startswith("#"))
    return comment.partition(". ")[0].partition(" python ")[0].rstrip(".:")
