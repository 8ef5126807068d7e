"""Cells of the layout matrix: models, layouts over processes, precisions, and what is compared."""

from __future__ import annotations

from itertools import product
from typing import Any

Cell = dict[str, Any]

TWO: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "ep2-tp2": {"tp": 2, "ep": 2},
    "ep2": {"fsdp": 2, "ep": 2},
    "fsdp2": {"fsdp": 2},
    "replicate2": {"dp_replicate": 2},
}
FOUR: dict[str, dict[str, int]] = {
    "ep4": {"fsdp": 4, "ep": 4},
    "ep2-fsdp2": {"fsdp": 4, "ep": 2},
    "tp2-fsdp2": {"fsdp": 2, "tp": 2},
    "ep2-tp2-fsdp2": {"fsdp": 2, "tp": 2, "ep": 2},
    "ep4-tp2-fsdp2": {"fsdp": 2, "tp": 2, "ep": 4},
    "fsdp2-replicate2": {"fsdp": 2, "dp_replicate": 2},
}
LAYOUTS = TWO | FOUR
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
DENSE = ("llama", "phi3", "gemma3")
NO_EP_PLAN = (*DENSE, "llama4", "longcat_flash")
"""Models without experts, or whose experts transformers has no expert-parallel plan for."""


def cell(model: str, layout: str, precision: str | None = "fp32", **more: Any) -> Cell:
    """Return a cell; its name says what it is."""
    words = [more.get("kind", "train"), model, layout, precision or "stock"]
    words += [f"{key}={value}" for key, value in more.items() if key not in ("kind", "plan")]
    sizes = LAYOUTS.get(layout, {"pp": 2})
    return {"name": " ".join(words), "model": model, "layout": sizes, "precision": precision, **more}


def _possible(model: str, layout: str) -> bool:
    sizes = LAYOUTS[layout]
    # gemma4: transformers 5.23 cannot give its experts an FSDP group of their own, patched or not.
    # phi3: it loads a fused weight wrongly that both cut along the same axis, patched or not.
    if model == "phi3" and {"tp", "fsdp"} <= sizes.keys():
        return False
    return not ("ep" in sizes and (model in NO_EP_PLAN or (model == "gemma4" and "fsdp" in sizes)))


def trainings(models: tuple[str, ...], layouts: tuple[str, ...], precisions: tuple[str, ...]) -> list[Cell]:
    """Return the cells of a cross product that transformers can load."""
    return [
        cell(model, layout, precision, **({"plan": PACKED} if model == "phi3" and "tp" in LAYOUTS[layout] else {}))
        for model, layout, precision in product(models, layouts, precisions)
        if _possible(model, layout)
    ]


CORE = [cell("mixtral", "tp2", "fp32"), cell("mixtral", "ep2", "mxfp8", kind="block")]
"""Two processes, in the fast part."""

BLOCKS = [
    *(
        cell("mixtral", layout, p, kind="block")
        for layout in ("tp2", "ep2-tp2", "ep2")
        for p in ("fp32", "bf16", "mxfp8")
    ),
    cell("mixtral", "ep2-tp2", "mxfp8", kind="block", exchange="all_to_all"),
    cell("mixtral_512", "tp2", "mxfp8", kind="block"),
    cell("gpt_oss", "ep2", "mxfp8", kind="block"),
]
ALWAYS = [
    *trainings(("mixtral",), tuple(TWO), ("mxfp8",)),
    *trainings(("mixtral",), ("ep2",), ("fp32",)),
    cell("mixtral", "pp2", "mxfp8", kind="inference"),
    *trainings(("mixtral",), ("ep2-tp2",), ("bf16", "fp32")),
    *trainings(("mixtral",), ("fsdp2",), ("fp32",)),
    *trainings(("llama",), ("tp2",), ("fp32",)),
    *trainings(("llama",), ("tp2", "fsdp2"), ("bf16", "mxfp8")),
    *trainings(("llama",), ("replicate2",), ("fp32",)),
    *trainings(("qwen2_moe", "gpt_oss"), ("tp2", "ep2"), ("fp32",)),
    *trainings(("longcat_flash", "gemma4", "llama4", "phi3"), ("tp2",), ("fp32",)),
    *(cell("mixtral", "ep2", "fp32", **{key: True}) for key in ("idle", "checkpointing")),
    cell("mixtral", "ep2", "mxfp8", checkpointing=True),
    cell("llama", "pp2", "bf16", kind="inference"),
    *BLOCKS,
]
"""Two processes, in every whole run."""

