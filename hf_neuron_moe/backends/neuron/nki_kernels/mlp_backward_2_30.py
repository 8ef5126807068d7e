"""``mlp_backward_mxfp8_nki`` as it was in nki-library 2.30: operands transposed by the caller, scratch passed in."""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object

mlp_backward_mxfp8_nki = nkilib_object("mlp_backward_mxfp8_nki")


@nki.jit
def mlp_backward(
    output_hidden_states_grad: Any,
    hidden_states: Any,
    gate_proj_weight_T: Any,
    up_proj_weight_T: Any,
    down_proj_weight_T: Any,
    gate_up_weights: Any,
    hidden_states_T: Any,
    output_grad_T: Any,
    hidden_T: Any,
    run_with_lnc2: bool,
    gate_pre: Any = None,
    gate_act: Any = None,
    up: Any = None,
    hidden: Any = None,
) -> Any:
    """Return the gradients of the input ``[S, H]``, gate and up ``[2I, H]`` and down ``[H, I]``, then the scratch.

    `hidden_T` is the transposed intermediate ``[I, S]``: the down gradient is made from it and never from `hidden`.
    """
    shape = (hidden_T.shape[1], hidden_T.shape[0])
    d_gate = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    d_up = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    d_gate_up_T = nl.ndarray((2 * shape[1], shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    new_gate_pre = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    new_gate_act = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    new_up = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    new_hidden = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    d_input, d_gate_up, d_down = mlp_backward_mxfp8_nki(
        output_hidden_states_grad=output_hidden_states_grad,
        hidden_states=hidden_states,
        gate_proj_weight_T=gate_proj_weight_T,
        up_proj_weight_T=up_proj_weight_T,
        down_proj_weight_T=down_proj_weight_T,
        gate_up_weights=gate_up_weights,
        d_gate_scratch=d_gate,
        d_up_scratch=d_up,
        hidden_states_T=hidden_states_T,
        output_grad_T=output_grad_T,
        hidden_T=hidden_T,
        silu_up_mul_gate_grad_T_scratch=d_gate_up_T,
        gate_pre_scratch=new_gate_pre,
        gate_act_scratch=new_gate_act,
        up_scratch=new_up,
        hidden_scratch=new_hidden,
        gate_pre=gate_pre,
        gate_act=gate_act,
        up=up,
        hidden=hidden,
        run_with_lnc2=run_with_lnc2,
    )
    return d_input, d_gate_up, d_down, d_gate, d_up, d_gate_up_T, new_gate_pre, new_gate_act, new_up, new_hidden
