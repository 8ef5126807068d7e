"""The examples for other projects: TRL's runs with the page that shows it, the others with stand-ins."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neuron_moe.patching.apply import report_of
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_the_example_for_trl_is_the_one_that_the_page_runs() -> None:
    """tests/scripts/test_doc_snippets.py runs it."""
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    _, _, code = (EXAMPLES / "trl_sft.py").read_text(encoding="utf-8").partition('"""\n\n')
    assert code == snippet


def test_the_plugin_for_axolotl_patches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stand-in for the base class: axolotl needs Python 3.12."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    pytest.importorskip("pydantic")
    spec = importlib.util.spec_from_file_location("neuron_moe_plugin", EXAMPLES / "axolotl" / "neuron_moe_plugin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin, model = module.NeuronMoEPlugin(), tiny_model("mixtral")
    assert plugin.get_input_args().endswith(f".{module.NeuronMoEArgs.__name__}")
    plugin.post_model_build(SimpleNamespace(neuron_moe={"precision": "mxfp8"}), model)
    report = report_of(model)
    assert report is not None and {entry.precision for entry in report.patched} == {"mxfp8"}
    assert "0 refused" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="axolotl is not installed")
def test_axolotl_trains_with_the_plugin() -> None:
    command, environment = ["bash", "scripts/check_axolotl.sh"], os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "opened in stock transformers" in done.stdout, done.stdout + done.stderr


def test_the_lines_for_llama_factory_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for run_exp, which hands its callbacks to a Trainer as LLaMA-Factory does."""
    model = tiny_model("mixtral")
    seen: list[bool] = []

    def run_exp(args: object = None, callbacks: list[TrainerCallback] | None = None) -> None:
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        Trainer(model=model, args=arguments, callbacks=callbacks)
        seen.append(report_of(model) is not None)

    tuner = ModuleType("llamafactory.train.tuner")
    tuner.run_exp = run_exp  # type: ignore[attr-defined]
    for module in (ModuleType("llamafactory"), ModuleType("llamafactory.train"), tuner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runpy.run_path(str(EXAMPLES / "llamafactory" / "train.py"), run_name="__main__")
    assert seen == [True]


def test_every_example_compiles_and_is_named() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.rglob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        assert f"`{path.relative_to(EXAMPLES)}`" in table