MEASURED = [
    cell("mixtral", layout, "fp32", kind="measured", **more)
    for layout, more in (("ep2", {}), ("ep2-tp2", {}), ("tp2", {}), ("ep2", {"idle": True}))
]
BUDGET = {"activations": "96KiB/32tokens"}
BUDGETS = [
    cell(model, layout, precision, kind="budget", options=BUDGET)
    for model, layout, precision in (("llama", "tp2", "mxfp8"), ("mixtral", "tp2", "mxfp8"), ("mixtral", "ep2", "bf16"))
]
COMPILED = cell("llama", "tp2", "mxfp8", kind="compiled")
REFUSED = {
    "its intermediate size 129 is no multiple of tp_size=2": cell("odd", "tp2", "fp32", kind="refused"),
    "option precision must be the same on all ranks": cell(
        "mixtral", "ep2", "bf16", kind="refused", on_rank_1={"precision": "mxfp8"}
    ),
    "use weights='stock'": cell("mixtral", "fsdp2", "bf16", kind="refused", options={"weights": "kernel"}),
    "rank 1 must be free of errors": cell("llama", "tp2", "bf16", kind="refused", on_rank_1={"backend": "neuron"}),
    "rank 1 must be given a model that was sharded": cell("llama", "tp2", "bf16", kind="refused", apart=True),
    "activations must be a budget of at least 512 bytes per token": cell(
        "llama", "tp2", "mxfp8", kind="refused", options={"activations": "1B/token"}
    ),
    "copy.deepcopy: model must be whole": cell("mixtral", "tp2", "bf16", kind="refused", copied=True),
    "copy.deepcopy: model must be whole, to be copied": cell("mixtral", "ep2", "bf16", kind="refused", copied=True),
}
"""Two processes: by what is said on the first one, what is refused on both."""

CUT_TWICE = cell("phi3", "tp2-fsdp2", "fp32", kind="refused", plan=PACKED)
ALWAYS_FOUR = [
    *trainings(("mixtral",), ("ep4", "ep4-tp2-fsdp2", "tp2-fsdp2"), ("fp32",)),
    cell("mixtral", "ep4", "fp32", idle=True, checkpointing=True),
    cell("mixtral", "ep4", "mxfp8", kind="block"),
    cell("mixtral", "ep4-tp2-fsdp2", "mxfp8", kind="block", tokens=2),  # a process without a token of its own
]
MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "gemma4", "llama4", "longcat_flash", "nemotron_h",
          "deepseek_v4", *DENSE)  # fmt: skip
PRECISIONS = ("fp32", "bf16", "mxfp8")


def rest(layouts: dict[str, dict[str, int]], done: list[Cell]) -> list[Cell]:
    """Return the cells that only ``--all-layouts`` runs."""
    names = {each["name"] for each in done}
    return [each for each in trainings(MODELS, tuple(layouts), PRECISIONS) if each["name"] not in names]


def control(each: Cell) -> Cell:
    """Return the same cell with the stock model: how far transformers' own computation is from one process."""
    options = {key: each[key] for key in ("plan", "idle", "checkpointing") if key in each}
    layout = next(name for name, sizes in LAYOUTS.items() if sizes == each["layout"])
    return cell(each["model"], layout, None, **options)
