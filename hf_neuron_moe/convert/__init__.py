"""Checkpoint conversion: Hugging Face safetensors folders to the kernels' weight layouts, and back."""

from __future__ import annotations

from hf_neuron_moe.config import LAYOUTS, PURPOSES, SCALE_LAYOUTS, SCALE_RULES, STORED_PRECISIONS as PRECISIONS
from hf_neuron_moe.convert.commands import convert_checkpoint, finalize_checkpoint
from hf_neuron_moe.convert.export import ExportReport, export_checkpoint
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, Manifest, read_manifest
from hf_neuron_moe.convert.notes import nonfinite_note, rounding_note
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan, plan_conversion

__all__ = [
    "LAYOUTS",
    "MANIFEST_FILE",
    "PRECISIONS",
    "PURPOSES",
    "SCALE_LAYOUTS",
    "SCALE_RULES",
    "ConversionPlan",
    "ConvertOptions",
    "ExportReport",
    "Manifest",
    "convert_checkpoint",
    "export_checkpoint",
    "finalize_checkpoint",
    "nonfinite_note",
    "plan_conversion",
    "read_manifest",
    "rounding_note",
]
