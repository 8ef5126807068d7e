"""What a block saves from forward to backward: presets, explicit policies, byte budgets. Imports no torch.

The four tensors that can be saved are the checkpoints of nki-library's ``mlp_fwd_mxfp8``, each ``[rows, I]``:

    gate_pre = x Wg^T      up = x Wu^T      gate_act = silu(gate_pre)      intermediate = gate_act * up

The bf16 kernels keep ``gate_pre`` and ``up`` only. What is not kept is computed again in the backward, by the torch
backend bit for bit. Operators and backends take a policy as one canonical string, which :func:`parse_keep` reads and
:func:`canonical_keep` writes: ``"minimal"``, ``"fp8"``, ``"recompute"``, or names joined by ``+`` (``"gate_pre+up"``).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard

from hf_neuron_moe.errors import ConfigError, nearest, public

CHECKPOINTS = ("gate_pre", "gate_act", "up", "intermediate")
BF16_CHECKPOINTS = ("gate_pre", "up")
"""What the kernels of the precisions other than mxfp8 keep."""

STORAGES = ("compute", "fp8")

_HELP = "See help(hf_neuron_moe.NeuronMoEConfig)."
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BUDGET = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*/\s*([0-9]*)\s*tokens?\s*(\+\s*fp8)?\s*")


@dataclass(frozen=True)
class Keep:
    """A canonical keep string, read."""

    names: frozenset[str] = frozenset()  # which checkpoints are kept
    fp8: bool = False  # gate_pre, up and the input are kept in FP8 groups instead of the compute dtype
    whole_up: bool = True  # all columns of up are kept, not only the first `saved_up_columns`
    text: str = ""  # the string itself

    @property
    def named(self) -> bool:
        """Whether a list of checkpoints does not say all, so that the string is a preset's name."""
        return self.fp8 or not self.whole_up

    @property
    def backward(self) -> bool:
        """Whether a backward may come."""
        return bool(self.text)

    @property
    def keeps_input(self) -> bool:
        """Whether the backward reads the block's input as it came, and not from its FP8 form."""
        return not self.fp8

    @property
    def keeps_input_quantized(self) -> bool:
        """The same where no weight has a gradient: only products that are made again read the input."""
        return not self.fp8 and not self.names.issuperset(BF16_CHECKPOINTS)


PRESETS = {
    "full": Keep(frozenset(CHECKPOINTS)),  # those of them that the precision's kernels have
    "minimal": Keep(frozenset(BF16_CHECKPOINTS), whole_up=False),
    "fp8": Keep(frozenset(BF16_CHECKPOINTS), fp8=True),
    "recompute": Keep(),
}
"""The policies that have a name, each a row without `text`. One that is no plain list may name gate_pre and up only."""


@functools.cache
def parse_keep(keep: str) -> Keep:
    """Read a canonical keep string; the empty one keeps nothing, for a backward that will not come."""
    names = frozenset(keep.split("+")) if keep else frozenset[str]()
    return replace(PRESETS.get(keep) or Keep(names), text=keep)


