"""Builds one class of transformers small on the CPU, from the default of its own configuration class."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from census_classes import Listed
from torch import nn

LARGEST = 8_000_000
"""Most parameters of an instance; more would say that a size was not made small."""

_SIZE = re.compile(
    r"hidden|intermediate|inner|ffn|mlp|d_model|d_ff|n_embd|dim|width|channels|embed|expert_size|lora|rank"
)
_NO_SIZE = re.compile(r"position|dropout|layers|heads|vocab|patch|image|act|per_")
_EXPERTS = re.compile(r"^(n|num|moe_num|moe_n)_?.*experts$|^moe_num_primary_experts$")
_TOP_K = re.compile(r"per_tok|top_?k")
_ARGUMENTS: dict[str, Any] = {
    "hidden_size": 64,
    "embed_dim": 64,
    "dim": 64,
    "in_features": 64,
    "in_channels": 64,
    "input_size": 64,
    "d_model": 64,
    "input_dim": 64,
    "out_features": 64,
    "output_dim": 64,
    "context_dim": 64,
    "out_dim": 64,
    "intermediate_size": 96,
    "hidden_dim": 96,
    "hidden_features": 96,
    "ffn_dim": 96,
    "mlp_dim": 96,
    "inner_dim": 96,
    "ffn_hidden_size": 96,
    "intermediate_dim": 96,
    "d_ff": 96,
    "layer_idx": 0,
    "layer_id": 0,
    "use_flexible_linear": False,
    "hidden_act": "silu",
    "activation": "silu",
    "act_fn": "silu",
    "act_layer": nn.GELU,
    "bias": True,
    "in_dim": 64,
    "out_chs": 64,
    "stage_idx": 0,
    "llm_embed_dim": 64,
    "ffn_latent_dim": 96,
    "n_state": 96,
    "widening_factor": 2,
    "dim_hidden": 96,
    "num_fwd_mem_blocks": 2,
    "multiplier": 2,
    "num_layers": 2,
    "block_id": 0,
    "layer_index": 0,
    "num_experts": 4,
    "drop": 0.0,
}
"""What constructors get for arguments without a default, where no constructor call of the library says it."""


class NotBuilt(Exception):  # noqa: N818 -- the answer "no", with the reason
    """No configuration builds the class; the message has the last error."""


def variants(cls: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield an instance for each way in which the library makes `cls`, with the arguments by which they differ.

    The instances are in eval mode and have random fp32 weights.

    Raises:
        NotBuilt: no configuration fits.
    """
    error: Exception | None = None  # the first one, of the likeliest configuration
    for config in chain(_configs(cls), [None]):
        built: set[str] = set()
        for said in _ways(cls, config):
            said = {name: value for name, value in said.items() if value is not None}
            text = ", ".join(f"{name}={value}" for name, value in said.items())
            if text in built:
                continue
            try:
                yield text, _instance(cls, _arguments(cls, config, said))
                built.add(text)
            except (NotBuilt, AttributeError, TypeError, ValueError, KeyError, RuntimeError, IndexError) as failed:
                error = error or failed
        if built:
            return
    raise NotBuilt(f"{type(error).__name__}: {error}") from error


def class_of(listed: Listed) -> type[nn.Module]:
    return getattr(importlib.import_module(listed.module), listed.name)


