"""How a wrapper kernel is called: through torch-neuronx on the device, or through NKI's simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hf_neuron_moe.backends.kernel_answers import current_answer
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.orientation import kernel_weight
from hf_neuron_moe.backends.neuron.versions import Toolchain
from hf_neuron_moe.backends.operator_registration import plugin_function
from hf_neuron_moe.backends.prepared import PreparedWeights
from hf_neuron_moe.errors import BackendUnavailableError, public


class Launcher:
    """Launches kernels on the grid ``(LNC,)``, physical cores per logical core; without a plugin in the simulator."""

    def __init__(self, toolchain: Toolchain, lnc: int) -> None:
        self.lnc = int(lnc)
        self._nki = toolchain.nki
        self._simulate = toolchain.torch_neuronx is None
        self._wrap = plugin_function("wrap_nki") if toolchain.torch_neuronx is not None else None
        self._wrapped: dict[Any, Any] = {}

    @public("neuron backend")
    def __call__(self, kernel: Callable[..., Any], /, **arguments: Any) -> tuple[Tensor, ...]:
        """Run `kernel`; tensors are made contiguous, arguments that are None are left out.

        Numbers are compile-time constants: each new value compiles the kernel anew. An entry without a branch for its
        options returns None.
        """
        # The simulator reads values through NumPy, which tensors that require gradients do not allow.
        given = {
            name: (value.detach() if self._simulate else value).contiguous() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
            if value is not None
        }
        result = self._grid(kernel)(**given)
        if result is None:
            name = getattr(kernel, "__name__", type(kernel).__name__)
            got = "None, so the installed nkilib has no branch for these options"
            fix = "Install the nki-library of SDK 2.33, or use backend='torch'."
            raise BackendUnavailableError.about(name, "a kernel that returns its outputs", got, fix)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def _grid(self, kernel: Any) -> Callable[..., Any]:
        # The grid belongs on the wrapped caller: a grid set on the kernel before wrapping it is ignored.
        if self._simulate:
            return self._nki.simulate(kernel[self.lnc])
        if kernel not in self._wrapped:
            self._wrapped[kernel] = kernel if self._wrap is None else self._wrap(kernel)
        return self._wrapped[kernel][(self.lnc,)]


@dataclass(frozen=True)
class Kernels:
    """What forward and backward of a kind of block call: found wrapper kernels, a launcher, prepared weights."""

    adapter: Adapter
    launch: Launcher
    weights: PreparedWeights

    def run(self, need: str, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        """Launch the wrapper kernel `name` of the installed generation of `need`."""
        if (answer := current_answer()) is not None:
            return answer(need, arguments)
        return self.launch(self.adapter.kernel(need, name), **arguments)

    def weight(self, *parts: Tensor, axes: str, wanted: str, block: Block, training: bool = True) -> Tensor:
        """Return `parts`, which have `axes`, as kernels read them; while `training` a copy stays for the next call."""
        hidden, inner = block.padded
        turn = partial(kernel_weight, axes=axes, wanted=wanted, hidden=hidden, inner=inner)
        return self.weights.get(f"{wanted} of {axes} {hidden}x{inner}", turn, *parts, keep=training)