def saved_up_columns(intermediate: int) -> int:
    """Return the columns of up that ``"minimal"`` keeps: seven eighths of them, all of less than 512.

    One eighth recomputed costs 1/72 of a step's multiplications and brings the kept bytes of a Mixtral-shaped block
    below 0.45 of what the stock experts keep.
    """
    return intermediate if intermediate < 512 else intermediate - -(-intermediate // 512) * 64


@dataclass(frozen=True)
class ActivationPolicy:
    """Which checkpoints a block keeps, and how."""

    keep: Any = ("gate_pre", "up")
    """Names out of ``gate_pre``, ``gate_act``, ``up`` and ``intermediate``, or the name of a preset. What is missing is
    computed again. The block's input and the routing are always kept."""
    storage: str = "compute"
    """``"compute"``: the dtype that the values have in the kernels (bf16; fp32 for ``precision="fp32"``). ``"fp8"``:
    e4m3 in groups of 64 with one bf16 scale, gate_pre and up together, the input as well."""
    modules: Any = ()
    """Exceptions: glob over module names -> preset name or policy. Globs are those of ``include`` and ``exclude``; one
    that matches no block, and a block that two of them match, are refused. Held as sorted pairs to be hashable."""

    @public("ActivationPolicy")
    def __new__(cls, *args: Any, **options: Any) -> ActivationPolicy:
        """Refuse misspelt option names with the package's own error."""
        check_option_names(cls, options, _HELP)
        return super().__new__(cls)

    @public("activations")
    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _checked_keep(self.keep))
        if self.storage not in STORAGES:
            raise _bad_value("storage", f"one of {', '.join(STORAGES)}", self.storage, nearest_of=STORAGES)
        if self.storage == "fp8" and self.keep != BF16_CHECKPOINTS:
            expected = "'compute' unless exactly gate_pre and up are kept: they are what COAT's backward reads in FP8"
            fix = "Use keep=('gate_pre', 'up') with storage='fp8', which is the preset 'fp8'."
            raise _bad_value("storage", expected, f"'fp8' with keep={self.keep!r}", fix)
        object.__setattr__(self, "modules", _checked_modules(self.modules))

    @property
    def name(self) -> str:
        """The policy without its exceptions as one short string: a preset's name, or names joined by ``+``."""
        if isinstance(self.keep, str):
            return self.keep
        return "fp8" if self.storage == "fp8" else "+".join(self.keep) or "recompute"

    def __str__(self) -> str:
        return self.name + "".join(f", {glob}: {_name(policy)}" for glob, policy in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts; :func:`as_activations` is the inverse."""
        keep = self.keep if isinstance(self.keep, str) else list(self.keep)
        modules = {glob: to_plain(policy) for glob, policy in self.modules}
        return {"keep": keep, "storage": self.storage, "modules": modules}


@dataclass(frozen=True)
class ActivationBudget:
    """How many bytes all patched blocks together may keep; ``patch_model`` solves it module by module.

    The plan never exceeds the budget, is lossless unless `allow_fp8`, and recomputes the fewest floating-point
    operations; for dozens of blocks of different sizes it may be near the fewest.
    """

    bytes_per_token: float | None = None  # bytes per token of input, all patched blocks together
    total_bytes: float | None = None  # instead of it, bytes for `tokens` tokens
    tokens: int | None = None  # tokens of one forward pass (batch size times length), with `total_bytes`
    allow_fp8: bool = False  # whether the plan may use the preset "fp8", which loses something

    @public("ActivationBudget")
    def __new__(cls, *args: Any, **options: Any) -> ActivationBudget:
        """Refuse misspelt option names with the package's own error."""
        check_option_names(cls, options, _HELP)
        return super().__new__(cls)

    @public("activations")
    def __post_init__(self) -> None:
        given = [name for name in ("bytes_per_token", "total_bytes", "tokens") if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            kinds = (int,) if name == "tokens" else (int, float)
            if type(value) not in kinds or not 0 < value < float("inf"):
                raise _bad_value(name, f"a positive {'int' if name == 'tokens' else 'number'}", value)
        if not isinstance(self.allow_fp8, bool):
            raise _bad_value("allow_fp8", "a bool", self.allow_fp8)
        if given not in (["bytes_per_token"], ["total_bytes", "tokens"]):
            expected = "either bytes_per_token, or total_bytes and tokens"
            raise _bad_value("budget", expected, ", ".join(given) or "neither")

    @property
    def limit(self) -> float:
        """Bytes per token."""
        if self.bytes_per_token is not None:
            return self.bytes_per_token
        assert self.total_bytes is not None and self.tokens is not None
        return self.total_bytes / self.tokens

    @property
    def name(self) -> str:
        """The budget as a string that :func:`as_activations` reads."""
        return f"{self.limit / 1024:g}KiB/token{'+fp8' if self.allow_fp8 else ''}"

    def __str__(self) -> str:
        return f"budget of {self.name}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts; :func:`as_activations` is the inverse."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


Activations = str | ActivationPolicy | ActivationBudget
"""A preset's name, an explicit policy, or a budget."""

BlockActivations = str | ActivationPolicy
"""What one block has: a preset's name, or a policy without exceptions."""


def as_activations(value: object) -> Activations:
    """Read every form that ``NeuronMoEConfig(activations=...)`` takes.

    That is a policy, a budget, the mapping of one, or a string: a preset's name, names of checkpoints joined by ``+``,
    or a budget. Budgets are ``"48KiB/token"``, ``"2GiB/8192tokens"`` or ``"24KiB/token+fp8"``, which allows FP8.
    """
    if isinstance(value, ActivationPolicy | ActivationBudget):
        return value
    if isinstance(value, Mapping):
        options = {str(key): item for key, item in value.items()}
        is_budget = any(f.name in options for f in fields(ActivationBudget))
        return ActivationBudget(**options) if is_budget else ActivationPolicy(**options)
    if not isinstance(value, str):
        raise _bad_value("activations", _FORMS, value, nearest_of=PRESETS)
    if value in PRESETS:
        return value
    budget = _BUDGET.fullmatch(value)
    if budget is not None and budget[2].upper() in _UNITS:
        size, fp8 = float(budget[1]) * _UNITS[budget[2].upper()], bool(budget[4])
        if budget[3]:
            return ActivationBudget(total_bytes=size, tokens=int(budget[3]), allow_fp8=fp8)
        return ActivationBudget(bytes_per_token=size, allow_fp8=fp8)
    if value and set(value.split("+")) <= set(CHECKPOINTS):
        return ActivationPolicy(keep=tuple(value.split("+")))
    raise _bad_value(
        "activations", _FORMS, value, nearest_of=(*PRESETS, *CHECKPOINTS, "48KiB/token", "2GiB/8192tokens")
    )


def activations_from_text(text: str, argument: str) -> Any:
    """Read the value of the command line's option `argument`: a JSON object as a mapping, any other text as it is."""
    return mapping_from_text(text, argument, "a name, a budget or a JSON object")


def mapping_from_text(text: str, argument: str, expected: str) -> Any:
    """Return the mapping that a JSON object in `text` is, and any other text as it is; ConfigError for broken JSON."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad_value(argument, expected, f"{text!r} ({error})") from error


_FORMS = (
    f"one of {', '.join(PRESETS)}, names of checkpoints ({', '.join(CHECKPOINTS)}) joined by '+', a budget such as "
    "'48KiB/token' or '2GiB/8192tokens', an ActivationPolicy or an ActivationBudget"
)


def to_plain(activations: Activations) -> str | dict[str, Any]:
    """Return the plain form that :func:`as_activations` reads back as an equal object."""
    return activations if isinstance(activations, str) else activations.to_dict()


def check_for_precision(activations: Activations, precision: str) -> None:
    """Refuse checkpoints that the precision's kernels do not have (ConfigError)."""
    own = activations.modules if isinstance(activations, ActivationPolicy) else ()
    for policy in (activations, *(policy for _, policy in own)):
        names = policy.keep if isinstance(policy, ActivationPolicy) and policy.keep not in PRESETS else ()
        absent = [name for name in names if name not in _kernel_checkpoints(precision)]
        if absent:
            expected = f"made of checkpoints that the {precision} kernels have ({', '.join(BF16_CHECKPOINTS)})"
            got = f"{' and '.join(absent)}, which only the mxfp8 kernels write"
            fix = "They cost an elementwise pass over gate_pre and up in the backward: leave them out."
            raise _bad_value("activations", expected, got, fix)


@functools.cache
@public("activations")
def canonical_keep(activations: Activations, precision: str) -> str:
    """Return the string that operators and backends take for one block's policy; `precision` decides on "full"."""
    policy = as_activations(activations)
    if not _is_of_one_block(policy):
        raise _bad_value("activations", "one block's policy", str(policy), "patch_model resolves the others.")
    check_for_precision(policy, precision)
    name = _name(policy)
    return _preset_keep(name, precision) if name in PRESETS else name


def keep_strings(precision: str) -> frozenset[str]:
    """Return every canonical keep string of a precision."""
    known = _kernel_checkpoints(precision)
    subsets = (some for size in range(1, len(known) + 1) for some in itertools.combinations(known, size))
    return frozenset({*preset_keeps(precision), *("+".join(some) for some in subsets)})


def preset_keeps(precision: str) -> dict[str, str]:
    """Return the presets' canonical keep strings and names, in the order of the table; of equal strings the first."""
    keeps: dict[str, str] = {}
    for name in PRESETS:
        keeps.setdefault(_preset_keep(name, precision), name)
    return keeps


def _preset_keep(name: str, precision: str) -> str:
    keep = PRESETS[name]
    return name if keep.named else "+".join(c for c in _kernel_checkpoints(precision) if c in keep.names) or "recompute"


def _kernel_checkpoints(precision: str) -> tuple[str, ...]:
    return CHECKPOINTS if precision == "mxfp8" else BF16_CHECKPOINTS


def _is_of_one_block(policy: Activations) -> TypeGuard[BlockActivations]:
    return isinstance(policy, str) or (isinstance(policy, ActivationPolicy) and not policy.modules)


def _name(policy: BlockActivations) -> str:
    return policy if isinstance(policy, str) else policy.name


def _checked_keep(keep: object) -> str | tuple[str, ...]:
    if isinstance(keep, str) and keep in PRESETS:
        return keep
    if isinstance(keep, str) or not isinstance(keep, list | tuple | set | frozenset):
        expected = f"a preset ({', '.join(PRESETS)}) or a list of checkpoints ({', '.join(CHECKPOINTS)})"
        raise _bad_value("keep", expected, keep, nearest_of=PRESETS)
    for name in keep:
        if name not in CHECKPOINTS:
            raise _bad_value("keep", f"made of {', '.join(CHECKPOINTS)}", name, nearest_of=CHECKPOINTS)
    return tuple(name for name in CHECKPOINTS if name in keep)


def _checked_modules(modules: Any) -> tuple[tuple[str, BlockActivations], ...]:
    pairs = modules.items() if isinstance(modules, Mapping) else modules
    if isinstance(modules, str) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise _bad_value("modules", "a mapping from globs over module names to presets or policies", modules)
    checked: list[tuple[str, BlockActivations]] = []
    for glob, value in pairs:
        if not isinstance(glob, str):
            raise _bad_value("modules", "a mapping whose keys are globs over module names", glob)
        policy = as_activations(value)
        if not _is_of_one_block(policy):
            raise _bad_value(f"modules[{glob!r}]", "a preset or a policy without exceptions of its own", value)
        checked.append((glob, policy))
    return tuple(sorted(checked, key=lambda pair: pair[0]))


def check_option_names(kind: type, options: Mapping[str, Any], fix: str) -> None:
    """Raise ConfigError for names that are no fields of the dataclass `kind`."""
    known = [f.name for f in fields(kind)]
    for key in options:
        if key not in known:
            hint = nearest(str(key), known)
            raise ConfigError.about("option name", f"one of {', '.join(known)}", repr(key), fix + hint)


def _bad_value(
    argument: str, expected: str, got: object, fix: str = _HELP, *, nearest_of: Iterable[str] = ()
) -> ConfigError:
    near = list(nearest_of)
    shown = got if isinstance(got, str) and (" " in got or not near) else repr(got)
    hint = nearest(got, near) if isinstance(got, str) else ""
    return ConfigError.about(argument, expected, shown, fix + hint)
