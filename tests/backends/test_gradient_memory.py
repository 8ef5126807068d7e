"""Memory of weight gradients is used again, and never while a tensor still needs it."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch import device_products, gradient_memory as module
from hf_neuron_moe.backends.torch.gradient_memory import GradientMemory, gradient_memory
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model

MODELS = {"llama": {}, "mixtral": {}, "many experts": {"num_local_experts": 32}}


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SMALLEST", 1)
    gc.collect()
    gradient_memory().release()
    yield
    gc.collect()
    gradient_memory().release()


def step(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The gradients of one step; those of the step before are gone."""
    model.zero_grad()
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(seed))
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if "mlp" in name and p.grad is not None}


def patched(family: str, home: str = "stock") -> nn.Module:
    name = "llama" if family == "llama" else "mixtral"
    model = tiny_model(name, num_hidden_layers=2, **MODELS[family]).to(torch.bfloat16).train()
    patch_model(model, {"precision": "bf16", "weights": home})
    return model


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_the_next_step_has_the_memory_and_its_own_values(
    family: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(family, home)
    step(model, 1)
    model.zero_grad()
    spare = gradient_memory().nbytes
    again = {name: grad.clone() for name, grad in step(model, 2).items()}
    model.zero_grad()
    assert gradient_memory().nbytes == spare > 0
    monkeypatch.setattr(module, "SMALLEST", 1 << 60)
    expected = step(model, 2)
    assert all(torch.equal(grad, expected[name]) for name, grad in again.items())


@pytest.mark.parametrize(
    "keep",
    [Tensor.detach, lambda grad: grad.flatten()[3:], lambda grad: grad.untyped_storage()],
    ids=["detached", "view", "storage"],
)
def test_memory_that_is_looked_at_is_not_used_again(keep: object) -> None:
    memory, weight = GradientMemory(), torch.zeros(40, 5)
    kept = keep(memory.empty_like(weight).fill_(7))  # type: ignore[operator]
    gc.collect()
    memory.empty_like(weight).fill_(1)
    values = torch.empty(0).set_(kept) if isinstance(kept, torch.UntypedStorage) else kept
    assert (values == 7).all()
    place = memory.empty_like(weight).data_ptr()
    assert place == memory.empty_like(weight).data_ptr(), "nobody looks at this one"


def test_memory_is_released_while_another_thread_takes_some() -> None:
    memory, interval = GradientMemory(), sys.getswitchinterval()

    def take() -> None:
        for size in range(1, 1500):
            memory.empty((size,), torch.uint8, torch.device("cpu"))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            taking = threads.submit(take)
            while not taking.done():
                assert memory.nbytes >= 0
                memory.release()
            taking.result()
    finally:
        sys.setswitchinterval(interval)


def test_memory_fits_shape_dtype_and_alignment() -> None:
    memory = GradientMemory()
    for shape, dtype in (((3, 7), torch.float32), ((3, 14), torch.bfloat16), ((2, 0), torch.bfloat16)):
        made = memory.empty_like(torch.zeros(shape, dtype=dtype).t())
        assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape[::-1]), dtype, True)
        assert made.data_ptr() % 64 == 0


def test_little_is_left_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1000)
    memory = GradientMemory()
    del_me = memory.empty_like(torch.zeros(249))
    assert del_me.untyped_storage().resizable()
    del del_me
    assert memory.nbytes == 0


def test_spare_memory_goes_with_training_mode_and_with_the_model() -> None:
    model = patched("llama")
    step(model, 1)
    model.zero_grad()
    assert gradient_memory().nbytes == sum(p.nbytes for n, p in model.named_parameters() if "mlp" in n)
    model.eval()
    assert gradient_memory().nbytes == 0
    step(model.train(), 1)
    model.zero_grad()
    assert gradient_memory().nbytes
    del model
    gc.collect()  # modules hold each other
    assert gradient_memory().nbytes == 0


def test_a_copy_of_a_model_releases_too() -> None:
    model = copy.deepcopy(patched("llama"))
    step(model, 1)
    model.zero_grad()
    assert gradient_memory().nbytes
    del model
    gc.collect()
    assert gradient_memory().nbytes == 0


def test_memory_in_use_at_a_release_is_not_kept_later() -> None:
    model = patched("llama")
    step(model, 1)
    model.eval()
    model.zero_grad()
    assert gradient_memory().nbytes == 0


def test_accumulated_gradients_are_those_of_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("mixtral")

    def two_steps() -> dict[str, Tensor]:
        step(model, 1)
        ids = torch.arange(20)[None]
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    reused = two_steps()
    monkeypatch.setattr(module, "SMALLEST", 1 << 60)
    expected = two_steps()
    assert all(torch.equal(grad, expected[name]) for name, grad in reused.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_few_rows_are_those_of_one_call(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    left, right = (torch.randn(21, size, generator=draw).to(dtype) for size in (16, 24))
    ends = torch.tensor([0, 1, 1, 9, 18, 18], dtype=torch.int32)  # three rows belong to no group
    gradient_memory().empty((6, 16, 24), dtype, left.device).fill_(7)  # what an earlier step left
    found = device_products._over_rows_in_pieces(left, right, ends, dtype, (None, None))
    expected = torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    assert torch.equal(found, expected) and not found[[0, 2, 5]].any()
    assert not found.untyped_storage().resizable(), "memory that is kept"
