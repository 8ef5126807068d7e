"""Every way to the device settles how many physical cores a logical one has, before the device is used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_neuron_moe import NeuronMoEArguments, NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.backends.neuron.versions import LNC_OVERRIDE, LNC_VARIABLE
from hf_neuron_moe.cli.main import main
from hf_neuron_moe.device.installed import inspect_installation
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError
from tests.refusals import refused
from tests.tiny_models import tiny_model

Machine = Callable[..., SimpleNamespace]


def tiny() -> Any:
    return tiny_model("llama", num_hidden_layers=1, hidden_size=128, intermediate_size=128).bfloat16()


def patch(folder: Path) -> None:
    patch_model(tiny(), {"backend": "neuron", "precision": "mxfp8"})


def arguments(folder: Path) -> None:
    NeuronMoETrainingArguments(output_dir=str(folder), use_cpu=True, neuron_backend="neuron")


def mixed_in(folder: Path) -> None:
    NeuronMoEArguments(neuron_backend="nki-sim")


ENTRIES = (patch, arguments, mixed_in)


@pytest.mark.parametrize("enter", ENTRIES)
def test_an_entry_point_sets_the_variable(
    enter: Callable[[Path], None], machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    monkeypatch.delenv(LNC_VARIABLE)
    enter(tmp_path)
    assert (os.environ[LNC_VARIABLE], os.environ["HF_DEACTIVATE_ASYNC_LOAD"]) == ("2", "1")


def test_the_passes_of_earlier_releases_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "custom")
    with refused(BackendUnavailableError, "backend", "NKI_COMPILER_FRONTEND is custom", got="'neuron'"):
        patch_model(tiny(), {"backend": "neuron", "precision": "mxfp8"})
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "python")
    patch_model(tiny(), {"backend": "neuron", "precision": "mxfp8"})


@pytest.mark.parametrize("enter", ENTRIES)
@pytest.mark.parametrize("variable", [LNC_OVERRIDE, LNC_VARIABLE])
def test_an_entry_point_refuses_another_number_than_the_runtime_has(
    variable: str, enter: Callable[[Path], None], machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    monkeypatch.setenv(variable, "1")
    with refused(ConfigError, "LNC", f"{variable}.*before Python starts"):
        enter(tmp_path)


def test_other_backends_leave_the_environment_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    monkeypatch.setenv(LNC_OVERRIDE, "1")
    monkeypatch.delenv(LNC_VARIABLE)
    NeuronMoETrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    patch_model(tiny())
    assert LNC_VARIABLE not in os.environ


def test_verify_device_settles_it_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine()
    monkeypatch.delenv(LNC_VARIABLE)
    monkeypatch.setattr("sys.argv", ["hf-neuron-moe", "verify-device", "none"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3 and os.environ[LNC_VARIABLE] == "2"
    monkeypatch.setenv(LNC_OVERRIDE, "1")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "LNC must be the same wherever it is set, got 1 by HF_NEURON_MOE_LNC, but" in capsys.readouterr().err


def test_doctor_has_a_contradiction_as_the_reason(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr("hf_neuron_moe.device.installed.device_count", lambda: 4)
    assert inspect_installation().usable
    monkeypatch.setenv(LNC_OVERRIDE, "1")
    found = inspect_installation()
    assert found.lnc[0] is None and "LNC must be the same wherever it is set" in str(found.unsupported_reason)


WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("LNC", os.environ.get("NEURON_LOGICAL_NC_CONFIG"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.parametrize(
    "start",
    [
        "sys.argv[1:] = ['train', 'tiny-llama']; from hf_neuron_moe.cli.main import main; main()",
        "sys.argv[1:] = ['verify-device', 'none']; from hf_neuron_moe.cli.main import main; main()",
    ],
    ids=["train", "verify-device"],
)
def test_it_is_set_before_torch_may_load_the_plugin(start: str, tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "nki.py").write_text("", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NEURON", "HF_NEURON"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, repo_root, repo_root / "scripts")))
    done = subprocess.run(
        [sys.executable, "-c", WATCH + start], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "LNC 2\n", done.stderr
