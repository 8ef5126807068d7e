"""Which options go together, and that those that do not are refused with the reason before anything is written."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, strategies as st

from hf_neuron_moe.convert import (
    LAYOUTS,
    PRECISIONS,
    PURPOSES,
    SCALE_LAYOUTS,
    SCALE_RULES,
    ConvertOptions,
    convert_checkpoint,
)
from hf_neuron_moe.errors import ConfigError, ConversionError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("wish", "argument", "says"),
    [
        ({"scales": "packed"}, "scales", "got 'packed'"),
        ({"scale_rule": "neuron"}, "scale_rule", ""),
        ({"layout": "fused", "swizzle": True}, "swizzle", "got True"),
        ({"layout": "fused", "pad": True}, "pad", ""),
        ({"precision": "mxfp8", "layout": "fused", "scales": "packed"}, "scales", "got 'packed'"),
        ({"precision": "mxfp8", "swizzle": False}, "swizzle", "got False"),
        ({"precision": "mxfp8", "scales": "compact"}, "scales", "got 'compact'"),
        ({"precision": "mxfp4", "layout": "fused"}, "layout", ""),
        ({"precision": "mxfp4", "purpose": "training"}, "purpose", "got 'training'"),
        ({"precision": "mxfp4", "purpose": "lora"}, "purpose", "got 'lora'"),
    ],
)
def test_senseless_combinations_are_refused(wish, argument, says):
    with refused(ConfigError, argument, says):
        ConvertOptions(**wish)


@pytest.mark.parametrize(
    ("wish", "argument", "says"),
    [
        ({"precision": "mxpf8"}, "precision", "Did you mean 'mxfp8'"),
        ({"layout": "kernal"}, "layout", "Did you mean 'kernel'"),
        ({"scales": "pakced"}, "scales", "Did you mean 'packed'"),
        ({"scale_rule": "rciel"}, "scale_rule", "Did you mean 'rceil'"),
        ({"purpose": "inferance"}, "purpose", "Did you mean 'inference'"),
        ({"swizzle": 1}, "swizzle", ""),
        ({"pad": "yes"}, "pad", ""),
        ({"tp_degree": 0}, "tp_degree", "got 0"),
        ({"tp_degree": True}, "tp_degree", "got True"),
        ({"max_shard_bytes": 1.5}, "max_shard_bytes", ""),
    ],
)
def test_unknown_values_are_refused_with_the_nearest_known_one(wish, argument, says):
    with refused(ConfigError, argument, says):
        ConvertOptions(**wish)


def test_what_is_left_out_is_what_the_kernels_take():
    bf16, mxfp8, mxfp4 = (ConvertOptions(precision) for precision in PRECISIONS)
    assert [options.purpose for options in (bf16, mxfp8, mxfp4)] == ["training", "training", "inference"]
    assert [options.rule for options in (mxfp8, mxfp4)] == ["neuron", "floor"]
    assert [options.swizzled for options in (bf16, mxfp8, mxfp4)] == [False, True, True]
    assert not ConvertOptions("mxfp8", "fused").swizzled
    # One bf16 orientation serves both directions; an MX operand cannot be transposed.
    assert bf16.orientations == ConvertOptions("mxfp8", purpose="inference").orientations == ("forward",)
    assert mxfp8.orientations == ConvertOptions("mxfp8", purpose="lora").orientations == ("forward", "backward")


@given(
    st.fixed_dictionaries(
        {
            "precision": st.sampled_from(PRECISIONS),
            "layout": st.sampled_from(LAYOUTS),
            "swizzle": st.sampled_from([None, True, False]),
            "scales": st.sampled_from([None, *SCALE_LAYOUTS]),
            "scale_rule": st.sampled_from([None, *SCALE_RULES]),
            "purpose": st.sampled_from([None, *PURPOSES]),
            "tp_degree": st.integers(1, 64),
            "pad": st.booleans(),
        }
    )
)
def test_options_that_are_accepted_survive_a_manifest(wish):
    """Accepted options are equal to what their own fields give again, and a refusal is a ConfigError, nothing else."""
    try:
        options = ConvertOptions(**wish)
    except ConfigError:
        return
    fields = dataclasses.asdict(options)
    assert ConvertOptions(**fields) == options
    assert all(fields[name] == value for name, value in wish.items() if name != "purpose" or value is not None)


def test_every_purpose_and_layout_is_possible_in_mxfp8_and_bf16():
    for precision, layout, purpose in itertools.product(("bf16", "mxfp8"), LAYOUTS, PURPOSES):
        assert ConvertOptions(precision, layout, purpose=purpose).purpose == purpose


@pytest.mark.parametrize(
    ("family", "wish", "argument", "says"),
    [
        ("llama", {"precision": "mxfp4"}, "precision mxfp4", ""),
        ("mixtral", {"swizzle": True}, "swizzle of model.layers.0.mlp.experts.gate_up_proj", ""),
        (
            "mixtral",
            {"precision": "mxfp8", "purpose": "inference"},
            "hidden size of model.layers.0.mlp.experts.gate_up_proj, for moe_cte's MX weights,",
            "got 64.*--pad",
        ),
        # Advice has to be possible: nothing trains with FP4.
        (
            "mixtral",
            {"precision": "mxfp4"},
            "hidden size of model.layers.0.mlp.experts.gate_up_proj, for moe_cte's MX weights,",
            r"got 64\. Use --pad\.$",
        ),
        (
            "mixtral",
            {"precision": "mxfp8", "purpose": "inference", "pad": True, "scales": "oversized"},
            "option scales of model.layers.0.mlp.experts.gate_up_proj, for moe_cte's MX weights,",
            "got oversized",
        ),
        (
            "llama",
            {"precision": "mxfp8", "purpose": "inference", "scales": "compact"},
            "scales of model.layers.0.mlp.gate_up_proj.weight",
            "",
        ),
        (
            "llama",
            {"tp_degree": 5},
            "intermediate size of model.layers.0.mlp.gate_up_proj.weight",
            "got 96.*or pad it with --pad",
        ),
        (
            "llama",
            {"tp_degree": 97, "pad": True},
            "intermediate size of model.layers.0.mlp.gate_up_proj.weight",
            "got 96",
        ),
        (
            "llama",
            {"precision": "mxfp8", "tp_degree": 2},
            "contraction size of model.layers.0.mlp.down_proj.weight",
            "got 48.*--pad",
        ),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_anything_is_written(
    family, wish, argument, says, checkpoint, tmp_path
):
    source = checkpoint(family)
    with refused(ConversionError, argument, says):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions(**wish))
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
