"""What is known of a run's model before it is loaded: where it is, its ``config.json``, and whether files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from hf_neuron_moe.config import QUANT_METHOD
from hf_neuron_moe.convert.io.source import damaged
from hf_neuron_moe.convert.manifest import INDEX_OUT
from hf_neuron_moe.errors import ConfigError, SourceDamageError
from hf_neuron_moe.finetune.needs import HTTP_ERROR
from hf_neuron_moe.finetune.options import ModelOptions, bad, one_line
from hf_neuron_moe.quantizers.quantization_config import PRECISIONS

CONFIG_FILE = "config.json"
MARK = "quantization_config"
HUB_TIMEOUT_S = 10.0
FROZEN = tuple(precision for precision in PRECISIONS if precision.startswith("mx"))
"""Conversions whose blocks are not trained: MX codes in place of weights."""


def check_places(options: ModelOptions, *, needed: bool = True) -> list[str]:
    """Refuse a model or tokenizer that is neither a folder here nor a name that the hub knows.

    The hub is asked about a name that is not in its cache: once, without the retries that loading makes.

    Args:
        options: with the names.
        needed: whether the run follows; otherwise a hub that cannot be asked is reported and not an error.

    Returns:
        Names that could not be asked about, a line each.

    Raises:
        ConfigError: it is neither.
    """
    unknown = []
    for argument, name in (("model", options.model), ("tokenizer", options.tokenizer)):
        if not name or Path(name).is_dir():
            continue
        if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no hub id
            fix = (
                "Correct the path; a hub id is OWNER/NAME. The head of the package's configuration says what makes it."
            )
            raise bad(argument, "an existing folder or a hub id", f"{name!r}, a folder that does not exist", fix)
        why = _ask_hub(argument, name, options.revision if argument == "model" else "main")
        if why is not None and needed:
            raise _no_such(argument, name, why)
        if why is not None:
            unknown.append(f"{argument} {name!r} is no folder here, and {why}")
    return unknown


def _ask_hub(argument: str, name: str, revision: str) -> str | None:
    """Refuse a name that the hub does not know; return why it cannot be asked, or None."""
    try:
        # Any file will do; a checkpoint has the first, and a tokenizer by itself the second.
        files = (CONFIG_FILE, "tokenizer_config.json")
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            return None
        if constants.HF_HUB_OFFLINE:
            return "not in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub"
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise _no_such(argument, name, f"not of the form that ids have ({one_line(error)})") from error
    except RevisionNotFoundError as error:
        raise _no_such(argument, name, f"known to the hub without a revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        why = "unknown to the hub, or private and not open to your token (`hf auth login`)"
        raise _no_such(argument, name, why) from error
    except HfHubHTTPError:
        return None  # the hub is busy, or a mirror does not know this question: loading will show
    except HTTP_ERROR as error:
        return f"not in the hub's cache, and the hub cannot be reached: {one_line(error)}"
    return None


def _no_such(argument: str, name: str, why: str) -> ConfigError:
    got = f"{name!r}: as a folder it does not exist here, and as a hub id it is {why}"
    fix = (
        "Correct the path, or the id; without a network name a folder, or one in the hub's cache with HF_HUB_OFFLINE=1."
    )
    return bad(argument, "an existing folder or a hub id", got, fix)


def read_config(options: ModelOptions, *, online: bool) -> bytes | str:
    """Return the bytes of the model's ``config.json``, or why it cannot be looked at.

    Args:
        options: with the model's name.
        online: whether the hub may be asked.
    """
    name = options.model
    if not online and not Path(name).is_dir():
        return f"the blocks of {name} cannot be looked at without its config.json"
    try:
        if Path(name).is_dir():
            return (Path(name) / CONFIG_FILE).read_bytes()
        return Path(hf_hub_download(name, CONFIG_FILE, revision=options.revision)).read_bytes()
    except (OSError, ValueError) as error:
        return f"the blocks of {name} cannot be looked at before it is loaded: {one_line(error)}"


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


def check_weights(name: str, *, needed: bool = True) -> list[str]:
    """Refuse weights that are cut off or missing; only the headers of safetensors files are read.

    Args:
        name: a folder here; anything else is the hub's, and loading checks it.
        needed: whether the run follows; otherwise a folder without any weights is reported and not an error.

    Returns:
        What is not there, a line each.

    Raises:
        SourceDamageError: a file is missing, shorter than its header says, or damaged otherwise.
    """
    folder = Path(name)
    if not folder.is_dir():
        return []
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        files = [SAFE_WEIGHTS_NAME]
    else:
        index = next((path for path in (SAFE_WEIGHTS_INDEX_NAME, INDEX_OUT) if (folder / path).is_file()), None)
        if index is None:
            if any((folder / path).is_file() for path in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_CONFIG_NAME)):
                return []  # pickled, or elsewhere: loading checks them
            if needed:
                fix = "Name another folder, or download the weights into this one."
                got = f"{name!r}, which has no file of them"
                raise SourceDamageError.about("model", "a folder with weights", got, fix).named("train")
            return [f"model {name!r} has no weights here, and the run needs them"]
        files = _files_of(folder / index)
    for file in files:
        try:
            with safe_open(folder / file, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise damaged(file, "a file of the checkpoint", "no such file").named("train") from error
        except SafetensorError as error:
            raise damaged(file, "a safetensors file as long as its header says", error).named("train") from error
    return []


def _files_of(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise damaged(index.name, "JSON with a weight_map from tensor names to files", error).named("train") from error
