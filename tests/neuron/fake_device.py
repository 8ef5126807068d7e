"""Train a tiny model on a fake ``neuron`` device: shapes, dtypes and devices, no values. Run as a script of its own.

Renaming torch's private device is for good, so this runs in a process of its own (``test_fake_device.py`` starts it).
Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration


class NeuronModule:
    """What ``torch.neuron`` needs for fake tensors."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        assert torch.device(device).type == "neuron" if not isinstance(device, int) else device == 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        assert isinstance(seed, int)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: Any, device: Any = None) -> None:
        assert state.dtype == torch.uint8

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def is_bf16_supported() -> bool:
        return True


def on_neuron(model: torch.nn.Module) -> torch.nn.Module:
    """Exchange all tensors of a model for fake ones on the device; ``Module.to`` cannot exchange fake parameters."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                values = torch.empty(param.shape, dtype=torch.bfloat16, device="neuron:0")
                module._parameters[name] = torch.nn.Parameter(values)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="neuron:0")
    return model


def train_on_fakes(name: str) -> dict[str, Any]:
    """One forward and backward of a patched model whose parameters are fake neuron tensors."""
    from hf_neuron_moe import patch_model
    from hf_neuron_moe.backends import resolve_backend
    from tests.neuron.double.contract import Double
    from tests.neuron.double.install import installed
    from tests.neuron.small_runs import CASES

    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder), Double(target=case.target)) as found:
        model = case.model()
        patch_model(model, {**case.options, "backend": "neuron"})
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = on_neuron(model)
            ids = torch.zeros(2, 12, dtype=torch.long, device="neuron:0")
            loss = fake(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            grads = {key: p.grad for key, p in fake.named_parameters()}
        return {
            "auto": resolve_backend("auto", torch.device("neuron:0")),
            "loss": str(loss.device),
            "parameters": sorted({str(p.device) for p in fake.parameters()}),
            "gradients": sorted({str(None if g is None else g.device) for g in grads.values()}),
            "shapes": all(g is not None and g.shape == p.shape for g, p in zip(grads.values(), fake.parameters())),
            "launches": len(found.double.launches),
            "traced": found.double.traced,
        }


def trace_bodies(name: str) -> dict[str, Any]:
    """The backend's own calls on fake neuron tensors, kernels included, as a compiler traces an operator's body."""
    from hf_neuron_moe.backends import get_backend
    from tests.flat_backend import flat
    from tests.neuron.double.contract import Double
    from tests.neuron.double.install import installed
    from tests.neuron.small_runs import CASES

    case = CASES[name]
    H, inner = case.sizes["hidden_size"], case.sizes["intermediate_size"]
    with tempfile.TemporaryDirectory() as folder, installed(Path(folder), Double(target=case.target)) as found:
        backend = flat(get_backend("neuron"))
        with FakeTensorMode():

            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device="neuron:0")

            x = empty(20, H)
            if name == "dense":
                operands: tuple[Any, ...] = (x, empty(inner, H), empty(inner, H), empty(H, inner))
                y, saved = backend.mlp_forward(*operands, case.precision, "minimal")
                grads = backend.mlp_backward(y, *operands, saved, case.precision, "minimal", True, True)
            else:
                index, weight = empty(20, 2, dtype=torch.long), empty(20, 2, dtype=torch.float32)
                operands = (x, index, weight, empty(4, 2 * inner, H), empty(4, H, inner))
                options = (False, case.precision, case.block_size, "minimal")
                y, saved = backend.experts_forward(*operands, *options)
                grads = backend.experts_backward(y, *operands, saved, *options, True, True, True)
        devices = sorted({str(tensor.device) for tensor in (y, *saved, *grads)})
        return {"devices": devices, "traced": len(found.double.traced), "launches": len(found.double.launches)}


def main() -> None:
    """Register the device, run what the command line names."""
    setup = backend_registration._setup_privateuseone_for_python_backend
    setup("neuron", backend_module=NeuronModule())
    print(json.dumps({name: {**train_on_fakes(name), "bodies": trace_bodies(name)} for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
