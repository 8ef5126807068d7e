"""What a conversion changes in the files beside the weights: ``config.json`` and the model card.

``config.json`` gets a ``quantization_config`` from which ``from_pretrained`` knows what it has before it opens a shard.
The texts that the source had are kept in the manifest, so that export gives them back byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.config import QUANT_METHOD
from hf_neuron_moe.convert.io.folder import CONFIG_FILE
from hf_neuron_moe.convert.io.source import damaged
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, SOURCE
from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.convert.options import BACKWARD, ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.convert.source_formats import QUANTIZATION_CONFIG, unquantized
from hf_neuron_moe.errors import counted
from hf_neuron_moe.precision_map import PrecisionMap

CARD_FILE = "README.md"
TITLE = "## Weight layout"

_PRECISIONS = {
    "bf16": "bfloat16",
    "mxfp8": "MXFP8: e4m3 codes with one power-of-two scale per 32 values of each contraction axis",
    "mxfp4": "MXFP4: e2m1 codes with one power-of-two scale per 32 values of each contraction axis (experts only)",
}
_PURPOSES = {
    "inference": "inference: what the forward reads",
    "training": "training: what the forward and the gradient of a block's input read",
    "lora": "adapters on frozen weights: what the forward and the gradient of a block's input read",
}


def quantization_config(options: ConvertOptions) -> dict[str, Any]:
    """The entry of ``config.json``: every option that shapes a tensor, and the values in force where one was left out.

    ``scales`` is null where each kernel got the layout it takes; the shards' headers say which, tensor by tensor. They
    also say where codes were kept, which ``allow_inexact`` alone does not tell.
    """
    return {
        "quant_method": QUANT_METHOD,
        "precision": options.precision,
        "layout": options.layout,
        "swizzle": options.swizzled,
        "scales": options.scales,
        "scale_rule": options.rule if options.quantized else None,
        "purpose": options.purpose,
        "tp_degree": options.tp_degree,
        "ep_degree": options.ep_degree,
        "pad": options.pad,
    }


def rewritten_files(plan: ConversionPlan) -> tuple[dict[str, bytes], dict[str, str | None]]:
    """Return the side files whose content differs from the source's, and the source's text by the same names.

    The latter is ``Manifest.replaced_files``: None for a file that the source does not have.
    """
    directory = plan.source.directory
    before: dict[str, str | None] = {CONFIG_FILE: _text(directory / CONFIG_FILE), CARD_FILE: None}
    if (directory / CARD_FILE).is_file():
        before[CARD_FILE] = _text(directory / CARD_FILE)
    content = json.loads(before[CONFIG_FILE] or "")
    if plan.source.format is not None:  # an export holds bf16 values, not what the source's entry describes
        content = unquantized(content)
        before[CONFIG_FILE] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    config = content | {QUANTIZATION_CONFIG: quantization_config(plan.options)}
    card = before[CARD_FILE] or ""
    gap = "\n" if card.endswith("\n") else "\n\n" if card else ""
    after = {
        CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        CARD_FILE: f"{card}{gap}{section(plan)}",
    }
    return {name: text.encode() for name, text in after.items()}, before


def _text(path: Path) -> str:
    """Read a file as text that encodes to the same bytes."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path.name, "text in UTF-8", error) from error


def _spelled_out(options: ConvertOptions) -> str:
    """The precision of the blocks in words."""
    if not isinstance(options.precision, PrecisionMap):
        return _PRECISIONS[options.precision]
    rows = [f"`{glob}`: {_PRECISIONS[own]}" for glob, own in options.precision.items()]
    return "; ".join(rows) + ". The first is that of modules that no other pattern matches"


def section(plan: ConversionPlan) -> str:
    """Return the Markdown that describes a conversion; the same plan gives the same text."""
    options = plan.options
    layouts = Counter(t.layout for t in plan.tensors if t.layout != SOURCE and t.layout not in SCALES)
    purpose, kept = _PURPOSES[options.purpose or "training"], "router, norms, embeddings, attention"
    if options.purpose != "inference" and not any(tensor.orientation == BACKWARD for tensor in plan.tensors):
        purpose += ", which are the same tensors in bf16"
    zeros: dict[str, int] = {}  # the most that a tensor has at the end of an axis
    for tensor in plan.tensors:
        zeros |= {axis: max(count, zeros.get(axis, 0)) for axis, count in tensor.padding.items()}
    padding = "none needed"
    if zeros:
        padding = "zeros at the end of " + " and ".join(f"{axis} (up to {zeros[axis]})" for axis in sorted(zeros))
    if plan.left:
        kept += f"; {len(plan.left)} modules that the kernels cannot compute"
    method = plan.source.format.method if plan.source.format is not None else ""
    quantized = {t.weight for t in plan.tensors if t.layout in SCALES}
    kept_codes = {t.weight for t in plan.tensors if t.layout in PERMUTED_WORDS.values()}
    rows = {
        "source": f"{method}, decoded to bf16{' but for the codes of permuted words' if kept_codes else ''}"
        if method
        else "",
        "precision": _spelled_out(options),
        "layout": ", ".join(f"{layout} ({counted(count, 'tensor')})" for layout, count in sorted(layouts.items())),
        "for": purpose,
        "scale rule": options.rule if options.quantized else "",
        "tensor parallelism": f"I axis split among {options.tp_degree} ranks, each with files of its own"
        if options.tp_degree > 1
        else "",
        "expert parallelism": f"experts dealt out to {options.ep_degree} ranks, each with files of its own"
        if options.ep_degree > 1
        else "",
        "padding": padding if options.pad else "",
        "kept as they were": f"{counted(len(plan.copied), 'tensor')}: {kept}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    lossy = quantized != kept_codes
    export = "hf-neuron-moe export DIR NEW" + (" --allow-inexact" if lossy else "")
    loss = "" if not lossy else " The values come back as the quantized ones; the original's bits are gone."
    return (
        f"{TITLE}\n\n"
        f"The MLP and expert weights of this checkpoint were rearranged with hf-neuron-moe {__version__} for the "
        "kernels of AWS Trainium. Stock transformers cannot read them; `import hf_neuron_moe` first.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"`{MANIFEST_FILE}` lists every tensor with its layout and checksum. `hf-neuron-moe verify DIR` checks them, "
        f"and `{export}` gives a stock checkpoint back.{loss}\n"
    )
