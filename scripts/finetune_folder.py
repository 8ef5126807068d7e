"""What the files of a model's folder tell before they are loaded: a conversion's precision, and damaged weights."""

from __future__ import annotations

import json
from pathlib import Path

from finetune_options import LoraOptions
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
from hf_neuron_moe.device.kernel_support import NO_TRAINING
from hf_neuron_moe.errors import ConfigError, SourceDamageError
from hf_neuron_moe.quantizers.quantization_config import PRECISIONS

CONFIG_FILE = "config.json"
MARK = "quantization_config"
FROZEN = tuple(precision for precision in PRECISIONS if precision.startswith("mx"))
"""Conversions whose blocks are not trained: MX codes in place of weights."""

_WHERE = "finetune"


def conversion_of(config: bytes) -> str | None:
    """Return the precision of what ``hf-neuron-moe convert`` wrote.

    Args:
        config: the bytes of a ``config.json``.

    Returns:
        ``"bf16"``, ``"mxfp8"`` or ``"mxfp4"``, of several one of frozen blocks; None where it is no such checkpoint or
        cannot be read.
    """
    mark = _content(config).get(MARK)
    if not isinstance(mark, dict) or mark.get("quant_method") != QUANT_METHOD:
        return None
    precision = mark.get("precision")
    names = precision.values() if isinstance(precision, dict) else [precision]
    return max((name for name in names if name in PRECISIONS), key=FROZEN.__contains__, default=None)


def without_mark(config: bytes) -> bytes:
    """Return a conversion's ``config.json`` as its source's was."""
    return json.dumps({key: value for key, value in _content(config).items() if key != MARK}).encode()


def longest_input(config: bytes) -> int | None:
    """Return how many tokens a model has positions for; None where its ``config.json`` does not say.

    Rotary embeddings that are scaled reach further than ``max_position_embeddings``, in some families' files.
    """
    content = _content(config)
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


def _content(config: bytes) -> dict[str, object]:
    try:
        content = json.loads(config.decode("utf-8"))
    except (ValueError, RecursionError):  # whoever builds the model of it refuses it
        return {}
    return content if isinstance(content, dict) else {}


def check_quantized(lora: LoraOptions) -> None:
    """Refuse to train a base of MX codes without adapters, or to merge adapters into it.

    Raises:
        ConfigError: `lora` asks for it.
    """
    if lora.lora_rank and not lora.lora_merge:
        return
    raise ConfigError.about(
        "lora_merge" if lora.lora_rank else "lora_rank",
        "off" if lora.lora_rank else "positive",
        "a checkpoint whose blocks are frozen MX codes",
        "Train adapters on it and keep them apart, or `hf-neuron-moe export` it first.",
    ).named(_WHERE)


def check_quantized_backend(backend: str, fallback: str) -> None:
    """Refuse to train on a base of MX codes by kernels alone: none trains through them.

    Args:
        backend: a name that ``resolve_backend`` returned, or one of Neuron's.
        fallback: the run's ``neuron_fallback``.

    Raises:
        ConfigError: PyTorch may not stand in for the kernels of `backend`.
    """
    if backend == "torch" or fallback == "torch":
        return
    raise ConfigError.about(
        "neuron_fallback",
        f"torch for a frozen MX base on backend {backend}",
        f"{fallback!r}, and {NO_TRAINING}",
        "Set neuron_fallback: torch, with which PyTorch computes its blocks on the device in training; or train "
        "from the original checkpoint, or from a conversion in bf16.",
    ).named(_WHERE)


def check_weights(name: str, *, needed: bool = True) -> list[str]:
    """Refuse weights that are cut off or missing; only the headers of safetensors files are read.

    Args:
        name: a folder here; anything else is the hub's, and loading checks it.
        needed: whether the run follows; otherwise a folder without any weights is told and not refused.

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
                raise _without_weights(name)
            return [f"model {name!r} has no weights here, and the run needs them"]
        files = _files_of(folder / index)
    for file in files:
        _check_file(folder / file)
    return []


def _without_weights(name: str) -> SourceDamageError:
    return SourceDamageError.about(
        "model",
        "a folder with weights",
        f"{name!r}, which has no file of them",
        "Name another folder, or download the weights into this one.",
    ).named(_WHERE)


def _check_file(path: Path) -> None:
    """Refuse a file that the safetensors library cannot open: whatever it can, loading may have a use for."""
    try:
        with safe_open(path, framework="pt"):
            return
    except FileNotFoundError as error:
        raise damaged(path.name, "a file of the checkpoint", "no such file").named(_WHERE) from error
    except SafetensorError as error:
        raise damaged(path.name, "a safetensors file as long as its header says", error).named(_WHERE) from error


def _files_of(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = sorted(set(content["weight_map"].values()))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise damaged(index.name, "JSON with a weight_map from tensor names to files", error).named(_WHERE) from error
    return files
