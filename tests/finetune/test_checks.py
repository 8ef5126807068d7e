"""What is found before data or model is loaded: names, the hub, the backend, precision against the chip."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
from hf_neuron_moe.backends.neuron.limits import Device
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.demo.tiny_model import make_tiny_model
from hf_neuron_moe.device.kernel_support import DocumentedAdapter
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NeuronMoEWarning, SourceDamageError
from hf_neuron_moe.finetune import check, configs, early_checks, model_files, read_options
from hf_neuron_moe.finetune.early_checks import (
    check_packing,
    check_quantized_backend,
    check_run,
    check_training,
    masks_with_positions,
)
from hf_neuron_moe.finetune.kernels import check_kernels
from hf_neuron_moe.finetune.model import load_model, load_tokenizer
from hf_neuron_moe.finetune.model_files import check_weights, longest_input, read_config
from hf_neuron_moe.finetune.resumed import check_resumed
from hf_neuron_moe.finetune.train_options import Options
from tests.finetune.data_files import ROWS, write
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed
from tests.refusals import refused
from tests.tiny_models import FAMILIES, OTHER_CALLS, OTHER_GATES, tiny_model, tokens

TRN2, TRN3 = Device("trn2", 2), Device("trn3", 2)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, ROWS["text"], ".txt")


def options(model: str | Path, **changes: Any) -> Options:
    given = {"model": model, "train_files": "rows.txt", "use_cpu": "true", "max_length": 512, **changes}
    return read_options([word for key, value in given.items() for word in (f"--{key}", str(value))])


def config_of(run: Options) -> bytes | str:
    return read_config(Path(run.model.model))


def kernels(run: Options, device: Device) -> list[str]:
    return check_kernels(run, config_of(run), device, DocumentedAdapter())


def training(run: Options) -> None:
    check_training(run, config_of(run))


def test_names_that_are_no_folder_and_not_known_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(
        SourceDamageError,
        "model",
        "HF_HUB_OFFLINE=1",
        got="'nowhere/model', no such folder, and from the Hub OfflineModeIsEnabled",
        where="command line",
    ):
        check(options("nowhere/model"))
    with refused(SourceDamageError, "tokenizer", got="'owner/words'"):
        check(options(tmp_path, tokenizer="owner/words"))
    with refused(ConfigError, "model", got="'./none', a folder that does not exist"):
        check(options("./none"))
    with refused(ConfigError, "model", "`hf-neuron-moe tiny-model mixtral ./tiny-mixtral`"):
        check(options("./tiny-mixtral"))
    asked: list[str] = []

    def resolve(name: str, *, weights: bool) -> Path:
        asked.append(name)
        return tmp_path

    monkeypatch.setattr(model_files, "resolve_source", resolve)
    check_run(options("owner/model", tokenizer="owner/words", revision="v7"))
    assert asked == ["owner/words", "owner/model@v7"]


def test_every_mistake_names_file_and_line(models: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path, [{"text": "a"}, {"text": None}])
    (tmp_path / "a_folder").mkdir()
    file = tmp_path / "mine.yaml"
    head = f"use_cpu: true\nmodel: {models['llama']}\n"
    for line, argument, got in (
        ("train_files: nope.jsonl", "train_files", "nothing at nope.jsonl"),
        ("train_files: rows.jsonl", "train_files", "null in column 'text' (rows.jsonl, line 2)"),
        ("train_files: rows.txt\nmax_length: 4096", "max_length", "4096"),
        ("train_files: rows.txt\noutput_dir: /dev/null/x", "output_dir", "'/dev/null/x'"),
        ("train_files: rows.txt\nreport_to: [wandb]", "report_to", "'wandb', which is not"),
        ("train_files: rows.txt\npush_to_hub: true", "push_to_hub", "HF_HUB_OFFLINE"),
        ("train_files: rows.txt\ntokenizer: ./nope", "tokenizer", "'./nope', a folder that does not exist"),
        ("train_files: rows.txt\nresume_from_checkpoint: runs/nope", "resume_from_checkpoint", "'runs/nope'"),
        ("train_files: rows.txt\nchat_template_path: no.jinja", "chat_template_path", "nothing at no.jinja"),
        ("train_files: rows.txt\neval_files: no.txt", "eval_files", "nothing at no.txt"),
        ("train_files: rows.txt\nneuron_backend: foo", "neuron_backend", "'foo'"),
        ("train_files: rows.txt\neos_token: zzz", "eos_token", "'zzz'"),
        ("train_files: rows.txt\npad_token: zzz", "pad_token", "'zzz'"),
        ("train_files: rows.txt\nattn_implementation: spda", "attn_implementation", "'spda'"),
        ("train_files: rows.txt\ndataset_kwargs: {skip_prepare_dataset: true}", "dataset_kwargs", "true"),
        ("train_files: rows.txt\ndataset_kwargs: {foo: 1}", "dataset_kwargs", "foo"),
        ("train_files: rows.txt\nmodel_init_kwargs: {foo: 1}", "model_init_kwargs", "some"),
        ("train_files: [a_folder]", "train_files", "the folder a_folder"),
    ):
        file.write_text(f"{head}{line}\n", encoding="utf-8")
        with refused(ConfigError, argument, got=got, where=f"{file}, line {3 + line.count(chr(10))}"):
            check(read_options([str(file)]))
    file.write_text(f"{head}train_files: rows.txt\nneuron_backend: nki-sim\n", encoding="utf-8")
    with refused(BackendUnavailableError, "neuron_backend", where=f"{file}, line 4"):
        check(read_options([str(file)]))


def test_the_backend_of_a_model_that_stays_stock_may_be_missing(models: dict[str, Path]) -> None:
    with refused(BackendUnavailableError, "neuron_backend"):
        check_run(options(models["llama"], neuron_backend="nki-sim"))
    check_run(options(models["llama"], neuron_backend="nki-sim", neuron_patch="false"))


def test_a_default_length_is_lowered_to_the_models_positions(models: dict[str, Path], tmp_path: Path) -> None:
    run = read_options(["--model", str(models["llama"]), "--train_files", "rows.txt", "--use_cpu", "--output_dir", "o"])
    check(run)
    assert run.training.max_length == 512
    assert not (tmp_path / "o").exists(), "nothing is left behind"


def test_a_whole_model_is_not_written_next_to_an_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    given = ["--model", str(models["llama"]), "--train_files", "rows.txt", "--use_cpu", "--output_dir", "out"]
    with refused(ConfigError, "output_dir", "a folder without an adapter", got="'out'"):
        check(read_options(given))
    check(read_options([*given, "--lora_rank", "4"]))


@pytest.mark.parametrize("weights", ["model.safetensors.index.json", "pytorch_model.bin"])
def test_an_adapter_is_not_written_next_to_a_whole_model(models: dict[str, Path], tmp_path: Path, weights: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / weights).write_text("{}")
    given = ["--model", str(models["llama"]), "--train_files", "rows.txt", "--use_cpu", "--output_dir", "out"]
    with refused(ConfigError, "output_dir", "a folder without a whole model", got="'out'"):
        check(read_options([*given, "--lora_rank", "4"]))
    check(read_options(given))
    resumed = read_options([*given, "--lora_rank", "4", "--resume_from_checkpoint", "out/checkpoint-1"])
    early_checks.check_leftovers(resumed)  # the run itself is compared with its checkpoint


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "true, and linear_attention in config.json"),
        ({"mamba_d_state": 16}, "true, and mamba_d_state"),
        ({"layer_types": ["full_attention", "sliding_attention"], "hidden_size": 8}, ""),
    ],
)
def test_models_with_a_state_do_not_pack(config: dict[str, Any], got: str) -> None:
    content = json.dumps(config).encode()
    check_packing(options("m"), content)
    check_packing(options("m", packing=True, packing_strategy="wrapped"), content)
    if not got:
        check_packing(options("m", packing=True), content)
        return
    with refused(ConfigError, "packing", got=got):
        check_packing(options("m", packing=True), content)


def test_documents_are_packed_where_the_mask_is_made_with_positions(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("llama", "mixtral", "qwen3_moe"):
        check(options(models[family], packing=True))
    with refused(ConfigError, "packing", "wrapped", got="true, and GptOssForCausalLM, whose mask is made without"):
        check(options(models["gpt_oss"]))  # text is packed by default
    check(options(models["gpt_oss"], packing_strategy="wrapped"))
    check(options(models["gpt_oss"], packing="false"))
    monkeypatch.setattr(early_checks, "_check_attention", lambda way: None)  # as on a GPU with the package
    check(options(models["gpt_oss"], attn_implementation="flash_attention_2"))


class MasksOfTwoKinds:
    """A decoder that changes a mask before it makes one."""

    def forward(self, inputs_embeds: Any, attention_mask: Any, position_ids: Any) -> Any:
        def widened_mask(mask: Any) -> Any:
            return mask

        def create_causal_mask(**given: Any) -> Any:
            return given

        mask = widened_mask(mask=attention_mask)
        return create_causal_mask(inputs_embeds=inputs_embeds, attention_mask=mask, position_ids=position_ids)


def test_functions_that_make_no_mask_need_no_positions() -> None:
    assert masks_with_positions(SimpleNamespace(get_decoder=MasksOfTwoKinds))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["flash_attention_2", "flash_attention_3", "flex_attention", "some/kernel"])
def test_attention_that_cannot_run_here_is_refused(way: str, models: dict[str, Path]) -> None:
    assert not torch.accelerator.is_available() and find_spec("kernels") is None, "the test knows CPUs without kernels"
    with refused(ConfigError, "attn_implementation", f"{way} needs", got=repr(way)):
        check(options(models["llama"], attn_implementation=way))
    with refused(ConfigError, "attn_implementation", f"{way} needs", got=repr(f"paged|{way}")):
        early_checks.check_loading(options("m", attn_implementation=f"paged|{way}"))


def test_options_of_loading_that_go_together() -> None:
    early_checks.check_loading(options("m", attn_implementation="paged|sdpa"))
    with refused(ConfigError, "attn_implementation", got="'paged|sdpo'"):
        early_checks.check_loading(options("m", attn_implementation="paged|sdpo"))
    with refused(ConfigError, "padding_free", got="neither"):
        early_checks.check_loading(options("m", padding_free="true"))
    early_checks.check_loading(options("m", padding_free="true", packing="true"))
    with refused(ConfigError, "dataset_kwargs", "without skip_prepare_dataset"):
        early_checks.check_loading(options("m", dataset_kwargs='{"skip_prepare_dataset": true}'))


@pytest.mark.parametrize("name", ["none.jinja", "none.j2"])
def test_a_chat_template_that_is_not_there_is_named(name: str) -> None:
    with refused(ConfigError, "chat_template_path", name):
        early_checks.check_files(options("m", chat_template_path=name))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"hidden_size": -1},
        {"hidden_size": 128},
        {"vocab_size": 10},
        {"hidden_act": "foo"},
        {"num_attention_heads": 0},
        {"quantization_config": 5},
        {"dtype": "foo"},
        [],
    ],
    ids=str,
)
def test_a_model_that_transformers_cannot_load_is_named(change: Any, models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["mixtral"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if change else change))
    with refused(ConfigError, "model", got=repr(str(tmp_path / "model"))):
        load_model(options(tmp_path / "model").model)


def test_what_could_not_be_saved_later_is_found_when_it_is_loaded(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false}')
    with refused(ConfigError, "model", got=repr(str(tmp_path / "model"))):
        load_model(options(tmp_path / "model").model)


def test_a_damaged_tokenizer_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with refused(ConfigError, "model", "tokenizer", got=repr(str(tmp_path / "model"))):
        load_tokenizer(options(tmp_path / "model").model)


def test_a_revision_of_a_folder_is_an_error(models: dict[str, Path]) -> None:
    with refused(ConfigError, "revision", got="'abc'"):
        check(options(models["llama"], revision="abc"))


def test_a_run_does_not_write_over_the_model_that_it_reads(models: dict[str, Path]) -> None:
    model = models["llama"]
    for same in (str(model), f"{model}/", f"{model}/../{model.name}"):
        for rank in (0, 4):
            with refused(ConfigError, "output_dir", "another folder than the model's", got=repr(same)):
                check(options(model, output_dir=same, lora_rank=rank))
    check(options(model, output_dir=f"{model}/run"))


@pytest.mark.parametrize("family", (*FAMILIES, *OTHER_GATES, *OTHER_CALLS))
def test_what_is_packed_keeps_documents_apart(family: str) -> None:
    model = tiny_model(family).float().eval()
    rows = tokens()[0, :7][None], tokens()[1, :9][None]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        packed = model(torch.cat(rows, 1), position_ids=positions, use_cache=False).logits[:, 7:]
        alone = model(rows[1], use_cache=False).logits
    apart = (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert apart or not masks_with_positions(model)
    assert family in ("gpt_oss", "llama4") or masks_with_positions(model)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 256}, "vocab_size": 9}, 256),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_positions_are_read_from_the_configuration(config: dict[str, Any], longest: int | None) -> None:
    assert longest_input(json.dumps(config).encode()) == longest


@pytest.fixture(scope="module")
def long_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with positions for long rows."""
    folder = tmp_path_factory.mktemp("long")
    for family in ("llama", "mixtral"):
        make_tiny_model(family, folder / family)
    return {family: folder / family for family in ("llama", "mixtral")}


