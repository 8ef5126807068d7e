"""Does the explorer predict what it says? Predicted against measured changes of the loss, and its plans on other text.

    python benchmarks/explore.py                                   # all four models; an hour or two on two cores
    python benchmarks/explore.py --only planted --tokens 2048      # a part of it

smollm2 is SmolLM2-135M-Instruct, and mixtral is upcycled from it (4 experts per layer). The planted ones are smollm2
with a channel times 2**12, compensated in its weights. In planted it is channel 17 of the last MLP's input, which is 64
times the median channel on most tokens. In planted-down it is the largest input channel of layer 2's down projection,
large on few tokens. Every block is switched to mxfp8 alone and measured. The plan is compared on held-out speeches with
10 other random choices of as many bf16 blocks, and with evenly spaced ones. Writes explore.json. Losses do not depend
on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.setting import machine, restart_with_isa
from hf_neuron_moe.explore.inputs import token_rows
from hf_neuron_moe.explore.measure import loss_sum
from hf_neuron_moe.explore.measured_changes import at_precisions, losses_of, spread_over
from hf_neuron_moe.explore.run import Options, explore, load_model

ROOT = Path(__file__).resolve().parents[1]
TEXT, HELD_OUT = ROOT / "data" / "sotu" / "eval.jsonl", ROOT / "data" / "sotu" / "train.jsonl"
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
PLANTED = {"planted": (29, "up_proj", 17), "planted-down": (2, "down_proj", 90)}
"""Layer, projection, and the input channel of it that is scaled."""

PLANTED_POWER, DRAWS = 12, 10
SUBJECTS = ("smollm2", "mixtral", *PLANTED)


def folder_of(subject: str, layers: int) -> Path:
    """Return the subject's checkpoint, made where it is not there; of mixtral with so many layers."""
    scripts = ROOT / "scripts"
    if not SMOLLM2.is_dir():
        subprocess.run([sys.executable, scripts / "get_smollm2.py"], check=True)
    name = f"mixtral-{layers}" if subject == "mixtral" else subject
    folder = SMOLLM2 if subject == "smollm2" else ROOT / ".cache" / f"explore-{name}"
    if folder.is_dir():
        return folder
    if subject == "mixtral":
        command = [sys.executable, scripts / "upcycle_mixtral.py", "--model", SMOLLM2, "--out", folder]
        subprocess.run([*command, "--layers", str(layers)], check=True)
        return folder
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    place, projection, channel = PLANTED[subject]
    layer, factor = model.model.layers[place], 2.0**PLANTED_POWER
    mlp = layer.mlp
    with torch.no_grad():
        if projection == "down_proj":
            mlp.up_proj.weight[channel] *= factor
            mlp.down_proj.weight[:, channel] /= factor
        else:
            layer.post_attention_layernorm.weight[channel] *= factor
            for weight_IH in (mlp.gate_proj.weight, mlp.up_proj.weight):
                weight_IH[:, channel] /= factor
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(subject: str, layers: int, options: Options, held_out_tokens: int) -> dict[str, Any]:
    """Explore a subject, measure every block, and compare plans on held-out text."""
    folder, start = folder_of(subject, layers), time.monotonic()
    state = ROOT / ".cache" / f"explore-{subject}.partial"
    result = explore(folder, TEXT, options, state, lambda done, total: print(done, "of", total, file=sys.stderr))
    seconds = time.monotonic() - start
    ranked = [row.block for row in result.ranking["mxfp8"]]
    exceptions = [name for name, precision in result.plan.precisions.items() if precision == "bf16"]
    count = len(exceptions) or max(1, len(ranked) // 10)  # a limit that all blocks keep leaves nothing to choose
    chosen = (
        exceptions or sorted(ranked, key=lambda name: -result.measures.blocks[name].scores["mxfp8"].expected)[:count]
    )
    rows_NL = token_rows(HELD_OUT, AutoTokenizer.from_pretrained(folder), held_out_tokens, options.length)
    choices = {"mxfp8": [], "plan": chosen, "evenly spaced": spread_over(sorted(ranked), count)}
    draw, drawn = random.Random(0), list[list[str]]()
    while len(drawn) < DRAWS:
        if set(sample := draw.sample(ranked, count)) != set(chosen):  # else it would be compared with itself
            drawn.append(sample)
    choices |= {f"random {number}": sample for number, sample in enumerate(drawn)}
    found = {
        "subject": subject,
        "tokens": result.measures.tokens,
        "loss": result.loss,
        "rank_correlation": result.correlation,
        "seconds": seconds,
        "first": {"block": ranked[0], "reason": result.ranking["mxfp8"][0].reason.text},
        "blocks": [[row.block, row.predicted, row.measured] for row in result.ranking["mxfp8"]],
        "measured_losses": result.measured,
        "plan": result.plan.recipe,
        "bf16_blocks": count,
        "held_out": held_out(load_model(folder), rows_NL, ranked, choices),
    }
    if subject in PLANTED:
        found |= folded(folder, result, options, PLANTED[subject][0])
    return found


def held_out(model: Any, rows_NL: torch.Tensor, names: list[str], choices: dict[str, list[str]]) -> dict[str, Any]:
    """Return by how many percent each choice of bf16 blocks changes the loss, and its divergence from bf16 in nats.

    The divergence is the change of the loss on text that the model itself would write, without a text's own chance.
    """
    base, sums = 0.0, {name: [0.0, 0.0] for name in choices}
    tokens = rows_NL[:, 1:].numel()
    for row_L in rows_NL.split(1):
        with torch.no_grad():
            expected = model(input_ids=row_L).logits
            base += loss_sum(expected, row_L).item()
            for name, bf16 in choices.items():
                with at_precisions(model, dict.fromkeys(set(names) - set(bf16), "mxfp8")):
                    logits = model(input_ids=row_L).logits
                logs = [each[0, :-1].float().log_softmax(-1) for each in (logits, expected)]
                sums[name][0] += loss_sum(logits, row_L).item()
                sums[name][1] += torch.nn.functional.kl_div(*logs, reduction="sum", log_target=True).item()
    found = {name: [100 * (loss / base - 1), apart / tokens] for name, (loss, apart) in sums.items()}
    return {"tokens": tokens, "loss": base / tokens, "change_percent_and_divergence": found}


def folded(folder: Path, result: Any, options: Options, layer: int) -> dict[str, Any]:
    """Fold the planted channel away and measure again."""
    from hf_neuron_moe.explore.fold import fold

    model = load_model(folder)
    row = next(row for row in result.ranking["mxfp8"] if f".{layer}." in row.block)
    rows_NL = token_rows(TEXT, AutoTokenizer.from_pretrained(folder), options.tokens, options.length)
    with torch.no_grad():
        before = model(input_ids=rows_NL[:1]).logits
        done = fold(model, row.block, row.reason.outliers, rows_NL[0])
        after = model(input_ids=rows_NL[:1]).logits
    losses = {}
    for precision in ("bf16", "mxfp8"):
        with at_precisions(model, dict.fromkeys(result.measures.blocks, precision)):
            each = losses_of(model, rows_NL)
        losses[precision] = sum(each) / len(each)
    same = torch.equal(before, after)
    return {"folded": {"done": [each.text for each in done], "equal_logits": same, "losses": losses}}


def show(found: dict[str, Any]) -> None:
    """Print one subject's figures."""
    held, loss = found["held_out"], found["loss"]
    print(f"\n{found['subject']}: {found['tokens']:,} tokens, loss {loss:.4f}, {found['seconds'] / 60:.1f} min")
    print(f"  rank correlation of {len(found['blocks'])} blocks: {found['rank_correlation']:.3f}")
    print(f"  first: {found['first']['block']}: {found['first']['reason']}")
    change = {name: 100 * (value - loss) / loss for name, value in found["measured_losses"].items()}
    print("  measured on the same text, %: " + ", ".join(f"{name} {value:+.3f}" for name, value in change.items()))
    print(f"  plan: {found['plan']}")
    print(f"  {held['tokens']:,} held-out tokens, {found['bf16_blocks']} blocks in bf16: loss, divergence from bf16")
    for name, (percent, apart) in sorted(held["change_percent_and_divergence"].items(), key=lambda item: item[1][1]):
        print(f"    {name:14} {percent:+.3f} %  {apart:.3e}")
    if "folded" in found:
        print(f"  folded: {found['folded']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30, help="of mixtral: the first and last of smollm2's")
    parser.add_argument("--held-out", type=int, default=8192, help="tokens that plans are compared on")
    parser.add_argument("--json", type=Path, default=Path("explore.json"))
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    arguments = parser.parse_args()
    if arguments.isa:
        restart_with_isa(arguments.isa)
    results = []
    for subject in arguments.only:
        options = Options(tokens=arguments.tokens, length=arguments.length, verify=10**6)
        results.append(run(subject, arguments.layers, options, arguments.held_out))
        show(results[-1])
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
