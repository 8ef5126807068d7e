"""What a conversion changes in the files beside the weights: ``config.json`` and the model card.

``config.json`` gets a ``quantization_config`` from which ``from_pretrained`` knows what it has before it opens a shard.
The texts that the source had are kept in the manifest, so that export gives them back byte for byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert.card import CARD_FILE, with_section
from hf_neuron_moe.convert.io.folder import CONFIG_FILE
from hf_neuron_moe.convert.io.source import damaged
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.errors import public

QUANT_METHOD = "neuron_moe"

QUANTIZATION_CONFIG = "quantization_config"


def quantization_config(options: ConvertOptions) -> dict[str, Any]:
    """The entry of ``config.json``: every option that shapes a tensor, and the values in force where one was left out.

    ``scales`` is null where each kernel got the layout it takes; the shards' headers say which, tensor by tensor.
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
        "pad": options.pad,
    }


def rewritten_files(plan: ConversionPlan) -> tuple[dict[str, bytes], dict[str, str | None]]:
    """Make the side files whose content differs from the source's.

    Returns:
        Content by name, and the source's text by the same names (None for a file that it does not have): the latter is
        ``Manifest.replaced_files``.
    """
    directory = plan.source.directory
    before: dict[str, str | None] = {CONFIG_FILE: _text(directory / CONFIG_FILE)}
    card = directory / CARD_FILE
    before[CARD_FILE] = _text(card) if card.is_file() else None
    config = json.loads(before[CONFIG_FILE] or "")
    config[QUANTIZATION_CONFIG] = quantization_config(plan.options)
    after = {
        CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        CARD_FILE: with_section(before[CARD_FILE], plan),
    }
    return {name: text.encode() for name, text in after.items()}, before


@public("convert")
def _text(path: Path) -> str:
    """Read a file as text that encodes to the same bytes."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path.name, "text in UTF-8", error) from error
