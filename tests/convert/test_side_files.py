"""Files beside the weights: folders of them, links, names, sizes; and files that a conversion did not write."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.estimate import estimate_conversion
from hf_neuron_moe.convert.io.folder import resolve_source, weights_of
from hf_neuron_moe.convert.io.side_files import side_files
from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.convert.transaction import commit
from hf_neuron_moe.convert.transaction.commit import held, partial_of
from hf_neuron_moe.errors import DestinationError, SourceDamageError, naming
from tests.convert.mutations import command
from tests.convert.test_parts import hub_cache
from tests.refusals import refused

TEMPLATE = "additional_chat_templates/tool_use.jinja"


def tree(folder: Path) -> dict[str, bytes]:
    """All files of a folder and its folders."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(checkpoint) -> Path:
    """A checkpoint with folders: templates, a hidden one, and ones with weights of their own."""
    folder = checkpoint("llama")
    for name, content in {
        TEMPLATE: b"{{ tools }}",
        "deep/er/file.txt": b"deep",
        ".cache/huggingface/x.lock": b"",
        "original/params.json": b"{}",
        "original/consolidated.00.pth": b"pickle",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("more", [{}, {"resume": True}])
def test_folders_are_copied_and_exported(more, source, tmp_path):
    dst = tmp_path / "dst"
    convert_checkpoint(source, dst, ConvertOptions(), **more)
    made = tree(dst)
    assert made[TEMPLATE] == b"{{ tools }}" and made["deep/er/file.txt"] == b"deep"
    assert not [name for name in made if name.startswith((".cache", "original"))]
    assert verify_checkpoint(dst, source).ok
    export_checkpoint(dst, tmp_path / "back")
    wanted = {name: content for name, content in tree(source).items() if not name.startswith((".cache", "original"))}
    assert tree(tmp_path / "back") == wanted
    assert estimate_conversion(source, tmp_path / "new").files == {name: len(content) for name, content in made.items()}
    (dst / TEMPLATE).write_bytes(b"{{ other }}")
    assert [finding.subject for finding in verify_checkpoint(dst).findings] == [TEMPLATE]


def test_a_resumed_run_removes_strangers_from_folders(source, tmp_path):
    convert_checkpoint(source, tmp_path / "dst", part=(1, 1))
    folder = partial_of(tmp_path / "dst") / "folder"
    (folder / "additional_chat_templates" / "stray").mkdir(parents=True)
    (folder / "additional_chat_templates" / "stray" / "file").write_text("x")
    convert_checkpoint(source, tmp_path / "dst", resume=True)
    convert_checkpoint(source, tmp_path / "one")
    assert tree(tmp_path / "dst") == tree(tmp_path / "one")


def test_links_out_of_a_folder_and_odd_names_are_refused(source, tmp_path):
    (tmp_path / "secret").write_text("x")
    link = source / "additional_chat_templates" / "link.jinja"
    link.symlink_to(tmp_path / "secret")
    with refused(SourceDamageError, "additional_chat_templates/link.jinja", got="a link to"):
        convert_checkpoint(source, tmp_path / "dst")
    link.unlink()
    (source / "folder").symlink_to(tmp_path)  # not followed: whatever lies there belongs to somebody else
    assert not [name for name in side_files(source) if name.startswith("folder")]
    (source / "\x1b[31m.txt").write_text("x")
    with refused(SourceDamageError, "a file's name"):
        convert_checkpoint(source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists() and not partial_of(tmp_path / "dst").exists()


def test_side_files_are_never_whole_in_memory(source, tmp_path):
    (source / "big.txt").write_bytes(b"x" * 40_000_000)
    tracemalloc.start()
    convert_checkpoint(source, tmp_path / "dst")
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "back" / "big.txt").stat().st_size == 40_000_000
    assert peak < 20_000_000


def test_strays_of_any_kind_are_named(source, tmp_path):
    convert_checkpoint(source, tmp_path / "dst")
    for name in ("adapter_config.json", "deep/pytorch_model.bin", ".gitattributes"):
        (tmp_path / "dst" / name).write_text("x")
    report = verify_checkpoint(tmp_path / "dst")
    assert [str(finding) for finding in report.findings] == [
        f"files: {name}: not part of the conversion" for name in ("adapter_config.json", "deep/pytorch_model.bin")
    ]
    assert report.notes == [".gitattributes: not part of the conversion, and hidden"]


def test_only_the_files_of_the_index_are_fetched(checkpoint, tmp_path, monkeypatch):
    plain = checkpoint("mixtral", shard="100KB")
    snapshot = hub_cache(tmp_path / "cache", plain, "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(repo, *, revision, allow_patterns, ignore_patterns):
        asked.append((allow_patterns, ignore_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("some-org/tiny") == snapshot
    shards = sorted(path.name for path in plain.glob("*.safetensors"))
    assert [name for name in asked[1][0] if name.endswith("safetensors")] == shards == weights_of(plain)
    assert not [name for name in asked[0][0] if name.endswith("safetensors")]
    assert all("original/*" in ignored for _, ignored in asked)
    asked.clear()
    assert resolve_source("some-org/tiny", weights=False) == snapshot
    assert [wanted for wanted, _ in asked] == [["config.json"]]
    assert weights_of(checkpoint("llama")) == ["model.safetensors"]


def test_a_lock_on_a_removed_folder_is_none(tmp_path, monkeypatch):
    """The owner finishes between our opening and locking its folder, and a third process makes a new one."""
    home, lock, others = tmp_path / "dst.partial", commit._lock, []

    def late(descriptor: int, *, shared: bool) -> bool:
        if not others:
            home.rmdir()
            third = held(home, tmp_path / "dst")
            others.append(third)
            third.__enter__()
        return lock(descriptor, shared=shared)

    monkeypatch.setattr(commit, "_lock", late)
    expected = refused(DestinationError, tmp_path / "dst", got="another process")
    with expected, naming("convert"), held(home, tmp_path / "dst"):
        raise AssertionError("two processes hold one folder")
    others[0].__exit__(None, None, None)
    with held(home, tmp_path / "dst"):
        assert home.is_dir()


def test_a_log_gets_a_line_per_minute(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("llama")
    code, quiet = command("convert", source, tmp_path / "one")
    assert code == 0 and "converting:" not in quiet
    monkeypatch.setattr("hf_neuron_moe.cli.progress_line.LOG_SECONDS", 0.0)
    code, printed = command("convert", source, tmp_path / "two")
    lines = [line for line in printed.splitlines() if line.startswith("converting: ")]
    assert code == 0 and len(lines) > 3 and "(100 %)" in lines[-1] and "peak" in lines[-1]


def test_an_export_that_was_inexact_can_be_converted_and_exported_again(checkpoint, tmp_path):
    source = checkpoint("llama")
    for number in range(2):
        options = ConvertOptions("mxfp8", "fused", purpose="inference")
        convert_checkpoint(source, tmp_path / f"mx{number}", options)
        export_checkpoint(tmp_path / f"mx{number}", tmp_path / f"back{number}", allow_inexact=True)
        source = tmp_path / f"back{number}"
    note = json.loads((source / "neuron_moe_export.json").read_text())
    assert note["inexact"] and (tmp_path / "mx1" / MANIFEST_FILE).is_file()


def test_folders_behind_links_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "b.txt").touch()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "far")
    assert [*side_files(tmp_path / "model")] == ["b.txt"]


def test_there_are_at_most_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_neuron_moe.convert.io.side_files.MOST_FILES", 2)
    for name in ("a", "b"):
        (tmp_path / name).touch()
    assert [*side_files(tmp_path)] == ["a", "b"]
    (tmp_path / "c").touch()
    with pytest.raises(SourceDamageError, match="at most 2 files"):
        side_files(tmp_path)
