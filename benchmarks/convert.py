"""Speed and memory of conversions, beside cp and beside transformers' load and save, on synthetic Mixtral checkpoints.

    python benchmarks/convert.py build/bench --gigabytes 1 2 4 --json out.json
    python benchmarks/convert.py build/bench --gigabytes 1 --only cp bf16-kernel

Every contestant runs in a process of its own, and its time begins when everything is imported; a checkpoint's
contestants take turns and ratios divide medians of one run. All of them read the same files from the page cache and end
with fsync.
Speeds are bytes of source weights per second. Memory is the largest anonymous memory seen by sampling every 10 ms:
``anonymous`` in all, ``added`` without what the process held before (imported libraries). The slope of ``anonymous``
over the checkpoint's bytes says whether memory stays flat.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parent.parent
CONVERSIONS: dict[str, dict[str, Any]] = {
    "bf16-kernel": {"precision": "bf16", "layout": "kernel"},
    "mxfp8-swizzled": {"precision": "mxfp8", "layout": "kernel", "purpose": "training"},
    "mxfp8-moe-words": {"precision": "mxfp8", "layout": "kernel", "purpose": "inference"},
}
CONTESTANTS = ("cp", *CONVERSIONS, "transformers")
SAMPLE_S = 0.01


def anonymous_mb() -> float:
    """Anonymous memory of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon"))


def sync_tree(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def prepared(name: str, source: Path, target: Path, workers: int) -> Callable[[], object]:
    """Import what a contestant needs and return its work."""
    if name == "cp":

        def copy() -> None:
            subprocess.run(["cp", "-rL", str(source), str(target)], check=True)
            sync_tree(target)

        return copy
    if name == "transformers":
        import torch
        from transformers import AutoModelForCausalLM, MixtralForCausalLM  # the second import loads the family's code

        assert MixtralForCausalLM

        def load_and_save() -> None:
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
            sync_tree(target)

        return load_and_save
    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, plan_conversion

    options = ConvertOptions(**CONVERSIONS[name])
    plan_conversion(source, options)  # loads the family's code
    return lambda: convert_checkpoint(source, target, options, workers=workers)


def contest(name: str, source: Path, target: Path, workers: int) -> dict[str, float]:
    """Run one contestant in this process."""
    work = prepared(name, source, target, workers)
    os.sync()
    before = peak = anonymous_mb()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_S):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    work()
    seconds = time.perf_counter() - start
    used = time.process_time() - cpu
    done.set()
    watcher.join()
    return {"seconds": seconds, "cpu_seconds": used, "anonymous_mb": peak, "added_mb": peak - before}


def in_child(name: str, source: Path, target: Path, workers: int) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, __file__, str(source), "--contestant", name, str(target), "--workers", str(workers)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    shutil.rmtree(target, ignore_errors=True)
    if result.returncode:
        raise SystemExit(f"{name}: {result.stderr}")
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def source_of(folder: Path, gigabytes: float) -> Path:
    """A synthetic checkpoint, made where it is not there yet."""
    source = folder / f"mixtral-{gigabytes:g}gb"
    if not (source / "config.json").exists():
        script = str(ROOT / "scripts" / "make_synthetic_mixtral.py")
        command = [sys.executable, script, str(source), "--gigabytes", str(gigabytes), "--force"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return source


def measure(source: Path, names: list[str], repeats: int, workers: int) -> dict[str, Any]:
    """All contestants on one checkpoint: medians, and the spread of their times."""
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names:
            runs[name].append(in_child(name, source, source.parent / "target", workers))
            print(f"   {name} {turn + 1} of {repeats}: {runs[name][-1]['seconds']:.2f} s", flush=True)
    result: dict[str, Any] = {"bytes": nbytes}
    for name, found in runs.items():
        times = [run["seconds"] for run in found]
        seconds = statistics.median(times)
        result[name] = {
            "seconds": seconds,
            "seconds_all": times,
            "mb_per_s": nbytes / 1e6 / seconds,
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in found),
            "anonymous_mb": max(run["anonymous_mb"] for run in found),
            "added_mb": max(run["added_mb"] for run in found),
        }
        for other in ("cp", "transformers"):
            if other in result and name != other:
                result[name][f"speed_of_{other}"] = result[other]["seconds"] / seconds
    for name in set(names) & set(CONVERSIONS):
        if "transformers" in result:
            result[name]["speed_of_transformers"] = result["transformers"]["seconds"] / result[name]["seconds"]
    return result


def largest_weight_mb(source: Path) -> float:
    """Bytes of the largest fused weight in bf16."""
    config = json.loads((source / "config.json").read_text())
    count = config["num_local_experts"] * 2 * config["intermediate_size"] * config["hidden_size"]
    return count * 2 / 1e6


def report(results: dict[float, dict[str, Any]], largest: float) -> dict[str, Any]:
    """Print a table and return what was derived."""
    slopes = {}
    print(f"\nlargest fused weight {largest:.0f} MB, so the memory limit is {2 * largest + 200:.0f} MB")
    print(
        f"{'GB':>5} {'contestant':<18}{'s':>8}{'cpu s':>8}{'MB/s':>8}{'x cp':>7}{'x tf':>7}{'anon MB':>9}{'added':>7}"
    )
    for size, result in results.items():
        for name, entry in result.items():
            if isinstance(entry, dict):
                cells = [entry.get("speed_of_cp"), entry.get("speed_of_transformers")]
                ratios = "".join(f"{value:>7.2f}" if value is not None else f"{'':>7}" for value in cells)
                speed = f"{entry['seconds']:>8.2f}{entry['cpu_seconds']:>8.2f}{entry['mb_per_s']:>8.0f}"
                print(f"{size:>5g} {name:<18}{speed}{ratios}{entry['anonymous_mb']:>9.0f}{entry['added_mb']:>7.0f}")
    first, last = results[min(results)], results[max(results)]
    for name in CONVERSIONS:
        if name in first and last["bytes"] > first["bytes"]:
            added = (last[name]["anonymous_mb"] - first[name]["anonymous_mb"]) * 1e6
            slopes[name] = added / (last["bytes"] - first["bytes"])
            print(f"{name}: {slopes[name]:.4f} bytes of memory more per byte of checkpoint")
    return {"largest_weight_mb": largest, "slopes": slopes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="where checkpoints are made and converted")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contestant", nargs=2, metavar=("NAME", "TARGET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        name, target = given.contestant
        print(json.dumps(contest(name, given.folder, Path(target), given.workers)))
        return
    names = [name for name in CONTESTANTS if name in given.only]
    results = {}
    for size in sorted(given.gigabytes):
        print(f"{size:g} GB", flush=True)
        results[size] = measure(source_of(given.folder, size), names, given.repeats, given.workers)
    derived = report(results, largest_weight_mb(source_of(given.folder, min(results))))
    if given.json:
        facts = {"date": datetime.datetime.now(datetime.UTC).isoformat(), "machine": platform.platform()}
        facts |= {"cores": os.cpu_count(), "workers": given.workers, **derived}
        content = {**facts, "results": {str(size): result for size, result in results.items()}}
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
