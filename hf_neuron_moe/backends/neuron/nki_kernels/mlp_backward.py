"""``mlp_backward_mxfp8_nki`` as redesigned in nki-library 2.31."""

from __future__ import annotations

from typing import Any

import nki

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

mlp_backward_mxfp8_nki = nkilib_object("mlp_backward_mxfp8_nki")


@nki.jit
def mlp_backward(
    output_grad: Any,
    hidden_states: Any,
    down_proj_weight: Any,
    gate_up_weights: Any,
    run_with_lnc2: bool,
    gate_pre: Any = None,
    gate_act: Any = None,
    up: Any = None,
    intermediate: Any = None,
) -> Any:
    """Return the gradients of the input ``[S, H]``, of gate and up ``[2I, H]`` and of down ``[H, I]``.

    Checkpoints are bf16 ``[S, I]``; the kernel recomputes those that are None.
    """
    return mlp_backward_mxfp8_nki(
        output_grad=output_grad,
        hidden_states=hidden_states,
        down_proj_weight=down_proj_weight,
        gate_up_weights=gate_up_weights,
        gate_pre=gate_pre,
        gate_act=gate_act,
        up=up,
        intermediate=intermediate,
        run_with_lnc2=run_with_lnc2,
    )
