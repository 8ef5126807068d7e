"""What is known of a run's model before it is loaded: where it is, its ``config.json``, and whether files are whole."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_neuron_moe.config import QUANT_METHOD
from hf_neuron_moe.convert.io.folder import hub_failure, resolve_source
from hf_neuron_moe.convert.io.source import damaged, read_index
from hf_neuron_moe.convert.manifest import INDEX_OUT
from hf_neuron_moe.errors import SourceDamageError, nearest, public
from hf_neuron_moe.finetune.configs import TINY_FAMILIES
from hf_neuron_moe.finetune.train_options import bad, one_line
from hf_neuron_moe.quantizers.quantization_config import PRECISIONS

CONFIG_FILE = "config.json"
MARK = "quantization_config"
REFUSALS = (
    *(OSError, ImportError, ValueError, RuntimeError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, StrictDataclassError),
)
"""What transformers raises for configurations, tokenizers and weights that it cannot load, most of it unchecked."""

FROZEN = tuple(precision for precision in PRECISIONS if precision.startswith("mx"))
"""Conversions whose blocks are not trained: MX codes in place of weights."""


def folder_of(argument: str, name: str, revision: str) -> Path:
    """Return the folder of a model or tokenizer; of a hub id, one with its ``config.json`` alone."""
    try:
        os.lstat(name)
    except (OSError, ValueError) as error:  # ValueError: a NUL
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            expected, got = "an existing folder or a hub id", "a name that no folder can have"
            raise bad(argument, expected, got, "Correct it; a hub id is OWNER/NAME.") from error
    try:
        folder = resolve_source(name if revision == "main" else f"{name}@{revision}", weights=False)
    except SourceDamageError as error:
        expected = "an existing folder or a hub id"
        fix = "Correct it; without a network name a folder, or an id in the hub's cache with HF_HUB_OFFLINE=1."
        got = f"{name!r}, no such folder, and from the Hub {hub_failure(error.__cause__ or error)}"
        raise SourceDamageError.about(argument, expected, got, fix).named("train") from error
    if not folder.is_dir():
        fix, family = "Correct the path; a hub id is OWNER/NAME.", Path(name).name.removeprefix("tiny-")
        if Path(name).name == f"tiny-{family}" and family.replace("-", "_") in TINY_FAMILIES:
            made = f"hf-neuron-moe tiny-model {family.replace('-', '_')} {shlex.quote(name)}"
            fix = f"Correct the path, or make it: `{made}`."
        if Path(name).is_dir():
            raise bad("revision", "left out with a folder, which has none", repr(revision), "Leave it out.")
        what = "a file" if folder.is_file() else "a folder that does not exist"
        raise bad(argument, "an existing folder or a hub id", f"{name!r}, {what}", fix)
    return folder


def read_config(folder: Path, name: str = CONFIG_FILE) -> bytes | str:
    """Return the bytes of a folder's ``config.json``, or why it cannot be looked at."""
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        return f"the blocks of {folder} cannot be looked at before it is loaded: {one_line(error)}"


def content_of(config: bytes | str) -> dict[str, Any]:
    """Return a configuration as a dictionary; an empty one where it cannot be read, which loading refuses."""
    try:
        content = json.loads(config.decode("utf-8")) if isinstance(config, bytes) else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def conversion_of(config: bytes | str) -> str | None:
    """Return the precision of what ``hf-neuron-moe convert`` wrote.

    Returns:
        ``"bf16"``, ``"mxfp8"`` or ``"mxfp4"``, of several one of frozen blocks; None where it is no such checkpoint or
        cannot be read.
    """
    mark = content_of(config).get(MARK)
    if not isinstance(mark, dict) or mark.get("quant_method") != QUANT_METHOD:
        return None
    precision = mark.get("precision")
    names = precision.values() if isinstance(precision, dict) else [precision]
    return max((name for name in names if name in PRECISIONS), key=FROZEN.__contains__, default=None)


def longest_input(config: bytes | str) -> int | None:
    """Return how many tokens a model has positions for; None where its ``config.json`` does not say.

    Rotary embeddings that are scaled reach further than ``max_position_embeddings``, in some families' files.
    """
    content = content_of(config)
    inner = content.get("text_config")
    content |= inner if isinstance(inner, dict) else {}
    known = [content[key] for key in ("max_position_embeddings", "n_positions") if _is_count(content.get(key))]
    scaling = content.get("rope_parameters") or content.get("rope_scaling")
    if known and isinstance(scaling, dict):
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings") or known[0]
        if isinstance(factor, int | float) and factor > 1 and _is_count(original):
            known.append(int(factor * original))
    return max(known, default=None)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def check_config(folder: Path) -> None:
    """Refuse a ``config.json`` that is missing, or that transformers cannot read."""
    if not (folder / CONFIG_FILE).is_file():
        fix = "Name another folder, or download the file into this one."
        raise bad("model", f"a folder with {CONFIG_FILE}", f"{str(folder)!r} without it", fix)
    try:
        act = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "hidden_act", None)
    except REFUSALS as error:
        got = f"{folder / CONFIG_FILE}: {one_line(error)}"
        raise bad("model", "one whose configuration transformers can read", got, "Correct the file.") from error
    if isinstance(act, str) and act not in ACT2FN:
        got = f"hidden_act {act!r} in {folder / CONFIG_FILE}"
        raise bad("model", "one whose activation transformers has", got, f"Correct it.{nearest(act, [*ACT2FN])}")


@public("train")
def check_weights(folder: Path) -> None:
    """Refuse weights that are cut off or missing; only the headers of safetensors files are read."""
    index = next((folder / name for name in (SAFE_WEIGHTS_INDEX_NAME, INDEX_OUT) if (folder / name).is_file()), None)
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        files = [SAFE_WEIGHTS_NAME]
    elif index is not None:
        files = sorted(set(read_index(index)[0].values()))
    elif any((folder / name).is_file() for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        return  # pickled: loading checks them
    else:
        fix, got = "Name another folder, or download the weights into this one.", f"{str(folder)!r} without any"
        raise SourceDamageError.about("model", "a folder with weights", got, fix)
    for file in files:
        try:
            with safe_open(folder / file, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise damaged(file, "a file of the checkpoint", "no such file") from error
        except SafetensorError as error:
            raise damaged(file, "a safetensors file as long as its header says", error) from error
