"""``mlp_forward_mxfp8_nki`` (nki-library 2.30 and later)."""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

mlp_forward_mxfp8_nki = nkilib_object("mlp_forward_mxfp8_nki")


@nki.jit
def mlp_forward(hidden: Any, gate_up_weights: Any, down_weights: Any, run_with_lnc2: bool) -> Any:
    """Return y ``[S, H]`` and the intermediate ``[S, I]``; weights are bf16 ``[2I, H]`` and ``[H, I]``."""
    shape = (hidden.shape[0], down_weights.shape[1])
    intermediate = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    output = mlp_forward_mxfp8_nki(
        hidden=hidden,
        gate_up_weights=gate_up_weights,
        down_weights=down_weights,
        intermediate_hbm=intermediate,
        run_with_lnc2=run_with_lnc2,
    )
    return output, intermediate


@nki.jit
def mlp_forward_keeping(hidden: Any, gate_up_weights: Any, down_weights: Any, run_with_lnc2: bool) -> Any:
    """Return y, the intermediate, and the pre-activations gate_pre and up, each ``[S, I]``.

    ``save_hidden`` is not passed: with it the kernel would leave ``intermediate_hbm`` unwritten.
    """
    shape = (hidden.shape[0], down_weights.shape[1])
    intermediate = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    gate_pre = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    up = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    output = mlp_forward_mxfp8_nki(
        hidden=hidden,
        gate_up_weights=gate_up_weights,
        down_weights=down_weights,
        intermediate_hbm=intermediate,
        run_with_lnc2=run_with_lnc2,
        save_gate_pre=gate_pre,
        save_up=up,
    )
    return output, intermediate, gate_pre, up
