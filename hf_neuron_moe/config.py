"""Options of :func:`hf_neuron_moe.patch_model`, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_neuron_moe.activation_policy import (
    Activations,
    as_activations,
    check_for_precision,
    check_option_names,
    to_plain,
)
from hf_neuron_moe.errors import ConfigError, nearest, not_one_of, public
from hf_neuron_moe.precision_map import as_precision, precisions_in

QUANT_METHOD = "neuron_moe"
"""Value of ``quant_method`` in the ``quantization_config`` of a converted checkpoint."""
PRECISIONS = ("bf16", "mxfp8", "fp32")
BACKENDS = {
    "torch": "hf_neuron_moe.backends.torch.backend:TorchBackend",
    "torch-grouped": "hf_neuron_moe.backends.torch.backend:TorchBackend",
    "triton": "hf_neuron_moe.backends.triton.backend:TritonBackend",
    "neuron": "hf_neuron_moe.backends.neuron.backend:NeuronBackend",
    "nki-sim": "hf_neuron_moe.backends.neuron.backend:NeuronBackend",
}
"""Where the class of each backend is (:class:`hf_neuron_moe.backends.base.Backend`); imported when asked for."""
DEFAULT_BACKEND = "torch"
"""What computes on devices that :data:`DEVICE_BACKENDS` does not name."""
DEVICE_BACKENDS = {"neuron": "neuron"}
"""By device type: the backend that ``"auto"`` means there."""
FALLBACKS = ("refuse", "torch")
WEIGHT_LAYOUTS = ("auto", "stock", "kernel")
BLOCK_SIZES = (128, 256, 512, 1024, 2048, 4096)
"""Tokens per block that ``blockwise_mm_bwd`` accepts (2048 and 4096 since release 2.33)."""
ACCUMULATIONS = ("convention", "device")
"""How the reference of the MoE kernels sums: in fp32 with one rounding, or in the I/O dtype block by block and core by
core, as the device does."""

# What `hf_neuron_moe.convert` takes.
STORED_PRECISIONS = ("bf16", "mxfp8", "mxfp4")
LAYOUTS = ("fused", "kernel")
SCALE_LAYOUTS = ("packed", "oversized", "compact")
SCALE_RULES = ("neuron", "floor", "ceil", "rceil", "even")
PURPOSES = ("inference", "training", "lora")
ON_NONFINITE = ("error", "keep")

# What `hf_neuron_moe.training.estimate_training` takes.
OPTIMIZERS = ("adamw", "adafactor", "sgd")
MOST_TOKENS, MOST_RANK = 2**31 - 1, 65536
"""Per step, and of adapters: their products with a model's sizes stay within the 63 bits of a tensor's bytes."""


@dataclass(frozen=True)
class NeuronMoEConfig:
    """What a patched block computes and where its weights live.

    Attributes:
        precision: ``"bf16"``: operands of every matmul are bfloat16, accumulation is fp32. ``"mxfp8"``: both operands
            of every matmul are quantized to MXFP8 (e4m3, Neuron block-scale rule) along its contraction axis.
            ``"fp32"``: exact; for tests and for CPUs. This holds whatever the dtype of the parameters is.
            A mapping gives blocks their own, by glob over module names: ``{"*": "mxfp8", "model.layers.0.*": "bf16"}``.
            ``"*"`` is needed and holds for blocks that no other glob matches. Every other glob must match a block, and
            those that match the same block must agree.
        backend: ``"torch"`` computes the kernels' contract with PyTorch on any device. ``"torch-grouped"`` does the
            same with all experts of a layer at once and no value read of an accelerator, ``"triton"`` that with Triton
            kernels on CUDA. ``"neuron"`` calls nkilib's kernels, ``"nki-sim"`` the same in NKI's simulator. ``"auto"``
            chooses by device, and never ``"triton"``, which no GPU has run.
        weights: ``"stock"`` leaves the parameters in Hugging Face's layout and reads them through views; ``"kernel"``
            moves them into the kernels' layout (dense ``[2I, H]``, experts ``[E, H, 2I]`` and ``[E, I, H]``).
            ``"auto"`` is ``"stock"`` on the torch backend, and for a model that is patched already, such as a loaded
            conversion, the layout that it has. ``state_dict`` and results are the same in either case.
        block_size: tokens per block of the blockwise MoE kernels. It decides which tokens share an MX scale in the
            weight gradients of ``"mxfp8"``; it does not change ``"bf16"`` and ``"fp32"`` results.
        activations: what a block saves for its backward. ``"full"``: its input and every checkpoint that the kernels of
            this precision have (gate_pre and up; for ``"mxfp8"`` also gate_act and intermediate). ``"minimal"``: its
            input, gate_pre and seven eighths of the columns of up. ``"recompute"``: the input only. These three give
            the same gradients, on the torch backend bit for bit. On Neuron, bf16 experts that keep gate_pre and up
            round them before they use them. Others do not (one rounding to bf16). ``"fp8"``: input, gate_pre and up in
            FP8 (e4m3, groups of 64 with one bf16 scale); the backward is that of COAT, ``fp8_mul_backward``, and the
            gradients differ by what FP8 loses.
            Also an :class:`~hf_neuron_moe.activation_policy.ActivationPolicy` (which checkpoints, with exceptions by
            glob), a budget (:class:`~hf_neuron_moe.activation_policy.ActivationBudget`, or ``"48KiB/token"``,
            ``"2GiB/8192tokens"``) that ``patch_model`` solves per module, or the mapping of either.
        fallback: for a block that the backend's kernels cannot compute (a precision, shape or option they do not have):
            ``"refuse"`` is an error with the reason, ``"torch"`` computes it with PyTorch on the model's device, and
            the report says so and why.
    """

    precision: Any = "bf16"
    backend: str = "auto"
    weights: str = "auto"
    block_size: int = 512
    activations: Activations = "minimal"
    fallback: str = "refuse"

    @public("NeuronMoEConfig")
    def __new__(cls, *args: Any, **options: Any) -> NeuronMoEConfig:
        """Refuse misspelt option names with the package's own error, before the generated ``__init__`` sees them."""
        check_option_names(cls, options, "Remove or rename it.")
        return super().__new__(cls)

    @public("NeuronMoEConfig")
    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", as_precision(self.precision, PRECISIONS))
        choices = {"backend": ("auto", *BACKENDS), "weights": WEIGHT_LAYOUTS, "fallback": FALLBACKS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise not_one_of(name, value, allowed, _hint(name, value, allowed))
        object.__setattr__(self, "activations", as_activations(self.activations))
        kinds = precisions_in(self.precision)  # of a map, patch_model checks each block's own
        check_for_precision(self.activations, "mxfp8" if "mxfp8" in kinds else kinds[0])
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            fix = "512 suits most models; smaller blocks pad less when experts get few tokens."
            raise ConfigError.about("block_size", f"one of {BLOCK_SIZES}", repr(self.block_size), fix)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values that ``json.dumps`` accepts; :meth:`from_dict` is the inverse."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        precision = dict(self.precision) if isinstance(self.precision, Mapping) else self.precision
        return values | {"precision": precision, "activations": to_plain(self.activations)}

    @classmethod
    @public("NeuronMoEConfig.from_dict")
    def from_dict(cls, options: Mapping[str, Any]) -> NeuronMoEConfig:
        """Build a config from a mapping; unknown option names are errors."""
        if not isinstance(options, Mapping):
            raise ConfigError.about(
                "options",
                "a mapping of option names to values",
                f"{options!r} ({type(options).__name__})",
                'For example {"precision": "mxfp8"}.',
            )
        check_option_names(cls, options, "Remove or rename it.")
        return cls(**options)


def _hint(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """What was probably meant; chips and devices are no backends, and look more like another name than like theirs."""
    if not isinstance(value, str):
        return ""
    if name == "backend" and value.lower().startswith(("trn", "trainium")):
        return " Trn2 and Trn3 are reached by 'neuron', which detects the chip."
    if name == "backend" and value.lower() in ("cpu", "cuda", "gpu", "mps"):
        return " 'torch' computes on the device where the model is."
    return nearest(value, list(allowed))
