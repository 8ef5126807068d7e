"""Which wrapper fits which installed function is read off its signature, and the launch off the toolchain."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_neuron_moe.backends.neuron import adapter, nki_kernels
from hf_neuron_moe.backends.neuron.adapter import Adapter, signature_of
from hf_neuron_moe.backends.neuron.gates import FURTHER_ARGUMENTS
from hf_neuron_moe.backends.neuron.generations import FUNCTIONS
from hf_neuron_moe.backends.neuron.launch import Launcher
from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object
from hf_neuron_moe.backends.neuron.versions import Toolchain
from hf_neuron_moe.errors import BackendUnavailableError
from tests.refusals import refused


def function_with(needed: frozenset[str]) -> Callable[..., Any]:
    """A function with exactly these arguments."""

    def function(**arguments: Any) -> dict[str, Any]:
        return arguments

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in sorted(needed)]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


@pytest.fixture
def nkilib(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Make a function the installed ``blockwise_mm_bwd``."""

    def put(function: Any) -> None:
        path = ""
        for part in ["nkilib", "experimental", "moe", "bwd", "blockwise_mm_backward"]:
            path = f"{path}.{part}".lstrip(".")
            made = ModuleType(path)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, path, made)
        made.blockwise_mm_bwd = function  # type: ignore[attr-defined]

    return put


def test_a_function_that_is_missing_or_hides_its_arguments_is_not_called(nkilib: Callable[[Any], None]) -> None:
    nkilib(None)
    assert Adapter().unsupported_reason("moe_backward") == "the installed nkilib has no blockwise_mm_bwd"
    nkilib(lambda *arguments, **options: None)
    assert "cannot be read" in str(Adapter().unsupported_reason("moe_backward"))


def test_signatures_are_seen_through_jit_objects() -> None:
    class Jitted:
        def __init__(self, func: Any) -> None:
            self.func = func

        def __call__(self, *arguments: Any, **options: Any) -> None: ...

    def kernel(a: int, b: int = 2) -> None: ...

    assert str(signature_of(Jitted(kernel))) == str(inspect.signature(kernel))

    class Other:
        def __init__(self, body: Any) -> None:
            self.compiled, self.body = {}, body

        def __call__(self, *arguments: Any, **options: Any) -> None: ...

    assert str(signature_of(Other(kernel))) == str(inspect.signature(kernel))
    assert signature_of(Other(3)) is None


def test_an_unknown_home_of_an_object_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nkilib", None)
    with refused(BackendUnavailableError, "nkilib"):
        nkilib_object("BackwardSkipMode")


