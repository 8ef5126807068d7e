"""The command ``doctor``: what is told on machines with everything, nothing, or something broken installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlavaConfig, MixtralConfig

from hf_neuron_moe.cli.doctor_text import table
from hf_neuron_moe.cli.verify_device import _show_block
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.device.device_report import BlockResult
from hf_neuron_moe.device.device_verification import load_for_verification
from hf_neuron_moe.device.gpus import GPUs, inspect_gpus
from hf_neuron_moe.device.installed import BROKEN, ENVIRONMENT, MISSING, OK, PLACEHOLDER, Package, inspect_installation
from hf_neuron_moe.device.kernel_support import block_groups, usable_kernels
from hf_neuron_moe.device.tolerances import BOUNDS, TensorResult
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed
from tests.tiny_models import tiny_config, tiny_model

WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository"


def put(folder: Path, distribution: str, version: str, description: str, module: str = "", code: str = "") -> None:
    """Install a package by hand."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\n{description}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    if module:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(code, encoding="utf-8")


def runtime(monkeypatch: pytest.MonkeyPatch, cores: int | None) -> None:
    """Let the runtime offer logical cores; the double of the packages has none."""
    monkeypatch.setattr("hf_neuron_moe.device.installed.device_count", lambda: cores)


def test_doctor_works_with_nothing_installed(run, model_dir):
    result = run("doctor", model_dir)
    assert (result.code, result.err) == (0, "")
    first, why, step = result.out.splitlines()[:3]
    assert first == 'backend="neuron" can run here: no'
    assert why.startswith("  why:   nki is not installed")
    assert step == "  first: Go to a Trn2 or Trn3 instance: none was recognized here."
    assert "Install nki, torch-neuronx, neuronx-cc from AWS's own index" in result.out
    assert "Neuron SDK not installed" in result.out
    assert "1 x mlp (64, 96), mxfp8: mlp_forward_mxfp8_nki, mlp_backward_mxfp8_nki" in result.out
    assert "1 x mlp (64, 96), bf16: moe_cte, blockwise_mm_bwd" in result.out
    assert "note  computed by the bf16 kernels of experts as one expert with affinity 1" in result.out
    assert run("doctor", "--strict").code == 1


def test_doctor_lists_the_block_sizes_that_work(run, mixtral_dir, tmp_path, monkeypatch):
    """Without --block-size no size is refused: those that work are listed, and the one that would be taken."""
    text = run("doctor", mixtral_dir).out
    assert "  trn2  yes; block sizes 256, 512, 1024, 2048, 4096" in text
    assert "  trn3  yes; block sizes 128, 256, 512, 1024, 2048, 4096" in text
    assert "judged at block_size=512; NeuronMoEConfig(block_size=...)" in text
    shown = run("doctor", mixtral_dir, "--block-size", 128).out
    assert "  trn2  no: the kernels take block sizes 256, 512, 1024, 2048, 4096, and block_size is 128" in shown
    assert "block_size is 128; block sizes" not in shown, "once is enough"
    wrong = run("doctor", mixtral_dir, "--block-size", 384)
    assert wrong.code == 2 and "'384' is not one of 128, 256, 512" in wrong.err
    runtime(monkeypatch, 4)
    with installed(tmp_path / "site", Double(release=(2, 31), target="trn2")):
        shown = json.loads(run("doctor", mixtral_dir, "--json").out)
    assert shown["blocks"][0]["here"] == {"usable": True, "reason": None, "block_sizes": [256, 512, 1024]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", ["nki", "torch_neuronx"])
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("raise RuntimeError('libnrt.so: no driver')", "RuntimeError: libnrt.so: no driver"),
        ("def of_a_later_python(: pass", "SyntaxError"),
        ("import hf_neuron_moe_no_such_module", "No module named 'hf_neuron_moe_no_such_module'"),
    ],
)
def test_doctor_diagnoses_a_broken_installation(run, module, code, shown, tmp_path, monkeypatch, mixtral_dir):
    """A missing driver, a wheel of a later Python, a missing dependency: told and not raised."""
    distribution = module.replace("_", "-")
    put(tmp_path, distribution, "9.9", "Real.", module, code)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("doctor", mixtral_dir)
    assert (result.code, result.err) == (0, "")
    assert f"{module} fails to import" in result.out and shown in result.out
    states = {package["name"]: package["state"] for package in json.loads(run("doctor", "--json").out)["packages"]}
    assert states[distribution] == "broken"
    assert result.out.startswith('backend="neuron" can run here: no\n  why:   ')


