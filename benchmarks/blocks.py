"""Speed and saved bytes of the patched blocks against stock transformers and against bare matmuls.

    python benchmarks/blocks.py --json out.json            # both instruction sets; about 40 minutes
    python benchmarks/blocks.py --cases a c --only train   # a part of it
    python benchmarks/blocks.py --isa native                # all that the processor has
    python benchmarks/blocks.py --isa avx2                  # as on a CPU without bf16 instructions
    python benchmarks/blocks.py --isa native --only busy    # with one core occupied by another process
    python benchmarks/blocks.py --isa native --only varied  # with other numbers of tokens in every step
    python benchmarks/blocks.py --isa native --only many    # many experts: one after another, and all at once

Each instruction set is measured in a process of its own, and ratios are taken within one. Every ratio divides medians
measured in one run, contestants taking turns in a random order, so that a change of the machine's clock or load hits
all of them. ``gemm`` is the time of the block's nine matrix products alone by ``torch.mm``, in fp32 and in bf16, into
buffers allocated before. Training in bf16 is measured at several numbers of tokens where the processor has bf16
instructions, elsewhere (where a stock step takes up to minutes) at one. Stock is timed in both its implementations that
work on a CPU, ``eager`` and ``grouped_mm``; ratios use the faster one. A contestant slower than ``--slow`` seconds runs
only twice.

Of many experts (cases e, f and g) one patched block is timed three times: as the package chooses, with one expert after
another (``HF_NEURON_MOE_GROUPED=0``) and with all at once (``1``). Contestants of one dtype share one set of weights.

What a step of several blocks costs, whose gradients are alive together, is in ``layers.py``.

Legend: H hidden, I intermediate, E experts, K experts per token, T tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.setting import Shape, machine, restart_with_isa
from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends.torch.compute import GROUPED, bf16_matmul_is_fast, environment_option
from hf_neuron_moe.training import measure_saved_bytes


class Case(Shape):
    """One block shape; a dense MLP has no experts."""

    @property
    def title(self) -> str:
        return f"{self.label} T={self.T}"

    @property
    def label(self) -> str:
        """Without the tokens, which are those of training."""
        return f"({self.name}) {self.sizes}"


CASES = {
    case.name: case
    for case in (
        Case("a", 512, 1792, 2048, 8, 2),
        Case("b", 1024, 3584, 1024, 8, 2),
        Case("c", 512, 256, 2048, 64, 8),
        Case("d", 1024, 4096, 2048),
        Case("e", 2048, 768, 512, 128, 8),
        Case("f", 128, 128, 1024, 128, 8),
        Case("g", 256, 128, 1024, 64, 8),
    )
}
MANY = ("e", "f", "g")  # the block of Qwen3-30B-A3B, and small experts
WAYS = {"chosen": "auto", "one by one": "0", "at once": "1"}
"""Values of the environment variable ``HF_NEURON_MOE_GROUPED``."""
DECODE_TOKENS = (1, 8, 32)
TRAIN_TOKENS = (64, 256, 512, 1024, 2048)
BUSY_TOKENS = 512
VARIED_STEPS = 60  # as many as it takes until libraries have met most shapes that they keep code for
PARTS = ("train", "decode", "generate", "busy", "varied", "many")
NEW_TOKENS = 24
GENERATION_LAYERS = 8
PROGRESS_S = 3.0
LONG_STEP_S = 2.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "mxfp8": torch.bfloat16}


class Block(nn.Module):
    """A model of one block, or of a stack of them, so that it can be patched by name like a real one."""

    def __init__(self, case: Case, dtype: torch.dtype, implementation: str, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.mlp = self._made(implementation)
        self.others = nn.ModuleList(self._made(implementation) for _ in range(layers - 1))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.to(dtype)

    def _made(self, implementation: str) -> nn.Module:
        case = self.case
        if not case.E:
            return LlamaMLP(LlamaConfig(hidden_size=case.H, intermediate_size=case.I))
        config = MixtralConfig(
            hidden_size=case.H,
            intermediate_size=case.I,
            num_local_experts=case.E,
            num_experts_per_tok=case.K,
            experts_implementation=implementation,
        )
        return MixtralExperts(config)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routing = (index, weights) if self.case.E else ()
        out: Tensor = self.mlp(x, *routing)
        for mlp in self.others:
            x = x + out
            out = mlp(x, *routing)
        return out


def make_inputs(case: Case, tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a routing drawn uniformly without replacement, and normalized fp32 weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, case.H, generator=generator).to(dtype)
    if not case.E:
        return x, torch.empty(0), torch.empty(0)
    index = torch.rand(tokens, case.E, generator=generator).topk(case.K, dim=-1).indices
    weights = torch.rand(tokens, case.K, generator=generator).softmax(-1)
    return x, index, weights


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Leaves of a training step: hidden states, routing and its weights, and the gradient of the result."""


