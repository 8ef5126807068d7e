"""Put the double's packages where imports and ``importlib.metadata`` find them, and take them out again."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from hf_neuron_moe.errors import NeuronMoEError
from tests.neuron.double import faults, mlp, moe_backward, moe_forward, moe_mxfp8, signatures
from tests.neuron.double.contract import ContractError, Double, KernelCall, broken
from tests.neuron.double.framework import make_nki_op, tracking, utilities, wrap_nki
from tests.neuron.double.launch import make_jit, make_simulate
from tests.neuron.double.memory import Language
from tests.neuron.double.records import Library, checkpoint_record, variant

ROOTS = ("nki", "nkilib", "torch_neuronx")
BACKEND = "hf_neuron_moe.backends.neuron"
VERSIONS = {"nki": "0.7.0", "torch-neuronx": "2.13.3", "neuronx-cc": "2.28.7631"}


def documented(double: Double, library: Library, name: str, text: str, home: str, body: Callable[..., Any]) -> Any:
    """A function of nkilib: its documented signature, bound by keyword, checked and computed by `body`."""
    whole = signatures.parse(text, library)
    signature = whole.replace(
        parameters=[found for found in whole.parameters.values() if found.name not in double.without]
    )
    absent = moe_mxfp8.absent(double, library, whole.parameters) if "moe_mxfp8" in home else {}

    def call(*args: Any, **kwargs: Any) -> Any:
        launch = double.current
        if launch is None:
            broken(name, "is called inside of a kernel")
        if args:
            broken(name, "arguments are passed by keyword: positions move between releases")
        try:
            bound = signature.bind(**kwargs)
        except TypeError as error:
            release = ".".join(map(str, double.release))
            raise ContractError(f"{name} of nkilib {release}: {error}") from None
        bound.apply_defaults()
        faults.before(double, launch, name)
        try:
            result = body(
                launch, {key: found.default for key, found in whole.parameters.items()} | absent | bound.arguments
            )
        except NeuronMoEError as error:
            raise ContractError(f"{name}: {error}") from error
        faults.after(double, launch, name, result)
        if not launch.fake:
            double.calls.append(KernelCall(name, dict(bound.arguments)))
        return result

    call.__name__ = call.__qualname__ = name
    call.__module__ = home
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.is_nkilib = True  # type: ignore[attr-defined]
    return call


def nkilib_tree(double: Double, library: Library) -> dict[str, dict[str, Any]]:
    """Modules of nkilib and what each holds."""
    release, jit = double.release, make_jit(double)
    make = functools.partial(documented, double, library)
    core, bwd = "nkilib.core.moe.moe_cte", "nkilib.experimental.moe.bwd"
    forward, backward = vars(library.forward), vars(library.backward)
    types = ("ActFnType", "ExpertAffinityScaleMode", "RouterActFnType", "QuantizationType")
    utils = ("BlockShardStrategy", "SkipMode")
    rest = {name: value for name, value in forward.items() if name not in (*types, *utils)}
    cte = functools.partial(moe_forward.unified, double, library)
    unified = jit(make("moe_cte", signatures.moe_cte(release), f"{core}.moe_cte", cte))
    tree: dict[str, dict[str, Any]] = {
        "nkilib.core.utils.common_types": {name: forward[name] for name in types},
        f"{core}.moe_cte_utils": {name: forward[name] for name in utils},
        f"{core}.moe_cte": {"moe_cte": unified, **rest},
        core: {"moe_cte": unified, **rest, **{name: forward[name] for name in utils}},
        f"{bwd}.moe_bwd_parameters": dict(backward),
    }
    homes = {
        "bwmm_shard_on_block": f"{core}.bwmm_shard_on_block",
        "bwmm_shard_on_block_mx": f"{core}.bwmm_shard_on_block_mx",
        "blockwise_mm_shard_intermediate_mx": f"{core}.bwmm_shard_on_I_mx",
        "blockwise_mm_shard_intermediate_mx_hybrid": f"{core}.bwmm_shard_on_I_mx",
        "blockwise_mm_baseline_shard_hidden": "nkilib.experimental.moe.forward.bwmm_shard_on_H",
    }
    for name, text in signatures.direct_forward(release).items():
        home = homes.get(name, f"{core}.bwmm_shard_on_I")
        body = functools.partial(_swap, moe_forward.direct, double, library, name)
        tree.setdefault(home, {})[name] = jit(make(name, text, home, body))
    home = f"{bwd}.blockwise_mm_backward"
    body = functools.partial(moe_backward.backward, double, library)
    tree[home] = {"blockwise_mm_bwd": jit(make("blockwise_mm_bwd", signatures.blockwise_mm_bwd(release), home, body))}
    tree[bwd] = dict(tree[home])
    tree |= mxfp8_tree(double, library, make)
    return tree


def mxfp8_tree(double: Double, library: Library, make: Any) -> dict[str, dict[str, Any]]:
    """The MXFP8 kernels that a release has."""
    release = double.release
    tree: dict[str, dict[str, Any]] = {}
    if release >= (2, 30):
        home = "nkilib.experimental.mlp_mxfp8.mlp_fwd_mxfp8"
        body = functools.partial(mlp.forward, double)
        name = "mlp_forward_mxfp8_nki"
        tree[home] = {name: make(name, signatures.mlp_forward(), home, body)}
        home = "nkilib.experimental.mlp_mxfp8.mlp_bwd_mxfp8"
        body = functools.partial(mlp.backward_2_31 if release >= (2, 31) else mlp.backward_2_30, double)
        name = "mlp_backward_mxfp8_nki"
        tree[home] = {name: make(name, signatures.mlp_backward(release), home, body), **vars(library.mlp)}
    return tree | pair_tree(double, library, make)


def pair_tree(double: Double, library: Library, make: Any) -> dict[str, dict[str, Any]]:
    """The MXFP8 expert pair: plain functions, to be called inside of a kernel."""
    home, config = "nkilib.experimental.moe_mxfp8", double.config_pair
    tree: dict[str, dict[str, Any]] = {}
    if double.release >= (2, 31):
        name, place = "blockwise_mm_bwd_mxfp8", f"{home}.bwd.blockwise_mm_backward_mxfp8"
        body = functools.partial(moe_mxfp8.backward_config if config else moe_mxfp8.backward, double, library)
        tree[place] = {name: make(name, signatures.moe_mxfp8_backward(config), place, body)}
    if double.release >= (2, 32):
        name, place = "blockwise_mm_fwd_mxfp8", f"{home}.fwd.blockwise_mm_forward_mxfp8"
        body = functools.partial(moe_mxfp8.forward_config if config else moe_mxfp8.forward, double, library)
        tree[place] = {name: make(name, signatures.moe_mxfp8_forward(config), place, body)}
    if tree:
        tree[home] = {name: value for module in tree.values() for name, value in module.items()}
    found = vars(library.pair)
    if double.release >= (2, 32):
        kept = found["MXFP8MOECheckpointConfig"]
        tree[kept.__module__] = {kept.__name__: kept}
    if config:
        for name in ("MXFP8MOEFwdConfig", "MXFP8MOEBwdConfig"):
            tree[found[name].__module__] = {name: found[name]}
        utils = library.pair.TensorDescriptor.__module__
        tree[utils] = {name: found[name] for name in ("TensorOrientation", "SwizzleMode", "TensorDescriptor")}
    return tree


def _swap(function: Any, double: Double, library: Library, name: str, launch: Any, call: Any) -> Any:
    return function(double, library, launch, call, name)


def framework_tree(double: Double) -> dict[str, dict[str, Any]]:
    """``nki`` and ``torch_neuronx``."""
    nki = {"jit": make_jit(double), "simulate": make_simulate(double), "__version__": VERSIONS["nki"]}
    hop = {"nki_op": make_nki_op(double), "wrap_nki": wrap_nki}
    neuronx = {**hop, **tracking(double), "__version__": double.plugin_version or VERSIONS["torch-neuronx"]}
    language = {name: getattr(Language(double), name) for name in dir(Language(double)) if not name.startswith("_")}
    tree = {"nki": nki, "nki.language": language, "nki.isa": {}}
    if double.plugin:
        tree |= {"torch_neuronx": neuronx, "torch_neuronx.nki_hop": hop, "torch_neuronx.utils": utilities(double)}
    return tree


def build_modules(tree: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Make modules and their parents; a name that a package defines wins over its submodule's."""
    names = {".".join(name.split(".")[: i + 1]) for name in tree for i in range(name.count(".") + 1)}
    modules = {}
    for name in sorted(names):
        module = ModuleType(name, f"Double of {name}.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        vars(module).update(tree.get(name, {}))
        modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and child not in tree.get(parent, {}):
            setattr(modules[parent], child, module)
    return modules


def forget() -> None:
    """Drop everything that was imported from a double, and this package's modules that bind to it."""
    for name in list(sys.modules):
        if name.split(".")[0] in ROOTS or name == BACKEND or name.startswith(f"{BACKEND}."):
            del sys.modules[name]
    backends = importlib.import_module("hf_neuron_moe.backends")
    vars(backends).pop("neuron", None)
    for value in vars(backends).values():
        clear = getattr(value, "cache_clear", None)
        if callable(clear):
            clear()


def write_metadata(folder: Path, double: Double) -> None:
    """Distributions as ``importlib.metadata`` reads them."""
    versions = VERSIONS | {"nki-library": f"{double.release[0]}.{double.release[1]}.0"}
    versions |= {"torch-neuronx": double.plugin_version} if double.plugin_version else {}
    for name, version in versions.items():
        if name == "torch-neuronx" and not double.plugin:
            continue
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


@contextmanager
def installed(folder: Path, double: Double) -> Iterator[SimpleNamespace]:
    """Install a double for the duration of a ``with`` block; yields its modules by name."""
    write_metadata(folder, double)
    library = Library.of(double.release)
    for name in ("MXFP8MOEFwdConfig", "MXFP8MOEBwdConfig"):
        setattr(library.pair, name, variant(getattr(library.pair, name), double.records, double.without))
    record = checkpoint_record(double.layout)
    library.pair.MXFP8MOECheckpointConfig = variant(record, double.records, double.without)
    modules = build_modules({**framework_tree(double), **nkilib_tree(double, library)})
    environment = {
        "NEURON_PLATFORM_TARGET_OVERRIDE": double.target,
        "NEURON_LOGICAL_NC_CONFIG": str(double.lnc),
    }
    forget()
    with mock.patch.dict("os.environ", environment), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        importlib.invalidate_caches()
        sys.modules.update(modules)
        try:
            yield SimpleNamespace(double=double, modules=modules, library=library)
        finally:
            forget()
            importlib.invalidate_caches()
