"""Options from files and the command line: configurations, types, and what is an error with which hint."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_neuron_moe import patch_model
from hf_neuron_moe.demo.tiny_model import tiny_config
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, UnsupportedModelError, nearest
from hf_neuron_moe.finetune import configs, read_options
from hf_neuron_moe.finetune.data_sources import files_of
from hf_neuron_moe.finetune.model import adapters, patch
from hf_neuron_moe.finetune.reading import ELSEWHERE, parser_of, read_yaml
from hf_neuron_moe.finetune.train_options import Options, known_options
from hf_neuron_moe.training.prepare import refuse_unsavable_adapters
from tests.refusals import refused

FAMILY = {
    "llama-3-8b": "llama",
    "qwen3-30b-a3b": "qwen3_moe",
    "mixtral-8x7b": "mixtral",
    "gpt-oss-20b": "gpt_oss",
    "smollm2-135m": "llama",
    "smollm2-gpt-oss": "gpt_oss",
    "smollm2-mixtral": "mixtral",
    "tiny-llama": "llama",
    "tiny-mixtral": "mixtral",
}
"""Model family of each configuration; its tiny twin stands in for it here."""


def options_of(name: str, *overrides: str) -> Options:
    return read_options([name, "--use_cpu", "true", *overrides])


def test_every_configuration_is_found_by_its_name_and_reads() -> None:
    names = configs.names()
    assert {name for name in names if "/" not in name} == set(FAMILY)
    assert {"distributed/deepseek-v3-trn2", "neuron/trn2-olmoe", "accelerate/fsdp2-cpu"} <= set(names)
    for name in names:
        assert configs.find(name) == configs.find(name.rpartition("/")[2]) == configs.find(f"{name}.yaml")
        assert configs.summary_of(name)
        if not name.startswith(configs.LAUNCHER):
            options = options_of(name)
            assert options.training.output_dir == f"runs/{name.rpartition('/')[2]}"
            assert all(map(Path.is_file, map(Path, files_of(options.data.train_files, "train_files"))))
    with refused(ConfigError, "CONFIG", r"Did you mean 'mixtral-8x7b'\?", got="'mixtral-8x7'"):
        configs.find("mixtral-8x7")


@pytest.mark.parametrize("name", FAMILY)
def test_a_configuration_patches_its_family_as_it_says(name: str) -> None:
    options = options_of(name)
    written = read_yaml(configs.find(name))
    for part in (options.model, options.data, options.lora):
        assert all(getattr(part, key) == given.value for key, given in written.items() if hasattr(part, key))
    assert options.training.learning_rate == written["learning_rate"].value
    model = AutoModelForCausalLM.from_config(tiny_config(FAMILY[name]))
    report = patch(model, options.training, options.lora)
    assert report is not None
    assert len(report.patched) == 2 and not report.refused and not report.skipped
    assert report.config.precision == options.training.neuron_precision
    found = adapters(options.lora, model)
    assert (found is None) == (options.lora.lora_rank == 0)


@pytest.mark.parametrize("name", configs.names())
def test_what_the_head_of_a_configuration_names_is_there(name: str, repo_root: Path) -> None:
    head = configs.find(name).read_text(encoding="utf-8").partition("\nmodel:")[0]
    for script in re.findall(r"scripts/\w+\.\w+", head):
        assert (repo_root / script).is_file()
    for known in re.findall(r"(?:hf-neuron-moe|hf_neuron_moe) train ([\w-]+)", head):
        assert known == "NAME" or configs.find(known)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults() -> None:
    options = options_of(
        "tiny-mixtral", "--max_steps", "3", "--neuron-precision", "mxfp8", "--lora_targets", "q", "v", "--lora_rank=2"
    )
    assert options.training.max_steps == 3
    assert options.training.neuron_precision == "mxfp8"
    assert options.training.per_device_train_batch_size == 4
    assert options.lora.lora_targets == ["q", "v"]
    assert options.places["max_steps"] == "command line" and options.places["dtype"].endswith("mixtral.yaml, line 5")
    again = options_of("tiny-mixtral", "--learning_rate=1e-4", "--no_neuron_patch", "--weight_decay", "0")
    assert (again.training.learning_rate, again.training.neuron_patch) == (1e-4, False)


@pytest.mark.parametrize(
    "option", ["lora_merge=true", "lora_targets=q_proj", "lora_parameters=mlp.x", "lora_alpha=8", "lora_dropout=0.1"]
)
def test_options_of_adapters_ask_for_a_rank(option: str) -> None:
    with refused(ConfigError, option.partition("=")[0], "used with lora_rank", got="no lora_rank"):
        options_of("tiny-mixtral", f"--{option}")


def test_two_half_precisions_are_both_named() -> None:
    with refused(ConfigError, "bf16, fp16", got="true for both"):
        options_of("tiny-mixtral", "--bf16", "true", "--fp16", "true", "--use_cpu", "true")


def test_values_are_of_their_fields_types(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    # YAML 1.1 reads 1e-4 as text and no as false; a single name stands for a list of one.
    text = "base: &base {weight_decay: 0, use_cpu: true}\nmodel: m\ntrain_files: a.jsonl\nlearning_rate: 1e-4\n"
    text = text.replace("base: &base {weight_decay: 0, use_cpu: true}\n", "weight_decay: 0\nuse_cpu: true\n")
    text += "resume_from_checkpoint: false\nneuron_precision: {'*': bf16}\nfsdp: false\npad_to_multiple_of: '8'\n"
    text += "save_strategy: no\ngradient_checkpointing_kwargs: {use_reentrant: false}\nmax_length: null\n"
    file.write_text(text, encoding="utf-8")
    options = read_options([str(file)])
    assert options.training.learning_rate == 1e-4
    assert isinstance(options.training.weight_decay, float)
    assert options.data.train_files == ["a.jsonl"]
    assert options.training.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert options.training.save_strategy == "no" and options.training.max_length is None
    training = options.training
    assert training.resume_from_checkpoint is False and training.neuron_precision == {"*": "bf16"}
    assert not training.fsdp and training.pad_to_multiple_of == 8
    assert options.training.bf16 is False, "TRL's default needs an accelerator"


def test_merge_keys_and_empty_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("<<: {model: m, max_steps: 1}\ntrain_files: [a.txt]\nuse_cpu: true\n", encoding="utf-8")
    assert read_options([str(file)]).training.max_steps == 1
    text = "max_steps: 5\n<<: {model: m, max_steps: 1, seed: 2}\ntrain_files: [a.txt]\nuse_cpu: true\n"
    file.write_text(text, encoding="utf-8")
    training = read_options([str(file)]).training
    assert (training.max_steps, training.seed) == (5, 2), "a key beside a merge wins"
    file.write_text(text + "max_steps: 6\n", encoding="utf-8")
    with refused(ConfigError, "max_steps", got="a second time, after line 1", where=f"{file}, line 5"):
        read_options([str(file)])
    file.write_text("# nothing\n", encoding="utf-8")
    with refused(ConfigError, "model", got="nothing"):
        read_options([str(file)])


WRONG = [
    ("max_stepz: 3", "key", "Did you mean 'max_steps'"),
    ("neuron_precison: mxfp8", "key", "Did you mean 'neuron_precision'"),
    ("lora_target: [q_proj]", "key", "Did you mean 'lora_targets'"),
    ("packin: true", "key", "Did you mean 'packing'"),
    ("assistant_only_los: true", "key", "Did you mean 'assistant_only_loss'"),
    ("block_length: 64", "key", r"'block_length'\. block_length is max_length here\.$"),
    ("lora_r: 8", "key", r"lora_r is lora_rank here\.$"),
    ("target_modules: [q_proj]", "key", r"target_modules is lora_targets here\.$"),
    ("load_in_4bit: true", "key", "Convert the model"),
    ("beta: 0.1", "key", r"It is an option of method: dpo\.$"),
    ("colour: red", "key", r"'colour'\. Remove or rename it\.$"),
    ("deepspeed: ds.json", "deepspeed", r"got 'ds\.json'\. Install it"),
    ("learning_rate: -1.0", "learning_rate", r"got -1\.0"),
    ("learning_rate: .nan", "learning_rate", "got nan"),
    ("max_steps: 0", "max_steps", "got 0"),
    ("include_num_input_tokens_seen: some", "include_num_input_tokens_seen", "got 'some'"),
    (
        "metric_for_best_model: eval_foo\nload_best_model_at_end: true\neval_strategy: steps\nsave_strategy: steps",
        "metric_for_best_model",
        "got 'eval_foo'",
    ),
    ("max_steps: ten", "max_steps", "a whole number, got 'ten'"),
    ("max_steps: 1.5", "max_steps", r"got 1\.5"),
    ("use_liger_kernel: maybe", "use_liger_kernel", "true or false, got 'maybe'"),
    ("lora_merge: 3", "lora_merge", "got 3"),
    ("neuron_precision: mxfp9", "neuron_precision", "mxfp9.*Did you mean 'mxfp8'"),
    ("neuron_activations: minimul", "neuron_activations", "minimul"),
    ("dtype: float23", "dtype", "Did you mean 'float32'"),
    ("dataset: b", "train_files, dataset", "got both"),
    ("lora_rank: -1", "lora_rank", "got -1"),
    ("lora_merge: true", "lora_merge", "got no lora_rank"),
    ("lora_dropout: 0.1\nlora_rank: 2\nlora_parameters: [x]", "lora_dropout", ""),
    ("eval_share: 1.0", "eval_share", ""),
    ("max_length: 1", "max_length", ""),
    ("tp_size: 0", "tp_size", ""),
    ("per_device_train_batch_size: 0", "per_device_train_batch_size", ""),
    ("eval_strategy: sometimes", "eval_strategy", "sometimes"),
    ("eval_strategy: epoch", "eval_strategy", "got none of them"),
    ("method: ppo", "method", "one of sft, dpo"),
    ("packing_strategy: best", "packing_strategy", "best"),
    ("model: again", "model", "got a second time, after line 2"),
    ("no_neuron_patch: 3", "key", "'no_neuron_patch'"),
    ("learning_rate:", "learning_rate", "a value, got null"),
    ("lora_targets: null", "lora_targets", "a value, got null"),
    ("learning_rate: {a: 1}", "learning_rate", "a number, got {'a': 1}"),
    ("max_steps: [1, 2]", "max_steps", r"a whole number, got \[1, 2\]"),
    ("seed: !!binary aGk=", "seed", "a whole number, got b'hi'"),
    ("eval_files: [1]", "eval_files", r"text, got 1\. Put it in quotes"),
    ("revision: {a: 1}", "revision", "text, got {'a': 1}"),
    ("run_name: 2026-11-26", "run_name", r"text, got 2026-11-26\. Put it in quotes"),
    ("max_steps: 99999999999999999999", "max_steps", "a whole number"),
    ("lr_scheduler_kwargs: '{a'", "lr_scheduler_kwargs", "got '{a': Expecting property name"),
    ("datasets: [{path: a}]", "key", "datasets is train_files, or dataset, here"),
    ("eval_split: test", "eval_split", "used with dataset, got no dataset"),
    ("output_dir: ''", "output_dir", "got nothing"),
    ("max_steps: 9223372036854775808", "max_steps", r"a whole number below 2\*\*63"),
    ("max_steps: true", "max_steps", "a whole number, got True"),
    ("learning_rate: true", "learning_rate", "a number, got True"),
    ("learning_rate: 1" + 400 * "0", "learning_rate", "a number, got 1000"),
    ("seed: -1", "seed", "below 2"),
    ("seed: 4294967296", "seed", "below 2"),
    ("lora_alpha: 0\nlora_rank: 2", "lora_alpha", "a positive number, got 0"),
    ("num_train_epochs: .nan", "num_train_epochs", "got nan"),
    ("num_train_epochs: 0", "num_train_epochs", "got 0.0"),
    ("lora_alpha: .nan", "lora_alpha", "got nan"),
    ("weight_decay: .inf", "weight_decay", "got inf"),
    ("adam_beta1: 2", "adam_beta1", "got 2.0"),
    ("adam_beta2: 1", "adam_beta2", "got 1.0"),
    ("adam_epsilon: -1", "adam_epsilon", "got -1.0"),
    ("neftune_noise_alpha: -3", "neftune_noise_alpha", "got -3.0"),
    ("gradient_checkpointing_kwargs: foo", "gradient_checkpointing_kwargs", "foo"),
    *((f"{key}: -1", key, "got -1") for key in ("per_device_eval_batch_size", "dataloader_num_workers")),
    *((f"{key}: 0", key, "got 0") for key in ("pad_to_multiple_of", "dataset_num_proc")),
]


@pytest.mark.parametrize(("text", "argument", "says"), WRONG, ids=[row[0] for row in WRONG])
def test_what_a_file_may_not_say_is_found_in_its_line(tmp_path: Path, text: str, argument: str, says: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"train_files: [a.txt]\nmodel: m\nuse_cpu: true\n\n{text}\n", encoding="utf-8")
    with refused(ConfigError, argument, says) as caught:
        read_options([str(file)])
    assert caught.value.where == f"{file}, line {1 if argument == 'train_files, dataset' else 5}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "line", "got"),
    [
        ("- a\n- b", "", "a sequence"),
        ("a: 1\nb: [1", ", line 2", "expected ',' or ']'"),
        ("a:\tb:", ", line 1", ""),
        ("a: 1\nb: !!python/name:os.system", ", line 2", "could not determine a constructor"),
        ("a: 1\nb: &b [*b]", ", line 2", "found unconstructable recursive node"),
        ("a: 1\nb: 2026-13-45", ", line 2", "month must be in"),
        ("a: " + "[" * 5000, "", "maximum recursion depth"),
    ],
    ids=["list", "cut", "tab", "tag", "recursion", "date", "depth"],
)
def test_what_is_no_mapping_is_an_error(tmp_path: Path, text: str, line: str, got: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    with refused(ConfigError, "content", got=got, where=f"{file}{line}"):
        read_options([str(file)])
    file.write_bytes(b"\xff\xfe")
    with refused(ConfigError, "content", where=str(file)):
        read_options([str(file)])


def test_what_the_command_line_may_not_say(tmp_path: Path) -> None:
    for option in ("--max_step", "--max-step"):  # no abbreviations: they are misspellings
        with refused(ConfigError, "key", "Did you mean 'max_steps'", where="command line"):
            options_of("tiny-llama", option, "3")
    with refused(ConfigError, "CONFIG"):
        read_options([str(tmp_path / "none.yaml")])
    with refused(ConfigError, "CONFIG", got="'b.yaml'"):
        read_options(["tiny-llama", "b.yaml"])
    with refused(ConfigError, "CONFIG", "accelerate launch --config_file fsdp2-cpu", got="'fsdp2-cpu', which is"):
        read_options(["fsdp2-cpu"])
    with refused(ConfigError, "model", got="nothing"):
        read_options(["--train_files", "a.txt", "--use_cpu"])
    with refused(ConfigError, "train_files, dataset", got="neither"):
        read_options(["--model", "m", "--use_cpu"])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator takes part by itself")
def test_several_processes_without_a_device_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without use_cpu each would train alone, on all rows."""
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cpu"))
    for count in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        assert read_options(["--model", "m", "--train_files", "a.txt"]).training.use_cpu is (count > 1)
        assert not read_options(["--model", "m", "--train_files", "a.txt", "--use_cpu", "false"]).training.use_cpu


