"""The folder a command was given, or the Hub id of one: is it there, and of the kind that the command works on?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_neuron_moe.convert.io.bounded import MAX_MANIFEST_BYTES, read_json
from hf_neuron_moe.convert.io.source import INDEX_FILE, SINGLE_FILE, inside, read_index
from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.errors import ConversionError, SourceDamageError

CONFIG_FILE = "config.json"
_MODEL_FOLDER = f"a local folder with {CONFIG_FILE}"

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+))?")

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.md", "*.tiktoken")
"""Index, configuration and tokenizer, in the repository and in folders of it. Never pickles: they are not read here."""

UNWANTED = ("original/*", "onnx/*", "*/onnx/*", "runs/*", "checkpoint-*/*")
"""Folders with weights in other formats, and what lies beside those."""


def checkpoint_folder(source: Path | str) -> Path:
    """The local folder of a checkpoint, which was given itself or as a Hub id."""
    folder = resolve_source(source)
    check_checkpoint(folder)
    return folder


def check_checkpoint(directory: Path) -> None:
    """Refuse what is not the folder of a Hugging Face checkpoint."""
    _check_folder(directory, _MODEL_FOLDER)
    if is_conversion(directory):
        got = f"a folder that `hf-neuron-moe convert` wrote{_options_of(directory)}"
        fix = f"Use the checkpoint it was made of, or rebuild that: `hf-neuron-moe export {directory} NEW`."
        raise ConversionError.about(str(directory), "a Hugging Face checkpoint", got, fix)
    check_model(directory)


def check_model(directory: Path) -> None:
    """Refuse what is not the folder of a model, be it a checkpoint, a conversion or ``config.json`` alone."""
    _check_folder(directory, _MODEL_FOLDER)
    if not (directory / CONFIG_FILE).is_file():
        fix = "Give the folder that save_pretrained wrote or that was downloaded from the Hub."
        raise ConversionError.about(str(directory), f"a folder with {CONFIG_FILE}", "a folder without it", fix)


def is_conversion(directory: Path) -> bool:
    """Return whether ``convert`` wrote this folder."""
    return (directory / MANIFEST_FILE).is_file()


def check_conversion(directory: Path, verb: str) -> None:
    """Refuse what is not a folder that ``convert`` wrote."""
    expected = f"a folder with {MANIFEST_FILE}, which `hf-neuron-moe convert` writes"
    _check_folder(directory, expected)
    if not is_conversion(directory):
        stock = (directory / CONFIG_FILE).is_file()
        raise ConversionError.about(
            str(directory),
            expected,
            "an ordinary checkpoint" if stock else "a folder without it",
            f"It is in Hugging Face's layout already; there is nothing to {verb}."
            if stock
            else "Give the destination of an earlier `hf-neuron-moe convert`.",
        )


def _check_folder(directory: Path, expected: str) -> None:
    if directory.is_dir():
        return
    kind: type[ConversionError] = SourceDamageError
    got, remedy = "no such folder", "Check the spelling."
    if directory.is_file():
        kind = ConversionError
        got, remedy = "a file", f"Give the folder that holds it: {Path(os.path.abspath(directory)).parent}."
        if directory.suffix in (".yaml", ".yml"):
            got, remedy = "a YAML file", "Give the model's folder, which finetune.py's files name in `model:`."
        if directory.suffix == ".gguf":
            remedy = (
                "Make a checkpoint of it first: load it in transformers with from_pretrained(FOLDER, gguf_file=NAME) "
                "and call save_pretrained."
            )
    elif directory.is_symlink():
        got, remedy = "a link to something that is not there", "Repair the link."
    elif (found := _HUB_ID.fullmatch(directory.as_posix())) and not found["revision"]:
        remedy = (
            "Hub ids are not looked up. If this is one, download it first, for example with "
            f"`hf download {directory.as_posix()} --local-dir FOLDER`, and give that folder."
        )
    raise kind.about(str(directory), expected, got, remedy)


def _options_of(directory: Path) -> str:
    """The conversion's options in brackets, as far as its manifest can be read."""
    try:
        options = read_json(directory / MANIFEST_FILE, MAX_MANIFEST_BYTES)["options"]
        return f" (precision {options['precision']}, layout {options['layout']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def resolve_source(source: Path | str) -> Path:
    """The local folder of a source: itself, or the snapshot of a Hub id ``org/name`` or ``org/name@revision``.

    A folder of that name wins. Otherwise ``huggingface_hub.snapshot_download`` decides, with its own environment
    variables for cache, token and offline mode; what is in the cache is not downloaded again.

    Returns:
        A folder; where `source` is neither a folder nor has the form of a Hub id, it comes back unchanged.
    """
    path = Path(source)
    name = source if isinstance(source, str) else source.as_posix()
    found = _HUB_ID.fullmatch(name)
    if path.exists() or path.is_symlink() or found is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        folder = snapshot_download(
            found["repo"], revision=found["revision"], allow_patterns=list(patterns), ignore_patterns=list(UNWANTED)
        )
        return Path(folder)

    try:
        snapshot = fetch(*BESIDE)
        fetch(*BESIDE, *weights_of(snapshot))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SourceDamageError.about(
            name,
            "a local folder with config.json, or a model on the Hub or in its cache",
            f"no such folder, and from the Hub {type(error).__name__} ({reason[:200]})",
            "Check the spelling, the network and, for gated models, `hf auth login`; or download it where you "
            f"can: `hf download {found['repo']} --local-dir FOLDER`, and give that folder.",
        ) from error
    return snapshot


def weights_of(snapshot: Path) -> list[str]:
    """Names of the weight files that belong to a checkpoint: those of its index, or the single one.

    A repository may hold the same weights a second time, such as ``consolidated.safetensors``.
    """
    if not (snapshot / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    return sorted(set(read_index(inside(snapshot, INDEX_FILE))[0].values()))
