"""A source that is not a folder here but a model on the Hugging Face Hub, or in its local cache."""

from __future__ import annotations

import re
from pathlib import Path

from hf_neuron_moe.convert.io.source import INDEX_FILE, SINGLE_FILE, inside, read_index
from hf_neuron_moe.errors import SourceDamageError

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@(?P<revision>[\w./-]+))?")

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.md", "*.tiktoken")
"""Index, configuration and tokenizer, in the repository and in folders of it. Never pickles: they are not read here."""

UNWANTED = ("original/*", "onnx/*", "*/onnx/*", "runs/*", "checkpoint-*/*")
"""Folders with weights in other formats, and what lies beside those."""


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
