"""The first-run check on the contract double: right kernels pass, wrong ones are found, refusals say why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_neuron_moe.cli.main import main
from hf_neuron_moe.device import device_verification
from hf_neuron_moe.device.device_report import DeviceReport
from hf_neuron_moe.device.device_verification import load_for_verification, random_inputs, run_block
from hf_neuron_moe.device.tolerances import BOUNDS, compare
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NothingToPatchError
from hf_neuron_moe.modules.block import NeuronBlock
from tests.neuron.small_runs import CASES, DENSE, EXPERTS, Case
from tests.refusals import refused
from tests.tiny_models import tiny_config, tiny_model

Start = Callable[..., SimpleNamespace]
GRADIENTS = {
    "dense": {"gate_up_proj", "down_proj"},
    "experts-mxfp8": {"gate_up_proj", "down_proj", "routing weights"},
    "experts-bf16": {"gate_up_proj", "down_proj", "routing weights"},
    "dense-bf16": {"gate_up_proj", "down_proj"},
}


def verify_device(model: torch.nn.Module, **options: Any) -> DeviceReport:
    """On the CPU: the mock makes no device of its own."""
    return device_verification.verify_device(model, **{"device": "cpu", **options})


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    place = () if "--device" in arguments else ("--device", "cpu")
    monkeypatch.setattr("sys.argv", ["hf-neuron-moe", "verify-device", *map(str, arguments), *place])
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_pass_block_by_block(name: str, machine: Start) -> None:
    case = CASES[name]
    double = machine(target=case.target).double
    model = case.model(layers=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shown: list[str] = []
    report = verify_device(
        model, tokens=48, block_size=case.block_size, progress=lambda block: shown.append(block.name)
    )
    assert report.ok and report.precision == case.precision and report.target == case.target
    assert shown == [block.name for block in report.blocks] and len(shown) == 2
    assert len(double.launches) >= 4, "forward and backward of two blocks"
    for block in report.blocks:
        assert {tensor.name for tensor in block.tensors} == {
            "output",
            "grad input",
            *(f"grad {name}" for name in GRADIENTS[name]),
        }
        # The MXFP8 kernels' double computes with the torch backend's operators; the bf16 pair rounds at other places.
        assert block.verdict == ("pass" if case.bound else "equal"), block
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "unpatched, as it was"
    json.dumps(report.to_dict(), allow_nan=False)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the forward of the machine's dense kernels return something else."""
    from hf_neuron_moe.backends import get_backend, resolve_backend

    backend: Any = get_backend(resolve_backend("neuron", torch.device("cpu")))
    right = backend.mlp_forward

    def wrong(*arguments: Any) -> Any:
        y, saved = right(*arguments)
        return change(y), saved

    monkeypatch.setattr(backend, "mlp_forward", wrong)


