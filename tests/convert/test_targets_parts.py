"""Ranks, padding and pieces of any shape: every value has one place, and comes back from it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from hf_neuron_moe.convert import ConvertOptions
from hf_neuron_moe.convert.io.source import Encoding, SourceTensor
from hf_neuron_moe.convert.layout.orientations import StoredForm, stored_forms
from hf_neuron_moe.convert.layout.relayout import Scratch, read_bytes, restore, scratch_bytes, store
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight, Part, codes_kept, part_of
from hf_neuron_moe.convert.manifest import Piece, WrittenTensor
from hf_neuron_moe.errors import ConversionError, SourceDamageError
from hf_neuron_moe.formats import fake_quantize_mx, quantize_mx, unswizzle
from hf_neuron_moe.formats.layouts import gate_up_interleaved_to_kernel
from tests.refusals import refused

SIZES = st.integers(1, 40)
CODED = (("codes", "F8_E4M3", (4, 64)), ("scales", "U8", (4, 2)))


def weight_of(role: str, hidden: int, inner: int, cuts: list[int], experts: int = 0) -> FusedWeight:
    """A weight whose rows come from one source tensor per cut (and expert); expert 0 means a dense one."""
    rows, columns = (2 * inner, hidden) if role == "gate_up_proj" else (hidden, inner)
    edges = sorted({0, rows, *(cut % rows for cut in cuts)})
    pieces = tuple(
        Piece(f"{expert}.{start}", "file", "BF16", (stop - start, columns), expert, start)
        for expert in (range(experts) if experts else (None,))
        for start, stop in itertools.pairwise(edges)
    )
    shape = (experts, rows, columns) if experts else (rows, columns)
    return FusedWeight(f"mlp.{role}", shape, pieces)


def test_a_rank_without_values_is_refused_with_padding_too():
    weight = weight_of("down_proj", 8, 4, [])
    with refused(ConversionError, "intermediate size of mlp.down_proj", where="convert") as caught:
        stored_forms(weight, ConvertOptions("bf16", "kernel", tp_degree=5, pad=True), 0)
    assert "--pad" not in str(caught.value), "which is no help, and here already"


def test_tensors_of_one_buffer_are_aligned():
    shapes = [((3,), torch.uint8), ((2,), torch.int32), ((5,), torch.uint8), ((2, 3), torch.bfloat16)]
    tensors = Scratch(4 * 64).tensors(shapes)
    assert [tensor.data_ptr() % tensor.itemsize for tensor in tensors] == [0, 0, 0, 0]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2], [3]]


def test_codes_are_kept_where_all_pieces_are_such_codes():
    codes, scales = (SourceTensor(f"{n}", "file", dtype, shape) for n, dtype, shape in CODED)
    encoding = Encoding(codes, scales, (1, 32))
    pieces = [Piece(name, "file", "BF16", (4, 64)) for name in ("gate", "up")]
    assert codes_kept(pieces, dict.fromkeys(("gate", "up"), encoding)) == "mxfp8"
    for name in ("gate", "up"):
        assert codes_kept(pieces, {name: encoding}) == ""
    assert codes_kept(pieces, {"gate": encoding, "up": replace(encoding, transposed=True)}) == ""
    mxfp4 = replace(encoding, codes=replace(encoding.codes, dtype="U8"))
    assert codes_kept(pieces, {"gate": encoding, "up": mxfp4}) == ""


@given(
    st.sampled_from(["gate_up_proj", "down_proj"]), SIZES, SIZES, st.lists(SIZES), st.integers(1, 5), st.integers(1, 9)
)
def test_every_value_has_one_place_on_one_rank_and_the_rest_is_zeros(role, hidden, inner, cuts, ranks, step):
    weight = weight_of(role, hidden, inner, cuts)
    padded = None if step == 1 else lambda axis, size: -(-size // step) * step
    try:
        parts = [part_of(weight, rank, ranks, padded) for rank in range(ranks)]
    except ConversionError:
        assert (inner % ranks and padded is None) or -(-inner // ranks) * (ranks - 1) >= inner
        return
    whole = torch.arange(1.0, weight.shape[0] * weight.shape[1] + 1).view(weight.shape)
    placed = []
    for part in parts:
        matrix = torch.zeros(part.shape)
        for piece in weight.pieces:
            for block in part.blocks(piece.rows):
                values = whole[piece.rows][block.rows, block.columns]
                place = matrix[block.row : block.row + len(values), : values.shape[1]]
                assert not place.any(), "two values in one place"
                place.copy_(values)
        placed.append(matrix)
        zeros = part.padding
        assert matrix.count_nonzero() == (hidden * (part.stop - part.start)) * (2 if part.gate_up else 1)
        assert (
            zeros.get("H", 0) == part.padded_hidden - hidden
            and part.width - zeros.get("I", 0) == part.stop - part.start
        )
    assert torch.equal(torch.cat([m[m != 0] for m in placed]).sort().values, whole.flatten())
    joined = _join(placed, parts)
    assert torch.equal(joined, whole)


def _join(matrices: list[torch.Tensor], parts: list[Part]) -> torch.Tensor:
    """Put ranks together as one reads it in a paper: gate rows of all ranks, then up rows; or columns of all ranks."""
    if not parts[0].gate_up:
        return torch.cat([m[: p.hidden, : p.stop - p.start] for m, p in zip(matrices, parts)], dim=1)
    halves = [[m[h * p.width :][: p.stop - p.start, : p.hidden] for m, p in zip(matrices, parts)] for h in (0, 1)]
    return torch.cat([torch.cat(half) for half in halves])


def run(
    weight: FusedWeight, options: ConvertOptions, source: dict[str, torch.Tensor], **how: str
) -> tuple[list[WrittenTensor], dict[str, torch.Tensor], Counter[str]]:
    """Store all ranks of a weight: descriptions, tensors by name, and counts of rounded values."""

    def read(piece: Piece, expert: int | None, rows: slice) -> torch.Tensor:
        tensor = source[piece.source] if expert is None else source[piece.source][expert]
        assert len(tensor[rows]) == rows.stop - rows.start > 0
        assert tensor[rows].nbytes <= read_bytes(piece)
        return tensor[rows].clone()

    written: list[WrittenTensor] = []
    made: dict[str, torch.Tensor] = {}
    rounded: Counter[str] = Counter()
    for rank in range(options.tp_degree) if options.tp_degree > 1 else (None,):
        forms: tuple[StoredForm, ...] = stored_forms(weight, options, rank)
        parts: list[list[torch.Tensor]] = [[] for _ in forms]
        scratch = Scratch(scratch_bytes(weight, forms))
        for tensors in store(weight, forms, read, scratch, rounded, **how):
            for place, tensor in zip(parts, tensors, strict=True):
                place.append(tensor.clone())
        for form, place in zip(forms, parts):
            tensor = form.written(weight.name)
            written.append(tensor)
            made[tensor.name] = torch.stack(place) if weight.has_experts else place[0]
            assert made[tensor.name].shape == form.shape
    return written, made, rounded


@settings(max_examples=60)
@given(st.data())
def test_what_is_stored_comes_back_whatever_the_pieces_and_options_are(data):
    draw = data.draw
    precision = draw(st.sampled_from(["bf16", "mxfp8", "mxfp4"]))
    role, experts = draw(st.sampled_from(["gate_up_proj", "down_proj"])), draw(st.integers(0, 3))
    multiple = 1 if precision == "bf16" else 32
    options = ConvertOptions(
        precision,
        "kernel" if precision == "mxfp4" else draw(st.sampled_from(["fused", "kernel"])),
        purpose=draw(st.sampled_from(["inference"] if precision == "mxfp4" else ["inference", "training"])),
        tp_degree=draw(st.integers(1, 3)),
    )
    options = replace(options, pad=options.layout == "kernel" and draw(st.booleans()))
    hidden, inner = draw(st.integers(1, 5)) * multiple, draw(st.integers(1, 5)) * multiple * options.tp_degree
    weight = weight_of(role, hidden, inner, draw(st.lists(st.integers(0, 200), max_size=3)), experts)
    fused = draw(st.booleans()) and experts
    shape = weight.shape
    if fused:
        transposed = draw(st.booleans())
        on_disk = (shape[0], *shape[:0:-1]) if transposed else shape
        interleaved = transposed and role == "gate_up_proj" and draw(st.booleans())
        weight = replace(weight, pieces=(Piece("all", "file", "BF16", on_disk, None, 0, transposed, interleaved),))
    source = {piece.source: torch.randn(piece.shape).bfloat16() for piece in weight.pieces}
    try:
        written, made, rounded = run(weight, options, source)
    except ConversionError:
        words = options.quantized and options.layout == "kernel" and options.purpose == "inference"
        assume(not (words and not options.pad))  # H is no multiple of 512
        raise
    assert not rounded.total()
    for piece in weight.pieces:

        def read(index: int, expert: int | None) -> torch.Tensor:
            tensor = made[written[index].name]
            return tensor if expert is None else tensor[expert]

        back = restore(piece, written, read)
        assert back.shape == piece.shape and back.dtype == torch.bfloat16
        original = source[piece.source]
        stays = precision == "bf16" or (precision == "mxfp4" and not experts)
        if stays:
            assert torch.equal(back, original)
        else:
            # e4m3 is within 2**-4 of the value and of the block's grid, e2m1 within a quarter or half the grid's step.
            bound = {"mxfp8": 2**-3, "mxfp4": 0.5}[precision]
            assert (back - original).norm() <= bound * original.norm()
            assert not torch.equal(back, torch.zeros_like(back))


@pytest.mark.parametrize("read_at_a_time", [None, 1, 1000])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("role", ["gate_up_proj", "down_proj"])
def test_transposed_sources_are_stored_like_others(role, transposed, read_at_a_time, monkeypatch):
    if read_at_a_time:
        monkeypatch.setattr("hf_neuron_moe.convert.layout.relayout.READ_BYTES", read_at_a_time)
    matrix = torch.randn(3, 64, 96).bfloat16()
    on_disk = matrix.transpose(1, 2).contiguous() if transposed else matrix
    weight = FusedWeight(
        f"x.{role}", (3, 64, 96), (Piece("w", "f", "BF16", tuple(on_disk.shape), None, 0, transposed),)
    )
    for options in (
        ConvertOptions("bf16", "fused"),
        ConvertOptions("bf16", "kernel"),
        ConvertOptions("mxfp8", "fused"),
    ):
        written, made, _ = run(weight, options, {"w": on_disk})
        if options.quantized:
            mx = [quantize_mx(expert) for expert in matrix]
            values = torch.stack([unswizzle(expert.codes) for expert in mx])
            assert torch.equal(made[f"x.{role}_scale"], torch.stack([expert.scales for expert in mx]))
        else:
            values = matrix.transpose(1, 2) if options.layout == "kernel" else matrix
        assert torch.equal(made[f"x.{role}"], values)
        back = restore(weight.pieces[0], written, lambda index, expert, w=written, m=made: m[w[index].name][expert])
        wanted = fake_quantize_mx(on_disk, 1 if transposed else 2).bfloat16() if options.quantized else on_disk
        assert torch.equal(back, wanted)


@pytest.mark.parametrize("read_at_a_time", [None, 1000])
def test_interleaved_sources_are_stored_gate_first(read_at_a_time, monkeypatch):
    """gpt-oss's ``[E, H, 2I]``: even columns gate, odd ones up. Every source row is read once."""
    if read_at_a_time:
        monkeypatch.setattr("hf_neuron_moe.convert.layout.relayout.READ_BYTES", read_at_a_time)
    on_disk = torch.randn(3, 64, 96).bfloat16()
    piece = Piece("w", "f", "BF16", (3, 64, 96), None, 0, True, True)
    weight = FusedWeight("x.gate_up_proj", (3, 96, 64), (piece,))
    kernel_EH2I = gate_up_interleaved_to_kernel(on_disk)
    for ranks in (1, 2):
        written, made, _ = run(weight, ConvertOptions("bf16", "kernel", tp_degree=ranks), {"w": on_disk})
        shares = kernel_EH2I.chunk(ranks, dim=3)
        for tensor, share in zip(made.values(), shares, strict=True):
            assert torch.equal(tensor, share.flatten(2))
        back = restore(piece, written, lambda index, expert, w=written, m=made: m[w[index].name][expert])
        assert torch.equal(back, on_disk)