@pytest.mark.parametrize("name", [name for name in configs.names() if name.startswith("neuron/")])
def test_neuron_files_can_be_rehearsed_with_the_tiny_models(name: str, long_models: dict[str, Path]) -> None:
    written = yaml.safe_load(configs.find(name).read_text())
    assert written["pad_to_multiple_of"] == written["max_length"], "all batches have one shape"
    for folder in long_models.values():
        assert written["max_length"] <= json.loads((folder / "config.json").read_text())["max_position_embeddings"]


BLOCKS = "neuron_precision, neuron_block_size and the length of batches"
REFUSED = [
    ("llama", "bf16", TRN3, {}, r"2 x mlp \(64, 96\) \(bf16\): the documents give the bf16 kernels of experts, which"),
    ("llama", "bf16", Device("trn2", 1), {}, "LNC 2"),
    ("llama", "bf16", TRN2, {"per_device_train_batch_size": 65}, "at most 32,768 tokens per call"),
    ("llama", "mxfp8", TRN2, {}, "the MXFP8 kernels run on Trn3 only, and this is trn2"),
    ("mixtral", "mxfp8", TRN2, {}, "the MXFP8 kernels run on Trn3 only"),
    ("mixtral", "fp32", TRN3, {}, "no Neuron kernel computes in fp32"),
    ("mixtral", "bf16", Device("trn2", 1), {}, "Set NEURON_LOGICAL_NC_CONFIG=2"),
    ("mixtral", "bf16", TRN2, {"neuron_block_size": 128}, "block_size is 128"),
    (
        "mixtral",
        "bf16",
        TRN2,
        {"per_device_train_batch_size": 65},
        "at most 32,768 tokens per call, and per_device_train_batch_size 65 x max_length 512 = 33,280",
    ),
    ("mixtral", "bf16", TRN2, {"eval_share": 0.1, "per_device_eval_batch_size": 65}, "per_device_eval_batch_size 65"),
    ("nowhere/model", "mxfp8", TRN2, {}, r"dense MLPs \(mxfp8\): the MXFP8.*; experts \(mxfp8\): the MXFP8"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("model", "precision", "device", "changes", "message"), REFUSED)
def test_a_precision_without_kernels_on_the_chip_is_an_error_or_falls_back(
    long_models: dict[str, Path], model: str, precision: str, device: Device, changes: dict[str, Any], message: str
) -> None:
    given = {"neuron_precision": precision, "neuron_backend": "neuron", **changes}
    with refused(ConfigError, BLOCKS, message):
        kernels(options(long_models.get(model, model), **given), device)
    shown = kernels(options(long_models.get(model, model), **given, neuron_fallback="torch"), device)
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
def test_what_the_kernels_compute_is_reported(
    long_models: dict[str, Path], model: str, precision: str, device: Device, changes: dict[str, Any], message: str
) -> None:
    run = options(long_models.get(model, model), neuron_precision=precision, neuron_backend="neuron", **changes)
    assert any(line.startswith(message) for line in kernels(run, device))


def test_excluded_blocks_and_those_that_may_stay_stock_do_not_count(long_models: dict[str, Path]) -> None:
    run = options(long_models["llama"], neuron_backend="neuron", neuron_exclude="model.layers.*")
    assert kernels(run, TRN2) == []
    run = options(long_models["llama"], neuron_backend="neuron", neuron_strict="false", neuron_precision="mxfp8")
    with refused(ConfigError, BLOCKS, "Trn3 only"):
        kernels(run, TRN2)  # nothing would be left to patch


@pytest.fixture(scope="module")
def conversions(long_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversions: a dense one in MX, and experts in bf16."""
    folder = tmp_path_factory.mktemp("conversions")
    convert_checkpoint(long_models["llama"], folder / "mxfp8", ConvertOptions("mxfp8"))
    with pytest.warns(NeuronMoEWarning, match="rounded"):
        convert_checkpoint(long_models["mixtral"], folder / "bf16", ConvertOptions("bf16"))
    return {precision: folder / precision for precision in ("mxfp8", "bf16")}


@pytest.mark.parametrize("device", [TRN2, TRN3])
def test_no_kernel_trains_through_frozen_mx_codes(conversions: dict[str, Path], device: Device) -> None:
    given = {"neuron_backend": "neuron", "neuron_precision": "mxfp8", "lora_rank": 4}
    with refused(ConfigError, "neuron_fallback", "Set neuron_fallback: torch"):
        kernels(options(conversions["mxfp8"], **given), device)
    (shown,) = kernels(options(conversions["mxfp8"], **given, neuron_fallback="torch"), device)
    assert shown.startswith("frozen MX blocks: in training PyTorch computes them on the device: ")


def test_a_frozen_base_is_known_before_it_is_loaded(conversions: dict[str, Path]) -> None:
    check_run(options(conversions["mxfp8"], lora_rank=4))
    with refused(ConfigError, "lora_rank", got="a checkpoint whose blocks are frozen"):
        check_run(options(conversions["mxfp8"]))
    with refused(ConfigError, "lora_merge", got="a checkpoint whose blocks are frozen"):
        check_run(options(conversions["mxfp8"], lora_rank=4, lora_merge="true"))
    check_run(options(conversions["mxfp8"], lora_rank=4, neuron_guard="warn"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "fp32"),
        ("precision", '{"*": "bf16", "nope": "fp32"}'),
        ("activations", "1KiB/token"),
        ("activations", "full"),
        ("weights", "kernel"),
        ("include", "nothing.*"),
        ("exclude", "nothing.*"),
    ],
)
def test_options_of_patched_blocks_are_refused_for_a_frozen_base(
    name: str, value: str, conversions: dict[str, Path], tmp_path: Path
) -> None:
    given = options(conversions["mxfp8"], lora_rank=4, **{f"neuron_{name}": value})
    with refused(ConfigError, f"neuron_{name}", "left out for a model whose blocks are frozen MX codes"):
        check_run(given)
    model = AutoModelForCausalLM.from_pretrained(conversions["mxfp8"])
    arguments = NeuronMoETrainingArguments(tmp_path, report_to="none", **{f"neuron_{name}": value})
    with refused(ConfigError, f"neuron_{name}", "left out for a model whose blocks are frozen MX codes"):
        NeuronMoETrainer(model, arguments)


def test_a_precision_that_was_given_is_that_of_a_frozen_base(conversions: dict[str, Path]) -> None:
    check_run(options(conversions["mxfp8"], lora_rank=4, neuron_precision="mxfp8"))
    with refused(ConfigError, "neuron_precision", "left out for a model whose blocks are frozen MX codes"):
        check_run(options(conversions["mxfp8"], lora_rank=4, neuron_precision="bf16"))


def test_another_scale_of_adapters_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    make_tiny_model("mixtral", tmp_path / "model")
    given = options(tmp_path / "model", resume_from_checkpoint=tmp_path, lora_rank=2, lora_targets="q_proj")
    given.lora.lora_targets = ["q_proj"]
    check_resumed(given, config_of(given))
    given.lora.lora_alpha = 1280.0
    with refused(ConfigError, "resume_from_checkpoint", "lora_alpha 16 and 1280"):
        check_resumed(given, config_of(given))


def test_a_conversion_in_bf16_is_judged_as_its_source(conversions: dict[str, Path]) -> None:
    run = options(conversions["bf16"], neuron_backend="neuron")
    assert kernels(run, TRN2) == ["2 x experts 4 x (64, 96): the kernels compute them"]
    with refused(ConfigError, BLOCKS, "for Trn2 only"):
        kernels(run, TRN3)


def test_somebody_elses_quantization_is_left_to_the_loading(long_models: dict[str, Path], tmp_path: Path) -> None:
    content = json.loads((long_models["llama"] / "config.json").read_text(encoding="utf-8"))
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (shown,) = kernels(options(tmp_path, neuron_backend="neuron"), TRN3)
    assert f"cannot be judged before it is loaded: train: {tmp_path}/config.json: quantization_config" in shown


def test_tensors_of_any_dtype_may_lie_beside_the_weights(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["extra"] = torch.zeros(3, dtype=torch.complex64)
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    check_weights(tmp_path / "model")


@pytest.mark.parametrize("index", [False, True])
def test_damaged_weights_are_found_before_they_are_loaded(tmp_path: Path, index: bool) -> None:
    folder = tmp_path / "model"
    make_tiny_model("llama", folder)
    weights = folder / "model.safetensors"
    check_run(options(folder))
    whole = weights.read_bytes()
    if index:
        weights.unlink()
        weights = folder / "model-00001-of-00001.safetensors"
        names = {"weight_map": {"lm_head.weight": weights.name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(names), encoding="utf-8")
        with refused(SourceDamageError, weights, got="no such file"):
            check_run(options(folder))
    weights.write_bytes(whole[:-1])
    with refused(SourceDamageError, weights, got="Error"):
        check_run(options(folder))
    weights.unlink()
    if index:
        (folder / "model.safetensors.index.json").write_text("{", encoding="utf-8")
        with refused(SourceDamageError, folder / "model.safetensors.index.json", "Expecting property name"):
            check_run(options(folder))
    else:
        with refused(SourceDamageError, "model", "without any"):
            check_run(options(folder))
        (folder / "pytorch_model.bin").touch()
        check_run(options(folder))  # pickled: loading checks them
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
        with refused(
            ConfigError,
            "model",
            "Name its base, 'some/base', .* --resume",
            got=f"{str(folder)!r}, which has an adapter",
        ):
            check_run(options(folder))


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"neuron_weights": "kernel"}, "neuron_weights", "got 'kernel'"),
        ({"neuron_backend": "neuron"}, "neuron_weights", "got 'auto', which is kernel on backend neuron"),
        ({"lora_rank": 4, "lora_merge": "true"}, "lora_merge", ""),
    ],
)
def test_what_sharding_excludes_is_found_first(
    long_models: dict[str, Path], changes: dict[str, Any], argument: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(options(long_models["llama"], **changes))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused(ConfigError, argument, says):
        training(options(long_models["llama"], **changes))
    for fine in ({"neuron_weights": "stock"}, {"neuron_fallback": "torch"}):
        training(options(long_models["llama"], neuron_backend="neuron", **fine))


def test_frozen_codes_have_one_layout_under_fsdp(conversions: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks are not patched: the layout of weights says nothing about them."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    training(options(conversions["mxfp8"], neuron_backend="neuron", lora_rank=4))


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "fsdp_size", "dp_replicate_size"])
def test_adapters_are_not_merged_into_weights_that_a_layout_spreads(long_models: dict[str, Path], size: str) -> None:
    """One process would wait for the others: a merge gathers."""
    with refused(ConfigError, "lora_merge", got="true"):
        training(options(long_models["llama"], lora_rank=4, lora_merge="true", **{size: 2}))
    training(options(long_models["llama"], lora_rank=4, **{size: 2}))


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "fsdp_size", "dp_replicate_size"])
def test_references_are_not_computed_before_training_with_a_layout(long_models: dict[str, Path], size: str) -> None:
    """TRL would end late: it hashes the weights, and those of a sharded model have no bytes."""
    given = {"method": "dpo", "precompute_ref_log_probs": "true"}
    with refused(ConfigError, "precompute_ref_log_probs", f"false with {size} 2", got="true"):
        training(options(long_models["llama"], **given, **{size: 2}))
    training(options(long_models["llama"], **given))


def test_a_run_asks_the_machine_that_it_is_on(models: dict[str, Path], tmp_path: Path) -> None:
    with installed(tmp_path, Double(target="trn2")):
        check(options(models["mixtral"], neuron_backend="neuron"))
        with refused(ConfigError, BLOCKS, "the MXFP8 kernels run on Trn3 only, and this is trn2"):
            check(options(models["mixtral"], neuron_backend="neuron", neuron_precision="mxfp8"))


def test_targets_of_adapters_are_looked_for_before_loading(
    long_models: dict[str, Path], conversions: dict[str, Path], tmp_path: Path
) -> None:
    for model in (long_models["llama"], long_models["mixtral"], conversions["mxfp8"]):
        with refused(ConfigError, "lora_targets", r"v_proj\. Did you mean 'q_proj'\?", got="qproj"):
            training(options(model, lora_rank=4, lora_targets="qproj"))
        for fine in ("q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj", "all-linear"):
            training(options(model, lora_rank=4, lora_targets=fine))
    with refused(ConfigError, "lora_targets", got="roj"):
        training(options(long_models["llama"], lora_rank=4, lora_targets="roj"))
    training(options(long_models["llama"], lora_rank=0, lora_targets="qproj"))  # there are no adapters
    given = {"lora_rank": 4, "lora_targets": "qproj", "lora_parameters": "mlp.down_proj.weight"}
    training(options(long_models["llama"], **given))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    training(options(tmp_path, lora_rank=4, lora_targets="qproj"))  # a family that nobody knows


def test_own_training_files_replace_the_evaluation_of_the_package_too() -> None:
    assert read_options(["tiny-llama"]).data.eval_files
    with pytest.warns(NeuronMoEWarning, match=r"tiny-llama.yaml, line \d+: eval_files, .* are left out.*--eval_files"):
        assert not read_options(["tiny-llama", "--train_files", "rows.txt"]).has_evaluation
    own = read_options(["tiny-llama", "--train_files", "rows.txt", "--eval_files", "rows.txt"])
    assert own.data.eval_files == ["rows.txt"]


def test_torch_backends_train_through_frozen_mx_codes() -> None:
    for backend in ("torch", "torch-grouped"):
        check_quantized_backend(backend, "refuse")
    with refused(ConfigError, "neuron_fallback", "on backend auto"):
        check_quantized_backend("auto", "refuse")


@pytest.mark.parametrize("targets", [["q_proj", "k_proj"], ["q_proj", "w2"]])
def test_a_checkpoint_with_adapters_of_other_targets_is_not_resumed(tmp_path: Path, targets: list[str]) -> None:
    """Parameters that peft did not make of these targets: `w2` would be the down projection."""
    adapter = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    make_tiny_model("mixtral", tmp_path / "model")
    given = options(tmp_path / "model", resume_from_checkpoint=tmp_path, lora_rank=2, lora_targets=" ".join(targets))
    given.lora.lora_targets = targets
    with refused(ConfigError, "resume_from_checkpoint", "lora_(parameters|targets)"):
        check_resumed(given, config_of(given))
