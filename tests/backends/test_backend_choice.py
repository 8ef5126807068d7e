"""Which backend runs is decided once, visibly, and refused with the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.spec import BlockShape
from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast, choose_compute
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError
from tests.refusals import refused

CPU = torch.device("cpu")


def test_auto_and_torch_resolve_to_torch() -> None:
    assert resolve_backend("auto", CPU) == resolve_backend("torch", torch.device("meta")) == "torch"
    assert get_backend("torch").name == "torch"


@pytest.mark.parametrize("name", ["neuron", "nki-sim"])
def test_unavailable_backends_say_why(name: str) -> None:
    with refused(BackendUnavailableError, "backend", "Use backend='torch'", got=f"'{name}'"):
        resolve_backend(name, CPU)


def test_auto_means_neuron_on_its_device_and_says_what_is_missing() -> None:
    class NeuronDevice:
        type = "neuron"

    with refused(BackendUnavailableError, "backend", "nki is not installed"):
        resolve_backend("auto", NeuronDevice())  # type: ignore[arg-type]


def test_a_misspelt_backend_names_the_near_miss() -> None:
    with refused(ConfigError, "backend", "Did you mean 'torch'"):
        resolve_backend("toch", CPU)


def test_unknown_backend_object() -> None:
    with refused(BackendUnavailableError, "name", "resolve_backend"):
        get_backend("auto")


@pytest.mark.parametrize("native", [True, False])
def test_bf16_runs_natively_only_where_it_pays(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: native)
    many = choose_compute("bf16", CPU, rows_per_expert=500, weight_dtype=torch.bfloat16)
    few = choose_compute("bf16", CPU, rows_per_expert=1, weight_dtype=torch.bfloat16)
    cast = choose_compute("bf16", CPU, rows_per_expert=1, weight_dtype=torch.float32)
    assert many.operand == (torch.bfloat16 if native else torch.float32)
    assert few.operand == torch.bfloat16
    assert cast.operand == many.operand
    assert {c.rounded for c in (many, few, cast)} == {torch.bfloat16}


@pytest.mark.parametrize("native", [True, False])
def test_mxfp8_multiplies_as_bf16_does_and_fp32_in_fp32(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: native)
    mx, plain = (
        choose_compute(precision, CPU, rows_per_expert=1, weight_dtype=torch.bfloat16)
        for precision in ("mxfp8", "fp32")
    )
    assert mx.operand == (torch.bfloat16 if native else torch.float32) and mx.mx
    assert plain.operand == plain.rounded == torch.float32 and not plain.mx


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is asked once per process is asked again, and once more afterwards."""
    monkeypatch.delenv(compute.OPTION, raising=False)
    asked = (compute.environment_option, compute._cpu_bf16_matmul_is_fast)
    for ask in asked:
        ask.cache_clear()
    yield monkeypatch
    for ask in asked:
        ask.cache_clear()


def test_without_onednn_there_are_no_bf16_products(fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert bf16_matmul_is_fast(CPU) is False


@pytest.mark.parametrize(("value", "expected"), [("native", True), ("fp32", False)])
@pytest.mark.parametrize("instructions", [True, False])
def test_the_environment_overrides_the_processor(
    value: str, expected: bool, instructions: bool, fresh_choice: pytest.MonkeyPatch
) -> None:
    fresh_choice.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: instructions)
    assert bf16_matmul_is_fast(CPU) is instructions
    compute.environment_option.cache_clear()
    fresh_choice.setenv(compute.OPTION, value)
    assert bf16_matmul_is_fast(CPU) is bf16_matmul_is_fast(torch.device("cuda")) is expected


def test_another_value_of_the_environment_is_an_error(fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setenv(compute.OPTION, "fast")
    with refused(ConfigError, f"the environment variable {compute.OPTION}"):
        bf16_matmul_is_fast(CPU)


@pytest.mark.parametrize("held", ["AVX2", "avx512_core"])
def test_held_to_older_instructions_there_are_no_bf16_products(held: str, fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    fresh_choice.setenv("ONEDNN_MAX_CPU_ISA", held)
    assert bf16_matmul_is_fast(CPU) is False


def test_no_clock_decides(fresh_choice: pytest.MonkeyPatch) -> None:
    """Two processes of one run would compute other bits on a loaded machine."""
    for name in ("perf_counter", "monotonic", "process_time", "time"):
        fresh_choice.setattr(time, name, lambda: pytest.fail("a measurement"))
    bf16_matmul_is_fast(CPU)


def test_scratch_is_reused_by_the_next_call_and_can_be_released() -> None:
    from hf_neuron_moe.backends.torch.compute import call_scratch, release_scratch

    release_scratch()
    with torch.inference_mode():
        first = call_scratch(CPU).get("x", (4, 8), torch.float32)
    again = call_scratch(CPU).get("x", (2, 8), torch.float32)
    assert first.data_ptr() == again.data_ptr() and not again.is_inference()
    assert call_scratch(CPU).get("x", (2, 8), torch.bfloat16).data_ptr() != first.data_ptr()
    release_scratch()
    assert not call_scratch(CPU).buffers


def test_grouped_experts_are_computed_at_once_however_many_tokens_they_get() -> None:
    shape, cpu = BlockShape("experts", 64, 128, 4, 2), torch.device("cpu")
    words = TorchBackend.instance("torch-grouped").describe_products("bf16", cpu, shape)
    assert words.endswith(" of all experts at once")