def as_batch(inputs: tuple[Tensor, Tensor, Tensor]) -> Batch:
    """Return copies that get gradients."""
    x, index, weights = inputs
    x = x.clone().requires_grad_()
    if weights.numel():
        weights = weights.clone().requires_grad_()
    return x, index, weights, torch.randn_like(x)


def train_step(block: Block, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    """Forward and backward with gradients for inputs, routing weights and parameters."""
    return train_steps(block, itertools.repeat(as_batch(inputs)))


def train_steps(block: Block, batches: Iterable[Batch]) -> Callable[[], None]:
    """The same, of the next batch in every call."""
    turns = iter(batches)

    def step() -> None:
        x, index, weights, dout = next(turns)
        for leaf in (x, weights, *block.parameters()):
            leaf.grad = None
        block(x, index, weights).backward(dout)

    return step


def decode_step(block: Block, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    """Forward as ``generate`` runs it, in evaluation mode."""
    block.eval()

    def step() -> None:
        with torch.inference_mode():
            block(*inputs)

    return step


def gemm_limit(case: Case, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """The block's nine products per expert, operands and results allocated beforehand."""
    experts = case.E or 1
    index = make_inputs(case, case.T, torch.float32)[1]
    rows = torch.bincount(index.reshape(-1), minlength=experts).tolist() if case.E else [case.T]
    most = max(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    gate_up, down = draw(experts, 2 * case.I, case.H), draw(experts, case.H, case.I)
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    x, inner, both = draw(most, case.H), draw(most, case.I), draw(most, 2 * case.I)
    out_H, out_I, out_2I = torch.empty_like(x), torch.empty_like(inner), torch.empty_like(both)

    def step() -> None:
        for expert, count in enumerate(rows):
            torch.mm(x[:count], gate_up[expert].t(), out=out_2I[:count])
            torch.mm(inner[:count], down[expert].t(), out=out_H[:count])
            torch.mm(x[:count], down[expert], out=out_I[:count])
            torch.mm(both[:count], gate_up[expert], out=out_H[:count])
            torch.mm(both[:count].t(), x[:count], out=d_gate_up[expert])
            torch.mm(x[:count].t(), inner[:count], out=d_down[expert])

    return step


class Progress:
    """Says what is being timed, before it starts; a step in well under a second gets a line every few seconds only."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said = -math.inf

    def __call__(self, text: str, expected_s: float) -> None:
        """Print `text` if the step is long or unknown, or if the last line is old."""
        now = time.perf_counter()
        if expected_s > LONG_STEP_S or now - self.said > PROGRESS_S:
            self.console.print(f"   {text}")
            self.said = now


def duration(seconds: float) -> str:
    """In words, in milliseconds below a second."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def called(contestant: str) -> str:
    """A contestant's name in words; the patched blocks have that of their precision in the report."""
    return f"patched {contestant}" if contestant in DTYPES else contestant.replace("_", " ", 1)


def time_in_turns(
    contestants: dict[str, Callable[[], None]],
    repeats: int,
    slow: float,
    label: str,
    progress: Progress,
    guess_s: float = math.inf,
) -> dict[str, dict[str, float]]:
    """Run all contestants in turns; return median, quartiles and count of each, in seconds.

    The order within a turn is drawn anew: who ran before decides what is in the caches, and of two copies of one
    implementation the one behind its twin is up to 5 % faster. `guess_s` is how long the first runs may take: what may
    be long is announced.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, draw = list(contestants), random.Random(0)
    for turn in range(repeats + 1):
        draw.shuffle(order)
        for name in order:
            step = contestants[name]
            if turn > 1 and min(times[name]) > slow:
                continue
            past_s = min(times[name], default=guess_s)
            done = f"run {turn} of {repeats}, about {duration(past_s)}" if turn else "warm-up"
            progress(f"{label}: {called(name)}, {done}", past_s)
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    result = {}
    for name, values in times.items():
        kept = values[1:]
        low, _, high = statistics.quantiles(kept, n=4) if len(kept) > 1 else (kept[0],) * 3
        result[name] = {"median_s": statistics.median(kept), "q1_s": low, "q3_s": high, "runs": float(len(kept))}
    return result


def stock_implementations(case: Case) -> list[str]:
    return ["grouped_mm", "eager"] if case.E else ["eager"]


def patched_block(case: Case, precision: str, layers: int = 1) -> Block:
    block = Block(case, DTYPES[precision], "eager", layers)
    patch_model(block, NeuronMoEConfig(precision=precision))
    return block


def bench_training(
    case: Case, repeats: int, slow: float, progress: Progress, dtypes: Sequence[str] = ("bf16", "fp32")
) -> dict[str, Any]:
    """Forward plus backward of one shape; mxfp8 is measured beside bf16."""
    result: dict[str, Any] = {"case": asdict(case)}
    for dtype in dtypes:
        inputs = make_inputs(case, case.T, DTYPES[dtype])
        contestants = {"gemm": gemm_limit(case)}
        native = dtype == "bf16" and bf16_matmul_is_fast(torch.device("cpu"))
        if native:
            contestants["gemm_bf16"] = gemm_limit(case, torch.bfloat16)
        for precision in ("bf16", "mxfp8") if dtype == "bf16" else ("fp32",):
            contestants[precision] = train_step(patched_block(case, precision), inputs)
        stock = stock_implementations(case)
        for name in stock:
            contestants[f"stock_{name}"] = train_step(Block(case, DTYPES[dtype], name), inputs)
        times = time_in_turns(contestants, repeats, slow, f"training, {dtype}", progress)
        progress(f"training, {dtype}: counting saved bytes", 0.0)
        best = min((f"stock_{name}" for name in stock), key=lambda name: times[name]["median_s"])
        medians = {name: entry["median_s"] for name, entry in times.items()}
        ours, theirs = saved_bytes(case, dtype, stock)
        result[dtype] = {
            "times": times,
            "best_stock": best,
            "speedup_over_best_stock": medians[best] / medians[dtype],
            "time_over_gemm": medians[dtype] / medians["gemm"],
            "saved_bytes_per_token": {"patched": ours, "stock": theirs},
            "saved_over_stock": ours / theirs,
        }
        if dtype == "bf16":
            result[dtype]["mxfp8_over_bf16"] = medians["mxfp8"] / medians["bf16"]
        if native:
            result[dtype]["time_over_bf16_gemm"] = medians[dtype] / medians["gemm_bf16"]
    return result


def saved_bytes(case: Case, precision: str, stock: list[str]) -> tuple[float, float]:
    """Bytes per token kept for backward (the block's input included): patched, and the leanest stock one."""

    def measure(block: Block) -> float:
        x, index, weights = make_inputs(case, 256, DTYPES[precision])
        with measure_saved_bytes({"mlp": block.mlp}) as saved:
            block(x.requires_grad_(), index, weights.requires_grad_() if weights.numel() else weights)
        return saved.bytes_per_token

    theirs = min(measure(Block(case, DTYPES[precision], name)) for name in stock)
    return measure(patched_block(case, precision)), theirs


def share_weights(block: Block, other: Block) -> None:
    """Let `block` read the weights of `other`; in which pages of memory a copy lies is worth some percent."""
    own, others = dict(block.named_parameters()), dict(other.named_parameters())
    assert own.keys() == others.keys()
    for name, parameter in own.items():
        assert torch.equal(parameter, others[name])
        parameter.data = others[name].data


def bench_decode(case: Case, repeats: int, progress: Progress) -> dict[str, Any]:
    """Forward without gradients at a few tokens."""
    result: dict[str, Any] = {}
    for precision in ("bf16", "fp32"):
        dtype = DTYPES[precision]
        for tokens in DECODE_TOKENS:
            inputs = make_inputs(case, tokens, dtype)
            patched = patched_block(case, precision)
            contestants = {precision: decode_step(patched, inputs)}
            for name in stock_implementations(case):
                stock = Block(case, dtype, name)
                share_weights(stock, patched)
                contestants[f"stock_{name}"] = decode_step(stock, inputs)
            if precision == "bf16":
                quantized = patched_block(case, "mxfp8")
                share_weights(quantized, patched)
                contestants["mxfp8"] = decode_step(quantized, inputs)
            times = time_in_turns(
                contestants, repeats * 20, 1.0, f"decode, {precision}, {tokens} tokens", progress, 0.0
            )
            best = min((n for n in times if n.startswith("stock")), key=lambda n: times[n]["median_s"])
            result[f"{precision}_T{tokens}"] = {
                "times": times,
                "best_stock": best,
                "time_over_best_stock": times[precision]["median_s"] / times[best]["median_s"],
            }
            if precision == "bf16":
                entry = result[f"{precision}_T{tokens}"]
                entry["mxfp8_over_bf16"] = times["mxfp8"]["median_s"] / times["bf16"]["median_s"]
    return result


def bench_generation(repeats: int, progress: Progress) -> dict[str, Any]:
    """Greedy generation by a whole model with blocks of TinyLlama-1.1B's shape, whose weights no cache holds.

    The warm-up makes the copies that mxfp8 keeps, so times are those after the first token.
    """
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=GENERATION_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    torch.manual_seed(0)
    stock = LlamaForCausalLM(config).bfloat16().eval()
    models = {"stock_eager": stock}
    for precision in ("bf16", "mxfp8"):
        models[precision] = LlamaForCausalLM(config).bfloat16().eval()
        models[precision].load_state_dict(stock.state_dict(), assign=True)
        patch_model(models[precision], NeuronMoEConfig(precision=precision))
    prompt = torch.arange(8)[None] + 5

    def generation(model: LlamaForCausalLM) -> Callable[[], None]:
        def step() -> None:
            model.generate(prompt, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)

        return step

    contestants = {name: generation(model) for name, model in models.items()}
    times = time_in_turns(contestants, repeats, 60.0, f"generation of {NEW_TOKENS} tokens", progress)
    bf16 = times["bf16"]["median_s"]
    return {
        "times": times,
        "bf16_over_stock": bf16 / times["stock_eager"]["median_s"],
        "mxfp8_over_bf16": times["mxfp8"]["median_s"] / bf16,
    }


def bench_busy(case: Case, repeats: int, progress: Progress) -> dict[str, Any]:
    """A training step in bf16 with all cores free, and with one of them occupied by another process."""
    inputs = make_inputs(case, case.T, torch.bfloat16)
    contestants = {"bf16": train_step(patched_block(case, "bf16"), inputs)}
    for name in stock_implementations(case):
        contestants[f"stock_{name}"] = train_step(Block(case, torch.bfloat16, name), inputs)
    times = {"free": time_in_turns(contestants, repeats, 30.0, "all cores free", progress)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            times["busy"] = time_in_turns(contestants, repeats, 30.0, "one core occupied", progress)
        finally:
            neighbour.kill()
    loss = {name: times["busy"][name]["median_s"] / times["free"][name]["median_s"] - 1 for name in contestants}
    best = min((name for name in loss if name != "bf16"), key=lambda name: times["free"][name]["median_s"])
    return {"case": asdict(case), "times": times, "loss": loss, "best_stock": best}


def bench_varied(case: Case, steps: int, slow: float, progress: Progress) -> dict[str, Any]:
    """A training step in bf16 on as many tokens in every step, and on other numbers of them, half of T to T.

    That is what texts of different lengths make, and routing makes it in every step. Libraries keep code by shape.
    """
    draw = random.Random(0)
    counts = [draw.randint(case.T // 2, case.T) for _ in range(steps + 1)]
    varied = [as_batch(make_inputs(case, count, torch.bfloat16, seed)) for seed, count in enumerate(counts)]
    same = itertools.repeat(as_batch(make_inputs(case, 3 * case.T // 4, torch.bfloat16)))
    blocks = {precision: patched_block(case, precision) for precision in ("bf16", "mxfp8")}
    blocks |= {f"stock_{name}": Block(case, torch.bfloat16, name) for name in stock_implementations(case)}

    times = {}
    for kind, batches in (("same", same), ("varied", varied)):
        contestants = {name: train_steps(block, batches) for name, block in blocks.items()}
        times[kind] = time_in_turns(contestants, steps, slow, f"{kind} tokens", progress)
    medians = {kind: {name: entry["median_s"] for name, entry in part.items()} for kind, part in times.items()}
    best = {kind: min(set(part) - {"bf16", "mxfp8"}, key=part.__getitem__) for kind, part in medians.items()}
    speedup = {
        kind: {name: part[best[kind]] / part[name] for name in ("bf16", "mxfp8")} for kind, part in medians.items()
    }
    return {"case": asdict(case), "times": times, "best_stock": best, "speedup_over_best_stock": speedup}


def computed(step: Callable[[], None], way: str) -> Callable[[], None]:
    """Let `step` compute experts in that way; the variable is otherwise read once in a process."""

    def chosen() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(GROUPED, WAYS[way])
            environment_option.cache_clear()
            step()
        environment_option.cache_clear()

    return chosen


def bench_many(
    case: Case, repeats: int, slow: float, progress: Progress, dtypes: Sequence[str] = ("bf16", "fp32")
) -> dict[str, Any]:
    """A training step of many experts in every way of computing them; mxfp8 is measured beside bf16."""
    result: dict[str, Any] = {"case": asdict(case)}
    for dtype in dtypes:
        inputs = make_inputs(case, case.T, DTYPES[dtype])
        stock = {name: Block(case, DTYPES[dtype], name) for name in stock_implementations(case)}
        first, *others = stock.values()
        contestants = {f"stock_{name}": train_step(block, inputs) for name, block in stock.items()}
        precisions = ("bf16", "mxfp8") if dtype == "bf16" else ("fp32",)
        for precision in precisions:
            patched = patched_block(case, precision)
            others.append(patched)
            for way in WAYS:
                contestants[f"{precision} {way}"] = computed(train_step(patched, inputs), way)
        for block in others:
            share_weights(block, first)
        times = time_in_turns(contestants, repeats, slow, f"many experts, {dtype}", progress)
        medians = {name: entry["median_s"] for name, entry in times.items()}
        best = min((f"stock_{name}" for name in stock), key=lambda name: medians[name])
        for precision in precisions:
            chosen, one_by_one = (medians[f"{precision} {way}"] for way in ("chosen", "one by one"))
            at_once = medians[f"{precision} at once"]
            result[precision] = {
                "times": {name: entry for name, entry in times.items() if name.startswith(("stock_", f"{precision} "))},
                "best_stock": best,
                "chosen_over_one_by_one": chosen / one_by_one,
                "chosen_over_at_once": chosen / at_once,
                "chosen_over_stock": chosen / medians[best],
            }
    return result


def many_table(entries: dict[str, Any]) -> Table:
    table = Table(
        "shape", "precision", *(f"{way} ms" for way in WAYS), "best stock ms", "chosen/one by one", "chosen/at once",
        "chosen/stock", title="many experts, forward and backward",
    )  # fmt: skip
    for entry in entries.values():
        for precision in (name for name in DTYPES if name in entry):
            part = entry[precision]
            best, times = part["best_stock"], part["times"]
            cells = [f"{times[name]['median_s'] * 1e3:.0f}" for name in (*(f"{precision} {way}" for way in WAYS), best)]
            cells[-1] += f" ({best[6:]})"
            ratios = [f"{value:.2f}" for name, value in part.items() if name.startswith("chosen_over")]
            table.add_row(Case(**entry["case"]).title, precision, *cells, *ratios)
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables, for the parts that were run."""
    console.print(report["machine"])
    if report["train"]:
        console.print(training_table(report["train"]))
    if report["decode"]:
        console.print(decode_table(report["decode"]))
    if report.get("generate"):
        console.print(generation_table(report["generate"]))
    if report.get("busy"):
        console.print(busy_table(report["busy"]))
    if report.get("varied"):
        console.print(varied_table(report["varied"]))
    if report.get("many"):
        console.print(many_table(report["many"]))


def generation_table(entry: dict[str, Any]) -> Table:
    names = ("stock_eager", "bf16", "mxfp8")
    table = Table(
        *(f"{called(name)} ms per token" for name in names),
        "bf16/stock",
        "mxfp8/bf16",
        title=f"generation by a whole model, {GENERATION_LAYERS} layers of TinyLlama-1.1B's shape",
    )
    each = [entry["times"][name]["median_s"] / NEW_TOKENS * 1e3 for name in names]
    ratios = (entry["bf16_over_stock"], entry["mxfp8_over_bf16"])
    table.add_row(*(f"{value:.1f}" for value in each), *(f"{value:.2f}" for value in ratios))
    return table


def busy_table(entries: dict[str, Any]) -> Table:
    table = Table("shape", "patched free ms", "busy ms", "loss", "best stock free ms", "busy ms", "loss")
    for entry in entries.values():
        row = [Case(**entry["case"]).title]
        for name in ("bf16", entry["best_stock"]):
            free, busy = (entry["times"][kind][name]["median_s"] * 1e3 for kind in ("free", "busy"))
            row += [f"{free:.0f}", f"{busy:.0f}", f"{entry['loss'][name]:.0%}"]
        table.add_row(*row)
    return table


def varied_table(entries: dict[str, Any]) -> Table:
    table = Table(
        "shape", "tokens", "bf16 ms", "mxfp8 ms", "best stock ms", "stock/bf16", "stock/mxfp8",
        title="a training step, as many tokens in every step and other numbers of them",
    )  # fmt: skip
    for entry in entries.values():
        for kind, times in entry["times"].items():
            names = ("bf16", "mxfp8", entry["best_stock"][kind])
            cells = [f"{times[name]['median_s'] * 1e3:.0f}" for name in names]
            ratios = [f"{ratio:.2f}" for ratio in entry["speedup_over_best_stock"][kind].values()]
            table.add_row(Case(**entry["case"]).label, kind, *cells, *ratios)
    return table


def show_side_by_side(reports: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the ratios of training in bf16 of both instruction sets, a shape to a line."""
    columns = [f"{isa}: {what}" for isa in reports for what in ("stock/ours", "ours/gemm", "mxfp8/bf16")]
    table = Table(
        "training in bf16", *columns, title="side by side; gemm in bf16 where the processor has it, else fp32"
    )
    for name in dict.fromkeys(key for report in reports.values() for key in report["train"]):
        cells = []
        for report in reports.values():
            row = report["train"].get(name, {}).get("bf16")
            gemm = None if row is None else row.get("time_over_bf16_gemm", row["time_over_gemm"])
            cells += ["", "", ""] if row is None else [
                f"{value:.2f}" for value in (row["speedup_over_best_stock"], gemm, row["mxfp8_over_bf16"])
            ]  # fmt: skip
        table.add_row(name, *cells)
    console.print(table)


def training_table(entries: dict[str, Any]) -> Table:
    table = Table(
        "shape",
        "dtype",
        "ours ms",
        "stock ms",
        "stock/ours",
        "ours/gemm",
        "ours/bf16 gemm",
        "saved KiB/token",
        "of stock",
        "mxfp8/bf16",
    )
    for entry in entries.values():
        for dtype in [key for key in entry if key != "case"]:
            row, times = entry[dtype], entry[dtype]["times"]
            table.add_row(
                Case(**entry["case"]).title,
                dtype,
                f"{times[dtype]['median_s'] * 1e3:.0f}",
                f"{times[row['best_stock']]['median_s'] * 1e3:.0f} ({row['best_stock'][6:]})",
                f"{row['speedup_over_best_stock']:.2f}",
                f"{row['time_over_gemm']:.2f}",
                f"{row['time_over_bf16_gemm']:.2f}" if "time_over_bf16_gemm" in row else "",
                f"{row['saved_bytes_per_token']['patched'] / 1024:.1f}",
                f"{row['saved_over_stock']:.3f}",
                f"{row['mxfp8_over_bf16']:.2f}" if "mxfp8_over_bf16" in row else "",
            )
    return table


def decode_table(entries: dict[str, Any]) -> Table:
    keys = [f"{precision}_T{tokens}" for precision in ("bf16", "fp32") for tokens in DECODE_TOKENS]
    mxfp8 = [f"mxfp8/bf16 T={tokens}" for tokens in DECODE_TOKENS]
    columns = [key.replace("_T", " T=") for key in keys]
    table = Table("shape", *columns, *mxfp8, title="decode: time over the best stock's (below 1 is faster)")
    for name, entry in entries.items():
        ratios = [entry.get(key, {}).get("time_over_best_stock") for key in keys]
        ratios += [entry.get(f"bf16_T{tokens}", {}).get("mxfp8_over_bf16") for tokens in DECODE_TOKENS]
        table.add_row(CASES[name].label, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    return table


def run_both(arguments: argparse.Namespace, console: Console) -> None:
    """Measure each instruction set in a process of its own."""
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for isa in ("native", "avx2"):
            console.rule(isa)
            file = Path(folder) / f"{isa}.json"
            words = [*_words(arguments), "--isa", isa, "--json", str(file)]
            subprocess.run([sys.executable, str(Path(__file__).resolve()), *words], check=True)
            reports[isa] = json.loads(file.read_text())
    if any(report["train"] for report in reports.values()):
        show_side_by_side(reports, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")
        console.print(f"report: {arguments.json}")


def _words(arguments: argparse.Namespace) -> list[str]:
    """The options that both runs share, as they were given."""
    words = []
    for key in ("cases", "only", "dtypes", "tokens", "repeats", "slow"):
        value = getattr(arguments, key)
        if value is not None:
            words += [f"--{key}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--only", choices=PARTS, help="run one part of the benchmark")
    parser.add_argument("--tokens", nargs="+", type=int, help="of training in bf16")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bf16", "fp32"), default=("bf16", "fp32"), help="of training and many experts"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slow", type=float, default=3.0, help="seconds above which a contestant runs only twice")
    parser.add_argument("--isa", choices=("native", "avx2", "both"), default="both", help="instruction set")
    arguments = parser.parse_args()
    console = Console(width=160)
    if arguments.isa == "both":
        run_both(arguments, console)
        return
    if arguments.isa == "avx2":
        restart_with_isa(arguments.isa)
    progress = Progress(console)
    report: dict[str, Any] = {"machine": machine(), "train": {}, "decode": {}, "busy": {}, "varied": {}, "many": {}}
    native = bf16_matmul_is_fast(torch.device("cpu"))
    if arguments.only in (None, "generate"):
        report["generate"] = bench_generation(arguments.repeats, progress)
    for name in arguments.cases if arguments.only != "generate" else ():
        case = CASES[name]
        if arguments.only not in ((None, "many") if name in MANY else (None, *PARTS[:-1])):
            continue
        console.print(f"{case.label} ...")
        if name in MANY:
            report["many"][name] = bench_many(case, arguments.repeats, arguments.slow, progress, arguments.dtypes)
        if arguments.only in (None, "train") and name not in MANY:
            for tokens in arguments.tokens or (TRAIN_TOKENS if native else (case.T,)):
                dtypes = [dtype for dtype in arguments.dtypes if dtype == "bf16" or tokens == case.T]
                sized = replace(case, T=tokens)
                if dtypes:
                    entry = bench_training(sized, arguments.repeats, arguments.slow, progress, dtypes)
                    report["train"][sized.title] = entry
        if arguments.only in (None, "decode") and name not in MANY:
            report["decode"][name] = bench_decode(case, arguments.repeats, progress)
        if arguments.only == "busy":
            report["busy"][name] = bench_busy(replace(case, T=BUSY_TOKENS), arguments.repeats, progress)
        if arguments.only == "varied":
            report["varied"][name] = bench_varied(case, VARIED_STEPS, arguments.slow, progress)
        if arguments.json:  # after every shape: the slow stock contestants make this a long run
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"report: {arguments.json}")


if __name__ == "__main__":
    main()
