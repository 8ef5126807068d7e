"""What finetune.py refuses before it loads text or model: names, the hub, the backend, precision against the chip."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import finetune
import finetune_places
import pytest
import torch
import yaml
from finetune_checks import check_kernels, check_run, check_training
from finetune_folder import check_weights
from finetune_options import Options, parse
from finetune_places import check_places
from huggingface_hub.errors import (
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file

from hf_neuron_moe.backends.neuron.limits import Device
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.device.kernel_support import DocumentedAdapter
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NeuronMoEWarning, SourceDamageError
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]

TRN2, TRN3 = Device("trn2", 2), Device("trn3", 2)


def options(model: str | Path, **changes: Any) -> Options:
    given = {"model": model, "train_files": "none.txt", "report_to": "none", "use_cpu": "true", **changes}
    return parse([word for key, value in given.items() for word in (f"--{key}", str(value))])


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[tuple[str, str | None]]:
    """Let the hub answer with `error`, or that it knows the name; return what it is asked."""
    asked = []

    def model_info(self: object, name: str, *, revision: str | None = None, timeout: float) -> None:
        assert timeout < 60
        asked.append((name, revision))
        if error is not None:
            raise error

    monkeypatch.setattr(finetune_places.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(finetune_places.HfApi, "model_info", model_info)
    return asked


def status(kind: type[HfHubHTTPError], code: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, status_code=code, request=None)
    return kind("told by the hub", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            finetune_places.HTTP_ERROR("Name or service not known"),
            "'nowhere/model': as a folder it does not exist here, and as a hub id it is not in the hub's cache, and "
            "the hub cannot be reached: Name or service not known. .*HF_HUB_OFFLINE=1",
        ),
        (status(RepositoryNotFoundError, 401), "as a hub id it is unknown to the hub, or private"),
        (status(RevisionNotFoundError, 404), "known to the hub without a revision 'v7'"),
    ],
)
def test_a_name_that_nobody_knows_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    asked = answer(monkeypatch, error)
    with refused(ConfigError, "model", message):
        check_run(options("nowhere/model", revision="v7"))
    assert asked == [("nowhere/model", "v7")], "once, without retries"


@pytest.mark.parametrize("error", [None, status(HfHubHTTPError, 503)])
def test_names_that_may_be_on_the_hub_go_on_to_loading(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    asked = answer(monkeypatch, error)
    check_run(options("owner/model", tokenizer="owner/words", revision="v7"))
    assert asked == [("owner/model", "v7"), ("owner/words", "main")]


def test_what_is_in_the_cache_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answer(monkeypatch, status(RepositoryNotFoundError, 404))
    kept = {"owner/model": "config.json", "owner/words": "tokenizer_config.json"}

    def in_cache(name: str, file: str, *, revision: str) -> str | None:
        return str(tmp_path / file) if kept[name] == file else None

    monkeypatch.setattr(finetune_places, "try_to_load_from_cache", in_cache)
    check_run(options("owner/model", tokenizer="owner/words"))
    assert asked == []


def test_offline_and_misspelt_names(tmp_path: Path) -> None:
    with refused(ConfigError, "model", "HF_HUB_OFFLINE"):
        check_run(options("nowhere/model"))
    shown = check_places(options("nowhere/model", tokenizer=tmp_path).model, needed=False)
    assert len(shown) == 1 and shown[0].startswith(
        "model 'nowhere/model' is no folder here, and not in the hub's cache"
    )
    for needed in (True, False):
        with refused(ConfigError, "tokenizer", "as a hub id"):
            check_places(options(tmp_path, tokenizer="no where/model").model, needed=needed)
        with refused(ConfigError, "model", got="'./none', a folder that does not exist"):
            check_places(options("./none").model, needed=needed)


@pytest.mark.parametrize("folder", finetune_places._MADE_BY)
def test_what_makes_a_missing_folder_is_where_the_refusal_says(folder: str, repo_root: Path) -> None:
    """The named file of options has that folder, and at its head a command that writes it."""
    shown = finetune_places._MADE_BY[folder]
    (name,) = re.findall(r"configs/\S+\.yaml", shown)
    text = (repo_root / name).read_text(encoding="utf-8")
    assert f"\nmodel: {folder}\n" in text
    head = text.partition("\nmodel:")[0]
    if "get_smollm2" in head:
        script = (repo_root / "scripts" / "get_smollm2.py").read_text(encoding="utf-8")
        assert f'".cache" / "{Path(folder).name}"' in script and "get_smollm2.py" in shown
    else:
        assert re.search(rf"python scripts/\w+\.py .*{re.escape(folder)}$", head, flags=re.MULTILINE)
        assert "demo.sh` makes it" not in shown, "the demo keeps the dense model only"


def test_a_backend_that_is_not_here_is_refused_before_anything_is_loaded(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("loaded")

    for name in ("load_tokenizer", "blocks", "load_model"):
        monkeypatch.setattr(finetune, name, load)
    words = ["--model", str(tmp_path), "--train_files", "none.txt", "--report_to", "none", "--use_cpu", "true"]
    assert finetune.main([*words, "--neuron_backend", "neuron"]) == 2
    assert "got 'neuron': nki is not installed" in capsys.readouterr().err
    with refused(BackendUnavailableError, "backend", got="'nki-sim'"):
        check_run(options(tmp_path, neuron_backend="nki-sim"))
    check_run(options(models["llama"], neuron_backend="neuron", neuron_patch="false"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "mixtral"):
        make_tiny_model(family, folder / family)
    return {family: folder / family for family in ("llama", "mixtral")}


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "neuron").glob("*.yaml")), ids=lambda file: file.stem)
def test_neuron_files_can_be_rehearsed_with_the_tiny_models(file: Path, models: dict[str, Path]) -> None:
    for folder in models.values():
        config = json.loads((folder / "config.json").read_text())
        assert yaml.safe_load(file.read_text())["block_length"] <= config["max_position_embeddings"]


REFUSED = [
    ("llama", "bf16", TRN3, {}, r"2 x mlp \(64, 96\) \(bf16\): the documents give the bf16 kernels of experts, which"),
    ("llama", "bf16", Device("trn2", 1), {}, "LNC 2"),
    ("llama", "bf16", TRN2, {"per_device_train_batch_size": 65}, "at most 32,768 tokens per call"),
    ("llama", "mxfp8", TRN2, {}, "the MXFP8 kernels run on Trn3 only, and this is trn2"),
    ("mixtral", "mxfp8", TRN2, {}, "the MXFP8 kernels run on Trn3 only"),
    ("mixtral", "fp32", TRN3, {}, "no Neuron kernel computes in fp32"),
    ("mixtral", "bf16", Device("trn2", 1), {}, "LNC 2"),
    ("mixtral", "bf16", TRN2, {"neuron_block_size": 128}, "block_size is 128"),
    (
        "mixtral",
        "bf16",
        TRN2,
        {"per_device_train_batch_size": 65},
        "at most 32,768 tokens per call, and per_device_train_batch_size 65 x block_length 512 = 33,280",
    ),
    ("mixtral", "bf16", TRN2, {"eval_share": 0.1, "per_device_eval_batch_size": 65}, "per_device_eval_batch_size 65"),
    ("nowhere/model", "mxfp8", TRN2, {}, r"dense MLPs \(mxfp8\): the MXFP8.*; experts \(mxfp8\): the MXFP8"),
]


@pytest.mark.parametrize(("model", "precision", "device", "changes", "message"), REFUSED)
def test_a_precision_without_kernels_on_the_chip_is_refused_or_falls_back(
    models: dict[str, Path], model: str, precision: str, device: Device, changes: dict[str, Any], message: str
) -> None:
    given = {"neuron_precision": precision, "neuron_backend": "neuron", **changes}
    with refused(ConfigError, "neuron_precision, neuron_block_size and the length of batches", message):
        check_kernels(options(models.get(model, model), **given), device, DocumentedAdapter())
    shown = check_kernels(
        options(models.get(model, model), **given, neuron_fallback="torch"), device, DocumentedAdapter()
    )
    assert any("PyTorch computes them: " in line for line in shown)


@pytest.mark.parametrize(
    ("model", "precision", "device", "changes", "message"),
    [
        ("llama", "mxfp8", TRN3, {}, "2 x mlp (64, 96): the kernels compute them"),
        ("mixtral", "bf16", TRN2, {"per_device_eval_batch_size": 65}, "2 x experts 4 x (64, 96): the kernels"),
        ("mixtral", "mxfp8", TRN3, {"per_device_train_batch_size": 65}, "2 x experts 4 x (64, 96): the kernels"),
        ("llama", "bf16", TRN2, {}, "2 x mlp (64, 96): the kernels compute them"),
        ("nowhere/model", "bf16", TRN2, {}, "if it has dense MLPs: the kernels compute them"),
    ],
)
def test_what_the_kernels_compute_is_told(
    models: dict[str, Path], model: str, precision: str, device: Device, changes: dict[str, Any], message: str
) -> None:
    run = options(models.get(model, model), neuron_precision=precision, neuron_backend="neuron", **changes)
    assert any(line.startswith(message) for line in check_kernels(run, device, DocumentedAdapter(), online=False))


def test_excluded_blocks_and_those_that_may_stay_stock_do_not_count(models: dict[str, Path]) -> None:
    run = options(models["llama"], neuron_backend="neuron", neuron_exclude="model.layers.*")
    assert check_kernels(run, TRN2, DocumentedAdapter()) == []
    run = options(models["llama"], neuron_backend="neuron", neuron_strict="false", neuron_precision="mxfp8")
    with refused(ConfigError, "neuron_precision, neuron_block_size and the length of batches", "Trn3 only"):
        # Nothing would be left to patch.
        check_kernels(run, TRN2, DocumentedAdapter())


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversions: a dense one in MX, and experts in bf16."""
    folder = tmp_path_factory.mktemp("conversions")
    for family in ("llama", "mixtral"):
        make_tiny_model(family, folder / family)
    convert_checkpoint(folder / "llama", folder / "mxfp8", ConvertOptions("mxfp8"))
    with pytest.warns(NeuronMoEWarning, match="rounded"):
        convert_checkpoint(folder / "mixtral", folder / "bf16", ConvertOptions("bf16"))
    return {precision: folder / precision for precision in ("mxfp8", "bf16")}


