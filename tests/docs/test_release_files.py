"""The files about the project agree with the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hf_neuron_moe
from hf_neuron_moe.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.partition("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in pinned}


def test_the_constraints_satisfy_every_range() -> None:
    pinned, extras = constraints(), PROJECT["optional-dependencies"]
    ranges = list(PROJECT["dependencies"])
    ranges += [line for name, lines in extras.items() if name != "neuron" for line in lines]  # AWS's wheels
    for requirement in map(Requirement, ranges):
        if requirement.name == PROJECT["name"]:
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert version in requirement.specifier, f"{requirement}, constraints.txt has {version}"


def test_the_constraints_name_public_versions_only() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert " @ " not in text and "file:" not in text and not re.search(r"==.*\+", text)
    assert all(re.fullmatch(r"(#.*)|([A-Za-z0-9._-]+==[\w.!]+)", line) for line in text.splitlines())


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["title"] == PROJECT["name"]
    assert citation["version"] == hf_neuron_moe.__version__ and citation["license"] == PROJECT["license"]
    assert all(entry.keys() >= {"type", "title", "authors", "url"} for entry in citation["references"])


def test_the_changelog_names_every_command_and_the_version_to_come() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog and hf_neuron_moe.__version__ in changelog
    assert [command for command in COMMANDS if not re.search(rf"[`\s]{command}\b", changelog)] == []


def test_continuous_integration_runs_the_developers_command() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in commands and (ROOT / ".ci" / "run").is_file()
    assert workflow["permissions"] == {"contents": "read"}


def test_the_issue_templates_are_forms() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 4
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= form.keys(), path.name
        assert all(part["attributes"]["label"] for part in form.get("body", ()))


def test_the_image_copies_what_it_installs() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert set(copied) == allowed and all((ROOT / name).exists() for name in copied)
    assert any("torch==2.13.0" in line for line in lines) and lines[-1].startswith("CMD")


def test_the_status_names_the_pythons_that_the_tests_ran_on() -> None:
    (ran,) = re.findall(r"tests passed: Python (3\.\d+),", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    asked = " and ".join(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    status = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    assert f"All of them on {ran}." in status
    assert f"The workflow file asks for Python {asked}, and has not run." in status


def test_names_that_are_placeholders_on_pypi_are_installed_from_one_index() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    commands = [line.partition("#")[0] for line in lines if line.lstrip().startswith("pip install")]
    neuron = [line for line in commands if re.search(r"\b(nki|neuronx-cc|torch-neuronx)\b", line)]
    assert neuron and all(" --index-url " in line for line in neuron), neuron
    assert len(commands) > 5 and not any("--extra-index-url" in line for line in commands)
