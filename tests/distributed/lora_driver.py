"""Two or four processes train, save, merge and load LoRA adapters under every layout, and compare with one process.

    python -m tests.distributed.lora_driver FOLDER RANK PROCESSES [--all-layouts]

All run the same cells in one process group. Each writes what it found to FOLDER/rank-N.json, by cell.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, TrainingArguments

from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.modules.sharded_lora import prepare_adapters
from hf_neuron_moe.parity import Run, Trial, compare, load, train, whole
from hf_neuron_moe.patching import patch_model
from hf_neuron_moe.training import NeuronMoETrainer
from tests.distributed.layout_driver import SameRouting
from tests.tiny_models import tiny_model, tokens

LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp2": {"fsdp": 2},
    "tp2": {"tp": 2},
    "ep2-fsdp2": {"ep": 2, "fsdp": 2},
    "ep2-tp2": {"ep": 2, "tp": 2},
    "replicate2": {"dp_replicate": 2},
}
FOUR: dict[str, dict[str, int]] = {
    "ep2-fsdp4": {"ep": 2, "fsdp": 4},
    "ep2-tp2-fsdp2": {"ep": 2, "tp": 2, "fsdp": 2},
    "tp2-fsdp2": {"tp": 2, "fsdp": 2},
    "ep4": {"ep": 4, "fsdp": 4},
    "fsdp2-replicate2": {"fsdp": 2, "dp_replicate": 2},
    "tp2-replicate2": {"tp": 2, "dp_replicate": 2},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ATTENTION + DENSE},
    "mixtral": {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    "qwen2_moe": {"target_modules": ATTENTION + DENSE, "target_parameters": EXPERTS},
    "gpt_oss": {"target_modules": ATTENTION, "target_parameters": EXPERTS},
}
CELLS = [
    (family, layout) for family in TARGETS for layout in LAYOUTS if family != "llama" or "ep" not in LAYOUTS[layout]
]
NAMES = [f"{family}/{layout}" for family, layout in CELLS]
CELLS_OF_FOUR = [
    *(("mixtral", layout) for layout in FOUR),
    ("gpt_oss", "ep2-fsdp4"),
    *(("llama", layout) for layout in ("tp2-fsdp2", "fsdp2-replicate2", "tp2-replicate2")),
]
NAMES_OF_FOUR = [f"{family}/{layout}" for family, layout in CELLS_OF_FOUR]
ALWAYS = [
    *(f"llama/{layout}" for layout in ("tp2", "fsdp2", "fsdp2-replicate2")),
    *(f"mixtral/{layout}" for layout in ("tp2", "ep2-fsdp2", "ep2-tp2", "replicate2", "tp2-fsdp2", "ep4")),
    "qwen2_moe/ep2-tp2",
    "gpt_oss/ep2-fsdp2",
]
"""Of these; ``--all-layouts`` runs the others too."""
TRAINER = "trainer"
Rounded = tuple[str, str, str]
ROUNDED = [
    (family, layout, precision)
    for family, layout in CELLS
    for precision in ("bf16", "mxfp8")
    if family in ("llama", "mixtral")
]
ROUNDED_OF_FOUR = [("mixtral", layout, precision) for layout in FOUR for precision in ("bf16", "mxfp8")]
ALWAYS_ROUNDED = [
    ("llama", "tp2", "mxfp8"),
    *(("mixtral", layout, "mxfp8") for layout in ("tp2", "fsdp2", "ep2-fsdp2", "ep4", "tp2-fsdp2")),
]
REFUSED = "refused"
CONVERTED = "converted"
CHECKPOINTED = {("llama", "tp2"), ("mixtral", "ep2-tp2")}


def filled(model: nn.Module) -> None:
    """Give adapters values that matter, the same in every layout: peft's products start at zero."""
    for name, param in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value = torch.randn(param.shape, generator=generator) * 0.1
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            with torch.no_grad():
                param.copy_(value)


def adapted(targets: dict[str, Any], average: bool) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **targets))
        filled(wrapped)
        for param in wrapped.parameters() if average else ():
            if param.requires_grad and not isinstance(param.data, DTensor):
                param.register_post_accumulate_grad_hook(averaged)
        return wrapped

    return prepare


def averaged(param: Tensor) -> None:
    """Average a gradient over all processes, as transformers' Trainer does for ordinary parameters."""
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def same_files(one: Path, other: Path) -> list[str]:
    """Names of the tensors that are not equal."""
    expected, found = load_file(one), load_file(other)
    names = expected.keys() | found.keys()
    return sorted(n for n in names if n not in found or n not in expected or not torch.equal(expected[n], found[n]))