def test_an_object_that_moved_is_found_beside_its_old_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nkilib" / "experimental" / "moe_mxfp8" / "training"
    folder.mkdir(parents=True)
    for part in (folder, *folder.parents[:3]):
        (part / "__init__.py").touch()
    (folder / "forward.py").write_text("def blockwise_mm_fwd_mxfp8(): ...", encoding="utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] == "nkilib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = nkilib_object("blockwise_mm_fwd_mxfp8")
    assert found.__module__ == "nkilib.experimental.moe_mxfp8.training.forward"
    with pytest.raises(BackendUnavailableError):
        nkilib_object("blockwise_mm_bwd_mxfp8")
    for name in [name for name in sys.modules if name.split(".")[0] == "nkilib"]:
        del sys.modules[name]  # for good: what monkeypatch deletes it puts back


def test_wrappers_pass_what_the_table_says_and_close_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of arguments is what the adapter checks; a wrapper that passed more would fail on the device."""
    calls: dict[str, set[str]] = {}

    def recorder(name: str) -> Any:
        def record(*arguments: Any, **options: Any) -> Any:
            assert not arguments or name not in functions, "nkilib's functions are called by keyword"
            if name in functions:
                calls.setdefault(name, set()).update(options)
                return SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
            return SimpleNamespace()

        return record

    class Anything:
        def __init__(self, name: str) -> None:
            self.call = recorder(name)
            if name in functions:  # of which nothing is known but the arguments
                self.func = function_with(current.passed)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return self.call(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return name

    functions = {generation.function or function for function, found in FUNCTIONS.values() for generation in found}
    language = ModuleType("nki.language")
    language.__dict__.update(bfloat16="bf16", shared_hbm="shared", ndarray=lambda *a, **k: SimpleNamespace())
    nki = ModuleType("nki")
    nki.__dict__.update(jit=lambda kernel: kernel, language=language, __path__=[])
    monkeypatch.setitem(sys.modules, "nki", nki)
    monkeypatch.setitem(sys.modules, "nki.language", language)
    monkeypatch.setattr("hf_neuron_moe.backends.neuron.nkilib_objects.find_object", Anything)
    operand, current = SimpleNamespace(shape=(256, 256)), FUNCTIONS["moe_forward"][1][0]
    for need, (function, generations) in FUNCTIONS.items():
        for current in generations:
            path = f"{nki_kernels.__name__}.{current.module}"
            module = importlib.reload(importlib.import_module(path))
            wrappers = [
                kernel
                for kernel in vars(module).values()
                if inspect.isfunction(kernel) and kernel.__module__ == path and kernel.__name__ != "options"
            ]
            assert wrappers, f"{path} has no kernel for {need}"
            further = FURTHER_ARGUMENTS.get(need, frozenset())  # of gates other than SwiGLU
            plain = [kernel for kernel in wrappers if not kernel.__name__.endswith(("gated", "clamped"))]
            for kernels, known in ((plain, frozenset()), (wrappers, further)):
                calls.clear()
                for kernel in kernels:
                    assert kernel.__closure__ is None
                    names = inspect.signature(kernel).parameters
                    kernel(**{name: 0 if name == "activation" else operand for name in names})  # a place in a tuple
                passed = calls[current.function or function]
                assert current.passed <= passed <= current.passed | known, (need, current.name)
            sys.modules.pop(path)


def test_kernels_are_in_the_package() -> None:
    files = {path.stem for path in Path(nki_kernels.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {generation.module for _, found in FUNCTIONS.values() for generation in found}
    assert adapter.FUNCTIONS is FUNCTIONS


class Kernel:
    """Remembers the grid and the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, dict[str, Any]]] = []
        self.result: Any = (torch.ones(1),)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(**arguments: Any) -> Any:
            self.launches.append((grid, arguments))
            return self.result

        return launch


@pytest.mark.parametrize("home", ["torch_neuronx", "torch_neuronx.nki_hop"])
def test_the_grid_is_the_lnc_and_sits_on_the_wrapped_caller(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wrapped = Kernel(), Kernel()
    plugin = ModuleType(home)
    plugin.wrap_nki = lambda found: wrapped if found is kernel else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home, plugin)
    launch = Launcher(Toolchain(ModuleType("nki"), ModuleType("nkilib"), plugin), lnc=2)
    turned = torch.arange(6).view(2, 3).t()
    launch(kernel, x=turned, scale=None, size=3)
    [(grid, arguments)] = wrapped.launches
    assert grid == (2,) and set(arguments) == {"x", "size"} and not kernel.launches
    assert arguments["x"].is_contiguous() and torch.equal(arguments["x"], turned)


def test_the_simulator_gets_the_same_call() -> None:
    kernel = Kernel()
    nki = ModuleType("nki")
    nki.simulate = lambda launched: launched  # type: ignore[attr-defined]
    launch = Launcher(Toolchain(nki, ModuleType("nkilib"), None), lnc=1)
    assert torch.equal(launch(kernel, x=torch.nn.Parameter(torch.ones(2)))[0], torch.ones(1))
    assert kernel.launches[0][0] == 1
    assert kernel.launches[0][1]["x"].numpy().tolist() == [1, 1], "NumPy takes no tensor that requires gradients"


def test_a_kernel_that_returns_nothing_is_refused() -> None:
    kernel = Kernel()
    kernel.result = None
    launch = Launcher(Toolchain(ModuleType("nki"), ModuleType("nkilib"), ModuleType("torch_neuronx")), lnc=2)
    with refused(BackendUnavailableError, "Kernel", got="None"):
        launch(kernel)
