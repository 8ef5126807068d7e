"""Processes that save, train and resume one model, sharded while loading in several layouts.

    python -m tests.training.sharded_driver FOLDER PROCESSES CELLS

CELLS is a list in JSON: names of functions here with their arguments. One process imports everything and forks the
others; each writes what its cells returned, or the error, to FOLDER/rank-N.json. Then the first one goes on alone, and
writes FOLDER/alone.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.errors import NeuronMoEError, NeuronMoEWarning
from hf_neuron_moe.patching.optimizer_layout import GROUP_KEY
from tests.tiny_models import tiny_model, tokens

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8, "num_hidden_layers": 1}
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "fsdp2": {"fsdp_size": 2},
    "ep2_fsdp2": {"ep_size": 2, "fsdp_size": 2},
    "ep2_tp2": {"ep_size": 2, "tp_size": 2},
    "fsdp4": {"fsdp_size": 4},
    "ep4_fsdp4": {"ep_size": 4, "fsdp_size": 4},
    "ep2_fsdp4": {"ep_size": 2, "fsdp_size": 4},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
}
STEPS, ROWS = 8, 4
"""Optimizer steps of a run, and rows of a global batch."""


class Stop(TrainerCallback):
    """Ends a run early, as if it had been killed between two steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def loaded(folder: Path, layout: str, **changes: Any) -> Any:
    """Return a patched model in a layout, from the folder of a checkpoint."""
    from transformers.distributed import DistributedConfig

    sizes: Any = LAYOUTS[layout]
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **options, **changes)
    patch_model(model, {"precision": "fp32"})
    return model


def trainer(home: Path, layout: str, output: str, *, model: Any = None, **options: Any) -> NeuronMoETrainer:
    """Return a Trainer whose batches hold the same rows in every layout."""
    sizes = LAYOUTS[layout]
    parts = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    AcceleratorState._reset_state()
    settings = {
        "output_dir": str(home / output),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // parts,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "report_to": [],
        "use_cpu": True,
        "seed": 5,
        "disable_tqdm": True,
        "neuron_precision": "fp32",
    }
    rows = [{"input_ids": row, "labels": row} for row in tokens(ROWS * STEPS, 12, seed=11)]
    callbacks = options.pop("callbacks", None)
    arguments = NeuronMoETrainingArguments(**{**settings, **options})  # type: ignore[arg-type]
    model = loaded(home / "model", layout) if model is None else model
    return NeuronMoETrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)


def whole(tensor: Any) -> Tensor:
    """Return all of a parameter."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def fingerprint(model: Any) -> str:
    """Hash of all weights, whatever their layout."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + whole(value).contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def figures(run: NeuronMoETrainer, key: str = "loss") -> list[float]:
    """Return what a run logged in each step, all digits."""
    return [entry[key] for entry in run.state.log_history if key in entry]


def saving(home: Path, layout: str, other: str) -> dict[str, Any]:
    """Save whole, by the Trainer, and in parts; load the parts on the `other` layout."""
    model = loaded(home / "model", layout)
    folder = home / f"saved-{layout}"
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "parts", distributed_checkpoint=True)
    trainer(home, layout, f"saved-{layout}/run", model=model).save_model(str(folder / "trainer"))
    dist.barrier()
    again = loaded(folder / "parts", other)
    expected = dict(model.state_dict())
    unequal = [name for name, each in again.state_dict().items() if not torch.equal(whole(each), whole(expected[name]))]
    return {
        "files": [digest(folder / kind / "model.safetensors") for kind in ("whole", "trainer")],
        "config": (folder / "whole" / "config.json").read_text(encoding="utf-8"),
        "parts": len(list((folder / "parts").glob("shard-*.safetensors"))),
        "unequal": unequal,
        "names": len(expected),
    }


