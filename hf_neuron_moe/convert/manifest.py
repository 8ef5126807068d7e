"""What a converted checkpoint says about itself: options, and for every tensor where it lies and what it was made of.

The manifest is written last, so a folder that has one is complete. It holds no time and no path, so that the same
source and options give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_neuron_moe.errors import ConfigError, ConversionError, nearest, refuse

MANIFEST_FILE = "neuron_moe_manifest.json"
FORMAT_VERSION = 1
PRECISIONS = ("bf16", "mxfp8")
LAYOUTS = ("fused", "kernel")


@dataclass(frozen=True)
class ConvertOptions:
    """What to make of the MLP and expert weights.

    Attributes:
        precision: ``"bf16"``, or ``"mxfp8"``: e4m3 codes and Neuron-rule block scales along each matmul's contraction
            axis.
        layout: ``"fused"`` keeps Hugging Face's axis order, ``"kernel"`` takes the kernels'.
        max_shard_bytes: a shard is closed before it would grow beyond this; a larger tensor gets its own.
    """

    precision: str = "bf16"
    layout: str = "kernel"
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        for name, allowed in (("precision", PRECISIONS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value not in allowed:
                raise refuse(
                    ConfigError,
                    where="convert",
                    argument=name,
                    expected=f"one of {', '.join(allowed)}",
                    got=repr(value),
                    remedy=f"Choose one of these.{nearest(str(value), list(allowed))}",
                )
        if self.max_shard_bytes <= 0:
            raise refuse(
                ConfigError,
                where="convert",
                argument="max_shard_bytes",
                expected="a positive number of bytes",
                got=self.max_shard_bytes,
                remedy="Leave it out for 5 GB shards.",
            )


@dataclass(frozen=True)
class Piece:
    """One source tensor's place in a fused weight ``[F, K]`` or ``[E, F, K]``.

    Attributes:
        source: name in the source checkpoint.
        file: source file that holds it.
        dtype: safetensors dtype there.
        shape: shape there.
        expert: index on the experts' axis, or None when the piece has that axis itself or there is none.
        start: first row on the F axis.
        transposed: the source holds ``[K, F]`` matrices.
    """

    source: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    transposed: bool = False

    @property
    def rows(self) -> slice:
        """Its rows on the F axis."""
        return slice(self.start, self.start + self.shape[-1 if self.transposed else -2])

    @property
    def holds_experts(self) -> bool:
        """Whether the source tensor itself has the experts' axis."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of the converted checkpoint.

    Attributes:
        name: its name in the shard.
        file: its shard.
        dtype: safetensors dtype.
        shape: shape as stored.
        layout: ``"source"`` (copied unchanged) or a layout name of :mod:`hf_neuron_moe.convert.relayout`.
        weight: name of the fused weight it belongs to; a quantised weight has two tensors.
        sha256: checksum of its bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    weight: str
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """Contents of ``neuron_moe_manifest.json``.

    Attributes:
        tool_version: version of this package that wrote the checkpoint.
        options: options of the conversion.
        source_files: bytes of each source file.
        source_metadata: safetensors ``__metadata__`` of each source file.
        weights: pieces of every weight by its name; a copied tensor is one piece.
        tensors: every tensor written.
        rounded: by source tensor, the number of its values that bf16 does not hold bit for bit; tensors without such
            values are left out. None in a manifest of a version that did not count.
    """

    tool_version: str
    options: ConvertOptions
    source_files: dict[str, int]
    source_metadata: dict[str, dict[str, str]]
    weights: dict[str, tuple[Piece, ...]]
    tensors: tuple[WrittenTensor, ...] = field(default=())
    rounded: dict[str, int] | None = None

    def to_json(self) -> str:
        """Serialise, with sorted keys."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a converted checkpoint.

    Raises:
        ConversionError: there is none, it is damaged, or another format version wrote it.
    """
    path = directory / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version}")
        return _from_content(content)
    except FileNotFoundError as error:
        got: object = "a folder without it"
        cause: Exception = error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got, cause = f"{type(error).__name__}: {error}", error
    raise refuse(
        ConversionError,
        where="export",
        argument=str(path),
        expected=f"a manifest of format version {FORMAT_VERSION}",
        got=got,
        remedy="Give the folder that `hf-neuron-moe convert` wrote.",
    ) from cause


def _from_content(content: dict[str, Any]) -> Manifest:
    def piece(entry: dict[str, Any]) -> Piece:
        return Piece(**{**entry, "shape": tuple(entry["shape"])})

    weights = {name: tuple(piece(entry) for entry in entries) for name, entries in content.pop("weights").items()}
    tensors = tuple(WrittenTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in content.pop("tensors"))
    options = ConvertOptions(**content.pop("options"))
    return Manifest(options=options, weights=weights, tensors=tensors, **content)