def test_a_metadata_folder_without_metadata_is_told(run, tmp_path, monkeypatch):
    (tmp_path / "nki-0.7.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("doctor", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["usable"] is False


def test_a_broken_part_of_nkilib_is_told(run, tmp_path, mixtral_dir):
    double = Double(release=(2, 33), target="trn2")
    with installed(tmp_path, double) as machine, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in machine.modules if name.startswith("nkilib.core")]:
            patch.delitem(sys.modules, name)
        broken = tmp_path / "core"
        broken.mkdir()
        (broken / "__init__.py").write_text("raise RuntimeError('compiled for another nki')", encoding="utf-8")
        patch.setattr(sys.modules["nkilib"], "__path__", [str(tmp_path)])
        result = run("doctor", mixtral_dir)
        shown = json.loads(run("doctor", "--json").out)
    assert (result.code, result.err) == (0, "")
    reasons = {kernel["need"]: kernel["reason"] for kernel in shown["kernels"]}
    assert "compiled for another nki" in reasons["moe_forward"]
    assert "nkilib fails: RuntimeError: compiled for another nki" in result.out


def test_the_first_step_follows_from_what_is_there(tmp_path, monkeypatch):
    """One machine after the other, from bare to ready."""
    runtime(monkeypatch, 4)
    with installed(tmp_path / "ready", Double(release=(2, 33), target="trn2")):
        ready = inspect_installation()
    assert ready.usable and "verify-device MODEL_DIR --layers 1" in ready.first_steps[0]
    packages = {package.name: package for package in ready.packages}

    def steps(**changes: object) -> str:
        return " / ".join(replace(ready, **changes).first_steps)

    def with_state(state: str, *names: str) -> tuple[Package, ...]:
        return tuple(replace(package, state=state) if name in names else package for name, package in packages.items())

    assert "`pip install torch`" in steps(reason="x", others={"torch": None})
    assert "this is Darwin arm64" in steps(reason="x", machine="Darwin arm64")
    no_chip = ("trn3", "assumed, as NKI does where it sees no device")
    bare = steps(reason="x", python="3.11.9", target=no_chip, packages=with_state(MISSING, *packages))
    assert bare.startswith("Go to a Trn2 or Trn3 instance") and "no wheels for 3.11.9" in bare
    assert "Install nki, torch-neuronx, neuronx-cc from AWS's own index (pip's --index-url, " in bare
    assert "'Install PyTorch for Neuron'" in bare and ".md" not in bare, "a wheel has no docs folder"
    placeholders = steps(reason="x", python="3.12.1", packages=with_state(PLACEHOLDER, "nki", "neuronx-cc"))
    assert placeholders.startswith("`pip uninstall -y nki neuronx-cc`")
    assert steps(reason="x", packages=with_state("broken", "nki")).startswith("Install nki again")
    assert "packages of SDK 2.33" in steps(reason="nki 0.6.0 is older than 0.7.0")
    for state in (MISSING, PLACEHOLDER, BROKEN):
        compiler = with_state(state, "neuronx-cc")
        assert (
            replace(ready, packages=compiler).unsupported_reason
            == f"neuronx-cc is {state}, and it compiles the kernels"
        )
        assert "nstall neuronx-cc" in steps(packages=compiler)
    assert "torch has no torch.neuron" in str(replace(ready, devices=None).unsupported_reason)
    assert "native torch-neuronx of SDK 2.33" in steps(devices=None)
    assert "neuron-ls" in steps(devices=0) and "no logical core" in str(replace(ready, devices=0).unsupported_reason)
    assert "unset that variable" in steps(lnc=(None, "LNC must be 1 or 2"))
    none = tuple(replace(kernel, generation=None, reason="has unknown arguments") for kernel in ready.kernels)
    assert "nki-library of SDK 2.33" in steps(kernels=none) and "unknown arguments" in str(
        replace(ready, kernels=none).unsupported_reason
    )


