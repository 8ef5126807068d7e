"""Compact, oversized and packed scales: the documented rows, inverses and detection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats import (
    detect_scale_layout,
    oversized_to_packed,
    packed_to_oversized,
    scale_row_count,
    scale_rows,
    to_compact,
    to_oversized,
    to_packed,
)
from tests.refusals import refused

LEGAL_K = st.integers(1, 210).map(lambda n: 32 * n)


@pytest.mark.parametrize(
    ("K", "compact", "oversized", "packed"),
    [
        (256, 8, 64, 128),
        (512, 16, 128, 128),
        (1024, 32, 256, 128),
        (1152, 36, 288, 128),
        (2048, 64, 512, 128),
        (2176, 68, 544, 256),
        (4096, 128, 1024, 256),
        (5120, 160, 1280, 384),
        (6400, 200, 1600, 512),
        (12288, 384, 3072, 768),
    ],
)
def test_documented_sizes(K: int, compact: int, oversized: int, packed: int) -> None:
    rows = [scale_row_count(K, layout) for layout in ("compact", "oversized", "packed")]
    assert rows == [compact, oversized, packed]


def test_documented_rows() -> None:
    quadrants = [0, 1, 2, 3, 32, 33, 34, 35, 64, 65, 66, 67, 96, 97, 98, 99]
    assert scale_rows(512, "oversized").tolist() == quadrants
    packed = scale_rows(2560, "packed").tolist()
    assert packed[:16] == quadrants
    assert packed[16:32] == [row + 4 for row in quadrants]
    assert packed[64:80] == [row + 128 for row in quadrants]
    last = scale_rows(1408, "packed").tolist()[32:]
    assert last == [8, 9, 10, 11, 40, 41, 42, 43, 72, 73, 74, 75]


@given(K=LEGAL_K, F=st.integers(1, 4), batch=st.sampled_from([(), (3,)]))
def test_layouts_are_inverse(K: int, F: int, batch: tuple[int, ...]) -> None:
    compact = torch.randint(1, 256, (*batch, K // 32, F), dtype=torch.uint8, generator=torch.Generator().manual_seed(K))
    oversized, packed = to_oversized(compact), to_packed(compact)
    assert oversized.shape == (*batch, scale_row_count(K, "oversized"), F)
    assert packed.shape == (*batch, scale_row_count(K, "packed"), F)
    assert torch.equal(to_compact(oversized, K), compact)
    assert torch.equal(to_compact(packed, K), compact)
    assert torch.equal(oversized_to_packed(oversized), packed)
    assert torch.equal(packed_to_oversized(packed, K), oversized)
    # Everything else is 0: no byte was written twice or to a second place.
    assert int((oversized != 0).sum()) == int((packed != 0).sum()) == compact.numel()


@given(K=LEGAL_K)
def test_rows_equal_the_formula_and_fit(K: int) -> None:
    for i, (oversized, packed) in enumerate(zip(scale_rows(K, "oversized").tolist(), scale_rows(K, "packed").tolist())):
        t, r = divmod(i, 16)
        assert oversized == 32 * (i // 4) + i % 4 < K // 4
        assert packed == 128 * (t // 4) + 32 * (r // 4) + 4 * (t % 4) + r % 4 < scale_row_count(K, "packed")


def test_unused_rows_are_never_read() -> None:
    compact = torch.randint(0, 256, (44, 5), dtype=torch.uint8)
    for expand in (to_oversized, to_packed):
        expanded = expand(compact)
        garbage = torch.full_like(expanded, 77)
        used = scale_rows(1408, "oversized" if expand is to_oversized else "packed")
        garbage[used] = expanded[used]
        assert torch.equal(to_compact(garbage, 1408), compact)


@given(K=LEGAL_K)
def test_detection_rule(K: int) -> None:
    packed_rows = 128 * -(-K // 2048)
    expected = "packed" if packed_rows != K // 4 else "oversized"
    assert detect_scale_layout(packed_rows, K) == expected
    assert detect_scale_layout(K // 4, K) == "oversized"


def test_the_two_kernel_layouts_coincide_at_512() -> None:
    compact = torch.randint(0, 256, (16, 3), dtype=torch.uint8)
    assert torch.equal(to_oversized(compact), to_packed(compact))
    assert detect_scale_layout(128, 512) == "oversized"


def test_e8m0_dtype_has_the_same_bytes() -> None:
    compact = torch.randint(0, 256, (8, 3), dtype=torch.uint8)
    expanded = to_oversized(compact.view(torch.float8_e8m0fnu))
    assert expanded.dtype == torch.uint8
    assert torch.equal(to_compact(expanded.view(torch.float8_e8m0fnu), 256), compact)


def test_refusals() -> None:
    compact = torch.zeros(8, 3, dtype=torch.uint8)
    with refused(ShapeError, "rows of the scales", "expand them with to_oversized"):
        to_compact(compact, 256)
    with refused(ShapeError, "rows of the scales", got="63"):
        to_compact(torch.zeros(63, 3, dtype=torch.uint8), 256)
    with refused(ShapeError, "K", got="100"):
        detect_scale_layout(8, 100)
    with refused(ShapeError, "rows of the scales", got="64"):
        packed_to_oversized(to_oversized(compact), 256)
    with refused(DTypeError, "scales", got="float32"):
        to_oversized(compact.float())
    with refused(ShapeError, "scales.ndim - 1", "rows"):
        to_packed(compact[0])
    with refused(ConfigError, "layout", "Did you mean 'packed'"):
        scale_row_count(512, "pack")
