"""The demo's page: what came out, in one picture of losses, bars of saved bytes, and where the model learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_neuron_moe.demo.comparison import STOCK, Comparison
from hf_neuron_moe.report.page import Section, render_page
from hf_neuron_moe.report.plots import Line, Table, bar_figure, heat_map, line_figure

HEADINGS = ("run", "loss before", "loss after", "loss vs stock", "tokens/s", "saved KiB/token", "share of stock")

_LEGEND = "Losses are in nats on held-out text. Saved: what all patched blocks together save for backward."


def rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return the table of results."""
    stock = found.runs[0]
    return [
        (
            run.name,
            f"{run.curve[0][1]:.3f}",
            f"{run.loss:.3f}",
            "-" if run is stock else f"{100 * (run.loss / stock.loss - 1):+.2f} %",
            f"{run.tokens_per_second:,.0f}",
            f"{run.saved_bytes_per_token / 1024:,.1f}",
            "-" if run is stock else f"{100 * run.saved_bytes_per_token / stock.saved_bytes_per_token:.0f} %",
        )
        for run in found.runs
    ]


def verdict(found: Comparison) -> str:
    """Return the result in three sentences."""
    stock, *patched = found.runs
    gap = max(0.01, *(100 * abs(run.loss / stock.loss - 1) for run in patched))
    least = min(found.saved, key=lambda name: found.saved[name])
    share = found.saved[least] / found.saved["stock, bf16"]
    return (
        f"All three runs learned alike: the loss on text that none was trained on went from {stock.curve[0][1]:.2f} to "
        f"{stock.loss:.2f} nats. The patched runs end within {gap:.2f} % of stock. With the policy that saves "
        f"least ({least}) a block saves {100 * share:.0f} % of the bytes of a stock block in bf16."
    )


def render(found: Comparison) -> str:
    """Return the page as one HTML document."""
    return render_page("hf-neuron-moe demo", _subtitle(found.environment), sections(found))


def sections(found: Comparison) -> list[Section]:
    """Return the page's sections, the result first."""
    setting = found.setting
    trained = setting["steps"] * setting["batch"] * setting["length"]
    how = (
        f"The model is {found.title}. Each run starts with the same weights and sees the same {trained:,} tokens in "
        f"the same order. The held-out text has {setting['held_out_tokens']:,} tokens of the {len(found.years)} "
        f"speeches of {found.years[0]} to {found.years[-1]}, and is the same at every point of the curves."
    )
    lines = [Line(run.name, [(float(step), loss) for step, loss in run.curve]) for run in found.runs]
    alt = f"Held-out loss over the steps of {', '.join(run.name for run in found.runs)}"
    losses = line_figure(lines, title="Loss on held-out text", alt=alt, y="loss (nats)")
    kib = {"KiB/token": [value / 1024 for value in found.saved.values()]}
    alt = "KiB per token that one block saves for backward, stock and by precision and policy"
    saved = bar_figure(list(found.saved), kib, title="Saved for backward, one block", alt=alt)
    return [
        Section("Result", [verdict(found), losses, saved, Table(HEADINGS, rows(found)), _LEGEND, how]),
        _where(found),
        Section("The checkpoint", [_checkpoint(found)]),
        Section("Setting", [Table(("of", "value"), _facts(found))]),
    ]


def _where(found: Comparison) -> Section:
    years = [str(year) for year in found.years]
    falls = [[before - after for before, after in zip(run.before, run.after)] for run in found.runs]
    alt = f"Fall of the held-out loss by speech, in {len(found.runs)} runs"
    title = "Fall of the loss by the year of the speech"
    drawn = heat_map([run.name for run in found.runs], years, falls, title=title, alt=alt, unit="nats", low=0.0)
    words = [
        (str(word.year), f"... {word.context}", word.token, f"{word.before:.2f}", f"{word.after:.2f}")
        for word in found.words
    ]
    caption = "From each held-out speech the token whose loss (in nats) fell most in the mxfp8 run."
    return Section("Where it learned", [drawn, caption, Table(("speech", "after", "expects", "before", "now"), words)])


def _checkpoint(found: Comparison) -> str:
    return (
        "The mxfp8 run was saved with save_pretrained and opened in stock transformers, in a process without this "
        f"package. Its held-out loss there is {found.reloaded_loss:.4f}. The same weights in stock blocks here: "
        f"{found.stock_loss:.4f}; in the mxfp8 blocks that trained them: {found.runs[-1].loss:.4f}."
    )


def _facts(found: Comparison) -> list[tuple[str, str]]:
    facts: dict[str, Any] = {**found.setting, **found.environment}
    flat = {
        name: value
        for key, of in facts.items()
        for name, value in (of.items() if isinstance(of, Mapping) else [(key, of)])
        if value is not None
    }
    note = f"{STOCK} computes in fp32. On a CPU mxfp8 is emulated in software, so tokens/s say nothing about Trainium."
    return [*((name.replace("_", " "), str(value)) for name, value in flat.items()), ("note", note)]


def _subtitle(environment: Mapping[str, Any]) -> str:
    return f"{environment.get('date', '')[:10]}; {environment.get('cpu_count')} cores, no accelerator"