def test_rounded_values_are_counted_once_over_all_ranks():
    values = torch.full((32, 48), 1.0)
    values[3, 5], values[7, 40], values[30, 20] = 1 + 2**-9, 1 + 2**-10, 3.4e38
    weight = FusedWeight("x.down_proj", (32, 48), (Piece("w", "f", "F32", (32, 48)),))
    for ranks in (1, 2, 3):
        _, _, rounded = run(weight, ConvertOptions("bf16", "fused", tp_degree=ranks), {"w": values})
        assert rounded == {"w": 3}


def test_a_rank_sees_nonfinite_values_of_its_own_part_only():
    values = torch.ones(32, 48)
    values[3, 47] = float("nan")
    weight = FusedWeight("x.down_proj", (32, 48), (Piece("w", "f", "F32", (32, 48)),))
    options = ConvertOptions("bf16", "kernel", tp_degree=2)
    with refused(SourceDamageError, "f: w"):
        run(weight, options, {"w": values}, on_nonfinite="error")
    _, made, _ = run(weight, options, {"w": values}, on_nonfinite="keep")
    assert made["x.down_proj.tp0"].isfinite().all() and made["x.down_proj.tp1"].isnan().sum() == 1


def test_ranks_read_their_rows_of_the_source_and_no_others():
    """With eight ranks, gate and up are read once in all, not eight times."""
    seen: Counter[tuple[str, int]] = Counter()
    weight = weight_of("gate_up_proj", 32, 64, [64], experts=2)
    source = {piece.source: torch.randn(piece.shape).bfloat16() for piece in weight.pieces}

    def read(piece: Piece, expert: int | None, rows: slice) -> torch.Tensor:
        seen.update((piece.source, row) for row in range(rows.start, rows.stop))
        return source[piece.source][rows]

    for rank in range(8):
        forms = stored_forms(weight, ConvertOptions("bf16", tp_degree=8), rank)
        for _ in store(weight, forms, read, Scratch(scratch_bytes(weight, forms)), Counter()):
            pass
    assert set(seen.values()) == {1} and len(seen) == 2 * 2 * 64
