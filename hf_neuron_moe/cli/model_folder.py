"""The model that a command looks at: a folder, its ``config.json`` alone, or a Hub id."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_neuron_moe.errors import NeuronMoEError


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """The folder of a checkpoint, or one that holds the single file that was given as its ``config.json``.

    Of a Hub id only ``config.json`` is fetched.
    """
    from hf_neuron_moe.convert.io.folder import resolve_source

    path = resolve_source(path, weights=False)
    if not path.is_file() or path.suffix != ".json":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-") as folder:
        copy = Path(folder) / "config.json"
        shutil.copyfile(path, copy)
        try:
            yield Path(folder)
        except NeuronMoEError as error:  # which names the copy
            message = str(error).replace(str(copy), str(path)).replace(folder, str(path))
            raise type(error)(message) from error


def quiet_transformers() -> None:
    """Keep transformers' notes about generation configs and the like, and its bars, out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