def resumed(home: Path, layout: str, others: list[str], dropout: float = 0.0, rank: int = 0) -> dict[str, Any]:
    """Train, train again from the checkpoint in the middle as if the rest had never been, and then on `others`.

    With a `rank`, adapters are trained.
    """
    runs, half, output = [], 4, f"adapters-{layout}" if rank else f"through-{layout}"

    def run(on: str, folder: str, **options: Any) -> NeuronMoETrainer:
        model = loaded(home / "model", on, attention_dropout=dropout)
        if rank:
            torch.manual_seed(1)
            targets: Any = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
            model = get_peft_model(model, LoraConfig(**targets, r=rank, init_lora_weights=False))
        return trainer(home, on, folder, model=model, **options)

    for resume in (None, True):
        if resume and dist.get_rank() == 0:
            shutil.rmtree(home / output / f"checkpoint-{STEPS}")
        dist.barrier()
        runs.append(run(layout, output, save_steps=half))
        runs[-1].train(resume_from_checkpoint=resume)
    through, again = runs
    result = {
        "losses": figures(through),
        "norms": figures(through, "grad_norm"),
        "again": figures(again),
        "weights": [fingerprint(each.model) for each in runs],
        "marked": any(GROUP_KEY in group for group in again.optimizer.param_groups),
        "only_model": again.args.save_only_model,
    }
    for other in others:
        moved = run(other, f"moved-{layout}-{other}", save_strategy="no")
        moved.train(resume_from_checkpoint=str(home / output / f"checkpoint-{half}"))
        result[other] = figures(moved)
    return result


def best(home: Path, layout: str) -> dict[str, Any]:
    """Load the best of three checkpoints at the end, the first one, whose rate was not too high."""
    kept: list[str] = []

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.append(fingerprint(kwargs["model"]))

    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3}
    options |= {"learning_rate": 1.0, "load_best_model_at_end": True, "callbacks": [Watch()]}
    run = trainer(home, layout, f"best-{layout}", **options)
    run.train()
    chosen = int(str(run.state.best_model_checkpoint).rpartition("-")[2])
    return {"chosen": chosen, "kept": kept, "weights": fingerprint(run.model)}


def refusing(home: Path, layout: str, damage: str) -> dict[str, Any]:
    """Resume from a checkpoint that is not this model's, or not whole."""
    folder, at = home / f"through-{layout}" / "checkpoint-4", home / f"refused-{damage}" / "checkpoint-4"
    if dist.get_rank() == 0:
        shutil.copytree(folder, at)
        for pattern in (damage,) if "." in damage else ():
            next(iter(at.rglob(pattern))).unlink()
    dist.barrier()
    changes: dict[str, dict[str, Any]] = {"sizes": {"intermediate_size": 512}, "layers": {"num_hidden_layers": 2}}
    changes["wider"] = {"vocab_size": 96}
    if damage in changes:
        if dist.get_rank() == 0:
            tiny_model("mixtral", **{**SIZES, **changes[damage]}).save_pretrained(home / damage)
        dist.barrier()
        model = loaded(home / damage, layout)
    else:
        model = loaded(home / "model", layout)
    if damage == "frozen":  # saved with fewer trained parameters than are trained now
        cut = loaded(home / "model", layout)
        cut.lm_head.weight.requires_grad_(False)
        trainer(home, layout, "refused-frozen/run", model=cut, callbacks=[Stop(2)]).train()
        at = home / "refused-frozen" / "run" / "checkpoint-2"
    if damage == "stock":
        if dist.get_rank() == 0:
            shutil.rmtree(at)
            shutil.copytree(home / "model", at)
        dist.barrier()
    before = fingerprint(model)
    run = trainer(home, layout, f"refused-{damage}/again", model=model)
    try:
        run.train(resume_from_checkpoint=str(at))
    except NeuronMoEError as error:
        return {"refused": [type(error).__name__, str(error)], "changed": fingerprint(model) != before}
    return {"refused": None}


def failing(home: Path, layout: str) -> dict[str, Any]:
    """The second process has no room for its random state when step 4 is saved."""
    run = trainer(home, layout, "failing")
    save = run._save_rng_state

    def without_room(folder: str) -> None:
        if dist.get_rank() == 1 and folder.endswith("-4"):
            raise OSError(28, "No space left on device", folder)
        save(folder)

    run._save_rng_state = without_room  # type: ignore[method-assign]
    run.train()
    return {}


