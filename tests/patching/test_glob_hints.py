"""A glob that matches nothing is answered with one that does, and is near what was written."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given, strategies as st
from torch import nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.patching.globs import suggest
from tests.refusals import refused
from tests.tiny_models import tiny_model

BLOCKS = [(f"model.layers.{layer}.mlp.{part}",) for layer in range(12) for part in ("experts", "shared_expert")]


@pytest.mark.parametrize(
    ("written", "offered"),
    [
        ("model.layer.0.*", "model.layers.0.*"),  # a level misspelt
        ("model.layers.0", "model.layers.0.*"),  # the layer, for what is in it
        ("layers.*.mlp.experts", "*.layers.*.mlp.experts"),  # the front left out
        ("layer.3", "*.layers.3.*"),  # both, and misspelt
        ("expert", "*.experts"),
        ("model.layers.*.mlp.shared_experts", "model.layers.*.mlp.shared_expert"),
        ("model.layers.0.mlp.expers", "model.layers.0.mlp.experts"),
        ("lm_head", None),
        ("99", None),  # another number is not what was meant
        ("model.layers.99.mlp.experts", "model.layers.9.mlp.experts"),  # no such layer: the nearest whole name
    ],
)
def test_the_offered_glob(written, offered):
    assert suggest(written, BLOCKS) == offered


@given(st.text("model.layers0123*[]?xp_", max_size=24))
def test_whatever_is_offered_matches_a_block(written):
    offered = suggest(written, BLOCKS)
    assert offered is None or any(fnmatch.filter(names, offered) for names in BLOCKS)


def test_the_message_says_how_much_the_offered_glob_matches():
    with refused(ConfigError, "exclude", r"Did you mean 'model.layers.0.\*', which matches 1 of"):
        patch_model(tiny_model("llama"), exclude="model.layer.0.*")
    with refused(ConfigError, "include", "Blocks are named like 'model", got="'q_proj'"):
        patch_model(tiny_model("llama"), include="q_proj")
    with refused(ConfigError, "include", "Remove it: the model has no such blocks"):
        patch_model(nn.Sequential(nn.Linear(2, 2)), include="mlp")
