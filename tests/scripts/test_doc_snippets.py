"""The documents' examples run as printed, their commands exist with their options, and their links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM

from hf_neuron_moe import NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.cli.main import application
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import BackendUnavailableError
from tests.tiny_models import tiny_model, tokens

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])
SELF_CONTAINED = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("get-started", "train", "how-to", "concepts", "reference", "integrations", "explore", "convert")
    ),
)
"""Pages whose examples need nothing but what they import. docs/kernels.md has a test of its own, and those of
docs/distributed.md need several processes: tests/distributed does what they show."""


def text_of(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def snippets(page: Path | str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.*?) *$", prose, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


class Rows(Dataset):
    ids = tokens(2, 8)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_are_python_without_left_out_arguments(page: Path) -> None:
    for number, snippet in enumerate(snippets(page), start=1):
        compile(snippet, f"{page.name}, example {number}", "exec")
        assert not re.search(r"[(,=] *\.\.\.[,)]", snippet), f"{page.name}, example {number}: ... for an argument"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(snippets("docs/training.md"))))
def test_the_examples_about_training_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model, and rows of it, where the page says `model` and `data`; and a layer and its input."""
    snippet = snippets("docs/training.md")[number]
    monkeypatch.chdir(tmp_path)
    model = tiny_model("qwen2_moe" if "shared_expert" in snippet else "mixtral")
    if "routing_replay_stats" in snippet:
        patch_model(model)
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    given = {"model": model, "data": Rows(), "layer": torch.nn.Linear(4, 4), "hidden": hidden, "__name__": "example"}
    exec(compile(snippet, f"training.md, example {number + 1}", "exec"), given)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in SELF_CONTAINED for number in range(len(snippets(page)))]
)
def test_self_contained_examples_run_as_printed(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by itself, as a reader would paste it; what a page shows as its output is what it prints."""
    snippet = snippets(page)[number]
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("example")  # a real one: the Trainer pickles its arguments
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(snippet, f"{page}, example {number + 1}", "exec"), module.__dict__)
    printed = capsys.readouterr().out
    shown = re.search(re.escape(snippet) + r"```\n\n```text\n(.*?)```", text_of(page), flags=re.DOTALL)
    if shown and page != "README.md":  # test_readme.py compares that one
        assert shown[1] == printed


def test_the_examples_about_loading_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a conversion at DST. The two about Trn3 raise the error that the page about backends promises."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).bfloat16().save_pretrained("SRC")
    for name, precision in (("DST", "mxfp8"), ("BF16", "bf16")):
        convert_checkpoint(Path("SRC"), Path(name), ConvertOptions(precision=precision))
    load, set_backend, patch, adapt = snippets("docs/loading.md")
    for folder, example in (("DST", set_backend), ("BF16", patch), ("DST", adapt)):
        given: dict[str, Any] = {"__name__": "example"}
        exec(compile(load.replace("DST", folder), "loading.md, example 1", "exec"), given)
        if example is not adapt:
            exec(set_backend.splitlines()[0], given)  # its imports
        with nullcontext() if example is adapt else pytest.raises(BackendUnavailableError):
            exec(compile(example, "loading.md", "exec"), given)


def test_the_example_about_weight_copies_runs() -> None:
    (snippet,) = snippets("docs/neuron.md")
    model = tiny_model("mixtral")
    patch_model(model)
    averages = [param.detach() * 0.5 for param in model.parameters()]
    exec(compile(snippet, "neuron.md", "exec"), {"model": model, "averages": averages})
    assert all(torch.equal(param, average) for param, average in zip(model.parameters(), averages, strict=True))


def commands(page: Path | str) -> Iterator[list[str]]:
    """Yield the words of every command: whole lines, and code within text."""
    text = re.sub(r"\\\n *", " ", text_of(page))
    programs = "hf-neuron-moe [a-z]|python |torchrun |accelerate launch |bash "
    lines = re.findall(rf"^ *(?:[A-Z_]+=\S+ +)*((?:{programs})[^`\n]*)$", text, re.MULTILINE)
    lines += re.findall(r"`(hf-neuron-moe [a-z][^`]*)`", text.replace("\n", " "))
    for line in lines:
        yield from (shlex.split(part) for part in re.sub(r" +#.*", "", line).split("&&"))


@pytest.fixture(scope="module")
def program() -> Any:
    return typer.main.get_command(application())


@pytest.fixture(scope="module")
def script_options() -> set[str]:
    """Options of scripts as their sources spell them, and the fields of dataclasses that become options."""
    files = [path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    files += [ROOT / "hf_neuron_moe" / "parity.py", *(ROOT / "hf_neuron_moe" / "finetune").rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"--([a-z][\w-]*)", source)) | set(re.findall(r"^    (\w+): ", source, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(NeuronMoETrainingArguments)}
    launchers = {"config_file", "nproc_per_node", "fast"}
    return {name.replace("-", "_") for name in named | fields | launchers}


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"-\w|--\w", word)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_exist_with_their_options(page: Path, program: Any, script_options: set[str]) -> None:
    """Held against the program's own table, or by name against the sources of scripts; nothing runs."""
    for command in commands(page):
        line, free, known = " ".join(command), True, {"-m", "-c"}
        if command[0] == "hf-neuron-moe":
            assert command[1] in program.commands, line
            verb = program.commands[command[1]]
            free = bool(verb.context_settings.get("allow_extra_args"))
            known = {"--help"}.union(*({*option.opts, *option.secondary_opts} for option in verb.params))
        unknown = options_of(command[1:]) - known
        if free:
            unknown = {option for option in unknown if option.lstrip("-").replace("-", "_") not in script_options}
        assert not unknown, line
        files = [
            word for word in command if re.match(r"(scripts|benchmarks|configs|examples|data|tests)/[\w./-]+$", word)
        ]
        assert all((ROOT / name).exists() for name in files), line


def test_commands_are_found_in_every_form() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 90
    assert {"hf-neuron-moe", "python", "torchrun", "accelerate", "bash"} == {command[0] for command in found}


def test_blocks_of_yaml_and_json_can_be_read() -> None:
    blocks = [
        block for page in PAGES for block in re.findall(r"^```(?:yaml|json)\n(.*?)^```", text_of(page), re.S | re.M)
    ]
    assert blocks and all(yaml.safe_load(block) for block in blocks)


def test_every_page_with_examples_is_run() -> None:
    with_examples = {page.relative_to(ROOT).as_posix() for page in PAGES if snippets(page)}
    others = {f"docs/{name}.md" for name in ("training", "loading", "neuron", "kernels", "distributed")}
    assert with_examples == {*SELF_CONTAINED} | others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith(("http:", "https:"))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_index_leads_to_every_page() -> None:
    index = text_of("docs/index.md")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)[^)]*\)", index))