def _instance(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        count = sum(param.numel() for param in cls(**arguments).parameters())
    if count > LARGEST:
        raise NotBuilt(f"it has {count:,} parameters")
    module = cls(**arguments).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in module.parameters():
            # Pre-activations of standard deviation 3 meet the limits of gates with clamps.
            scale = 3 / param.shape[-1] ** 0.5 if param.dim() > 1 else 0.5
            param.copy_(scale * torch.randn(param.shape, generator=generator))
    return module


def _ways(cls: type[nn.Module], config: Any) -> Iterator[dict[str, Any]]:
    """Arguments for instances: as the library's own calls say, none, then those that a default of None asks for."""
    parameters = inspect.signature(cls.__init__).parameters
    layers = [0]
    if "layer_idx" in parameters and (count := getattr(config, "num_hidden_layers", 1)) > 1:
        layers.append(count - 1)
    calls = list(_calls(cls, config)) or [{}]
    for said in calls:
        for layer in layers:
            yield said | ({"layer_idx": layer} if "layer_idx" in parameters else {})
    yield {name: _ARGUMENTS.get(name) for name, each in parameters.items() if each.default is None}


def _arguments(cls: type[nn.Module], config: Any, said: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name == "config" or name.endswith("_config") or "Config" in str(parameter.annotation):
            if config is None:
                raise NotBuilt("no configuration of its module fits")
            found[name] = config
        elif name in said:
            found[name] = said[name]
        elif parameter.default is parameter.empty:
            if name not in _ARGUMENTS:
                raise NotBuilt(f"nothing is known about its argument {name}")
            found[name] = _ARGUMENTS[name]
    return found


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


@cache
def _calls_by_class(module: str) -> dict[str, list[tuple[str, ast.Call]]]:
    """By class of a module, the plain names that it calls; made once, as a walk through a long file takes 50 ms."""
    return {
        node.name: [
            (each.func.id, each)
            for each in ast.walk(node)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ]
        for node in _tree(module).body
        if isinstance(node, ast.ClassDef)
    }


def _calls(cls: type[nn.Module], config: Any) -> Iterator[dict[str, Any]]:
    """The arguments with which its module makes instances: constants and attributes of the configuration."""
    names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    for called, node in chain.from_iterable(_calls_by_class(cls.__module__).values()):
        if called != cls.__name__:
            continue
        given = {**dict(zip(names, node.args)), **{keyword.arg: keyword.value for keyword in node.keywords}}
        said: dict[str, Any] = {}
        for name, value in given.items():
            match value:
                case ast.Constant(value=constant) if name is not None:
                    said[name] = constant
                case ast.Attribute(value=ast.Name("config"), attr=attribute) if name is not None:
                    said[name] = getattr(config, attribute, None)
        yield said


def _configs(cls: type[nn.Module]) -> Iterator[Any]:
    """Yield small configurations that `cls` may be made from: as annotated, then by likeness of names, then nested."""
    from transformers import PreTrainedConfig

    module = importlib.import_module(cls.__module__)
    folder = importlib.import_module(cls.__module__.replace(".modeling_", ".configuration_"))
    known = {name: kind for home in (folder, module) for name, kind in vars(home).items() if inspect.isclass(kind)}
    kinds = {name: kind for name, kind in known.items() if issubclass(kind, PreTrainedConfig)}
    kinds.pop("PreTrainedConfig", None)
    like = sorted(kinds, key=lambda name: -_shared(name, cls.__name__))
    nested: list[Any] = []
    tried: set[str] = set()
    for name in chain(_annotated(cls.__module__, cls.__name__), like):
        if name not in kinds or name in tried:
            continue
        tried.add(name)
        try:
            config = _default(kinds[name])
        except (TypeError, ValueError, AttributeError, KeyError, ImportError, OSError):
            continue
        inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
        nested += map(_small, inner)  # before an instance is made, which may read them
        yield _small(config)
    yield from nested


def _default(kind: Any) -> Any:
    """The default configuration; with plain parts where a part's default needs a package or a file of the hub."""
    from transformers import PreTrainedConfig

    try:
        return kind()
    except (ImportError, OSError):
        return kind(**{name: PreTrainedConfig() for name in kind.sub_configs})


def _shared(one: str, other: str) -> int:
    """How many letters two names begin with alike."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _annotated(module: str, name: str, levels: int = 4) -> Iterator[str]:
    """Yield the names of configurations by annotations: of the class itself, then of classes that make it."""
    nodes = [node for node in _tree(module).body if isinstance(node, ast.ClassDef)]
    for node in nodes:
        if node.name == name:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    yield from re.findall(r"\w+Config\b", ast.unparse(function.args))
    makers = [maker for maker, calls in _calls_by_class(module).items() if maker != name and _makes(calls, name)]
    for maker in makers if levels else ():
        yield from _annotated(module, maker, levels - 1)


def _makes(calls: list[tuple[str, ast.Call]], name: str) -> bool:
    """Whether a class with these calls makes another one from its own configuration."""
    made = (each for called, each in calls if called == name)
    return any("config" in map(ast.unparse, (*each.args, *(k.value for k in each.keywords))) for each in made)


def _small(config: Any) -> Any:
    _shrink(config)
    if not hasattr(config, "mlp_bias"):  # which a class may read although its configuration has no such option
        config.mlp_bias = False
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def _shrink(config: Any) -> None:
    """Make the sizes of `config` small in place, with their ratios kept; a size that is None becomes 96."""
    sizes = {name: value for name, value in vars(config).items() if _SIZE.search(name) and not _NO_SIZE.search(name)}
    lists = [value for value in sizes.values() if isinstance(value, list | tuple)]
    numbers = [value for value in (*sizes.values(), *(each for value in lists for each in value)) if type(value) is int]
    factor = 1
    while max(numbers, default=0) // factor > 128:
        factor *= 2
    for name, value in sizes.items():
        if type(value) is int and value >= 16 and not name.startswith("num"):
            setattr(config, name, max(4, value // factor))
        elif name == "intermediate_size" and isinstance(value, list | tuple):  # one per layer
            setattr(config, name, [each // factor for each in value])
        elif not value and re.search(r"(intermediate|inner|hidden|ffn)\w*_(size|dim)$", name):
            setattr(config, name, 96)
    for name, value in vars(config).items():
        if value is None or type(value) is int:
            if _EXPERTS.match(name):
                setattr(config, name, min(value or 4, 4))
            elif _TOP_K.search(name):
                setattr(config, name, min(value or 2, 2))
