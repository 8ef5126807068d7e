"""What NeuronMoETrainer's metrics cost, in parts of a training step.

    python benchmarks/training_overhead.py --json out.json

One Trainer trains one model; its steps take turns in being measured and not, so that both kinds meet the same model,
the same machine and the same load, and the medians of their times are compared. What does not happen in every step is
timed by itself and spread over the steps between: collecting the figures (in every logging step) and the quantisation
health (every ``neuron_health_steps``, 100 by default).

Legend: H hidden, I intermediate, E experts, K experts per token, L layers, T tokens per step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, TrainerCallback

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
from hf_neuron_moe.training.arguments import DEFAULT_HEALTH_STEPS
from hf_neuron_moe.training.metrics import TrainingMonitor


@dataclass(frozen=True)
class Case:
    """One model and batch; a dense model has no experts."""

    name: str
    H: int
    I: int  # noqa: E741
    L: int
    T: int
    E: int = 0
    K: int = 0

    @property
    def title(self) -> str:
        experts = f" E={self.E} K={self.K}" if self.E else " dense"
        return f"H={self.H} I={self.I} L={self.L}{experts} T={self.T}"


CASES = (
    Case("dense", 512, 1536, 6, 1024),
    Case("few experts", 512, 1024, 4, 1024, 8, 2),
    Case("many experts", 512, 256, 4, 1024, 64, 8),
    Case("short steps", 128, 256, 4, 128, 8, 2),
)
LENGTH = 128


class Ids(Dataset[dict[str, Tensor]]):
    """Random token ids."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 1024, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Alternate(TrainerCallback):
    """Measures every second step, and times all of them and the parts that are not in every step."""

    def __init__(self, warm_up: int) -> None:
        self.monitor: TrainingMonitor | None = None
        self.warm_up = warm_up
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.health: list[float] = []
        self.collect: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measured = state.global_step % 2 == 1
        assert self.monitor is not None
        self.monitor.detach()
        if self.measured:
            self.monitor.attach()
        # Inputs are looked at now and then, in steps that are not compared.
        self.sampled = state.global_step % 8 == 7
        self.monitor.begin_step(sample=self.sampled)
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.monitor is not None
        elapsed = time.perf_counter() - self.begun
        start = time.perf_counter()
        self.monitor.end_step()
        ended = time.perf_counter() - start
        if state.global_step <= self.warm_up:
            return
        if self.sampled:
            self.health.append(ended)
        else:
            self.times[self.measured].append(elapsed + ended)
        if self.measured:
            start = time.perf_counter()
            self.monitor.take()
            self.collect.append(time.perf_counter() - start)


def build(case: Case) -> nn.Module:
    """Make a model of random weights."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": case.H,
        "num_hidden_layers": case.L,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    }
    if case.E:
        config = Qwen3MoeConfig(
            **common, head_dim=case.H // 8, num_experts=case.E, num_experts_per_tok=case.K, moe_intermediate_size=case.I
        )
    else:
        config = LlamaConfig(**common, intermediate_size=case.I)
    return AutoModelForCausalLM.from_config(config)


def measure(case: Case, steps: int, precision: str) -> dict[str, Any]:
    """Train a little and return the costs, times in seconds."""
    alternate = Alternate(warm_up=4)
    with tempfile.TemporaryDirectory() as folder:
        options = NeuronMoETrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=case.T // LENGTH,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            neuron_precision=precision,
            neuron_patch=True,
        )
        trainer = NeuronMoETrainer(
            model=build(case), args=options, train_dataset=Ids(steps * case.T // LENGTH), callbacks=[]
        )
        trainer.remove_callback(trainer.neuron_callback)
        alternate.monitor = TrainingMonitor(trainer.model)
        trainer.add_callback(alternate)
        trainer.train()
    step = statistics.median(alternate.times[False])
    hooks = statistics.median(alternate.times[True]) - step
    collect, health = statistics.median(alternate.collect), statistics.median(alternate.health)
    return {
        **asdict(case),
        "step_s": step,
        "steps_compared": len(alternate.times[True]),
        "hooks_s": hooks,
        "collect_s": collect,
        "health_s": health,
        "overhead_logging_every_step": (hooks + collect + health / DEFAULT_HEALTH_STEPS) / step,
        "overhead_logging_every_10": (hooks + collect / 10 + health / DEFAULT_HEALTH_STEPS) / step,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Lay the results out for reading."""
    made = Table(title=f"Cost of the metrics; health every {DEFAULT_HEALTH_STEPS} steps (default)")
    for heading in ("case", "shape", "step", "hooks", "collect", "health", "log every step", "log every 10"):
        made.add_column(heading, justify="left" if heading in ("case", "shape") else "right")
    for row in rows:
        case = Case(**{key: row[key] for key in ("name", "H", "I", "L", "T", "E", "K")})
        made.add_row(
            case.name,
            case.title,
            *(f"{1e3 * row[key]:.2f} ms" for key in ("step_s", "hooks_s", "collect_s", "health_s")),
            *(f"{100 * row[f'overhead_logging_every_{often}']:.2f} %" for often in ("step", "10")),
        )
    return made


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--steps", type=int, default=44, help="steps per case (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "mxfp8", "fp32"))
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    rows = [measure(case, options.steps, options.precision) for case in chosen]
    Console(width=140).print(table(rows))
    if options.json is not None:
        machine = {
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "precision": options.precision,
        }
        options.json.write_text(json.dumps({"environment": machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
