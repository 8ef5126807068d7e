"""The precision of each block: one name for all of them, or a map from globs over module names. Imports no torch."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_neuron_moe.errors import ConfigError, nearest, not_one_of

DEFAULT_GLOB = "*"
"""The entry of a map for blocks that none of its other globs matches."""

PRODUCTS = ("gate_up_proj", "up_proj", "down_proj")
"""What a glob ends in that is about one product of experts; only conversions take such globs."""

MAX_RECIPE_BYTES = 1_000_000

_FORM = f'a mapping such as {{"{DEFAULT_GLOB}": "mxfp8", "model.layers.0.*": "bf16"}}'
_SHORT_NAMES = {"bfloat16": "bf16", "float32": "fp32"}


class PrecisionMap(dict[str, str]):
    """Precision by glob over module names. It is sorted, hashable, and equal to an ordinary dict of its entries.

    ``"*"`` holds for blocks that none of the other globs matches.
    """

    def _refuse_change(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError("a PrecisionMap cannot be changed: make a new one")

    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return PrecisionMap, (dict(self),)

    def __str__(self) -> str:
        return spelled(self)

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs over names of blocks, without the default."""
        return tuple(glob for glob in self if glob != DEFAULT_GLOB and not _is_of_product(glob))

    @property
    def product_globs(self) -> tuple[str, ...]:
        """The globs over names of products."""
        return tuple(filter(_is_of_product, self))

    def of(self, names: Sequence[str], product: str = "") -> str:
        """Return the precision of the block that has `names`; ConfigError where globs that match it disagree.

        `product` is one of :data:`PRODUCTS`, whose own globs go before those of its block.
        """
        full = [f"{name}.{product}".removeprefix(".") for name in names]
        matching = [glob for glob in self.product_globs if fnmatch.filter(full, glob)]
        matching = matching or [glob for glob in self.globs if fnmatch.filter(names, glob)]
        if len({self[glob] for glob in matching}) > 1:
            expected = "made of globs of which those that match one block give it one precision"
            given = " and ".join(f"{glob!r} ({self[glob]})" for glob in matching)
            raise ConfigError.about(
                "precision", expected, f"{given}, which match {names[0]!r}", "Make one of them narrower."
            )
        return self[matching[0] if matching else DEFAULT_GLOB]


Precision = str | PrecisionMap
"""One precision for all blocks, or a map."""


def as_precision(value: object, allowed: tuple[str, ...]) -> Precision:
    """Check every form that an option ``precision`` takes, and return it; a map of one entry is that precision."""
    if not isinstance(value, Mapping):
        return _checked("precision", value, allowed)
    for glob, precision in value.items():
        if not isinstance(glob, str):
            fix = "Put the glob into quotes."
            raise ConfigError.about("precision", "a mapping whose keys are globs over module names", repr(glob), fix)
        _checked(f"precision[{glob!r}]", precision, allowed)
        if _is_of_product(glob) and "mxfp4" not in allowed:
            expected = "a mapping whose keys are globs over names of blocks: only conversions take single products"
            fix = f"Name the block: {glob.rpartition('.')[0]!r}."
            raise ConfigError.about("precision", expected, repr(glob), fix)
    if DEFAULT_GLOB not in value:
        fix = f'Add "{DEFAULT_GLOB}" with the precision of the blocks that no other glob matches.'
        raise ConfigError.about("precision", f'{_FORM}, with the key "{DEFAULT_GLOB}"', repr(dict(value)), fix)
    return PrecisionMap(sorted(value.items())) if len(value) > 1 else str(value[DEFAULT_GLOB])


def precision_of(precision: Precision, names: Sequence[str]) -> str:
    """Return the precision of the block that has `names`."""
    return precision.of(names) if isinstance(precision, PrecisionMap) else precision


def precisions_in(precision: Precision) -> tuple[str, ...]:
    """Return the names that occur in `precision`, sorted."""
    return tuple(sorted(set(precision.values()))) if isinstance(precision, PrecisionMap) else (precision,)


def spelled(precision: object) -> str:
    """Return a precision or a map of precisions as one line: the default, then what each other glob has."""
    if not isinstance(precision, Mapping):
        return str(precision)
    others = [f"{glob}: {name}" for glob, name in precision.items() if glob != DEFAULT_GLOB]
    return ", ".join([str(precision.get(DEFAULT_GLOB, "?")), *others])


def _is_of_product(glob: str) -> bool:
    return glob.rpartition(".")[2] in PRODUCTS


def _checked(argument: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    name = str(value).lower().removeprefix("torch.")  # a dtype's name
    hint = nearest(_SHORT_NAMES.get(name, name), list(allowed))
    if name == "mxfp4" and name not in allowed:
        hint = " mxfp4 is for converted checkpoints only: `hf-neuron-moe convert --precision mxfp4`."
    if name.endswith((".yaml", ".yml", ".json")):
        hint = " Pass what yaml.safe_load reads from the file."
    raise not_one_of(argument, value, allowed, hint)


def read_recipe(path: Path) -> dict[str, str]:
    """Read a map of precisions from a YAML or JSON file; ConfigError for anything else and for a key given twice."""
    import yaml

    try:
        if (size := path.stat().st_size) > MAX_RECIPE_BYTES:
            raise ValueError(f"{size:,} bytes")
        # Tabs are white space in JSON, which is YAML otherwise.
        pairs = _pairs(yaml.compose(path.read_text(encoding="utf-8").replace("\t", " "), Loader=yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        expected = f'a YAML or JSON file such as {{"{DEFAULT_GLOB}": "mxfp8", "model.layers.0.*": "bf16"}}'
        got = f"{path} ({type(error).__name__}: {' '.join(str(error).split())})"
        fix = "Correct the path." if isinstance(error, OSError) else "Put globs into quotes, and each of them once."
        raise ConfigError.about("recipe", expected, got, fix) from error
    return dict(pairs)


def _pairs(root: Any) -> list[tuple[str, str]]:
    """The entries of a YAML mapping of texts; ValueError for anything else and for a key given twice."""
    if root is None or root.id != "mapping":
        raise ValueError("no mapping")
    pairs = [(_text(glob), _text(precision)) for glob, precision in root.value]
    for glob, count in Counter(glob for glob, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{glob!r} appears twice")
    return pairs


def _text(node: Any) -> str:
    """The text of a YAML node; ValueError for a list or a mapping."""
    if not isinstance(node.value, str):
        raise ValueError(f"a {node.id} within the mapping")
    return node.value