def test_bf16_without_a_device_says_what_to_do() -> None:
    with refused(ConfigError, "bf16", "on a CPU add --use_cpu true", got="true on a machine without an accelerator"):
        read_options(["llama-3-8b"])
    with pytest.raises(NeuronMoEError, match="nki is not installed"):
        read_options(["trn2-olmoe"])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned for an accelerator")
def test_memory_is_not_pinned_for_a_processor_unless_asked_for() -> None:
    given = ["--model", "m", "--train_files", "a.txt"]
    assert read_options(given).training.dataloader_pin_memory is False, "torch warns of it"
    assert read_options([*given, "--dataloader_pin_memory", "true"]).training.dataloader_pin_memory is True


def test_epochs_do_not_matter_where_steps_are_counted() -> None:
    assert options_of("tiny-llama", "--max_steps", "3", "--num_train_epochs", "0").training.max_steps == 3


def test_options_that_change_nothing_need_no_others() -> None:
    assert not options_of("tiny-llama", "--lora_merge", "false").lora.lora_merge
    assert options_of("tiny-llama", "--learning_rate", "0").training.learning_rate == 0
    best = ["--load_best_model_at_end", "true", "--metric_for_best_model", "loss", "--eval_share", "0.1"]
    steps = ["--eval_strategy", "steps", "--save_strategy", "steps", "--eval_steps", "2", "--save_steps", "2"]
    assert options_of("tiny-llama", *best, *steps).training.metric_for_best_model == "loss"


