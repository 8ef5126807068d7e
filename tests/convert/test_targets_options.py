"""Which options go together, and that those that do not are refused with the reason before anything is written."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"scales": "packed"}, "scales must be left out with precision bf16"),
        ({"scale_rule": "neuron"}, "scale_rule must be left out with precision bf16"),
        ({"layout": "fused", "swizzle": True}, "swizzle must be off in fused layout"),
        ({"layout": "fused", "pad": True}, "pad must be off in fused layout"),
        ({"precision": "mxfp8", "layout": "fused", "scales": "packed"}, "scales must be compact in fused layout"),
        ({"precision": "mxfp8", "swizzle": False}, "swizzle must be on for MX in kernel layout"),
        ({"precision": "mxfp8", "scales": "compact"}, "scales must be packed or oversized"),
        ({"precision": "mxfp4", "layout": "fused"}, "layout must be kernel with mxfp4"),
        ({"precision": "mxfp4", "purpose": "training"}, "purpose must be inference with mxfp4"),
        ({"precision": "mxfp4", "purpose": "lora"}, "purpose must be inference with mxfp4"),
    ],
)
def test_senseless_combinations_are_refused(wish, message):
    with pytest.raises(ConfigError, match=message):
        ConvertOptions(**wish)


@pytest.mark.parametrize(
    ("wish", "hint"),
    [
        ({"precision": "mxpf8"}, "Did you mean 'mxfp8'"),
        ({"layout": "kernal"}, "Did you mean 'kernel'"),
        ({"scales": "pakced"}, "Did you mean 'packed'"),
        ({"scale_rule": "rciel"}, "Did you mean 'rceil'"),
        ({"purpose": "inferance"}, "Did you mean 'inference'"),
        ({"swizzle": 1}, "swizzle must be one of True, False"),
        ({"pad": "yes"}, "pad must be one of True, False"),
        ({"tp_degree": 0}, "tp_degree must be a positive number of ranks"),
        ({"tp_degree": True}, "tp_degree must be a positive number of ranks"),
        ({"max_shard_bytes": 1.5}, "max_shard_bytes must be a positive number of bytes"),
    ],
)
def test_unknown_values_are_refused_with_the_nearest_known_one(wish, hint):
    with pytest.raises(ConfigError, match=hint):
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
    ("family", "wish", "message"),
    [
        ("llama", {"precision": "mxfp4"}, "no kernel computes dense MLPs with FP4"),
        ("mixtral", {"swizzle": True}, "off for experts in bf16"),
        (
            "mixtral",
            {"precision": "mxfp8", "purpose": "inference"},
            r"a multiple of 512 \(hidden size\), got 64.*--pad",
        ),
        # Advice has to be possible: nothing trains with FP4.
        ("mixtral", {"precision": "mxfp4"}, r"a multiple of 512 \(hidden size\), got 64\. Use --pad\.$"),
        (
            "mixtral",
            {"precision": "mxfp8", "purpose": "inference", "pad": True, "scales": "oversized"},
            "packed or comp",
        ),
        ("llama", {"precision": "mxfp8", "purpose": "inference", "scales": "compact"}, "MLP kernels take no compact"),
        ("llama", {"tp_degree": 5}, "divisible among 5 tensor-parallel ranks, got 96.*or pad it with --pad"),
        ("llama", {"tp_degree": 97, "pad": True}, "divisible among 97 tensor-parallel ranks"),
        ("llama", {"precision": "mxfp8", "tp_degree": 2}, "a multiple of 32 for MXFP8, got 48.*--pad"),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_anything_is_written(family, wish, message, checkpoint, tmp_path):
    source = checkpoint(family)
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions(**wish))
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