def test_doctor_without_torch_says_that_a_model_was_not_looked_at(mixtral_dir, repo_root):
    code = "import sys; sys.modules['torch'] = None\nfrom hf_neuron_moe.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "doctor", str(mixtral_dir)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repo_root)
    assert 'backend="neuron" can run here: no' in result.stdout
    assert 'backend="torch" can run here: no: torch is not installed' in result.stdout
    assert "not looked at: that needs torch and transformers" in result.stdout and not result.stderr
    strict = subprocess.run(
        [*command, "--strict", "--json"], capture_output=True, text=True, check=False, cwd=repo_root
    )
    assert strict.returncode == 1 and "needs torch" in json.loads(strict.stdout)["unjudged"]


def test_a_file_is_named_as_it_was_given(run, tmp_path, monkeypatch):
    """Not the copy that is made of it; the folder to give instead is a whole path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    for command in (("doctor",), ("estimate", "--length", 8)):
        shown = run(command[0], "generation_config.json", *command[1:]).err
        assert "generation_config.json must be the configuration of a model" in shown and "hf-neuron-moe-" not in shown
        assert f"Give the folder that holds it: {tmp_path}." in run(command[0], "notes.txt", *command[1:]).err
    assert "[[MODEL_DIR]]" not in run("doctor", "--help").out


def test_text_and_json_say_the_same(run, mixtral_dir):
    text, shown = run("doctor", mixtral_dir).out, json.loads(run("doctor", mixtral_dir, "--json").out)
    facts = [
        shown["why_not"],
        *shown["first_steps"],
        shown["simulator_reason"],
        shown["python"],
        shown["machine"],
    ]
    facts += [part for package in shown["packages"] for part in (package["name"], package["state"], package["note"])]
    kernels = [kernel for kernel in shown["kernels"] if kernel["need"].startswith("moe_")]  # those of its kind of block
    facts += [part for kernel in kernels for part in (kernel["need"], kernel["function"], kernel["reason"])]
    facts += [shown["target"]["source"], shown["lnc"]["source"], shown["model"]]
    for block in shown["blocks"]:
        facts += [*block["kernels"], block["precision"], *(place["reason"] for place in block["documented"].values())]
    assert [fact for fact in facts if fact and fact not in text] == []


def test_the_kernels_of_a_models_kinds_of_blocks_are_listed(run, model_dir, mixtral_dir):
    everything, dense, experts = (run("doctor", *model).out for model in ([], [model_dir], [mixtral_dir]))
    for text, listed in ((everything, ("mlp_", "moe_")), (dense, ("mlp_",)), (experts, ("moe_",))):
        for prefix, need in (("mlp_", "mlp_forward"), ("moe_", "moe_forward_mxfp8")):
            assert any(line.startswith(f"{need} ") for line in text.splitlines()) == (prefix in listed)
        assert "moe_forward and moe_backward: the documents leave open" in text  # of dense blocks too


def test_notes_are_for_blocks_that_some_kernel_computes(run, model_dir):
    assert "  note  computed by the bf16 kernels" in run("doctor", model_dir).out
    assert "  note  " not in run("doctor", model_dir, "--lnc", 1).out, "they need LNC 2"


def test_the_documents_are_asked_about_the_lnc_that_is_set(run, mixtral_dir, monkeypatch):
    """LNC 1 has no kernels for experts: that can be told before a machine is rented."""
    assert "Trn2 and Trn3" in run("doctor", mixtral_dir).out.partition("trn2 and trn3: by")[2].splitlines()[0]
    for arguments, variable in ((["--lnc", 1], None), ([], "HF_NEURON_MOE_LNC"), ([], "NEURON_LOGICAL_NC_CONFIG")):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, "1")
            text = run("doctor", mixtral_dir, *arguments).out
            shown = json.loads(run("doctor", mixtral_dir, *arguments, "--json").out)
        assert f"trn2 and trn3: by the documents of SDK 2.33, LNC 1 ({variable or '--lnc'})" in text
        assert "  trn2  no: the experts' backward needs two physical cores" in text
        assert shown["documented_lnc"] == {"value": 1, "source": variable or "--lnc"}
        assert not shown["blocks"][0]["documented"]["trn2"]["usable"]
    monkeypatch.setenv("HF_NEURON_MOE_LNC", "1")
    assert "  trn2  yes" in run("doctor", mixtral_dir, "--lnc", 2).out
    assert run("doctor", "--lnc", 3).code == 2


def test_the_variable_that_is_wrong_is_named(run, monkeypatch):
    for variable in ("HF_NEURON_MOE_LNC", "NEURON_LOGICAL_NC_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "3")
            assert f"Set {variable} to 1 or 2, or unset it." in run("doctor").out
    monkeypatch.setenv("NEURON_CC_FLAGS", "--lnc 4")
    shown = run("doctor").out
    assert "Correct --lnc or --logical-nc-config in NEURON_CC_FLAGS" in shown


def test_wrong_values_of_variables_are_told(run, monkeypatch):
    for name, value in (("GROUPED", "banana"), ("RANK_TIMEOUT", "-1")):
        monkeypatch.setenv(f"HF_NEURON_MOE_{name}", value)
    result = run("doctor")
    (line,) = (line for line in result.out.splitlines() if line.startswith('backend="torch" can run here: '))
    assert line == (
        "backend=\"torch\" can run here: no: the environment variable HF_NEURON_MOE_GROUPED must be 'auto' or '0' or "
        "'1', got 'banana'. Unset it, or set one of these before Python starts."
    )
    assert "HF_NEURON_MOE_GROUPED=banana" in result.out.splitlines()
    monkeypatch.setenv("HF_NEURON_MOE_GROUPED", "1")
    found = json.loads(run("doctor", "--json").out)
    assert found["torch_reason"] is None, "one process needs no time limit"
    assert found["wrong_variables"] == [
        "the environment variable HF_NEURON_MOE_RANK_TIMEOUT must be a positive number of seconds, got '-1'. Unset it "
        "for 600 seconds."
    ]
    assert f"wrong: {found['wrong_variables'][0]}" in run("doctor").out.splitlines()


def test_doctor_judges_the_blocks_of_a_conversion(run, tmp_path):
    """Before they are loaded anywhere: dense MX on Trn3 in inference, words where their sizes fit, bf16 as it is."""
    torch.manual_seed(0)
    dense, experts = tmp_path / "dense", tmp_path / "experts"
    tiny_model("llama", num_hidden_layers=2, hidden_size=128, intermediate_size=256).bfloat16().save_pretrained(dense)
    sizes = {"hidden_size": 512, "intermediate_size": 64}
    tiny_model("mixtral", num_hidden_layers=1, **sizes).bfloat16().save_pretrained(experts)
    conversions = {
        "dense": (dense, ConvertOptions(precision="mxfp8")),
        "words": (experts, ConvertOptions(precision="mxfp8", purpose="inference")),
        "natural": (experts, ConvertOptions(precision="mxfp8", purpose="training")),
        "bf16": (dense, ConvertOptions(precision="bf16", layout="kernel")),
    }
    shown = {}
    for name, (source, options) in conversions.items():
        convert_checkpoint(source, tmp_path / f"{name}-converted", options)
        result = run("doctor", tmp_path / f"{name}-converted", "--json")
        assert result.code == 0, result.err
        shown[name] = json.loads(result.out)["blocks"]
        if name == "bf16":
            continue
        # What the loaded model's own blocks are judged to be.
        loaded = block_groups(load_for_verification(tmp_path / f"{name}-converted"))
        by_loaded = usable_kernels(loaded, None, "nki is not installed")
        assert [answer.documented for answer in by_loaded] == [
            {place: answer["reason"] for place, answer in block["documented"].items()} for block in shown[name]
        ]
    (block,) = shown["dense"]
    assert (block["frozen"], block["kernels"], len(block["names"])) == (True, ["mlp_forward_mxfp8_nki"], 2)
    assert block["documented"]["trn3"]["usable"] and "Trn3 only" in block["documented"]["trn2"]["reason"]
    assert "not trained" in block["training"] and "nki is not installed" in block["here"]["reason"]
    (block,) = shown["words"]
    assert block["kernels"] == ["moe_cte"] and block["documented"]["trn3"]["usable"]
    (block,) = shown["natural"]
    assert "takes words" in block["documented"]["trn3"]["reason"]
    assert [block["precision"] for block in shown["bf16"]] == ["bf16", "mxfp8"] and not shown["bf16"][0]["frozen"]
    kinds = {name: (blocks[0]["kind"], blocks[0]["experts"]) for name, blocks in shown.items()}
    assert kinds == {"dense": ("mlp", None), "words": ("experts", 4), "natural": ("experts", 4), "bf16": ("mlp", None)}
    advice = "--precision mxfp8 --for inference --pad` writes experts as words"
    assert advice in run("doctor", tmp_path / "natural-converted").out
    text = run("doctor", tmp_path / "dense-converted").out
    assert advice not in text, "nothing is wrong with it"
    assert "2 x frozen mlp (128, 256), e4m3fn codes, swizzled: mlp_forward_mxfp8_nki" in text
    assert "  trn3  yes, in inference" in text and "kernels for inference only" in text
    assert "needs two physical cores" in run("doctor", tmp_path / "words-converted", "--lnc", 1).out


def test_estimate_says_what_to_give_instead_of_a_conversion(run, model_dir, tmp_path):
    convert_checkpoint(model_dir, tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    result = run("estimate", tmp_path / "mx", "--length", 8)
    assert result.code == 1 and "config.json of the checkpoint it was made of is enough" in result.err


def test_doctor_as_json(run, mixtral_dir):
    shown = json.loads(run("doctor", mixtral_dir, "--json").out)
    assert (shown["ok"], shown["usable"], shown["sdk"], shown["devices"]) == (True, False, None, None)
    assert {package["state"] for package in shown["packages"]} == {MISSING}
    assert shown["kernels"] and {kernel["generation"] for kernel in shown["kernels"]} == {None}
    bf16, mxfp8 = shown["blocks"]
    assert (bf16["precision"], bf16["experts"], len(bf16["names"])) == ("bf16", 4, 2)
    assert bf16["kernels"] == ["moe_cte", "blockwise_mm_bwd"]
    sizes = [256, 512, 1024, 2048, 4096]
    assert bf16["documented"]["trn2"] == {"usable": True, "reason": None, "block_sizes": sizes}
    assert mxfp8["documented"]["trn3"] == {"usable": True, "reason": None, "block_sizes": [128, *sizes]}
    assert bf16["block_size"] == 512 and mxfp8["documented"]["trn2"]["block_sizes"] == []
    assert mxfp8["documented"]["trn3"]["usable"] and "Trn3 only" in mxfp8["documented"]["trn2"]["reason"]
    assert not bf16["here"]["usable"] and "nki is not installed" in bf16["here"]["reason"]


def test_gpus_are_named_or_why_there_are_none(run, tmp_path, monkeypatch):
    """A machine with a driver, and PyTorch's answers for builds with and without CUDA."""
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr("hf_neuron_moe.device.gpus.DRIVERS", (str(tmp_path / "none"), str(driver)))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "GPU: none: no driver of a GPU was found" in run("doctor").out
    driver.touch()
    answers = {"is_available": True, "device_count": 2, "get_device_name": "H100", "get_device_capability": (9, 0)}
    for cuda, seen, expected in ((None, False, "built for CPUs"), ("13.0", False, "built for 13.0, finds none")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        assert expected in (inspect_gpus().reason or "")
        assert (inspect_gpus().names, inspect_gpus().triton_reason) == (
            (),
            "there is no GPU (on a CPU, TRITON_INTERPRET=1 tries it, slowly)",
        )
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    found = inspect_gpus()
    assert found == GPUs(("H100 (compute capability 9.0)",) * 2, None, None)
    monkeypatch.setattr("hf_neuron_moe.device.installed.inspect_gpus", lambda: found)
    shown = run("doctor").out
    assert 'backend="triton" can run here: yes\n' in shown and shown.count("GPU: H100") == 2
    assert "No GPU has run this package." in shown
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: torch._C._no_such_name)
    assert (inspect_gpus().reason or "").startswith("torch fails: AttributeError")


