"""``mlp_forward_mxfp8_nki`` (nki-library 2.30 and later) with pre-quantized weights."""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

mlp_forward_mxfp8_nki = nkilib_object("mlp_forward_mxfp8_nki")


@nki.jit
def mlp_forward_quantized(
    hidden: Any,
    gate_up_weights: Any,
    down_weights: Any,
    gate_up_scales: Any,
    down_scales: Any,
    run_with_lnc2: bool,
) -> Any:
    """Return y and the intermediate.

    Weights are float8_e4m3fn ``[H/4, 8I]`` and ``[I/4, 4H]``, swizzled; scales uint8, packed, as is the default.
    """
    shape = (hidden.shape[0], down_weights.shape[0] * 4)
    intermediate = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    output = mlp_forward_mxfp8_nki(
        hidden=hidden,
        gate_up_weights=gate_up_weights,
        down_weights=down_weights,
        intermediate_hbm=intermediate,
        run_with_lnc2=run_with_lnc2,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
    )
    return output, intermediate
