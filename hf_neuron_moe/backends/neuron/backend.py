"""The Neuron backend: nkilib's kernels behind the :class:`~hf_neuron_moe.backends.base.Backend` protocol.

Letters: S or T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.copies import weight_copy_bytes
from hf_neuron_moe.backends.neuron.dense import DenseKernels, fake_saved
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, Experts
from hf_neuron_moe.backends.neuron.launch import Launcher
from hf_neuron_moe.backends.neuron.limits import Block, check_call, most_tokens, this_device, why_not, why_not_tokens
from hf_neuron_moe.backends.neuron.quantized_experts import FROZEN_TOKENS, FrozenKernels
from hf_neuron_moe.backends.prepared import FreshWeights, PreparedWeights
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.errors import BackendUnavailableError

NEURON, SIMULATOR = "neuron", "nki-sim"


class NeuronBackend:
    """Implements :class:`~hf_neuron_moe.backends.base.Backend` with the installed nkilib.

    :attr:`without_copies` is the same backend for weights that exist for one call only: it keeps no copies of them.

    What a policy keeps differs from the protocol's description in form, not in meaning: dense checkpoints are
    ``[S, I]`` padded to multiples of 128, all columns of up; experts keep gate and up in the kernels' blocks
    ``[N, 2, I, B]``, and only together: their kernels have no other checkpoint, so a policy that keeps one of the two
    keeps none. ``"fp8"`` rounds what the kernels wrote and read; experts then have no FP8 rounding of the gate's
    activation, which COAT has.

    Args:
        name: ``"neuron"``, or ``"nki-sim"`` for NKI's simulator.

    Raises:
        BackendUnavailableError: the Neuron stack cannot be used here.
    """

    def __init__(self, name: str = NEURON) -> None:
        self.name = name
        toolchain = versions.toolchain(simulator=name == SIMULATOR)
        self.adapter = Adapter()
        self.device = this_device()
        self.weights = PreparedWeights()
        launch = Launcher(toolchain, self.device.lnc)
        self._dense = DenseKernels(self.adapter, launch, self.weights)
        self._experts = ExpertKernels(self.adapter, launch, self.weights)
        self._frozen = FrozenKernels(self.adapter, launch, self.weights)
        self._torch = TorchBackend()
        self.without_copies = self._with(FreshWeights())

    def _with(self, weights: PreparedWeights) -> NeuronBackend:
        """Return this backend with another store of copies; kernels, launcher and device are shared."""
        twin = copy.copy(self)
        twin.weights = weights
        twin._dense = replace(self._dense, weights=weights)
        twin._experts = replace(self._experts, weights=weights)
        twin._frozen = replace(self._frozen, weights=weights)
        twin.without_copies = twin
        return twin

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weight copies in kernel orientation that exist now; at most one optimizer step old."""
        return self.weights.nbytes

    def why_not(self, block: Block) -> str | None:
        """Return why the kernels cannot compute `block`, or None."""
        return why_not(block, self.device, self.adapter)

    def why_not_experts(self, precision: str, hidden: int, inner: int, block_size: int, tokens: int = 0) -> str | None:
        """Return why the kernels cannot compute experts of these sizes, or a call of so many tokens, or None."""
        block = Block("experts", precision, hidden, inner, block_size)
        return self.why_not(block) or why_not_tokens(most_tokens(block), tokens)

    def most_tokens(self, block: Block) -> int | None:
        """Return the largest number of tokens of one call that the kernels take; None if there is no limit."""
        return most_tokens(block)

    def weight_copy_bytes(self, block: Block, experts: int | None, ordered: bool, dtype: torch.dtype) -> int:
        """Return the bytes of the weight copies that forward and backward of a block need.

        Args:
            block: the block; :meth:`why_not` is None for it.
            experts: E; None for a dense MLP.
            ordered: gate and up are one tensor (dense), or weights are ``[E, H, 2I]`` and ``[E, I, H]`` (experts).
            dtype: of the parameters.
        """
        return weight_copy_bytes(self.adapter, block, experts, ordered, dtype)

    def why_not_frozen(self, stack: MXExpertStack, training: bool, tokens: int = 0) -> str | None:
        """Return why the kernels cannot compute a block with MX weights, or a call of so many tokens, or None."""
        most = FROZEN_TOKENS if stack.gate_up_codes.dim() > 2 else None
        return self._frozen.why_not(stack, self.device, training) or why_not_tokens(most, tokens)

    def fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> Saved:
        return fake_saved(x, rows, Block("mlp", "mxfp8", x.shape[1], intermediate), keep)

    def fake_experts_saved(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
    ) -> Saved:
        experts = _experts(gate_up, down, transposed, precision, block_size)
        return self._experts.fake_saved(x_TH, index_TK.shape[1], experts, keep)

    def frozen_fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> tuple[Tensor, Tensor]:
        return self._torch.frozen_fake_saved(x, rows, intermediate, keep)

    def mlp_few_rows(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str
    ) -> Tensor | None:
        return None

    def mlp_forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, keep: str
    ) -> tuple[Tensor, Saved]:
        block = self._checked(Block("mlp", precision, *down_HI.shape), x_SH)
        return self._dense.forward(x_SH, gate_IH, up_IH, down_HI, block, keep)

    def mlp_backward(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        gate_IH: Tensor,
        up_IH: Tensor,
        down_HI: Tensor,
        saved: Saved,
        precision: str,
        keep: str,
        wants_input: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        block = self._checked(Block("mlp", precision, *down_HI.shape), dout_SH)
        d_x, *d_weights = self._dense.backward(dout_SH, x_SH, gate_IH, up_IH, down_HI, saved, block, keep)
        d_gate, d_up, d_down = (_wanted(grad, wants_weights, dout_SH) for grad in d_weights)
        return _wanted(d_x, wants_input, dout_SH), d_gate, d_up, d_down

    def experts_forward(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
    ) -> tuple[Tensor, Saved]:
        experts = _experts(gate_up, down, transposed, precision, block_size)
        self._checked(experts.block, x_TH)
        return self._experts.forward(x_TH, index_TK, weight_TK, experts, keep)

    def experts_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        saved: Saved,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
        wants_input: bool,
        wants_routing: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        experts = _experts(gate_up, down, transposed, precision, block_size)
        self._checked(experts.block, dout_TH)
        grads = self._experts.backward(dout_TH, x_TH, index_TK, weight_TK, experts, saved, keep)
        wants = (wants_input, wants_routing, wants_weights, wants_weights)
        d_x, d_weight, d_gate_up, d_down = (_wanted(grad, want, dout_TH) for grad, want in zip(grads, wants))
        return d_x, d_weight, d_gate_up, d_down

    def frozen_forward(
        self, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack, keep: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        reason = self.why_not_frozen(stack, training=bool(keep))
        if reason is not None:
            raise _no_frozen_kernel(reason)
        out_TH = self._frozen.forward(x_TH, index_TK, weight_TK, stack)
        return out_TH, x_TH.new_empty(0), x_TH.new_empty(0)

    def frozen_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        index_TK: Tensor | None,
        weight_TK: Tensor | None,
        stack: MXExpertStack,
        saved: tuple[Tensor, Tensor],
        keep: str,
        wants_input: bool,
        wants_routing: bool,
    ) -> tuple[Tensor, Tensor]:
        raise _no_frozen_kernel(str(self.why_not_frozen(stack, training=True)))

    def _checked(self, block: Block, rows: Tensor) -> Block:
        """Refuse what the kernels would not take, before one is called."""
        check_call(block, rows.shape[0], str(rows.dtype), self.device, self.adapter)
        return block


_machines: dict[str, tuple[Any, ...]] = {}
_backends: dict[str, NeuronBackend] = {}


def neuron_backend(name: str) -> NeuronBackend:
    """Return the backend for the Neuron stack that is installed now, the same object while that stays the same."""
    if name in _backends and torch.compiler.is_compiling():  # looking at the machine cannot be traced
        return _backends[name]
    if name not in _backends or _machines[name] != _machine():
        _backends[name] = NeuronBackend(name)
        _machines[name] = _machine()
    return _backends[name]


def drop_copies(weights: Iterable[Tensor]) -> int:
    """Drop the copies of `weights` in all backends; return their bytes."""
    sources = list(weights)
    return sum(backend.weights.drop(sources) for backend in _backends.values())


def _machine() -> tuple[Any, ...]:
    """What a backend depends on: the imported modules, the platform and the logical cores."""
    modules = (sys.modules.get(module) for module in ("nki", "nkilib", "torch_neuronx"))
    return *modules, versions.platform(), versions.lnc()


def _experts(gate_up: Tensor, down: Tensor, transposed: bool, precision: str, block_size: int) -> Experts:
    inner, hidden = down.shape[1:] if transposed else down.shape[:0:-1]
    return Experts(gate_up, down, transposed, Block("experts", precision, hidden, inner, block_size))


def _wanted(grad: Tensor, wanted: bool, anchor: Tensor) -> Tensor:
    return grad if wanted else anchor.new_empty(0)


def _no_frozen_kernel(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError.about(
        "a block with MX weights",
        "one that the installed kernels compute",
        reason,
        "Use fallback='torch' to compute such blocks without the kernels.",
    ).named("neuron backend")