def test_triton_runs_in_its_interpreter(run, monkeypatch):
    monkeypatch.setattr("hf_neuron_moe.device.gpus.DRIVERS", ())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert 'backend="triton" can run here: no: there is no GPU' in run("doctor").out
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert 'backend="triton" can run here: yes, in Triton\'s interpreter' in run("doctor").out


def test_doctor_names_no_kernels_for_a_gate_that_they_do_not_compute(run, tmp_path):
    tiny_config("gpt_oss", hidden_size=512, intermediate_size=64).save_pretrained(tmp_path)
    bf16, mxfp8 = json.loads(run("doctor", tmp_path, "--json").out)["blocks"]
    assert bf16["kernels"] and bf16["documented"]["trn2"]["usable"]
    assert (mxfp8["kernels"], mxfp8["documented"]["trn3"]["usable"]) == ([], False)
    text = run("doctor", tmp_path).out
    assert ", mxfp8: no kernels" in text and "and this is trn3" in text and "kernel pair" not in text
    tiny_config("llama_biased").save_pretrained(tmp_path / "dense")
    blocks = json.loads(run("doctor", tmp_path / "dense", "--json").out)["blocks"]
    assert [bool(block["kernels"]) for block in blocks] == [bool(block["notes"]) for block in blocks] == [True, False]


