"""The forms of the files that a report reads. Keys that it does not use may hold anything.

Files of earlier versions lack some keys, and what could not be measured is null.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

Number = float | None
Figures = dict[str, Number]
Step = Annotated[int, Field(ge=0, lt=1 << 53)]


class Entry(TypedDict):
    """A module of the patch report."""

    name: str
    status: str
    saved_bytes_per_token: NotRequired[Number]


class Patch(TypedDict):
    """The patch report."""

    entries: NotRequired[list[Entry]]


class Arguments(TypedDict):
    """What was recorded of the training arguments."""

    learning_rate: NotRequired[Number]
    trainable_parameters: NotRequired[int | None]
    parameters: NotRequired[int | None]
    batch_size_per_process: NotRequired[int | None]
    accumulation_steps: NotRequired[int | None]
    processes: NotRequired[int | None]
    max_steps: NotRequired[int | None]
    resumed_from_step: NotRequired[int | None]
    loss_type: NotRequired[str | None]
    rows: NotRequired[int | None]


class Before(TypedDict):
    """What a run computed before it was continued with another configuration."""

    config: dict[str, Any]
    until: Step


class Run(TypedDict):
    """``run.json``."""

    patch: Patch
    config: dict[str, Any]
    environment: NotRequired[dict[str, Any] | None]
    training: NotRequired[Arguments | None]
    before: NotRequired[list[Before]]


class Load(TypedDict):
    """What one step's tokens were to the experts of a module."""

    load: Annotated[list[float], Field(min_length=1)]
    entropy: Number


class Health(TypedDict):
    """Errors of quantization of a module's tensors."""

    weights: NotRequired[dict[str, Figures | None]]
    input: NotRequired[Figures | None]


class Record(TypedDict):
    """A line of ``metrics.jsonl`` or ``evaluations.jsonl``."""

    step: Step
    loss: NotRequired[Number]
    learning_rate: NotRequired[Number]
    grad_norm: NotRequired[Number]
    reward_margin: NotRequired[Number]
    reward_accuracy: NotRequired[Number]
    tokens_per_second: NotRequired[Number]
    peak_memory_bytes: NotRequired[Number]
    saved_bytes_per_token: NotRequired[Number]
    padding_overhead: NotRequired[Number]
    experts: NotRequired[dict[str, Load] | None]
    health: NotRequired[dict[str, Health] | None]


class Alarm(TypedDict):
    """A figure that left its band."""

    step: Step
    block: str
    product: str
    operand: str | None
    result: str | None
    figure: str
    value: Number
    low: Number
    high: Number
    expert: int
    process: NotRequired[int | None]


class Watched(TypedDict):
    """A line of ``guard.jsonl``: figures by block, product, and operand or result."""

    step: Step
    blocks: dict[str, dict[str, dict[str, Figures]]]
    alarms: NotRequired[list[Alarm]]


class Variant(TypedDict):
    """The summary of a variant of a parity study."""

    last_mean: float
    seed_spread_percent: NotRequired[Number]
    difference_percent: NotRequired[float]
    reference: NotRequired[str | None]
    goal_percent: NotRequired[float]
    met: NotRequired[bool]


class Exact(TypedDict):
    """The summary of the policies that are compared in fp32."""

    largest_difference: float
    steps: int
    goal: float
    met: bool


class Summary(TypedDict):
    """The summary of a model."""

    variants: NotRequired[dict[str, Variant]]
    fp32: NotRequired[Exact | None]


class Study(TypedDict):
    """``parity.json``: losses by model, variant and seed."""

    models: dict[str, dict[str, dict[str, Annotated[list[float], Field(min_length=1)]]]]
    summary: NotRequired[dict[str, Summary] | None]
    saved_bytes_per_token: NotRequired[dict[str, dict[str, float]] | None]
    environment: NotRequired[dict[str, Any] | None]


RUN, RECORD, WATCHED, STUDY = TypeAdapter(Run), TypeAdapter(Record), TypeAdapter(Watched), TypeAdapter(Study)
