"""What a measuring pass has gathered so far, on disk: a killed run goes on behind its last row."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe._version import __version__
from hf_neuron_moe.errors import DestinationError, NeuronMoEWarning
from hf_neuron_moe.explore.measures import BlockMeasures, Measures, Score
from hf_neuron_moe.explore.operand_sums import Operand
from hf_neuron_moe.output_files import check_file, replacing

FORM = 4
OTHER_FOLDER = "Remove it, or start in another folder."


def identity_of(folder: Path, text: Path, options: Sequence[Any]) -> str:
    """Return what tells runs apart: the model's files, the text, the options and this version."""
    digest = hashlib.sha256(repr((FORM, __version__, torch.__version__, *options)).encode())
    for path in (*sorted(path for path in folder.glob("[!.]*") if path.is_file()), text):
        facts = path.stat()
        digest.update(repr((path.name, facts.st_size, facts.st_mtime_ns)).encode())
    return digest.hexdigest()


def save_state(path: Path, identity: str, measures: Measures) -> None:
    """Write what was gathered, whole or not at all."""
    with replacing(path, OTHER_FOLDER) as partial:
        torch.save({"identity": identity, "measures": asdict(measures)}, partial)


def load_state(path: Path, identity: str) -> Measures | None:
    """Return what a run with this identity left; None where there is none, or one of another run."""
    check_file(path, OTHER_FOLDER)
    if not path.is_file():
        return None
    try:
        held = torch.load(path, weights_only=True)
        other = held["identity"] != identity
    except (EOFError, LookupError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        got, fix = f"something else ({type(error).__name__})", "Remove it."
        raise DestinationError.about(str(path), "what an interrupted run left", got, fix) from error
    if other:
        words = f"{path} is of another model, text, or other options. This run begins anew and overwrites it."
        warnings.warn(words, NeuronMoEWarning, stacklevel=3)
        return None
    stored = held["measures"]
    blocks = {}
    for name, block in stored["blocks"].items():
        operands = {key: Operand(**parts) for key, parts in block["operands"].items()}
        scores = {key: Score(**parts) for key, parts in block["scores"].items()}
        blocks[name] = BlockMeasures(**block | {"operands": operands, "scores": scores})
    return Measures(**stored | {"blocks": blocks})