def test_flags_that_take_words_too() -> None:
    for word in ("all", "non_padding", "no"):
        given = options_of("tiny-llama", "--include_num_input_tokens_seen", word)
        assert given.training.include_num_input_tokens_seen == word
    assert options_of("tiny-llama", "--include_num_input_tokens_seen").training.include_num_input_tokens_seen == "all"


def test_names_from_elsewhere_are_not_ours_and_lead_to_ours() -> None:
    known = {*known_options("sft"), *known_options("dpo")}
    assert not set(ELSEWHERE) & known
    assert {name.partition(",")[0] for name in ELSEWHERE.values()} <= known
    for name in ("batch_size", "grad_accum"):
        assert nearest(name, known_options("sft")) == ""


def test_checkpointing_is_asked_for_without_a_warning() -> None:
    """transformers 5.23 renames it; TRL and the configurations have the name that all supported releases know."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        options = options_of("mixtral-8x7b", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}')
        assert options.training.gradient_checkpointing
        assert options.training.gradient_checkpointing_kwargs == {"use_reentrant": False}
        assert not options_of("mixtral-8x7b", "--gradient_checkpointing", "false").training.gradient_checkpointing


def test_adapters_that_could_not_be_saved_are_an_error_before_training() -> None:
    from peft import get_peft_model

    options = options_of("tiny-llama", "--lora_rank", "2", "--lora_parameters", "mlp.down_proj")
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    patch_model(model, {"weights": "kernel"})
    config = adapters(options.lora, model)
    assert config is not None
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        refuse_unsavable_adapters(get_peft_model(model, config))


def test_keys_are_listed_own_ones_first() -> None:
    sft, dpo = parser_of("sft").format_help(), parser_of("dpo").format_help()
    assert (
        sft.index("--model ") < sft.index("--lora_rank ") < sft.index("--learning_rate ") > sft.index("--eval_share ")
    )
    assert "--neuron_precision " in sft and "--no_neuron_patch" not in sft
    assert "--loss_weights " in dpo and "--loss_weights " not in sft


def test_the_files_of_the_documentation_read(tmp_path: Path, repo_root: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (repo_root / "docs" / "train.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
        read_options([str(tmp_path / "mine.yaml"), "--use_cpu", "--model", "MODEL_DIR"])
