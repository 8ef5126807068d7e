"""Options are checked when they are made."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from hf_neuron_moe import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "precision must be one of bf16, mxfp8, fp32, got 'fp16'"),
        ({"precision": "mxfp"}, "Did you mean 'mxfp8'"),
        ({"precision": None}, "got None"),
        (
            {"backend": "cuda"},
            r"backend must be one of auto, torch, neuron, nki-sim, got 'cuda'\. .*'torch' computes on",
        ),
        ({"weights": "kernels"}, "Did you mean 'kernel'"),
        ({"backend": "trn2"}, "reached by 'neuron'"),
        ({"backend": "nki-smi"}, "Did you mean 'nki-sim'"),
        ({"block_size": 100}, "block_size must be one of"),
        ({"block_size": 512.0}, "got 512.0"),
        ({"block_size": True}, "got True"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeuronMoEConfig(**options)


def test_round_trip_and_unknown_names() -> None:
    config = NeuronMoEConfig(precision="mxfp8", block_size=256)
    assert NeuronMoEConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"got 'precison'.*Did you mean 'precision'"):
        NeuronMoEConfig.from_dict({"precison": "bf16"})
    for options in (None, "precision", ["precision"]):
        with pytest.raises(ConfigError, match="options must be a mapping of option names to values, got "):
            NeuronMoEConfig.from_dict(options)  # type: ignore[arg-type]


def test_a_misspelt_keyword_names_the_near_miss() -> None:
    with pytest.raises(ConfigError, match=r"got 'precison'.*Did you mean 'precision'"):
        NeuronMoEConfig(precison="mxfp8")  # type: ignore[call-arg]


def test_copies_and_pickles() -> None:
    config = NeuronMoEConfig("mxfp8", block_size=128)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, precision="fp32").precision == "fp32"
