"""What NeuronMoETrainer's metrics cost, in parts of a training step.

    python benchmarks/training_overhead.py --json out.json
    OMP_NUM_THREADS=1 python benchmarks/training_overhead.py --clock cpu    # on a machine that others use too

One Trainer trains one model; its steps take turns in being measured and not, so that both kinds meet the same model,
the same machine and the same load. ``ratio`` is that of the medians of their times, with the interquartile range of the
unmeasured steps beside it as the noise. The cost is far below that noise on most machines, so it is also timed where it
arises: in the hooks, when figures are collected (every logging step) and when the quantization health is measured
(every ``neuron_health_steps``, 100 by default); the last two columns spread these over the steps.

Legend: H hidden, I intermediate, E experts, K experts per token, L layers, T tokens per step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, TrainerCallback

from benchmarks.setting import Shape
from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
from hf_neuron_moe.training.arguments import DEFAULT_HEALTH_STEPS
from hf_neuron_moe.training.metrics import TrainingMonitor


@dataclass(frozen=True)
class Case(Shape):
    """One model and batch; a dense model has no experts."""

    L: int = 4

    @property
    def title(self) -> str:
        return f"{self.sizes} L={self.L} T={self.T}"


CASES = (
    Case("dense", 384, 1024, 256),
    Case("few experts", 256, 512, 256, 8, 2),
    Case("many experts", 256, 128, 256, 64, 8),
)
"""Short steps on purpose: the cost hardly depends on a step's length, so that longer ones are slowed down less."""
LENGTH = 128
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Ids(Dataset[dict[str, Tensor]]):
    """Random token ids."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 1024, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class TimedMonitor(TrainingMonitor):
    """A monitor that knows how long its hooks took."""

    clock: Callable[[], float]
    in_hooks = 0.0

    def _timed(self, hook: Callable[..., Any], *args: Any) -> None:
        start = self.clock()
        hook(*args)
        self.in_hooks += self.clock() - start

    def _enter(self, *args: Any) -> None:
        self._timed(super()._enter, *args)

    def _leave(self, *args: Any) -> None:
        self._timed(super()._leave, *args)

    def _see_block(self, *args: Any) -> None:
        self._timed(super()._see_block, *args)


class Alternate(TrainerCallback):
    """Measures every second step, and times all of them and the parts that are not in every step."""

    def __init__(self, warm_up: int, clock: Callable[[], float]) -> None:
        self.monitor: TimedMonitor | None = None
        self.warm_up, self.clock = warm_up, clock
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.hooks: list[float] = []
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
        self.monitor.in_hooks = 0.0
        self.begun = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.monitor is not None
        elapsed = self.clock() - self.begun
        start = self.clock()
        self.monitor.end_step()
        ended = self.clock() - start
        if state.global_step <= self.warm_up:
            return
        if self.sampled:
            self.health.append(ended)
        else:
            self.times[self.measured].append(elapsed + ended)
            if self.measured:
                self.hooks.append(self.monitor.in_hooks + ended)
        if self.measured:
            start = self.clock()
            self.monitor.take()
            self.collect.append(self.clock() - start)


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


def measure(case: Case, steps: int, precision: str, clock: str) -> dict[str, Any]:
    """Train a little and return the costs, times in seconds."""
    alternate = Alternate(warm_up=4, clock=CLOCKS[clock])
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
        alternate.monitor = TimedMonitor(trainer.model)
        alternate.monitor.clock = CLOCKS[clock]
        trainer.add_callback(alternate)
        trainer.train()
    without = alternate.times[False]
    step, hooks = statistics.median(without), statistics.median(alternate.hooks)
    quartiles = statistics.quantiles(without, n=4)
    collect, health = statistics.median(alternate.collect), statistics.median(alternate.health)
    return {
        **asdict(case),
        "step_s": step,
        "steps_compared": len(alternate.times[True]),
        "ratio_of_medians": statistics.median(alternate.times[True]) / step,
        "noise": (quartiles[2] - quartiles[0]) / step,
        "hooks_s": hooks,
        "collect_s": collect,
        "health_s": health,
        "overhead_logging_every_step": (hooks + collect + health / DEFAULT_HEALTH_STEPS) / step,
        "overhead_logging_every_10": (hooks + collect / 10 + health / DEFAULT_HEALTH_STEPS) / step,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Lay the results out for reading."""
    made = Table(title=f"Cost of the metrics; health every {DEFAULT_HEALTH_STEPS} steps (default)")
    for heading in (
        "case",
        "shape",
        "step",
        "ratio ± noise",
        "hooks",
        "collect",
        "health",
        "log every step",
        "log every 10",
    ):
        made.add_column(heading, justify="left" if heading in ("case", "shape") else "right")
    for row in rows:
        case = Case(**{each.name: row[each.name] for each in fields(Case)})
        made.add_row(
            case.name,
            case.title,
            f"{1e3 * row['step_s']:.1f} ms",
            f"{row['ratio_of_medians']:.3f} ± {row['noise']:.3f}",
            *(f"{1e3 * row[key]:.2f} ms" for key in ("hooks_s", "collect_s", "health_s")),
            *(f"{100 * row[f'overhead_logging_every_{often}']:.2f} %" for often in ("step", "10")),
        )
    return made


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--steps", type=int, default=44, help="steps per case (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "mxfp8", "fp32"))
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: the process's time on all its cores")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    rows = [measure(case, options.steps, options.precision, options.clock) for case in chosen]
    Console(width=140).print(table(rows))
    if options.json is not None:
        machine = {
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "precision": options.precision,
            "clock": options.clock,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        options.json.write_text(json.dumps({"environment": machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