@pytest.mark.parametrize("device", [TRN2, TRN3])
def test_no_kernel_trains_through_frozen_mx_codes(conversions: dict[str, Path], device: Device) -> None:
    given = {"neuron_backend": "neuron", "neuron_precision": "mxfp8", "lora_rank": 4}
    with refused(ConfigError, "neuron_fallback", "Set neuron_fallback: torch"):
        check_kernels(options(conversions["mxfp8"], **given), device, DocumentedAdapter())
    run = options(conversions["mxfp8"], **given, neuron_fallback="torch")
    (shown,) = check_kernels(run, device, DocumentedAdapter())
    assert shown.startswith("frozen MX blocks: in training PyTorch computes them on the device: ")


def test_a_frozen_base_is_known_before_it_is_loaded(conversions: dict[str, Path]) -> None:
    check_run(options(conversions["mxfp8"], lora_rank=4))
    with refused(ConfigError, "lora_rank", got="a checkpoint whose blocks are frozen"):
        check_run(options(conversions["mxfp8"]))
    with refused(ConfigError, "lora_merge", got="a checkpoint whose blocks are frozen"):
        check_run(options(conversions["mxfp8"], lora_rank=4, lora_merge="true"))


def test_a_conversion_in_bf16_is_judged_as_its_source(conversions: dict[str, Path]) -> None:
    run = options(conversions["bf16"], neuron_backend="neuron")
    assert check_kernels(run, TRN2, DocumentedAdapter()) == ["2 x experts 4 x (64, 96): the kernels compute them"]
    with refused(ConfigError, "neuron_precision, neuron_block_size and the length of batches", "for Trn2 only"):
        check_kernels(run, TRN3, DocumentedAdapter())


