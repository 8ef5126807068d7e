"""What is installed, for which device, and why it cannot be used: said before anything is launched."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.device.installed import inspect_installation
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError
from tests.refusals import refused


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put modules into sys.modules for one test; None makes one impossible to import."""
    for variable in (
        "NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_FLAGS", versions.LNC_OVERRIDE,
    ):  # fmt: skip
        monkeypatch.setenv(variable, "")  # so that it goes again where the test lets it be set
        monkeypatch.delenv(variable)

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
    with refused(ConfigError, "version", got="'unknown'"):
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
    with refused(BackendUnavailableError, "backend", f"{reason}.*Use backend='torch'", got="'neuron'"):
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
    with refused(ConfigError, "NEURON_PLATFORM_TARGET_OVERRIDE"):
        versions.platform()
    versions._product_name.cache_clear()


def test_without_any_sign_of_a_device_the_platform_is_assumed(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    monkeypatch.setattr(versions, "_product_name", lambda: "")
    assert versions.platform().name == "trn3" and "assumed" in versions.platform().source


def test_lnc_is_looked_for_in_order(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.LNC_OVERRIDE, raising=False)
    install(torch_neuronx=None)
    monkeypatch.delitem(sys.modules, "torch_neuronx")
    assert versions.logical_cores() == versions.Detected("2", "the default of Trn2 and Trn3")
    for flags in ("--lnc 1", "--lnc=1", "-O1 --logical-nc-config 1 --target trn2", "--lnc 2 --logical-nc-config=1"):
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        assert versions.logical_cores() == versions.Detected("1", "NEURON_CC_FLAGS")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    found = versions.logical_cores()
    assert (found.name, found.source) == ("2", "NEURON_LOGICAL_NC_CONFIG")
    assert found.contradiction == "but NEURON_CC_FLAGS says 1: make them agree"
    install(**working_stack())
    assert (versions.logical_cores().source, versions.logical_cores().name) == ("torch_neuronx", "1")
    assert versions.logical_cores().described == "torch_neuronx; but NEURON_LOGICAL_NC_CONFIG says 2: make them agree"
    monkeypatch.setenv(versions.LNC_OVERRIDE, "2")
    assert (versions.logical_cores().source, versions.logical_cores().name) == (versions.LNC_OVERRIDE, "2")
    monkeypatch.setenv(versions.LNC_OVERRIDE, "4")
    with refused(ConfigError, "LNC (HF_NEURON_MOE_LNC)", got="'4'"):
        versions.lnc()


def test_sources_of_lnc_that_contradict_each_other_are_an_error(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(**working_stack())
    assert versions.lnc() == 1
    monkeypatch.setenv(versions.LNC_OVERRIDE, "2")
    for ask in (versions.lnc, versions.toolchain):
        with refused(ConfigError, "LNC", "NEURON_LOGICAL_NC_CONFIG alone and before Python", got="2 by HF_NEURON_MOE"):
            ask()
    assert versions.LNC_VARIABLE not in os.environ


def test_the_variable_is_set_before_the_plugin_is_imported(
    install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As torch-neuronx has it: its answer is the variable, or the chip's default."""
    stack = working_stack()
    install(nki=stack["nki"], nkilib=stack["nkilib"])
    package = tmp_path / "torch_neuronx"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n__version__ = '2.14.3'\nnki_op = object\nseen = dict(os.environ)\n"
    )
    utils = "import os\ndef get_logical_neuron_cores(): return os.environ.get('NEURON_LOGICAL_NC_CONFIG', '2')\n"
    (package / "utils.py").write_text(utils + "def get_platform_target(): return 'trn2'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(versions.LNC_OVERRIDE, "1")
    for name in ("torch_neuronx", "torch_neuronx.utils"):
        monkeypatch.setitem(sys.modules, name, module(name))
        monkeypatch.delitem(sys.modules, name)
    assert versions.toolchain().torch_neuronx.seen[versions.LNC_VARIABLE] == "1" and versions.lnc() == 1  # type: ignore[union-attr]
    monkeypatch.delenv(versions.LNC_OVERRIDE)
    monkeypatch.setenv(versions.LNC_VARIABLE, "2")
    with refused(ConfigError, "LNC (NEURON_LOGICAL_NC_CONFIG)", "must be 1, with which the runtime runs", got="2"):
        versions.toolchain()
    monkeypatch.setenv(versions.LNC_VARIABLE, "1")
    versions.toolchain()


def test_an_imported_plugin_has_its_default_confirmed(install: Any) -> None:
    install(**working_stack())
    versions.settle_environment()
    assert os.environ[versions.LNC_VARIABLE] == "1"


def test_without_nki_the_environment_stays(install: Any) -> None:
    install(nki=None)
    with refused(BackendUnavailableError, "backend"):
        versions.toolchain()
    assert versions.LNC_VARIABLE not in os.environ


def test_flags_that_no_shell_would_take_are_refused(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--lnc '2")
    with refused(ConfigError, "NEURON_CC_FLAGS", "Close its quotation marks"):
        versions.logical_cores()


@pytest.mark.parametrize(
    ("answer", "name"),
    [("gen4", "trn3"), ("Gen3", "trn2"), ("gen2", "trn1"), ("trn2n", "trn2"), ("Trn3", "trn3"), ("inf2", "inf2")],
)
def test_the_runtime_may_name_the_platform_either_way(install: Any, answer: str, name: str) -> None:
    stack = working_stack()
    stack["torch_neuronx__utils"].get_platform_target = lambda: answer
    install(**stack)
    assert versions.platform() == versions.Detected(name, "torch_neuronx")
    stack["torch_neuronx__utils"].get_platform_target = lambda: Enum("PlatformTarget", {answer: 1})[answer]
    assert versions.platform() == versions.Detected(name, "torch_neuronx")
    refused = None if name in versions.PLATFORMS else f"{name} is neither Trn2 nor Trn3"
    assert versions.why_unavailable() == refused


@pytest.mark.parametrize(
    ("plugin", "torch", "shown"),
    [
        ("2.13.3", "2.13.0+cpu", None),
        ("2.14.3", "2.14.1", None),
        ("2.13.3", "2.14.0", "torch-neuronx 2.13.3 is documented with torch 2.13, and torch is 2.14.0"),
        ("2.14.3", "2.13.0", "torch-neuronx 2.14.3 is documented with torch 2.14, and torch is 2.13.0"),
    ],
)
def test_a_plugin_of_another_torch_is_told(
    install: Any, monkeypatch: pytest.MonkeyPatch, plugin: str, torch: str, shown: str | None
) -> None:
    install(**working_stack() | {"torch_neuronx": module("torch_neuronx", nki_op=object, __version__=plugin)})
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: torch)
    assert versions.pairing() == (shown and f"{shown}: install a matching pair")
    assert versions.why_unavailable() is None
    package = next(found for found in inspect_installation().packages if found.module == "torch_neuronx")
    assert (package.state, package.note) == ("ok", versions.pairing() or "")