WRONG: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "scaled": ("fail", lambda y: y * 1.25),
    "rows moved": ("fail", lambda y: y.roll(1, 0)),
    "nothing written": ("fail", torch.zeros_like),
    "not finite": ("fail", lambda y: torch.full_like(y, torch.nan)),
    "another rounding": ("close", lambda y: y * (1 + 0.05 * torch.randn(y.shape, generator=torch.Generator()))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_found(name: str) -> None:
    verdict, change = WRONG[name]
    expected = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    result = compare("output", change(expected), expected, BOUNDS["mxfp8"])
    assert result.verdict == verdict, result
    assert compare("output", expected.clone(), expected, BOUNDS["mxfp8"]).verdict == "equal"
    assert compare("output", expected[:-1], expected, BOUNDS["mxfp8"]).verdict == "fail"
    single = expected.bfloat16().float()
    assert compare("output", single, expected, BOUNDS["bf16"]).verdict == "pass"


def test_a_wrong_kernel_fails_the_command(
    machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    DENSE.model(layers=2).save_pretrained(tmp_path)
    machine(target=DENSE.target)
    spoil(monkeypatch, lambda y: y * 2)
    code, out, _ = run_command(monkeypatch, capsys, tmp_path, "--tokens", 32, "--json")
    shown = json.loads(out)
    assert code == 6 and shown["ok"] is False
    assert shown["verdicts"] == {"fail": 2, "equal": 0, "pass": 0, "close": 0, "not run": 0, "error": 0}
    worst = {tensor["name"]: tensor["verdict"] for tensor in shown["blocks"][0]["tensors"]}
    assert worst["output"] == "fail" and worst["grad down_proj"] != "fail", "the forward alone is wrong"


def test_an_error_of_the_device_is_told_and_equal_blocks_are_not_tried(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(target=DENSE.target)

    def raises(result: Any) -> Any:
        raise RuntimeError("NRT: out of memory")

    spoil(monkeypatch, raises)
    report = verify_device(DENSE.model(layers=2), tokens=16)
    first, second = report.blocks
    assert (first.verdict, first.note) == ("error", "NRT: out of memory")
    assert second.verdict == "not run" and first.name in second.note
    assert not report.ok


@pytest.mark.parametrize("random", [False, True])
def test_the_command_reads_weights_or_makes_them(
    random: bool, machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    case = EXPERTS
    if random:
        tiny_config(case.family, num_hidden_layers=2, **case.sizes).save_pretrained(tmp_path)
    else:
        case.model(layers=2).save_pretrained(tmp_path)
    machine(target=case.target)
    options = ["--tokens", 32, "--block-size", 256, "--layers", 1, *(["--random-weights"] if random else [])]
    code, out, err = run_command(monkeypatch, capsys, tmp_path, *options)
    assert code == 0, err
    assert "model.layers.0.mlp.experts (experts): pass" in out and "layers.1" not in out
    assert "grad routing weights" in out and "SQNR dB" in out
    assert "1 of 1 blocks compared (1 pass): the kernels compute what PyTorch does, up to rounding" in out
    assert f"(neuron on cpu ({case.target}, LNC 2)" in out
    assert ("random weights" if random else "checkpoint weights") in out


def test_frozen_blocks_are_compared_in_inference(machine: Start, tmp_path: Path) -> None:
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    DENSE.model(layers=1).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    machine(target=DENSE.target)
    report = verify_device(load_for_verification(tmp_path / "mx"), tokens=32)
    (block,) = report.blocks
    assert [tensor.name for tensor in block.tensors] == ["output"] and block.kind == "frozen mlp"
    assert report.ok, report


def test_a_conversion_in_bf16_is_compared_like_a_checkpoint(machine: Start, tmp_path: Path) -> None:
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    EXPERTS.model(layers=1).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "bf16", ConvertOptions(precision="bf16"))
    machine(target=EXPERTS.target)
    report = verify_device(load_for_verification(tmp_path / "bf16"), tokens=32, block_size=256)
    (block,) = report.blocks
    assert "grad gate_up_proj" in [tensor.name for tensor in block.tensors]
    assert report.ok, report


def test_a_frozen_block_without_a_kernel_is_not_compared_with_itself(machine: Start, tmp_path: Path) -> None:
    from hf_neuron_moe import set_backend
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    DENSE.model(layers=1).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    double = machine(target="trn2").double
    model = load_for_verification(tmp_path / "mx")
    set_backend(model, "neuron", fallback="torch")
    report = verify_device(model, precision="bf16", tokens=32)
    assert not report.ok and not double.launches
    assert [block.verdict for block in report.blocks] == ["not run"] and "Trn3" in report.blocks[0].note
    assert {block.neuron_config.fallback for block in model.modules() if isinstance(block, NeuronBlock)} == {"torch"}


def test_what_did_not_run_is_told_once(
    machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """A conversion on a chip without MX: exit code 1, each block on one line, and no weights to make up."""
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    DENSE.model(layers=2).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "mx", ConvertOptions(precision="mxfp8"))
    machine(target="trn2")
    code, out, _ = run_command(monkeypatch, capsys, tmp_path / "mx", "--tokens", 16)
    assert code == 1 and "NOTHING COMPARED" in out and "Trn3 only" in out
    assert out.count("model.layers.1.mlp (frozen mlp)") == 1
    code, _, err = run_command(monkeypatch, capsys, tmp_path / "mx", "--random-weights")
    assert code == 2 and "--random-weights must be off for a conversion" in err


def test_it_is_refused_with_the_reason(machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with refused(BackendUnavailableError, "this machine", "nki is not installed"):
        verify_device(DENSE.model())
    machine(target="trn2")
    with refused(ConfigError, "precision", "Trn3 only"):
        verify_device(DENSE.model(), precision="mxfp8")
    with refused(NothingToPatchError, "model", "block_size is 128"):
        verify_device(EXPERTS.model(), block_size=128)
    with refused(ConfigError, "tokens", got="0"):
        verify_device(DENSE.model(), tokens=0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 3, "got no such folder"),
        (["EMPTY"], 1, "a folder with config.json"),
        (["MODEL", "--device", "neutron:0"], 2, "--device must be a device such as neuron:0"),
        (["MODEL", "--device", "cuda:0"], 2, "--device must be a device such as neuron:0"),
        (["MODEL", "--tokens", 40000, "--precision", "bf16"], 2, "--tokens must be at most 32,768 in bf16"),
        (["MODEL", "--block-size", 384], 2, "--block-size must be one of 128, 256"),
        (["MODEL", "--seed", 2**63], 2, "--seed must be an integer of 64 bits"),
        (["MODEL", "--precision", "mxfp4"], 2, "'mxfp4' is not one of bf16, mxfp8"),
        (["MODEL", "--backend", "torch"], 2, "'torch' is not one of neuron, nki-sim"),
        (["MODEL"], 1, "nki is not installed"),
        (["MODEL", "--device", "neuron:3"], 1, "nki is not installed"),
    ],
)
def test_arguments_are_checked_first_and_nothing_is_loaded(
    arguments: list[Any], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Weights are not read: the machine comes before them."""
    places = {"MODEL": tmp_path / "model", "EMPTY": tmp_path / "empty"}
    for folder in places.values():
        folder.mkdir()
    tiny_model("llama", num_hidden_layers=1).save_pretrained(places["MODEL"])
    loading = "transformers.AutoModelForCausalLM.from_pretrained"
    monkeypatch.setattr(loading, lambda *_, **__: pytest.fail("weights were read"))
    found, out, err = run_command(monkeypatch, capsys, *(places.get(part, part) for part in arguments))
    assert (found, out) == (code, "") and message in err, err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("config", "config.json must be JSON in UTF-8"),
        ("weights", "model.safetensors: data must be"),
        ("no weights", "must be a folder with the weights in safetensors files, got config.json without them"),
        ("shard", "model-00002-of-00002.safetensors must be a file of the checkpoint"),
        ("conversion", "neuron-00001-of-00001.safetensors: data must be"),
        ("ranks", "tp_degree must be 1 for codes of model.layers.0.mlp, loaded whole, got 2"),
    ],
)
def test_a_damaged_model_is_refused_on_any_machine(
    damage: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Before the machine is asked, which has no Neuron here."""
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    model, weights = tmp_path / "model", "model.safetensors"
    DENSE.model(layers=1).bfloat16().save_pretrained(model)
    if damage == "config":
        (model / "config.json").write_text("{", encoding="utf-8")
    elif damage == "weights":
        (model / weights).write_bytes((model / weights).read_bytes()[:-10])
    elif damage in ("conversion", "ranks"):
        degree = 2 if damage == "ranks" else 1
        convert_checkpoint(model, tmp_path / "mx", ConvertOptions(precision="mxfp8", tp_degree=degree))
        model = tmp_path / "mx"
        if damage == "conversion":
            (shard,) = model.glob("*.safetensors")
            shard.write_bytes(shard.read_bytes()[:-10])
    else:
        (model / weights).unlink()
    if damage == "shard":
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    code, out, err = run_command(monkeypatch, capsys, model)
    assert (code, out) == (1 if damage == "ranks" else 3, "") and message in err, err
    if damage in ("weights", "no weights"):
        code, _, err = run_command(monkeypatch, capsys, model, "--random-weights")
        assert code == 1 and "nki is not installed" in err, "weights that nobody reads do not matter"
    if damage == "no weights":
        code, _, err = run_command(monkeypatch, capsys, model / "config.json")
        assert code == 3 and str(model / "config.json") in err and "--random-weights" in err


def test_precision_is_checked_against_the_chip_before_weights_are_read(
    machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    machine(target="trn2")
    code, _, err = run_command(monkeypatch, capsys, tmp_path, "--precision", "mxfp8")
    assert code == 2 and "Trn3 only, and this is trn2 (known from NEURON_PLATFORM_TARGET_OVERRIDE)" in err
    code, _, err = run_command(monkeypatch, capsys, tmp_path)
    assert code == 3 and "whose weights transformers can read" in err and "--random-weights" in err
    code, _, err = run_command(monkeypatch, capsys, tmp_path, "--tokens", 40000)
    assert code == 2 and "at most 32,768 in bf16" in err, "the precision of the chip"


def test_a_device_that_does_not_work_is_refused(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the reasons that doctor gives, of the runtime and of the compiler too."""
    machine()
    with refused(BackendUnavailableError, "this machine", "there is no runtime"):
        verify_device(DENSE.model(), device=None)
    for name in ("neutron:0", "cuda:0", "meta"):
        with refused(ConfigError, "device"):
            verify_device(DENSE.model(), device=name)
    present = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(torch, "neuron", present, raising=False)
    with refused(BackendUnavailableError, "this machine", "no device neuron:7"):
        verify_device(DENSE.model(), device="neuron:7")
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(is_available=lambda: False), raising=False)
    with refused(BackendUnavailableError, "this machine", "no logical core.*neuron-ls"):
        verify_device(DENSE.model(), device=None)
    assert verify_device(DENSE.model(), tokens=8).ok
    monkeypatch.setattr("hf_neuron_moe.device.installed.versions.installed_version", lambda module: None)
    with refused(BackendUnavailableError, "this machine", "neuron-cc? is missing|neuronx-cc is"):
        verify_device(DENSE.model())


def test_blocks_without_kernels_are_listed_beside_those_with(machine: Start) -> None:
    """The dense shared expert takes any block size, the experts beside it do not take 128."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    machine(target="trn2")
    report = verify_device(tiny_model("qwen2_moe", num_hidden_layers=1, **sizes), tokens=16, block_size=128)
    verdicts = {block.name.rpartition(".")[2]: block for block in report.blocks}
    assert verdicts["shared_expert"].verdict == "pass" and report.ok
    assert verdicts["experts"].verdict == "not run"
    assert "block_size is 128" in verdicts["experts"].note


def test_dense_blocks_in_bf16_are_held_against_the_device_accumulation(machine: Start) -> None:
    machine(target="trn2")
    model = tiny_model("llama", num_hidden_layers=1)
    report = verify_device(model, tokens=600, accumulation="device")  # two blocks
    (block,) = report.blocks
    assert block.kind == "mlp" and block.verdict == "pass"


def test_the_simulator_takes_the_same_way(machine: Start) -> None:
    machine(target=DENSE.target)
    report = verify_device(DENSE.model(), backend="nki-sim", tokens=16)
    assert report.ok and (report.backend, report.device) == ("nki-sim", "cpu")


def test_random_inputs_are_a_proper_routing_and_the_block_stays_as_it_was() -> None:
    from hf_neuron_moe import patch_model

    case: Case = EXPERTS
    model = case.model().eval()
    patch_model(model, {**case.options, "backend": "torch"})
    block: Any = model.get_submodule("model.layers.0.mlp.experts")
    inputs = random_inputs(block, 64, 3)
    ids, weights = inputs.routing
    assert ids.shape == (64, 2) and set(ids.unique().tolist()) == {0, 1, 2, 3}
    assert bool((ids[:, 0] != ids[:, 1]).all())
    assert torch.allclose(weights.sum(-1), torch.ones(64))
    results, _ = run_block(block, inputs, "torch", torch.device("cpu"))
    again, _ = run_block(block, inputs, "torch", torch.device("cpu"))
    assert results.keys() == {"output", "grad input", "grad routing weights", "grad gate_up_proj", "grad down_proj"}
    assert all(torch.equal(results[key], again[key]) for key in results)
    assert not block.training and block.neuron_config.backend == "torch"
    assert all(param.grad is None for param in block.parameters())
