"""The same bytes however the work is divided: workers, parts, runs that go on; and sources from the Hub's cache."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_neuron_moe.convert import MANIFEST_FILE, ConvertOptions, convert_checkpoint, execute, finalize_checkpoint
from hf_neuron_moe.convert.execute import memory_per_worker, workers_for
from hf_neuron_moe.convert.plan import plan_conversion
from hf_neuron_moe.convert.transaction import commit, disk, resume
from hf_neuron_moe.convert.transaction.parts import part_of_shards
from hf_neuron_moe.convert.transaction.resume import Job
from hf_neuron_moe.convert.workers import Workers, cores, working
from hf_neuron_moe.errors import ConfigError, ConversionError, DestinationError, DiskError, SourceDamageError
from tests.hub_cache import hub_cache
from tests.refusals import refused

SMALL = ConvertOptions("bf16", "kernel", max_shard_bytes=40_000)
VARIANTS = {
    "bf16": SMALL,
    "mxfp8": ConvertOptions("mxfp8", "kernel", max_shard_bytes=40_000),
    "ranks": ConvertOptions("bf16", "kernel", max_shard_bytes=40_000, tp_degree=2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_change_no_byte(variant, checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral", shard="100KB")
    threads = torch.get_num_threads()
    for workers in (1, 2, 5):
        convert_checkpoint(source, tmp_path / str(workers), VARIANTS[variant], workers=workers)
    assert torch.get_num_threads() == threads
    assert len(list((tmp_path / "1").glob("*.safetensors"))) > 3
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "2") == snapshot(tmp_path / "5")


@pytest.mark.sampled(3)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [1, 3, 50])
def test_parts_and_finalize_give_the_bytes_of_one_run(variant, count, checkpoint, snapshot, tmp_path):
    source, options = checkpoint("mixtral", shard="100KB"), VARIANTS[variant]
    convert_checkpoint(source, tmp_path / "one", options)
    for index in range(count, 0, -1):
        assert not (tmp_path / "dst").exists()
        assert convert_checkpoint(source, tmp_path / "dst", options, part=(index, count), workers=1 + index % 2) is None
    manifest = finalize_checkpoint(source, tmp_path / "dst", workers=2)
    assert manifest.options == options
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")
    assert not commit.partial_of(tmp_path / "dst").exists()
    assert finalize_checkpoint(source, tmp_path / "dst") == manifest, "calling it again changes nothing"


def test_a_part_that_finds_a_marker_alone_makes_the_folders(checkpoint, snapshot, tmp_path):
    """Another part has written it a moment ago, or was killed behind it."""
    source = checkpoint("mixtral", shard="100KB")
    convert_checkpoint(source, tmp_path / "one", SMALL)
    convert_checkpoint(source, tmp_path / "dst", SMALL, part=(1, 2))
    home = commit.partial_of(tmp_path / "dst")
    for path in [path for path in home.iterdir() if path.is_dir()]:
        shutil.rmtree(path)
    for index in (2, 1):
        convert_checkpoint(source, tmp_path / "dst", SMALL, part=(index, 2))
    finalize_checkpoint(source, tmp_path / "dst")
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")


def test_parts_made_at_once_and_on_other_machines(checkpoint, snapshot, tmp_path):
    """Two parts at once in one folder, a third elsewhere from a copy of the source with other times."""
    source = checkpoint("mixtral", shard="100KB")
    convert_checkpoint(source, tmp_path / "one", SMALL)
    far = tmp_path / "far"
    far.mkdir()
    shutil.copytree(source, far / "source")
    for path in (far / "source").iterdir():
        os.utime(path, (1, 1))
    convert_checkpoint(far / "source", far / "dst", SMALL, part=(3, 3))
    errors: list[BaseException] = []

    def make(index: int) -> None:
        try:
            convert_checkpoint(source, tmp_path / "dst", SMALL, part=(index, 3))
        except ConversionError as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    shutil.copytree(commit.partial_of(far / "dst"), commit.partial_of(tmp_path / "dst"), dirs_exist_ok=True)
    finalize_checkpoint(source, tmp_path / "dst")
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")


def test_finalize_refuses_what_is_missing_or_damaged_and_keeps_the_rest(checkpoint, tmp_path):
    source, target = checkpoint("mixtral"), tmp_path / "dst"
    with refused(DestinationError, target, "--part I/N"):
        finalize_checkpoint(source, target)
    convert_checkpoint(source, target, SMALL, part=(1, 2))
    for _ in range(2):
        with refused(ConversionError, target, "--part 2/2;"):
            finalize_checkpoint(source, target)
    convert_checkpoint(source, target, SMALL, part=(2, 2))
    folder = commit.partial_of(target) / commit.FOLDER
    shard = sorted(folder.glob("*.safetensors"))[1]
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with refused(ConversionError, target, f"such as {shard.name}", got="1 "):
        finalize_checkpoint(source, target)
    assert not target.exists()
    shard.write_bytes(good)
    finalize_checkpoint(source, target)
    assert (target / MANIFEST_FILE).is_file()


def test_finalize_names_the_parts_to_run_again(checkpoint, tmp_path):
    source, target = checkpoint("mixtral"), tmp_path / "dst"
    for index in (1, 2, 4):
        convert_checkpoint(source, target, SMALL, part=(index, 5))
    with refused(ConversionError, target, "--part 3/5, 5/5;"):
        finalize_checkpoint(source, target)
    for index in (5, 3):
        convert_checkpoint(source, target, SMALL, part=(index, 5))
    folder = commit.partial_of(target) / commit.FOLDER
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    with refused(ConversionError, target, "--part 1/5;"):
        finalize_checkpoint(source, target)
    convert_checkpoint(source, target, SMALL, part=(1, 5))
    finalize_checkpoint(source, target)


def test_conversions_differ_by_every_option(checkpoint):
    source = checkpoint("llama")
    prints = {
        resume.fingerprint(plan_conversion(source, replace(SMALL, **changes)))
        for changes in ({}, {"allow_inexact": True}, {"max_shard_bytes": 50_000})
    }
    assert len(prints) == 3


def test_what_does_not_belong_to_a_conversion_is_removed_with_its_folders(tmp_path):
    job = Job(tmp_path / "dst")
    (job.folder / "strange" / "deep").mkdir(parents=True)
    (job.folder / "kept").mkdir()
    for name in ("strange/deep/a", "kept/b", "kept/c"):
        (job.folder / name).touch()
    job.drop_strangers({"kept/b"})
    assert [path.relative_to(job.folder).as_posix() for path in sorted(job.folder.rglob("*"))] == ["kept", "kept/b"]


def test_parts_of_different_conversions_do_not_mix(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", SMALL, part=(1, 2))
    for arguments in ({"part": (2, 2)}, {"resume": True}):
        with refused(DestinationError, tmp_path / "dst", got="an unfinished run of another source"):
            convert_checkpoint(source, tmp_path / "dst", VARIANTS["mxfp8"], **arguments)
    with refused(DestinationError, tmp_path / "dst", got="an unfinished run of another source"):
        finalize_checkpoint(source, tmp_path / "dst", VARIANTS["mxfp8"])
    convert_checkpoint(source, tmp_path / "dst", VARIANTS["mxfp8"])
    assert not commit.partial_of(tmp_path / "dst").exists()


@pytest.mark.parametrize("part", [(0, 2), (3, 2), (1, 0), (-1, -1)])
def test_part_numbers_are_checked(part, tmp_path):
    with refused(ConfigError, "part"):
        convert_checkpoint(tmp_path, tmp_path / "dst", part=part)


def test_every_shard_is_in_exactly_one_part():
    shards = {f"s{number}": number for number in range(11)}
    for count in (1, 2, 3, 11, 20):
        parts = [part_of_shards(shards, (index, count)) for index in range(1, count + 1)]
        assert [file for part in parts for file in part] == list(shards)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


class Interrupted(KeyboardInterrupt):
    """Raised by the progress callback in these tests."""


def stop_after(fraction: float):
    """Return a progress callback that interrupts."""

    def progress(done: int, total: int) -> None:
        if done >= fraction * total:
            raise Interrupted

    return progress


@pytest.mark.parametrize("workers", [1, 3])
def test_resume_redoes_at_most_one_shard(workers, checkpoint, snapshot, tmp_path, monkeypatch):
    source, target = checkpoint("mixtral"), tmp_path / "dst"
    convert_checkpoint(source, tmp_path / "one", SMALL)
    created: list[str] = []
    original = disk.create
    monkeypatch.setattr(disk, "create", lambda path: (created.append(path.name), original(path))[1])
    with pytest.raises(Interrupted):
        convert_checkpoint(source, target, SMALL, resume=True, workers=workers, progress=stop_after(0.6))
    assert not target.exists()
    first = {name for name in created if name.endswith(".safetensors")}
    assert not any(path.name.startswith(resume.WRITING) for path in commit.partial_of(target).iterdir())
    created.clear()
    convert_checkpoint(source, target, SMALL, resume=True, workers=workers)
    second = {name for name in created if name.endswith(".safetensors")}
    assert len(first) > 3 and len(second) > 1
    assert len(first & second) <= 1
    assert snapshot(target) == snapshot(tmp_path / "one")
    created.clear()
    convert_checkpoint(source, target, SMALL, resume=True)
    assert created == [], "a finished conversion is left alone"


def test_resume_makes_damaged_shards_again(checkpoint, snapshot, tmp_path):
    source, target = checkpoint("mixtral"), tmp_path / "dst"
    convert_checkpoint(source, tmp_path / "one", SMALL)
    with pytest.raises(Interrupted):
        convert_checkpoint(source, target, SMALL, resume=True, progress=stop_after(0.7))
    home = commit.partial_of(target)
    first, second, third, *_ = sorted((home / commit.FOLDER).glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-5])
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 16
    second.write_bytes(content)
    (home / resume.DONE / f"{third.name}.json").write_text("{")
    (home / commit.FOLDER / "stranger.txt").write_text("?")
    convert_checkpoint(source, target, SMALL, resume=True)
    assert snapshot(target) == snapshot(tmp_path / "one")


def test_resume_notices_a_source_that_changed(checkpoint, snapshot, tmp_path):
    source, target = checkpoint("mixtral"), tmp_path / "dst"
    with pytest.raises(Interrupted):
        convert_checkpoint(source, target, SMALL, resume=True, progress=stop_after(0.7))
    path = source / "model.safetensors"
    tensors = {name: tensor.neg() for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, (2, 2))
    convert_checkpoint(source, tmp_path / "one", SMALL)
    convert_checkpoint(source, target, SMALL, resume=True)
    assert snapshot(target) == snapshot(tmp_path / "one")


def test_a_finished_conversion_of_another_source_is_replaced_on_resume(checkpoint, snapshot, tmp_path):
    source, target = checkpoint("llama"), tmp_path / "dst"
    convert_checkpoint(source, target, SMALL)
    path = source / "model.safetensors"
    save_file({name: tensor.neg() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with refused(DestinationError, target, "--force", got="one of others"):
        convert_checkpoint(source, target, SMALL, resume=True)
    convert_checkpoint(source, target, SMALL, resume=True, force=True)
    convert_checkpoint(source, tmp_path / "one", SMALL)
    assert snapshot(target) == snapshot(tmp_path / "one")


def test_source_changed_while_it_is_read(checkpoint, tmp_path):
    source = checkpoint("mixtral")

    def touch(done: int, total: int) -> None:
        os.utime(source / "model.safetensors", (3, done))

    with refused(SourceDamageError, "model.safetensors", got="a file that was changed meanwhile"):
        convert_checkpoint(source, tmp_path / "dst", SMALL, progress=touch)
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("after", [1, 3])
def test_source_changed_between_two_shards(after, workers, checkpoint, tmp_path, monkeypatch):
    source = checkpoint("mixtral")
    path, record, recorded = source / "model.safetensors", Job.record_shard, []

    def record_and_change(job: Job, *arguments: object) -> None:
        record(job, *arguments)
        recorded.append(arguments[0])
        if len(recorded) == after:
            content = bytearray(path.read_bytes())
            content[-1] ^= 0x80
            with path.open("r+b") as file:
                file.write(content)
            os.utime(path, (3, 3))

    monkeypatch.setattr(Job, "record_shard", record_and_change)
    with refused(SourceDamageError, path.name, got="a file that was changed meanwhile"):
        convert_checkpoint(source, tmp_path / "dst", SMALL, workers=workers)
    assert len(recorded) == after
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_one_process_at_a_time(checkpoint, tmp_path):
    source, target = checkpoint("llama"), tmp_path / "dst"
    home = commit.partial_of(target)
    with commit.held(home, target), refused(DestinationError, target, got="another process"):
        convert_checkpoint(source, target, SMALL)
    with commit.held(home, target, shared=True):
        convert_checkpoint(source, target, SMALL, part=(1, 1))
        with refused(DestinationError, target, got="another process"):
            finalize_checkpoint(source, target)
    finalize_checkpoint(source, target)
    assert (target / MANIFEST_FILE).is_file()


def test_a_disk_without_room_is_refused_before_any_shard(checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with refused(DiskError, tmp_path, got="one with 1,000"):
        convert_checkpoint(checkpoint("llama"), tmp_path / "dst", SMALL)
    assert not commit.partial_of(tmp_path / "dst").exists()
    commit.check_space(tmp_path, 1000)
    with pytest.raises(DiskError, match="1,001 free bytes, got one with 1,000"):
        commit.check_space(tmp_path, 1001)


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot swap names")
def test_a_swap_that_fails_is_not_one_that_the_system_lacks(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        disk.exchange(tmp_path / "one", tmp_path / "none")


def test_systems_that_cannot_swap_names(checkpoint, snapshot, tmp_path, monkeypatch):
    source, target = checkpoint("llama"), tmp_path / "dst"
    convert_checkpoint(source, target, ConvertOptions("bf16", "fused"))
    earlier = snapshot(target)
    monkeypatch.setattr(disk, "exchange", lambda first, second: False)
    original, renames = os.rename, []

    def fail_second(old, new):
        renames.append((Path(old).name, Path(new).name))
        if renames[-1] == (commit.FOLDER, "dst"):
            raise OSError(5, "Input/output error")
        original(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_second)
        with pytest.raises(DiskError):
            convert_checkpoint(source, target, SMALL, force=True)
    assert snapshot(target) == earlier
    # Killed between the two renames: the next run puts the earlier conversion back before it does anything else.
    home = commit.partial_of(target)
    home.mkdir()
    (home / commit.MARKER_FILE).touch()
    target.rename(home / commit.OLD)
    with pytest.raises(Interrupted):
        convert_checkpoint(source, target, SMALL, force=True, progress=stop_after(0))
    assert snapshot(target) == earlier
    convert_checkpoint(source, target, SMALL, force=True)
    convert_checkpoint(source, tmp_path / "one", SMALL)
    assert snapshot(target) == snapshot(tmp_path / "one")


def test_workers_keep_order_and_stop_at_the_first_failure():
    ran: list[int] = []

    def task(number: int):
        def work() -> int:
            ran.append(number)
            if number == 3:
                raise ValueError("third")
            time.sleep(0.05)  # all 200 together take so long that a busy machine, too, drops some
            return number

        return work

    with working(2) as workers:
        assert list(workers.run([task(number) for number in (5, 4, 6)])) == [5, 4, 6]
        ran.clear()
        with pytest.raises(ValueError, match="third"):
            list(workers.run([task(number) for number in range(200)]))
    assert len(ran) < 200
    assert list(Workers(None).run([task(1)])) == [1]


def test_workers_are_as_many_as_memory_allows(checkpoint, monkeypatch):
    plan = plan_conversion(checkpoint("mixtral"), SMALL)
    assert workers_for(plan, 4) == 4
    assert workers_for(plan, None) == workers_for(plan, cores())
    # On a machine of any size all workers together stay below what docs/convert.md states.
    monkeypatch.setattr(execute, "cores", lambda: 10**6)
    largest = max(math.prod(weight.shape) for weight in plan.weights.values()) * 2
    assert 4 < workers_for(plan, None) <= (2 * largest + 128 * 2**20) / memory_per_worker(plan)
    # A worker holds one expert's matrix, and the source matrix that is being put into it.
    assert memory_per_worker(plan) < 2 * 2 * 192 * 64 + (1 << 20) + 1000
    with refused(ConfigError, "workers"):
        convert_checkpoint(plan.source.directory, plan.source.directory.parent / "dst", SMALL, workers=0)


def test_every_core_works_by_default(checkpoint, tmp_path, monkeypatch):
    """On two cores two threads work at once: the first task waits until another thread has begun one."""
    monkeypatch.setattr(execute, "cores", lambda: 2)
    together = threading.Barrier(2, timeout=20)
    make_group = execute._Run._make_group
    met: list[str] = []

    def meeting(run, *arguments):
        if len(met) < 2:
            met.append(threading.current_thread().name)
            together.wait()
        return make_group(run, *arguments)

    monkeypatch.setattr(execute._Run, "_make_group", meeting)
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", SMALL)
    assert len(set(met)) == 2


@pytest.mark.parametrize(
    ("given", "revision"),
    [("some-org/tiny", "main"), (Path("some-org/tiny"), "main"), ("some-org/tiny@v2.0", "v2.0")],
)
def test_hub_ids_are_found_in_the_cache(given, revision, checkpoint, snapshot, tmp_path, monkeypatch):
    plain = checkpoint("llama")
    hub_cache(tmp_path / "cache", plain, revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    convert_checkpoint(given, tmp_path / "dst", SMALL)
    convert_checkpoint(plain, tmp_path / "one", SMALL)
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")
    assert "some-org" not in json.dumps(json.loads((tmp_path / "dst" / MANIFEST_FILE).read_text()))


@pytest.mark.parametrize("given", ["some-org/unknown", "some-org/tiny@nowhere"])
def test_hub_ids_that_cannot_be_had(given, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with refused(SourceDamageError, given, "hf download some-org/") as caught:
        convert_checkpoint(given, tmp_path / "dst", SMALL)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "dst").exists()
