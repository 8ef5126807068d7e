"""What is installed, for which device, and why it cannot be used: said before anything is launched."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put modules into sys.modules for one test; None makes one impossible to import."""
    for variable in ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_FLAGS"):
        monkeypatch.delenv(variable, raising=False)

    def put(**modules: ModuleType | None) -> None:
        for name, found in modules.items():
            monkeypatch.setitem(sys.modules, name.replace("__", "."), found)

    return put


def working_stack() -> dict[str, ModuleType]:
    return {
        "nki": module("nki", jit=object, simulate=object, __version__="0.7.0b1"),
        "nkilib": module("nkilib"),
        "torch_neuronx": module("torch_neuronx", nki_op=object, __version__="2.14.3"),
        "torch_neuronx__utils": module(
            "torch_neuronx.utils", get_platform_target=lambda: "trn2", get_logical_neuron_cores=lambda: 1
        ),
    }


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.7.0", (0, 7, 0)),
        ("0.7.0b1", (0, 7, 0)),
        ("0.7.0rc2.dev3", (0, 7, 0)),
        ("2.14.3+abc", (2, 14, 3)),
        ("1!2.9.0.2.15.32035", (2, 9, 0, 2, 15, 32035)),
    ],
)
def test_releases_leave_pre_release_marks_out(version: str, numbers: tuple[int, ...]) -> None:
    assert versions.release(version) == numbers


def test_a_version_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'unknown'"):
        versions.release("unknown")


@pytest.mark.parametrize(
    ("nki", "sdk"), [("0.7.0b1", "2.33"), ("0.5.0", "2.31"), ("0.8.1", "later than 2.33"), ("0.1.0", None)]
)
def test_the_sdk_is_told_by_nki(install: Any, nki: str, sdk: str | None) -> None:
    install(nki=module("nki", __version__=nki))
    assert versions.sdk_generation() == sdk


def test_a_beta_of_the_minimum_will_do(install: Any) -> None:
    install(**working_stack())
    assert versions.why_unavailable() is None
    del sys.modules["torch_neuronx"].nki_op  # then torch.library registers the operators
    assert versions.why_unavailable() is None
    assert versions.toolchain().torch_neuronx is sys.modules["torch_neuronx"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"nki": None}, "nki is not installed"),
        ({"torch_neuronx": None}, "torch-neuronx is not installed"),
        ({"nki": module("nki")}, "placeholder"),
        ({"nki": module("nki", jit=object, __version__="0.6.0")}, "nki 0.6.0 is older than 0.7.0"),
        (
            {"torch_neuronx": module("torch_neuronx", __version__="2.9.0.2.15")},
            r"2.9.0.2.15 is older than 2.13.3 \(native",
        ),
        ({"torch_neuronx": module("torch_neuronx")}, "neither nki_op nor wrap_nki"),
        (
            {"torch_neuronx": module("torch_neuronx", nki_op=object, __version__="2.13.2")},
            "torch-neuronx 2.13.2 is older than 2.13.3",
        ),
    ],
)
def test_what_does_not_fit_is_named(install: Any, broken: dict[str, Any], reason: str) -> None:
    install(**(working_stack() | broken))
    with pytest.raises(BackendUnavailableError, match=f"'neuron': .*{reason}.*Use backend='torch'"):
        versions.toolchain()


def test_trn1_is_refused_and_the_simulator_needs_no_plugin(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(**working_stack())
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen2")
    assert versions.why_unavailable() == "trn1 is neither Trn2 nor Trn3"
    install(torch_neuronx=None)
    assert versions.why_unavailable(simulator=True) is None
    assert versions.toolchain(simulator=True).torch_neuronx is None
    install(nki=module("nki", jit=object, __version__="0.7.0"))
    assert versions.why_unavailable(simulator=True) == "the installed nki has no nki.simulate"


def test_the_platform_is_looked_for_in_order(install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    product.write_text("Trn2.48xlarge\n", encoding="ascii")
    monkeypatch.setattr(versions, "_PRODUCT_NAME", product)
    versions._product_name.cache_clear()
    install(torch_neuronx=None)
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    assert versions.platform() == versions.Detected("trn2", "the machine's product name")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--lnc 2 --target trn3")
    assert versions.platform().name == "trn3"
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=trn2")
    assert versions.platform() == versions.Detected("trn2", "NEURON_CC_FLAGS")
    stack = working_stack()
    stack["torch_neuronx__utils"].get_platform_target = lambda: "trn3"
    install(**stack)
    assert versions.platform() == versions.Detected("trn3", "torch_neuronx")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    assert versions.platform() == versions.Detected("trn2", "NEURON_PLATFORM_TARGET_OVERRIDE")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "h200")
    with pytest.raises(ConfigError, match="one of trn1, trn2, trn3"):
        versions.platform()
    versions._product_name.cache_clear()


def test_without_any_sign_of_a_device_the_platform_is_assumed(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    monkeypatch.setattr(versions, "_product_name", lambda: "")
    assert versions.platform().name == "trn3" and "assumed" in versions.platform().source


def test_lnc_is_the_variable_then_the_runtime_then_two(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    assert versions.lnc() == 2
    install(**working_stack())
    assert versions.lnc() == 1
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert versions.logical_cores() == versions.Detected("2", "NEURON_LOGICAL_NC_CONFIG")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(ConfigError, match="1 or 2, got '4'"):
        versions.lnc()
