"""Does the guard stay silent where nothing is wrong, and what does it cost?

    python benchmarks/guard.py                       # both; runs go on where an earlier call stopped
    python benchmarks/guard.py --only scratch-mixtral --steps 200
    OMP_NUM_THREADS=1 python benchmarks/guard.py --cost-only     # in CPU time, for a machine that others use too

Healthy runs are those of the parity study, each with a seed of its own, for 1,000 steps, of which the guard looks at
every fourth. Their schedules are as long as the runs. The cost is what a step takes longer that is looked at, over
the steps from one such step to the next; the first steps, in which bands are learned, cost more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

# Not the benchmarks' own folder: kernels.py in it is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "parity_study"))

import torch
from rich.console import Console
from rich.table import Table
from study_models import SUBJECTS, Study, study_parser
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.setting import restart_with_isa
from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.recipes.variant_runs import batches
from hf_neuron_moe.training import find_last_complete
from hf_neuron_moe.training.arguments import DEFAULT_GUARD_STEPS
from hf_neuron_moe.training.guard.bands import Bands
from hf_neuron_moe.training.guard.watch import Watch

EVERY = 4
TOKENS, ROWS = 256, 4
SIZES: dict[str, int] = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, Any] = {
    "dense, H=576 I=1536": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=576, intermediate_size=1536, **SIZES)),
    "experts, H=256 I=512 E=8 k=2": lambda: MixtralForCausalLM(
        MixtralConfig(hidden_size=256, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2, **SIZES)
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, "guard_output")
    parser.add_argument("--only", nargs="+", choices=sorted(SUBJECTS), default=sorted(SUBJECTS))
    parser.add_argument("--precision", choices=("bf16", "mxfp8"), default="mxfp8")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cost-only", action="store_true")
    parser.add_argument("--pairs", type=int, default=7, help="steps with and without the guard, for the cost")
    return parser.parse_args()


def healthy(name: str, seed: int, asked: argparse.Namespace, study: Study) -> dict[str, Any]:
    """Train one model, from its last checkpoint if there is one; return what the guard's file says."""
    subject, folder = study.subjects[name], asked.out / f"{name}.{asked.precision}.{seed}"
    rows_NL = torch.cat(list(islice(batches(study.windows(name), subject.batch, seed), asked.steps)))
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": asked.steps,
        "per_device_train_batch_size": subject.batch,
        "learning_rate": subject.rate,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "seed": seed,
        "train_sampling_strategy": "sequential",
        "save_steps": 100,
        "save_total_limit": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 50,
    }
    arguments = NeuronMoETrainingArguments(
        **options, neuron_precision=asked.precision, neuron_guard="warn", neuron_guard_steps=EVERY
    )
    examples = [{"input_ids": row, "labels": row} for row in rows_NL]
    trainer = NeuronMoETrainer(model=study.model(name, seed), args=arguments, train_dataset=examples)
    trainer.train(resume_from_checkpoint=None if find_last_complete(str(folder)) is None else True)
    lines = (folder / "neuron_moe" / "guard.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    alarms = [alarm for record in records for alarm in record["alarms"]]
    return {"steps": trainer.state.global_step, "looked": len(records), "alarms": alarms}


def cost(model: PreTrainedModel, precision: str, pairs: int) -> tuple[float, float]:
    """Return the median CPU seconds of a step, and of one that is looked at; the two kinds take turns."""
    patch_model(model, {"precision": precision})
    watch, optimizer = Watch(model, Bands()), torch.optim.AdamW(model.parameters())
    ids = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(2 * pairs + 2):
        begin = time.process_time()
        if step % 2:
            watch.begin(step)
        model(input_ids=ids, labels=ids).loss.backward()
        watch.pause()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            seconds[step % 2].append(time.process_time() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    asked = parse_arguments()
    if asked.isa:
        restart_with_isa(asked.isa)
    transformers_logging.set_verbosity_error()
    console = Console(width=120)
    table = Table("model", "precision", "step (CPU s)", "looked at", f"cost at every {DEFAULT_GUARD_STEPS} steps")
    for title, made in MODELS.items():
        for precision in ("bf16", "mxfp8"):
            torch.manual_seed(0)
            plain, looked = cost(made(), precision, asked.pairs)
            share = (looked / plain - 1) / DEFAULT_GUARD_STEPS
            table.add_row(title, precision, f"{plain:.3f}", f"{looked:.3f}", f"{share:.2%}")
    console.print(f"{ROWS * TOKENS} tokens per step, {torch.get_num_threads()} threads")
    console.print(table)
    if asked.cost_only:
        return
    study, silent = Study(SUBJECTS, asked.out, asked.model), True
    for seed, name in enumerate(asked.only):
        found = healthy(name, seed, asked, study)
        silent &= not found["alarms"]
        console.print(
            f"{name}, {asked.precision}: {found['steps']} steps, {found['looked']} looked at, alarms: ", end=""
        )
        console.print(found["alarms"] or "none")
    sys.exit(0 if silent else 1)


if __name__ == "__main__":
    main()
