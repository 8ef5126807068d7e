"""Options are checked when they are made."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from hf_neuron_moe import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        ({"precision": "fp16"}, "precision", "got 'fp16'"),
        ({"precision": "mxfp"}, "precision", "Did you mean 'mxfp8'"),
        ({"precision": None}, "precision", r"got None\. Choose one of these\.$"),
        (
            {"precision": "mxfp4"},
            "precision",
            r"these\. mxfp4 is for converted .*`hf-neuron-moe convert --precision mxfp4`",
        ),
        ({"precision": {"*": "bf16", "a": "mxfp4"}}, "precision['a']", "mxfp4 is for converted checkpoints only"),
        ({"precision": "plan.yaml"}, "precision", r"Pass what yaml\.safe_load reads from the file\.$"),
        ({"precision": "MXFP8"}, "precision", "Did you mean 'mxfp8'"),
        ({"precision": "MXFP4"}, "precision", "mxfp4 is for converted checkpoints only"),
        ({"precision": "float32"}, "precision", "Did you mean 'fp32'"),
        ({"precision": torch.bfloat16}, "precision", r"got torch.bfloat16\. .*Did you mean 'bf16'"),
        (
            {"backend": "cuda"},
            "backend",
            r"got 'cuda'\. .*'torch' computes on",
        ),
        ({"weights": "kernels"}, "weights", "Did you mean 'kernel'"),
        ({"backend": "trn2"}, "backend", "reached by 'neuron'"),
        ({"backend": "Trainium"}, "backend", "reached by 'neuron'"),
        ({"backend": "nki-smi"}, "backend", "Did you mean 'nki-sim'"),
        ({"block_size": 100}, "block_size", "got 100"),
        ({"block_size": 512.0}, "block_size", "got 512.0"),
        ({"block_size": True}, "block_size", "got True"),
    ],
)
def test_refused(options: dict[str, Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        NeuronMoEConfig(**options)


def test_round_trip_and_unknown_names() -> None:
    config = NeuronMoEConfig(precision="mxfp8", block_size=256)
    assert NeuronMoEConfig.from_dict(config.to_dict()) == config
    with refused(ConfigError, "option name", "Did you mean 'precision'", got="'precison'"):
        NeuronMoEConfig.from_dict({"precison": "bf16"})
    for options in (None, "precision", ["precision"]):
        with refused(ConfigError, "options"):
            NeuronMoEConfig.from_dict(options)  # type: ignore[arg-type]


def test_a_misspelt_keyword_names_the_near_miss() -> None:
    with refused(ConfigError, "option name", "Did you mean 'precision'", got="'precison'"):
        NeuronMoEConfig(precison="mxfp8")  # type: ignore[call-arg]


def test_copies_and_pickles() -> None:
    config = NeuronMoEConfig("mxfp8", block_size=128)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, precision="fp32").precision == "fp32"