def evaluated(home: Path, layout: str) -> dict[str, Any]:
    """Train one step, with and without an evaluation before."""
    weights = []
    for first in (True, False):
        run = trainer(home, layout, "evaluated", save_strategy="no", max_steps=1)
        if first:
            run.evaluate()
        run.train()
        weights.append(fingerprint(run.model))
    return {"weights": weights}


def predicted(home: Path, layout: str) -> dict[str, Any]:
    """Predict five rows, of which the last batch has one."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(5, 12, seed=12)]
    found = trainer(home, layout, "predicted", per_device_eval_batch_size=4).predict(rows)
    return {"loss": found.metrics["test_loss"], "sums": found.predictions.sum((1, 2)).tolist()}


def scattered(home: Path, layout: str) -> dict[str, Any]:
    """Each process saves to a disk of its own."""
    trainer(home, layout, f"scattered-{dist.get_rank()}").train()
    return {}


CELLS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (saving, resumed, best, refusing, failing, scattered, evaluated, predicted)
}


def run_cells(home: Path, cells: list[list[Any]]) -> None:
    """Run cells one after another; what one process raises, the others note beside their own result."""
    results = []
    for name, *arguments in cells:
        start = time.monotonic()
        result: dict[str, Any] = {"error": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeuronMoEWarning)
            try:
                result |= CELLS[name](home, *arguments)
            except Exception as error:  # the test looks at it, and the next cell needs all processes
                logging.getLogger(__name__).info("%s %s", name, arguments, exc_info=True)
                result["error"] = [type(error).__name__, str(error)]
        results.append(result | {"seconds": time.monotonic() - start})
        (home / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
        dist.barrier()


def in_processes(
    count: int, home: Path, function: Callable[..., None], *arguments: Any, grace: float = 10
) -> list[int]:
    """Run `function` in so many forks that form a group; return their exit statuses, negative for a signal.

    After the first one that fails the others have `grace` seconds.
    """
    meeting = f"{home}/meeting-{os.getpid()}-{time.monotonic_ns()}"
    children = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "none", "MASTER_PORT": 1}
                os.environ.update({key: str(value) for key, value in own.items()})
                limit = timedelta(seconds=60)
                dist.init_process_group("gloo", f"file://{meeting}", limit, world_size=count, rank=rank)
                function(home, *arguments)
            except BaseException:  # a fork must not go on with its parent's work
                logging.getLogger(__name__).exception("rank %d", rank)
                os._exit(1)
            os._exit(0)
        children[child] = rank
    statuses = [0] * count
    end = float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            for late in children if time.monotonic() > end else ():
                os.kill(late, signal.SIGKILL)
            time.sleep(0.02)
            continue
        statuses[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:
            end = min(end, time.monotonic() + grace)
    return statuses


def alone(home: Path) -> dict[str, Any]:
    """Train on one process, and from the middle of each run of :func:`resumed`."""
    through = trainer(home, "one", "one", save_strategy="no")
    through.train()
    result: dict[str, Any] = {"losses": figures(through), "norms": figures(through, "grad_norm")}
    result["predicted"] = predicted(home, "one")
    folders = sorted(home.glob("through-*/checkpoint-4"))
    kernel = AutoModelForCausalLM.from_pretrained(home / "model")
    patch_model(kernel, {"precision": "fp32", "weights": "kernel"})
    try:
        options: dict[str, Any] = {"save_strategy": "no", "neuron_weights": "kernel"}
        trainer(home, "one", "kernel", model=kernel, **options).train(resume_from_checkpoint=str(folders[0]))
    except NeuronMoEError as error:
        result["kernel"] = str(error)
    for folder in folders:
        moved = trainer(home, "one", f"moved-{folder.parent.name}", save_strategy="no")
        moved.train(resume_from_checkpoint=str(folder))
        result[folder.parent.name] = figures(moved)
    return result


def main(home: Path, processes: int, cells: list[list[Any]]) -> None:
    """Make the model, run the cells, and go on alone."""
    torch.set_num_threads(1)
    tiny_model("mixtral", **SIZES).save_pretrained(home / "model")
    statuses = in_processes(processes, home, run_cells, cells)
    if any(statuses):
        raise SystemExit(f"processes ended with {statuses}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuronMoEWarning)
        (home / "alone.json").write_text(json.dumps(alone(home)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