def test_doctor_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom hf_neuron_moe.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert json.loads(result.stdout)["usable"] is False


@pytest.mark.parametrize(
    ("without", "why"), [("runtime", "there is no runtime"), ("neuronx-cc", "neuronx-cc is missing, and it compiles")]
)
def test_a_machine_that_lacks_a_part_of_the_table_is_not_usable(without, why, run, mixtral_dir, tmp_path, monkeypatch):
    runtime(monkeypatch, None if without == "runtime" else 4)
    with installed(tmp_path / "site", Double(target="trn2")):
        if without != "runtime":
            (info,) = (tmp_path / "site").glob("neuronx_cc-*")
            info.rename(tmp_path / "away")
        text, strict = run("doctor", mixtral_dir), run("doctor", mixtral_dir, "--strict")
        shown = json.loads(run("doctor", mixtral_dir, "--json").out)
    assert text.out.startswith(f'backend="neuron" can run here: no\n  why:   {why}')
    assert "  here  no, see the top" in text.out and (text.code, strict.code) == (0, 1)
    assert not shown["usable"] and not shown["blocks"][0]["here"]["usable"]


def test_doctor_on_machines(run, mixtral_dir, tmp_path, monkeypatch):
    runtime(monkeypatch, 4)
    for release, target, block_size, usable in (((2, 33), "trn2", 512, True), ((2, 31), "trn2", 2048, False)):
        double = Double(release=release, target=target)
        with installed(tmp_path / f"site{release[1]}", double):
            result = run("doctor", mixtral_dir, "--json", "--block-size", block_size)
            text = run("doctor", mixtral_dir, "--block-size", block_size).out
            strict = run("doctor", mixtral_dir, "--strict", "--block-size", block_size).code
        shown = json.loads(result.out)
        assert shown["usable"] and shown["sdk"] == "2.33", "of nki, which stays 0.7.0 on every one of these machines"
        assert shown["target"] == {"value": target, "source": "NEURON_PLATFORM_TARGET_OVERRIDE"}
        assert shown["environment"]["NEURON_LOGICAL_NC_CONFIG"] == shown["lnc"]["value"] == "2"
        packages = {package["name"]: (package["state"], package["version"]) for package in shown["packages"]}
        assert packages["nki"] == (OK, "0.7.0") and packages["neuronx-cc"] == (OK, "2.28.7631")
        precision = "mxfp8" if target == "trn3" else "bf16"
        here = next(found["here"] for found in shown["blocks"] if found["precision"] == precision)
        assert here["usable"] is usable
        assert 'backend="neuron" can run here: yes' in text
        assert strict == (0 if usable else 1)
        kernels = {kernel["need"]: kernel["generation"] for kernel in shown["kernels"]}
        assert {found["need"] for found in shown["kernels"] if found["note"]} == {"moe_forward", "moe_backward"}
        assert "moe_forward and moe_backward: the documents leave open" in text and "verify-device checks it" in text
        assert (kernels["moe_forward_mxfp8"] is None) == (release == (2, 31))
        if not usable:
            assert "block_size is 2048" in here["reason"]
            assert "no blockwise_mm_fwd_mxfp8" in text
        assert not double.launches


