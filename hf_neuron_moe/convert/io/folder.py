"""The folder a command was given, or the Hub id of one: is it there, and of the kind that the command works on?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_neuron_moe.convert.io.bounded import MAX_MANIFEST_BYTES, read_json
from hf_neuron_moe.convert.io.source import GGUF_FIX, INDEX_FILE, SINGLE_FILE, gguf_in, inside, read_index
from hf_neuron_moe.convert.manifest import INDEX_OUT, MANIFEST_FILE
from hf_neuron_moe.errors import ConfigError, ConversionError, SourceDamageError, with_article
from hf_neuron_moe.precision_map import spelled

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
MERGE_FIX = "Merge it first: lora_merge in a run of `train`; or merge_and_unload() and save_pretrained in peft."

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+))?")

# Index, configuration and tokenizer, in the repository and in folders of it. Never pickles: they are not read here.
BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.md", "*.tiktoken")
# Folders with weights in other formats, and what lies beside those.
UNWANTED = ("original/*", "onnx/*", "*/onnx/*", "runs/*", "checkpoint-*/*")


def check_folder(folder: object, argument: str) -> None:
    """Raise ConfigError for what is no path."""
    if not isinstance(folder, Path):
        got = f"the str {folder!r}" if isinstance(folder, str) else with_article(type(folder).__name__)
        raise ConfigError.about(argument, "a pathlib.Path", got, "Pass pathlib.Path(...).")


def checkpoint_folder(source: Path | str) -> Path:
    """The local folder of a checkpoint, which was given itself or as a Hub id."""
    folder = resolve_source(source)
    check_checkpoint(folder)
    return folder


def check_checkpoint(directory: Path) -> None:
    """Refuse what is not the folder of a Hugging Face checkpoint."""
    if is_conversion(directory):
        got = f"a folder that `hf-neuron-moe convert` wrote{_options_of(directory)}"
        fix = f"Use the checkpoint it was made of, or rebuild that: `hf-neuron-moe export {directory} NEW`."
        raise ConversionError.about(str(directory), "a Hugging Face checkpoint", got, fix)
    check_model(directory)
    if (directory / ADAPTER_FILE).is_file():
        got = f"a model and {ADAPTER_FILE}, with which transformers loads the model that the adapter names"
        fix = f"{MERGE_FIX} Or take {ADAPTER_FILE} out of the folder, to use the model without the adapter."
        raise ConversionError.about(str(directory), "a model without an adapter of peft", got, fix)


def check_model(directory: Path) -> None:
    """Refuse what is not the folder of a model, be it a checkpoint, a conversion or ``config.json`` alone."""
    _check_folder(directory, f"a local folder with {CONFIG_FILE}")
    if not (directory / CONFIG_FILE).is_file():
        got = "a folder without it"
        fix = "Give the folder that save_pretrained wrote or that was downloaded from the Hub."
        if (directory / ADAPTER_FILE).is_file():
            got, fix = "an adapter of peft", MERGE_FIX
        elif (found := gguf_in(directory)) is not None:
            got, fix = found, GGUF_FIX
        raise ConversionError.about(str(directory), f"a folder with {CONFIG_FILE}", got, fix)


def is_conversion(directory: Path) -> bool:
    """Return whether ``convert`` wrote this folder."""
    return (directory / MANIFEST_FILE).is_file()


def check_conversion(directory: Path, verb: str) -> None:
    """Refuse what is not a folder that ``convert`` wrote."""
    expected = f"a folder with {MANIFEST_FILE}, which `hf-neuron-moe convert` writes"
    _check_folder(directory, expected)
    if not is_conversion(directory):
        got, fix = "a folder without it", "Give the destination of an earlier `hf-neuron-moe convert`."
        if (directory / CONFIG_FILE).is_file():
            got, fix = "an ordinary checkpoint", f"It is in Hugging Face's layout already; there is nothing to {verb}."
        raise ConversionError.about(str(directory), expected, got, fix)


def _check_folder(directory: Path, expected: str) -> None:
    if directory.is_dir():
        return
    name, kind = directory.as_posix(), ConversionError if directory.is_file() else SourceDamageError
    got, fix = "no such folder", "Check the spelling."
    if directory.suffix in (".yaml", ".yml") and directory.is_file():
        got, fix = "a YAML file", "Give the model's folder, which the files of `train` name in `model:`."
    elif directory.suffix == ".gguf" and directory.is_file():
        got, fix = "a file", GGUF_FIX
    elif directory.is_file():
        got, fix = "a file", f"Give the folder that holds it: {Path(os.path.abspath(directory)).parent}."
    elif directory.is_symlink():
        got, fix = "a link to something that is not there", "Repair the link."
    elif (found := _HUB_ID.fullmatch(name)) and not found["revision"]:
        fix = (
            "Hub ids are not looked up. If this is one, download it first, for example with "
            f"`hf download {name} --local-dir FOLDER`, and give that folder."
        )
    raise kind.about(str(directory), expected, got, fix)


def _options_of(directory: Path) -> str:
    """The conversion's options in brackets, as far as its manifest can be read."""
    try:
        options = read_json(directory / MANIFEST_FILE, MAX_MANIFEST_BYTES)["options"]
        return f" (precision {spelled(options['precision'])}, layout {options['layout']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def resolve_source(source: Path | str, *, weights: bool = True) -> Path:
    """The local folder of a source: itself, or the snapshot of a Hub id ``org/name`` or ``org/name@revision``.

    Without `weights` only ``config.json`` is fetched.

    A folder of that name wins, and what is neither a folder nor of that form comes back unchanged. Otherwise
    ``huggingface_hub.snapshot_download`` decides, with its own environment variables for cache, token and offline mode;
    what is in the cache is not downloaded again.
    """
    path = Path(source)
    name = source if isinstance(source, str) else source.as_posix()
    found = _HUB_ID.fullmatch(name)
    if path.exists() or path.is_symlink() or found is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, revision = found["repo"], found["revision"]
    try:
        first = [*BESIDE] if weights else [CONFIG_FILE]
        folder = snapshot_download(repo, revision=revision, allow_patterns=first, ignore_patterns=[*UNWANTED])
        if not weights:
            return Path(folder)
        wanted = [*BESIDE, *weights_of(Path(folder))]
        snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=[*UNWANTED])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        expected = "a local folder with config.json, or a model on the Hub or in its cache"
        got = f"no such folder, and from the Hub {hub_failure(error)}"
        fix = (
            "Check the spelling, the network and, for gated models, `hf auth login`; or download it where you "
            f"can: `hf download {repo} --local-dir FOLDER`, and give that folder."
        )
        raise SourceDamageError.about(name, expected, got, fix) from error
    return Path(folder)


def hub_failure(error: BaseException) -> str:
    """Return what failed when the Hub was asked, without the advice that huggingface_hub puts around it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__} ({' '.join(str(error).split()).rstrip('.')})"


def weights_of(snapshot: Path) -> list[str]:
    """Names of the files of the index, or the single one: a repository may hold the same weights a second time."""
    index = INDEX_OUT if is_conversion(snapshot) else INDEX_FILE
    if not (snapshot / index).is_file():
        return [SINGLE_FILE]
    return sorted(set(read_index(inside(snapshot, index))[0].values()))
