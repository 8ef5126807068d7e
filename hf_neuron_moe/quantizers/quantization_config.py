"""The ``quantization_config`` of a converted checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_neuron_moe.config import LAYOUTS, QUANT_METHOD, STORED_PRECISIONS as PRECISIONS
from hf_neuron_moe.errors import ConfigError, nearest, public
from hf_neuron_moe.precision_map import as_precision, precisions_in

ONE_DEVICE = "Load it on one device, or shard the loaded model afterwards."
_DAMAGED = "The conversion is damaged, or a later version of hf-neuron-moe wrote it: convert the original again."


class NeuronMoEQuantizationConfig(QuantizationConfigMixin):
    """What ``hf-neuron-moe convert`` made: which conversion this is.

    `precision` is ``"bf16"``, ``"mxfp8"``, ``"mxfp4"`` or a map of these by glob over module names. `layout` is
    ``"fused"`` or ``"kernel"``, `tp_degree` the number of ranks that the tensors are split among. `options` are the
    conversion's others. How a single tensor is stored is recorded in its shard's header, and loading goes by that.
    """

    @public("quantization_config")
    def __init__(
        self,
        precision: str | Mapping[str, str] = "mxfp8",
        layout: str = "kernel",
        tp_degree: int = 1,
        quant_method: str = QUANT_METHOD,
        **options: Any,
    ) -> None:
        known = as_precision(precision, PRECISIONS) if isinstance(precision, Mapping) else precision
        for name, value, allowed in (
            ("precision", precisions_in(known)[0], PRECISIONS),
            ("quant_method", quant_method, (QUANT_METHOD,)),
        ):
            if value not in allowed:
                fix = f"Was it written by a later version of hf-neuron-moe?{nearest(str(value), list(allowed))}"
                raise ConfigError.about(name, f"one of {', '.join(allowed)}", repr(value), fix)
        if type(tp_degree) is not int or tp_degree < 1:
            raise ConfigError.about("tp_degree", "a positive number", repr(tp_degree), _DAMAGED)
        if layout not in LAYOUTS:
            raise ConfigError.about("layout", f"one of {', '.join(LAYOUTS)}", repr(layout), _DAMAGED)
        self.quant_method = quant_method  # type: ignore[assignment] # the base class knows transformers' own ones only
        self.precision, self.layout, self.tp_degree = known, layout, tp_degree
        for name, value in options.items():
            if hasattr(type(self), name) or not isinstance(value, (str, int, type(None))):
                expected = "an option of a conversion: a text, a number or none"
                raise ConfigError.about(name, expected, type(value).__name__, _DAMAGED)
            setattr(self, name, value)

    @property
    def dequantize(self) -> bool:
        """Whether the loaded model is an ordinary, trainable one (transformers then forgets the configuration)."""
        return precisions_in(self.precision) == ("bf16",)