def test_somebody_elses_quantization_is_left_to_the_loading(models: dict[str, Path], tmp_path: Path) -> None:
    content = json.loads((models["llama"] / "config.json").read_text(encoding="utf-8"))
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (shown,) = check_kernels(options(tmp_path, neuron_backend="neuron"), TRN3, DocumentedAdapter())
    assert f"cannot be judged before it is loaded: finetune: {tmp_path}/config.json: quantization_config" in shown


def test_the_device_is_not_asked_for_kernels_of_missing_cores(models: dict[str, Path]) -> None:
    with refused(
        ConfigError, "neuron_precision, neuron_block_size and the length of batches", "Set NEURON_LOGICAL_NC_CONFIG=2"
    ):
        check_kernels(options(models["mixtral"], neuron_backend="neuron"), Device("trn2", 1), DocumentedAdapter())


def test_tensors_of_any_dtype_may_lie_beside_the_weights(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["extra"] = torch.zeros(3, dtype=torch.complex64)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_weights(str(tmp_path)) == []


@pytest.mark.parametrize("index", [False, True])
def test_damaged_weights_are_refused_before_they_are_loaded(tmp_path: Path, index: bool) -> None:
    make_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    check_run(options(tmp_path))
    whole = weights.read_bytes()
    if index:
        weights.unlink()
        weights = tmp_path / "model-00001-of-00001.safetensors"
        names = {"weight_map": {"lm_head.weight": weights.name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names), encoding="utf-8")
        with refused(SourceDamageError, weights.name, got="no such file"):
            check_run(options(tmp_path))
    weights.write_bytes(whole[:-1])
    with refused(SourceDamageError, weights.name, got="Error"):
        check_run(options(tmp_path))
    weights.unlink()
    if index:
        (tmp_path / "model.safetensors.index.json").write_text("{", encoding="utf-8")
        with refused(SourceDamageError, "model.safetensors.index.json", got="Expecting property name"):
            check_run(options(tmp_path))
    else:
        assert "has no weights here" in check_weights(str(tmp_path), needed=False)[0]
        with refused(SourceDamageError, "model", "no file of them"):
            check_run(options(tmp_path))
        (tmp_path / "adapter_config.json").touch()
        check_run(options(tmp_path))  # whose base is elsewhere


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"neuron_weights": "kernel"}, "neuron_weights", "got 'kernel'"),
        ({"neuron_backend": "neuron"}, "neuron_weights", "got 'auto', which is kernel on backend neuron"),
        ({"lora_rank": 4, "lora_merge": "true"}, "lora_merge", ""),
    ],
)
def test_what_sharding_excludes_is_refused_first(
    models: dict[str, Path], changes: dict[str, Any], argument: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_training(options(models["llama"], **changes))
    with refused(ConfigError, argument, says):
        check_training(options(models["llama"], **changes, fsdp="full_shard"))
    for fine in ({"neuron_weights": "stock"}, {"neuron_fallback": "torch"}):
        check_training(options(models["llama"], fsdp="full_shard", neuron_backend="neuron", **fine))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused(ConfigError, argument, says):
        check_training(options(models["llama"], **changes))


def test_a_run_asks_the_machine_that_it_is_on(models: dict[str, Path], tmp_path: Path) -> None:
    with installed(tmp_path, Double(target="trn2")):
        check_run(options(models["mixtral"], neuron_backend="neuron"))
        with refused(
            ConfigError,
            "neuron_precision, neuron_block_size and the length of batches",
            "the MXFP8 kernels run on Trn3 only, and this is trn2",
        ):
            check_run(options(models["mixtral"], neuron_backend="neuron", neuron_precision="mxfp8"))


def test_blocks_longer_than_the_models_positions_are_refused_before_loading(models: dict[str, Path]) -> None:
    with refused(ConfigError, "block_length", "Set block_length: 4096", got="8192"):
        check_run(options(models["llama"], block_length=8192))
    check_run(options(models["llama"], block_length=4096))


def test_targets_of_adapters_are_looked_for_before_loading(
    models: dict[str, Path], conversions: dict[str, Path], tmp_path: Path
) -> None:
    for model in (models["llama"], models["mixtral"], conversions["mxfp8"]):
        with refused(ConfigError, "lora_targets", r"v_proj\. Did you mean 'q_proj'\?", got="qproj"):
            check_training(options(model, lora_rank=4, lora_targets="qproj"))
        for fine in ("q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj", "all-linear"):
            check_training(options(model, lora_rank=4, lora_targets=fine))
    with refused(ConfigError, "lora_targets", got="roj"):
        check_training(options(models["llama"], lora_rank=4, lora_targets="roj"))
    check_training(options(models["llama"], lora_targets="qproj"))  # there are no adapters
    check_training(options(models["llama"], lora_rank=4, lora_targets="qproj", lora_parameters="mlp.down_proj.weight"))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    check_training(options(tmp_path, lora_rank=4, lora_targets="qproj"))  # a family that nobody knows
