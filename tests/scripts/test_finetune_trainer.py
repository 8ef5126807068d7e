"""Options that no Trainer can be made with: refused in one line before text or model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import finetune
import pytest
from finetune_trainer import check_output
from make_tiny_model import make_tiny_model

from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused
from tests.scripts.test_finetune_checks import check_run, options


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded; and what TrainingArguments put into the environment is taken out again."""

    def load(*_: object) -> None:
        raise AssertionError("loaded")

    for name in ("load_tokenizer", "blocks", "load_model"):
        monkeypatch.setattr(finetune, name, load)
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"output_dir": "/dev/null/x"}, "output_dir", "got '/dev/null/x' (/dev/null is no folder)."),
        ({"accelerator_config": "nofile.json"}, "training options", "No such file or directory: 'nofile.json'."),
        ({"accelerator_config": '{"a": 1}'}, "training options", "unexpected keyword argument 'a'."),
        ({"torch_compile": "true", "torch_compile_backend": "inducter"}, "torch_compile_backend", "mean 'inductor'?"),
        ({"fsdp": "full_shard"}, "fsdp", "accelerate launch"),
    ],
)
def test_what_no_trainer_takes_is_refused_before_anything_is_loaded(
    tmp_path: Path,
    unloaded: None,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    argument: str,
    says: str,
) -> None:
    make_tiny_model("llama", tmp_path)
    given = {"model": tmp_path, "train_files": "none.txt", "report_to": "none", "use_cpu": "true"}
    given |= {"output_dir": tmp_path / "out", **changes}
    capsys.readouterr()
    assert finetune.main([word for key, value in given.items() for word in (f"--{key}", str(value))]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: finetune: {argument} must be ") and says in line
    assert not (tmp_path / "out").exists()


def test_a_backend_of_torch_compile_counts_only_where_it_compiles(tmp_path: Path, unloaded: None) -> None:
    make_tiny_model("llama", tmp_path)
    check_run(options(tmp_path, torch_compile="true", torch_compile_backend="aot_eager"))
    with refused(ConfigError, "torch_compile_backend", got="'nope'"):
        check_run(options(tmp_path, torch_compile="true", torch_compile_backend="nope"))


def test_an_output_folder_is_made_later_and_probed_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    there = sorted(tmp_path.iterdir())
    for fine in ("out", "out/a/b", "new"):
        check_output(str(tmp_path / fine))
    for bad in ("file", "file/a", "link", "link/a"):
        with refused(ConfigError, "output_dir", "is no folder"):
            check_output(str(tmp_path / bad))
    assert sorted(tmp_path.iterdir()) == there and not os.listdir(tmp_path / "out")
