"""``resume_from_checkpoint: auto``: which folders of an interrupted run count."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from finetune import checkpoint_to_resume

from hf_neuron_moe.training import mark_complete


def options(folder: Path, wish: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(training=types.SimpleNamespace(resume_from_checkpoint=wish, output_dir=str(folder)))


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_auto_starts_anew_where_a_kill_left_half_a_checkpoint_only(tmp_path):
    assert checkpoint_to_resume(options(tmp_path, "auto")) is None
    half = checkpoint(tmp_path / "checkpoint-2")
    (half / "neuron_moe_saving.json").write_text("{}")
    assert checkpoint_to_resume(options(tmp_path, "auto")) is None
    mark_complete(checkpoint(tmp_path / "checkpoint-4"))
    assert checkpoint_to_resume(options(tmp_path, "auto")) is True


def test_auto_takes_a_checkpoint_that_waits_under_another_name(tmp_path):
    mark_complete(checkpoint(tmp_path / "checkpoint-6"))
    (tmp_path / "checkpoint-6").rename(tmp_path / "replaced-checkpoint-6")
    assert checkpoint_to_resume(options(tmp_path, "auto")) is True


@pytest.mark.parametrize(("wish", "resumed"), [(None, None), (True, True), ("true", True), ("some/path", "some/path")])
def test_other_wishes_are_passed_on(wish, resumed, tmp_path):
    assert checkpoint_to_resume(options(tmp_path, wish)) == resumed
