"""``import hf_neuron_moe`` makes the method known, before or after transformers, and stays cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quantizers.conftest import Converted

ROOT = Path(__file__).resolve().parent.parent.parent
KNOWN = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as q, AUTO_QUANTIZATION_CONFIG_MAPPING as c\n"
SHOW = KNOWN + "print(q['neuron_moe'].__name__, c['neuron_moe'].__name__)\n"
REGISTERED = "NeuronMoEQuantizer NeuronMoEQuantizationConfig\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import transformers.quantizers.auto\nimport hf_neuron_moe\n", id="after", marks=pytest.mark.slow),
        pytest.param("import transformers\nimport hf_neuron_moe\n", id="between", marks=pytest.mark.slow),
        pytest.param(
            "import hf_neuron_moe, sys\ndel sys.modules['hf_neuron_moe']\nimport hf_neuron_moe\n",
            id="twice",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_method_is_registered_in_either_order(first: str) -> None:
    result = run(first + SHOW)
    assert result.stdout == REGISTERED, result.stderr


@pytest.mark.slow
def test_waiting_costs_no_import_and_leaves_no_trace() -> None:
    code = (
        "import sys\n"
        "before = list(sys.meta_path)\n"
        "import hf_neuron_moe\n"
        "assert not {'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)\n"
        "[finder] = [finder for finder in sys.meta_path if finder not in before]\n"
        "import transformers.quantizers.auto as auto\n"
        "assert finder not in sys.meta_path\n"
        "loaders = {type(auto.__loader__).__name__, type(auto.__spec__.loader).__name__}\n"
        "assert loaders == {'SourceFileLoader'}, loaders\n"
        f"{SHOW}"
        "import inspect, importlib\n"
        "assert 'AutoHfQuantizer' in inspect.getsource(auto)\n"
        "importlib.reload(auto)\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == REGISTERED


@pytest.mark.slow
def test_an_import_that_fails_once_registers_when_it_succeeds() -> None:
    code = (
        "import sys, hf_neuron_moe\n"
        "sys.modules['transformers.quantizers.quantizer_vptq'] = None\n"
        "try:\n"
        "    import transformers.quantizers.auto\n"
        "except ImportError:\n"
        "    del sys.modules['transformers.quantizers.quantizer_vptq']\n"
        "else:\n"
        "    raise SystemExit('the import should have failed')\n"
    )
    result = run(code + SHOW)
    assert result.stdout == REGISTERED, result.stderr


@pytest.mark.slow
def test_another_method_of_the_name_is_not_replaced() -> None:
    code = (
        "from transformers.quantizers import auto\n"
        "from transformers.utils.quantization_config import QuantizationConfigMixin\n"
        "class Theirs(QuantizationConfigMixin): pass\n"
        "auto.register_quantization_config('neuron_moe')(Theirs)\n"
        "import hf_neuron_moe\n"
        "print(auto.AUTO_QUANTIZATION_CONFIG_MAPPING['neuron_moe'].__name__)\n"
    )
    assert run(code).stdout == "Theirs\n"


LOAD = (
    "import sys\nfrom transformers import AutoModelForCausalLM\n"
    "try:\n    AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
    "except OSError as error:\n    print(error, file=sys.stderr)\n"
    "import hf_neuron_moe\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "mxfp8"}, id="mxfp8"),
        pytest.param({"precision": "bf16", "layout": "fused"}, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_transformers_alone_stops_instead_of_misreading(converted: Converted, options: dict[str, str]) -> None:
    folder = str(converted("llama", **options))
    alone = run(LOAD + SHOW, folder)  # the method is registered afterwards, too
    assert alone.stdout == REGISTERED, alone.stderr
    assert "Error no file named model.safetensors" in alone.stderr
    assert "Unknown quantization type, got neuron_moe" in alone.stderr