def cell(family: str, layout: str, folder: Path, rank: int) -> dict[str, Any]:
    sizes, here = (LAYOUTS | FOUR)[layout], folder / f"{family}-{layout}"
    trial = Trial(str(folder / family), sizes, {"precision": "fp32"}, steps=2, prepare=adapted(TARGETS[family], False))
    one: Any = load(trial, distributed=False)
    one.save_pretrained(here / f"one-{rank}")
    expected = train(trial, one)
    filled(one)
    merged_one = one.merge_and_unload().eval()

    trial = replace(trial, prepare=adapted(TARGETS[family], True), checkpointing=(family, layout) in CHECKPOINTED)
    model: Any = load(trial, distributed=True)
    model.save_pretrained(here / "many", is_main_process=rank == 0)
    found = train(trial, model, rank // sizes.get("tp", 1), trial.batches)
    result = compare(expected, found)
    answer: dict[str, Any] = {"loss": result.loss, "worst": result.worst, "count": len(result.gradients)}
    dist.barrier()
    file = "adapter_model.safetensors"
    answer["adapters"] = same_files(here / f"one-{rank}" / file, here / "many" / file)

    filled(model)
    prepare_adapters(model)
    merged = model.merge_and_unload().eval()
    wanted = dict(merged_one.named_parameters())
    held = {name: whole(param.detach()) for name, param in merged.named_parameters()}
    answer["merged"] = [name for name, value in held.items() if not torch.equal(value, wanted[name])]
    answer["names"] = sorted(held) == sorted(wanted)
    with torch.no_grad():
        logits, expected_logits = merged(tokens()).logits, merged_one(tokens()).logits
    answer["logits"] = float((logits - expected_logits).abs().max() / expected_logits.abs().max())
    merged_one.save_pretrained(here / "merged-one")  # the first process writes, as in every distributed run
    merged.save_pretrained(here / "merged")
    dist.barrier()
    file = "model.safetensors"
    answer["merged_file"] = same_files(here / "merged-one" / file, here / "merged" / file)

    again = PeftModel.from_pretrained(merged, here / "many")
    other = adapted(TARGETS[family], False)(merged_one)
    params = dict(other.named_parameters())
    lora = [(name, param) for name, param in again.named_parameters() if "lora_" in name]
    answer["loaded"] = [name for name, param in lora if not torch.equal(whole(param.detach()), params[name])]
    return answer


@functools.cache
def alone(folder: Path, family: str, precision: str) -> tuple[Run, Run, list[Tensor]]:
    """One process's runs in fp32 and in `precision`, with the choices of experts that the latter makes."""
    trial = Trial(str(folder / family), {}, {"precision": precision}, steps=1, prepare=adapted(TARGETS[family], False))
    model = load(trial, distributed=False)
    with SameRouting(None) as routing:
        one = train(trial, model)
    model = load(replace(trial, patch={"precision": "fp32"}), distributed=False)
    with SameRouting(routing.chosen):
        exact = train(trial, model)
    return exact, one, routing.chosen


def rounded_cell(family: str, layout: str, precision: str, folder: Path, rank: int) -> dict[str, Any]:
    """Distances of each gradient: of the layout from one process, and of that from fp32.

    Where no block is cut, also which gradients differ if every process gets the tokens of the one process.
    """
    sizes = (LAYOUTS | FOUR)[layout]
    exact, one, chosen = alone(folder, family, precision)
    trial = Trial(
        str(folder / family), sizes, {"precision": precision}, steps=1, prepare=adapted(TARGETS[family], True)
    )

    def run(part: int, parts: int) -> Run:
        model = load(trial, distributed=True)
        with SameRouting(chosen, part, parts):
            return train(trial, model, part, parts)

    found, far = compare(one, run(rank // sizes.get("tp", 1), trial.batches)), compare(exact, one).gradients
    answer: dict[str, Any] = {"far": {name: [each, far[name]] for name, each in found.gradients.items()}}
    if not sizes.keys() & {"tp", "ep"}:
        same = run(0, 1)
        assert same.gradients.keys() == one.gradients.keys()
        answer["unequal"] = [
            name for name, each in same.gradients.items() if not torch.equal(each, one.gradients[name])
        ]
    return answer


def refused_cell(folder: Path) -> dict[str, Any]:
    """What is said of adapters whose sizes peft took before the model was patched."""
    trial = Trial(str(folder / "llama"), FOUR["fsdp2-replicate2"], None)
    model = get_peft_model(load(trial, distributed=True), LoraConfig(r=4, target_modules=ATTENTION))
    try:
        patch_model(model, {"precision": "fp32"})
    except UnsupportedModelError as error:
        return {"error": str(error), "patched": any(block_of(module) is not None for module in model.modules())}
    return {"error": ""}


def converted_cell(folder: Path, rank: int) -> dict[str, Any]:
    """Gradients of adapters with biases, of a model that computed once and was then put into another dtype and back."""
    targets = {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}

    def prepare(model: nn.Module) -> nn.Module:
        wrapped = adapted(targets, average=True)(model)
        with torch.no_grad():
            wrapped(tokens())
        return wrapped.to(torch.float64).to(torch.float32)

    if rank == 0:
        tiny_model("qwen2", num_hidden_layers=1).save_pretrained(folder / "qwen2")
    dist.barrier()
    trial = Trial(str(folder / "qwen2"), FOUR["tp2-fsdp2"], {"precision": "fp32"}, steps=1, prepare=prepare)
    alone = replace(trial, prepare=adapted(targets, average=False))
    expected = train(alone, load(alone, distributed=False))
    found = train(trial, load(trial, distributed=True), rank // 2, trial.batches)
    return {"gradients": compare(expected, found).gradients}


def trainer_cell(layout: str, folder: Path, rank: int) -> dict[str, Any]:
    """Losses of the Trainer, with adapters that start unequal on processes that have other tokens."""
    losses, sizes = [], (LAYOUTS | FOUR)[layout]
    for distributed in (False, True):
        trial = Trial(str(folder / "mixtral"), sizes, {"precision": "fp32"})
        torch.manual_seed(rank // sizes.get("tp", 1) if distributed else 0)
        model = load(replace(trial, prepare=lambda base: base), distributed=distributed)
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **TARGETS["mixtral"])
        model = get_peft_model(model, config)
        rows = [{"input_ids": row, "labels": row} for row in tokens(16, 12, seed=11)]
        if distributed:
            losses.append(trained(OursInOrder if "tp" in sizes else InOrder, model, folder, rows))
        else:  # not as one of two processes, for which transformers' Trainer would take it
            losses.append(by_hand(model, rows))
    return {"losses": losses}


def by_hand(model: nn.Module, rows: list[dict[str, Tensor]]) -> list[float]:
    """Losses of steps of 4 rows with plain gradient descent."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    losses = []
    for step in range(4):
        ids = torch.stack([row["input_ids"] for row in rows[4 * step : 4 * step + 4]])
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


class InOrder(Trainer):
    """transformers' Trainer, taking rows in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class OursInOrder(InOrder, NeuronMoETrainer):
    """Ours: on CPUs transformers' refuses tensor parallelism."""


def trained(kind: type[Trainer], model: nn.Module, folder: Path, rows: list[dict[str, Tensor]]) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=4,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = kind(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def cells(folder: Path, rank: int, processes: int, every: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for family, layout in CELLS if processes == 2 else CELLS_OF_FOUR:
        name = f"{family}/{layout}"
        if every or name in ALWAYS:
            yield name, lambda family=family, layout=layout: cell(family, layout, folder, rank)
    for each in ROUNDED if processes == 2 else ROUNDED_OF_FOUR:
        if every or each in ALWAYS_ROUNDED:
            yield "/".join(each), lambda each=each: rounded_cell(*each, folder, rank)
    yield TRAINER, lambda: trainer_cell("ep2-fsdp2" if processes == 2 else "tp2-fsdp2", folder, rank)
    if processes == 4:
        yield REFUSED, lambda: refused_cell(folder)
        yield CONVERTED, lambda: converted_cell(folder, rank)


def main(folder: Path, rank: int, processes: int, every: bool) -> None:
    """Run all cells; the first that fails ends this process, and the test ends the others."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes, timeout=limit)
    for family in TARGETS if rank == 0 else ():
        tiny_model(family, num_hidden_layers=1).save_pretrained(folder / family)
    dist.barrier()
    answers: dict[str, Any] = {}
    for name, run in cells(folder, rank, processes, every):
        print(name, flush=True)
        answers[name] = run()
        (folder / f"rank-{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", NeuronMoEWarning)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "--all-layouts" in sys.argv)