def test_strict_counts_gated_blocks_only(run, tmp_path, monkeypatch):
    """A vision tower's fc1 and fc2 stay stock, here as in patch_model; of nothing else, nothing can be computed."""
    mixtral = MixtralConfig(
        hidden_size=512, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    vision.architectures = ["CLIPVisionModel"]
    both = LlavaConfig(text_config=mixtral, vision_config=vision, architectures=["LlavaForConditionalGeneration"])
    both.save_pretrained(tmp_path / "both")
    vision.save_pretrained(tmp_path / "vision")
    runtime(monkeypatch, 4)
    with installed(tmp_path / "site", Double(target="trn2")):
        shown = json.loads(run("doctor", tmp_path / "both", "--json").out)["blocks"]
        codes = [run("doctor", tmp_path / name, "--strict").code for name in ("both", "vision")]
        refused = run("doctor", tmp_path / "both", "--strict", "--block-size", 128).code
    usable = {(block["kind"], block["precision"]): (block["gated"], block["here"]["usable"]) for block in shown}
    assert usable["mlp", "bf16"] == (False, False) and usable["experts", "bf16"] == (True, True)
    assert codes == [0, 1] and refused == 1, "experts without kernels still count"


def test_placeholders_of_pypi_are_recognized(tmp_path, monkeypatch):
    """As they are on PyPI: two that raise on import, one whose module cannot be named, one without a module."""
    raises = f"raise ImportError({WRONG!r})"
    put(tmp_path, "nki", "0.0.1", WRONG, "nki", raises)
    put(tmp_path, "torch-neuronx", "1.0", WRONG, "torch_neuronx", raises)
    put(tmp_path, "neuronx-cc", "1.0.post1", WRONG)
    put(tmp_path, "nki-library", "0.0.2", "NKI Library does not publish installable wheels to PyPI.")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = inspect_installation()
    assert {package.name: package.state for package in found.packages} == dict.fromkeys(
        ("nki", "nki-library", "torch-neuronx", "neuronx-cc"), PLACEHOLDER
    )
    assert not found.usable and "WRONG PACKAGE" in str(found.reason)
    assert all("AWS's own index" in package.note for package in found.packages)
    assert "nki-library 0.0.2 is installed and has no module nkilib" in str(found.reason)
    assert "nki-library is not installed" not in str(found.reason)


def test_a_bad_setting_is_told_and_not_raised(run, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    shown = json.loads(run("doctor", "--json").out)
    assert shown["lnc"]["value"] is None and "1 or 2" in shown["lnc"]["source"]
    assert shown["target"]["value"] is None and "trn9" in shown["target"]["source"]


def test_the_document_names_the_variables_and_the_bounds(repo_root):
    page = (repo_root / "docs" / "neuron.md").read_text(encoding="utf-8")
    table = page.partition("### Environment variables")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ENVIRONMENT)
    bf16, mxfp8 = BOUNDS["bf16"], BOUNDS["mxfp8"]
    for text in (
        f"{bf16.good_db:.0f} dB and more, and within {100 * bf16.relative:.0f} %",
        f"{mxfp8.good_db:.0f} dB and more, within {100 * mxfp8.relative:.0f} %",
        f"({bf16.slice_db:.0f} dB in bf16, {mxfp8.slice_db:.0f} in MXFP8",
        f"({100 * bf16.factor:.1f} %)",
    ):
        assert text in page
    for bounds in (bf16, mxfp8):
        assert f"{bounds.least_db:.0f} to {bounds.good_db:.0f} dB" in page


def test_numbers_of_a_table_are_aligned_on_the_right() -> None:
    rows = [("name", "n", "m"), ("a", "10", "5"), ("long one", "200", "60")]
    assert list(table(rows, " ", numbers=True)) == [
        " name        n   m",
        " a          10   5",
        " long one  200  60",
    ]
    assert list(table(rows))[:2] == ["name      n    m", "a         10   5"]


def test_verify_device_prints_both_figures_of_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = (TensorResult("output", 0.0031, 48.26, "pass"), TensorResult("grad input", None, None, "fail", "NaN"))
    _show_block(BlockResult("layers.0.mlp", "mlp", "fail", tensors, seconds=1.25))
    block, heading, output, gradient = (line.split() for line in capsys.readouterr().out.splitlines())
    assert block == ["layers.0.mlp", "(mlp):", "fail,", "1.2", "s"]
    assert heading == ["max", "relative", "SQNR", "dB"]
    assert (output, gradient) == (["output", "3.1e-03", "48.3", "pass"], ["grad", "input", "-", "-", "fail", "NaN"])
