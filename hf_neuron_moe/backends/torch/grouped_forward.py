"""The gated feed-forward network of all groups at once, by bf16 products: the forward.

This is what processors with bf16 instructions run. Groups are the experts of a layer, or one for a dense MLP. Rounding
points are those of ``ffn_forward`` and ``ffn_backward``:

* Every product takes its whole contraction axis and is rounded once.
* Where the contract has the fp32 sum (``d_int``, and gate and up in mxfp8), products give it (``grouped_products``): in
  mxfp8 the sum itself, in bf16 16 bits of it. There it meets no rounding but those to bf16.
* What an expert adds to a token is rounded to bf16 first, as the device's kernels accumulate in the dtype of their
  output. The sum over a token's experts is fp32.

Rows are processed in batches of whole groups, which bounds the temporaries. Values between the products are made for a
few rows at a time, which stay in the caches.

Legend: G groups, T tokens, R rows (token-expert pairs in expert order), r rows of a batch, H hidden, I intermediate,
K experts per token. Widths are those of the operands: padded to whole MX groups in mxfp8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.device_products import project_on_device
from hf_neuron_moe.backends.torch.experts import GroupedWeights, Rows, Runs, sum_over_experts
from hf_neuron_moe.backends.torch.ffn_forward import Added, Checkpoints, added_to_sums, save_products
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.grouped_products import (
    ADDED,
    Operand,
    adds_to_sums,
    project,
    project_sums,
    rows_with_ones,
    whole_end,
)
from hf_neuron_moe.backends.torch.saved import put_tile, take_tile
from hf_neuron_moe.backends.torch.tiles import Loader, lies_by_column

BATCH = 1 << 22  # elements ``[r, I]`` of a batch's intermediate, from which on groups are processed in turns
CHUNK = 1 << 18  # elements between the products that are processed at a time
DEVICE_CHUNKS = 3  # at most so many where every operation is a launch


@dataclass(frozen=True)
class ReadyWeights:
    """The projections as operands of the forward's products, for calls that save nothing."""

    gate_GIH: Operand
    up_GIH: Tensor
    down_GHI: Operand
    gate_bias_GI: Tensor | None = None
    up_bias_GI: Tensor | None = None
    down_bias_GH: Tensor | None = None

    @property
    def inner(self) -> int:
        return self.up_GIH.shape[1]


class Batch:
    """Some whole runs: where they lie among the rows, and their rows of a tensor."""

    def __init__(self, rows: Rows, runs: Runs) -> None:
        self.rows, self.start, stop = rows, runs[0][1], runs[-1][2]
        self.runs = [(group, start - self.start, end - self.start) for group, start, end in runs]
        self.part, self.length = slice(self.start, stop), stop - self.start
        self.on_device = rows.on_device
        self.size = self.length if rows.on_device else whole_end(self.runs)
        """Rows of its buffers: as many more as are multiplied with those of its runs."""

    @property
    def room(self) -> slice:
        """Its part of a result of :func:`result_rows`, and the rows after it that its products may overwrite."""
        return slice(self.start, self.start + self.size)

    @classmethod
    def cut(cls, rows: Rows, inner: int) -> Iterator[Batch]:
        """Cut the runs of a call into batches; those that only the device knows are one."""
        if rows.on_device is not None:
            yield cls(rows, [(0, 0, rows.count)])
            return
        batch: list[tuple[int, int, int]] = []
        for run in rows.runs:
            if batch and (run[2] - batch[0][1]) * inner > BATCH:
                yield cls(rows, batch)
                batch = []
            batch.append(run)
        if batch:
            yield cls(rows, batch)

    def take(self, values_TH: Tensor, loader: Loader, name: str) -> Tensor:
        """Return the batch's rows of a tensor of tokens, and any others up to its size: a copy, if it has others.

        Gathered rows lie in a buffer of that name.
        """
        token_R, others = self.rows.token_R, self.size - self.length
        if token_R is None:
            return F.pad(values_TH[self.part], (0, 0, 0, others)) if others else values_TH[self.part]
        token_r = F.pad(token_R[self.part], (0, others)) if others else token_R[self.part]
        if self.on_device is not None:
            return values_TH.index_select(0, token_r)
        out_rH = loader.scratch.get(name, (self.size, values_TH.shape[1]), values_TH.dtype)
        return torch.index_select(values_TH, 0, token_r, out=out_rH)

    def chunks(self, inner: int) -> Iterator[slice]:
        """Cut the batch's rows for what is computed between the products."""
        step = max(CHUNK // inner, 1)
        if self.on_device is not None:
            step = max(step, -(-self.length // DEVICE_CHUNKS))
        for start in range(0, self.length, step):
            yield slice(start, min(start + step, self.length))

    def global_part(self, chunk: slice) -> slice:
        """Return `chunk` as rows of the call."""
        return slice(self.start + chunk.start, self.start + chunk.stop)

    def scale(self, chunk: slice) -> Tensor | None:
        return self.rows.scale(self.start + chunk.start, self.start + chunk.stop)


def result_rows(rows: Rows, like_TH: Tensor, dtype: torch.dtype, loader: Loader) -> Tensor:
    """Return memory of a result of the products: the call's rows, and those that runs at its end are padded by.

    It is a buffer where a token's rows are added next.
    """
    shape = (max(rows.count, whole_end(rows.runs)), like_TH.shape[1])
    return like_TH.new_empty(shape, dtype=dtype) if rows.token_R is None else loader.scratch.get("rows", shape, dtype)


def tokens_operand(values_TH: Tensor, loader: Loader, *, with_ones: bool = False) -> Tensor:
    """Return tokens as left operands with H as contraction axis; each is quantized once, whatever experts it has.

    `with_ones` is for products with something added, where nothing is quantized.
    """
    if with_ones:
        return rows_with_ones(values_TH.to(loader.compute.operand))
    if not loader.compute.mx and values_TH.dtype == loader.compute.operand:
        return values_TH
    operand = values_TH.new_empty((len(values_TH), loader.width(values_TH.shape[1])), dtype=loader.compute.operand)
    loader.fill(operand, values_TH)
    return loader.quantize(operand, axis=1) if loader.compute.mx else operand


class PreActivations:
    """Gate and up of a batch: products of the forward, or of a backward for what was not saved.

    A value has the same bits wherever it is made, whatever is saved. So gate, the first columns of up and its others
    are separate products, with two exceptions. Gate and up are one where both are made in the same calls. In kernel
    order ``[H, 2I]`` with alternating columns both are multiplied as they lie, cut where up is: every other column is
    slow to gather. Then a half that was saved is multiplied again with one that was not.
    """

    def __init__(
        self,
        weights: GroupedWeights | ReadyWeights,
        batch: Batch,
        loader: Loader,
        saved: Checkpoints,
        added: Added = (None, None),
        *,
        plain_up: bool = False,
    ) -> None:
        self.plain_up = plain_up and batch.on_device is not None
        self.weights, self.batch, self.loader, self.saved, self.added = weights, batch, loader, saved, added
        self.cut = weights.inner if saved.up_cut is None else min(saved.up_cut, weights.inner)
        self.made: dict[str, Tensor] = {}
        self.is_saved: set[str] = set()
        self.is_joint = False  # gate and up are views of one product

    def multiply(self, x_rH: Tensor, *, missing_only: bool = False) -> None:
        """Multiply the batch's input rows, an operand: results are rounded to bf16, in mxfp8 fp32 sums.

        The rows have ones where :func:`has_ones` says so. With `missing_only`, products are left out whose results were
        saved.
        """
        if (both_G2IH := self._both()) is not None:
            if not missing_only or self.saved.up is None:
                self._make("both", x_rH, both_G2IH, None)
                self.is_joint = True
                self.made["gate"], self.made["up"] = self.made.pop("both").chunk(2, dim=1)
            return
        gate, up, cut = self.weights.gate_GIH, self.weights.up_GIH, self.cut
        saved_up, (gate_added, up_added) = 0 if self.saved.up is None else self.saved.up.shape[1], self.added
        parts = (("", slice(0, cut), saved_up >= cut), ("_tail", slice(cut, self.weights.inner), saved_up > cut))
        if (pairs_G2IH := self._pairs()) is not None:
            added = self._added_to_pairs()
            for suffix, columns, is_saved in parts:
                pairs = slice(2 * columns.start, 2 * columns.stop)
                is_saved = is_saved and self.saved.gate is not None
                if columns.start < columns.stop and not (missing_only and is_saved):
                    part = None if added is None else added[:, pairs]
                    self._make(f"pairs{suffix}", x_rH, pairs_G2IH[:, pairs], part)
            return
        if gate.shape[1] and not (missing_only and self.saved.gate is not None):
            self._make("gate", x_rH, gate, gate_added)
        for suffix, columns, is_saved in parts:
            if columns.start < columns.stop and not (missing_only and is_saved):
                part = None if up_added is None else up_added[:, columns]
                self._make(f"up{suffix}", x_rH, up[:, columns], part)

    def _pairs(self) -> Tensor | None:
        """Return the weight of gate and up where it is ``[H, 2I]``, their columns alternate, and results are bf16.

        These are taken apart as halves of 32-bit numbers, the gate in the lower one.
        """
        weights = self.weights
        if not isinstance(weights, GroupedWeights) or not weights.interleaved or weights.gate_up_G2IH is None:
            return None
        if self.batch.on_device is not None or self.loader.has_sums or sys.byteorder != "little":
            return None
        return weights.gate_up_G2IH if lies_by_column(weights.gate_up_G2IH[0]) else None

    def _added_to_pairs(self) -> Tensor | None:
        gate_GI, up_GI = self.added
        some = up_GI if gate_GI is None else gate_GI
        if some is None:
            return None
        parts = [some.new_zeros(some.shape) if part is None else part for part in (gate_GI, up_GI)]
        return torch.stack(parts, dim=2).flatten(1)

    def _both(self) -> Tensor | None:
        """Return the weight of gate and up where both are made and saved together, and it is read as it lies.

        Not for results in fp32, whose last bits may depend on the number of columns.
        """
        weights, saved = self.weights, self.saved
        if not isinstance(weights, GroupedWeights) or self.batch.on_device is None:
            return None
        if self.loader.compute.mx or self.loader.compute.operand == torch.float32:
            return None
        apart = self.cut < weights.inner or (saved.gate is None) != (saved.up is None)
        if apart or weights.interleaved or not weights.gate_GIH.shape[1] or self.added != (None, None):
            return None
        return weights.gate_up_G2IH

    def _make(self, name: str, x_rH: Tensor, weight_GNH: Operand, added_GN: Tensor | None) -> None:
        loader, runs = self.loader, self.batch.runs
        left_rH = x_rH if has_ones((added_GN,), loader) else x_rH[:, : weight_GNH.shape[2]]
        if self.batch.on_device is not None:
            left_rH = x_rH if loader.compute.mx else left_rH
            self.made[name] = project_on_device(
                left_rH, weight_GNH, self.batch.on_device, loader, added_GN, sums=loader.has_sums
            )
            return
        shape = (self.batch.size, weight_GNH.shape[1])
        if loader.compute.mx:
            out_rN = loader.scratch.get(name, shape, torch.float32)
            project_sums(x_rH, weight_GNH, runs, loader, out_rN, added_GN)
        else:
            out_rN = loader.scratch.get(name, shape, loader.compute.operand)
            project(left_rH, weight_GNH, runs, loader, out_rN, added_GN=added_GN)
        self.made[name] = out_rN

    def save_products(self) -> None:
        """Save products without a copy where they are what the policy saves."""
        if self.batch.on_device is None or self.is_joint:
            return
        for name, kept in (("gate", self.saved.gate), ("up", self.saved.up)):
            made = self.made.get(name)
            if made is None or not isinstance(kept, Tensor) or not made.is_contiguous():
                continue
            if (made.shape, made.dtype) == (kept.shape, kept.dtype):
                kept.set_(made)  # type: ignore[call-overload]
                self.is_saved.add(name)

    def save(self, chunk: slice, gate: Tensor, up: Tensor) -> None:
        """Save what else the policy saves of a chunk's :meth:`values`, rounded to bf16."""
        for name, kept, values in (("gate", self.saved.gate, gate), ("up", self.saved.up, up)):
            if kept is not None and name not in self.is_saved:
                columns = slice(0, kept.shape[1])
                put_tile(kept, self.batch.global_part(chunk), columns, values[:, columns])

    def values(self, chunk: slice, *, rounded: bool, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return gate and up of a chunk in fp32: of the products where they were made, else what was saved.

        With `rounded`, sums are rounded as they would have been saved. A gate that does not exist holds anything. Both
        are to be read only, but a gate that is made in the buffer `gate`. Up is bf16 where `plain_up` allows it.
        """
        shape, scratch = (chunk.stop - chunk.start, self.weights.inner), self.loader.scratch
        plain = {"gate": None if gate is not None else self._plain("gate", rounded=rounded)}
        plain["up"], filled = self._plain("up", rounded=rounded), {} if gate is None else {"gate": gate}
        for name in ("gate", "up"):
            if plain[name] is None and name not in filled:
                filled[name] = scratch.get(f"{name}_fp32", shape, torch.float32)
        for name, target in filled.items():
            kept = self.saved.gate if name == "gate" else self.saved.up
            if kept is not None and not self.made.keys() & {name, "pairs"}:
                columns = slice(0, kept.shape[1])
                target[:, columns].copy_(take_tile(kept, self.batch.global_part(chunk), columns))
        first, others = slice(0, self.cut), slice(self.cut, None)
        for name, made in self.made.items():
            part, columns = name.removesuffix("_tail"), others if name.endswith("_tail") else first
            if part == "pairs":
                _split_pairs(made[chunk], filled["gate"][:, columns], filled["up"][:, columns])
            elif part in filled:
                target = filled[part] if part == "gate" else filled[part][:, columns]
                target.copy_(made[chunk])
                if rounded and made.dtype == torch.float32:
                    self.loader.round_(target)
        gate_RI, up_RI = (filled[name] if whole_RI is None else whole_RI[chunk] for name, whole_RI in plain.items())
        return gate_RI, up_RI

    def _plain(self, name: str, *, rounded: bool) -> Tensor | None:
        """Return gate or up of all rows as it is, where it is fp32, or nothing but a product reads it."""
        whole_RI = self.made.get(name, self.saved.gate if name == "gate" else self.saved.up)
        if self.batch.on_device is None or not isinstance(whole_RI, Tensor) or whole_RI.shape[1] != self.weights.inner:
            return None
        if whole_RI.dtype == torch.float32:
            return None if rounded and self.loader.compute.mx else whole_RI
        return whole_RI if name == "up" and self.plain_up else None


def _split_pairs(pairs_rN: Tensor, gate_rI: Tensor, up_rI: Tensor) -> None:
    """Write the fp32 values of bf16 columns that alternate: bf16 is the upper half of fp32."""
    both_rI = pairs_rN.view(torch.int32)
    torch.bitwise_left_shift(both_rI, 16, out=gate_rI.view(torch.int32))
    torch.bitwise_and(both_rI, -(1 << 16), out=up_rI.view(torch.int32))


def grouped_forward(
    x_TH: Tensor,
    rows: Rows,
    weights: GroupedWeights | ReadyWeights,
    loader: Loader,
    save: Checkpoints,
    gating: Gating = SILU,
) -> Tensor:
    """Return ``(silu(x Wg^T) * x Wu^T * scale) Wd^T`` of each token ``[T, H]``, and fill `save`.

    The result is that of a dense MLP with its down bias, rounded to bf16 or (mxfp8 with this bias) not. Of experts it
    is the fp32 sum over a token's, without down biases. The loader has bf16 operands, MX-quantized or not.
    """
    compute, inner = loader.compute, weights.inner
    added = added_to_sums(weights.up_GIH, (weights.gate_bias_GI, weights.up_bias_GI), gating)
    x_op, width = tokens_operand(x_TH, loader, with_ones=has_ones(added, loader)), loader.width(inner)
    bias_GH = None if weights.down_bias_GH is None or rows.token_R is not None else weights.down_bias_GH.float()
    sums = compute.mx and bias_GH is not None
    out_RH = x_TH if rows.on_device else result_rows(rows, x_TH, torch.float32 if sums else compute.operand, loader)
    for batch in Batch.cut(rows, inner):
        pre = PreActivations(weights, batch, loader, save, added, plain_up=gating.multiplies_by_up)
        pre.multiply(batch.take(x_op, loader, "x_rows"))
        pre.save_products()
        inter_rI, left_rI = _intermediate(batch, loader, width, with_ones=has_ones((bias_GH,), loader))
        _fill_intermediate(inter_rI, batch, pre, loader, save, gating)
        del pre  # gate and up are as large as the operands of the next product
        if batch.on_device is not None:
            out_RH = project_on_device(left_rI, weights.down_GHI, batch.on_device, loader)
        elif sums:
            project_sums(left_rI, weights.down_GHI, batch.runs, loader, out_RH[batch.room], bias_GH)
        else:
            project(left_rI, weights.down_GHI, batch.runs, loader, out_RH[batch.room], added_GN=bias_GH)
    return sum_over_experts(out_RH, rows)


def _fill_intermediate(
    inter_rI: Tensor, batch: Batch, pre: PreActivations, loader: Loader, save: Checkpoints, gating: Gating
) -> None:
    """Write a batch's scaled intermediate, an operand of the next product, and save what `save` has."""
    mx, inner = loader.compute.mx, pre.weights.inner
    in_place = batch.on_device is not None and inter_rI.dtype == torch.float32 and inter_rI.shape[1] == inner
    for chunk in batch.chunks(inner):
        target_rI, shape = inter_rI[chunk], (chunk.stop - chunk.start, inner)
        made_rI = target_rI if in_place else loader.scratch.get("gate_fp32", shape, torch.float32)
        gate, up = pre.values(chunk, rounded=False, gate=made_rI)
        pre.save(chunk, gate, up)
        save_products(gate, up, loader, save, batch.global_part(chunk), gating)
        product = gating.intermediate_(gate, up)
        scale_r1 = batch.scale(chunk)
        if scale_r1 is not None:
            product.mul_(scale_r1)
        if not in_place:
            loader.fill(target_rI, product)
        if mx and batch.on_device is None:
            loader.quantize(target_rI, axis=1)
    if mx and batch.on_device is not None:
        loader.quantize(inter_rI, axis=1)


def has_ones(added: Iterable[Tensor | None], loader: Loader) -> bool:
    """Whether the rows of products have ones for what is added to these, as some are `added`."""
    if loader.has_sums:
        return False
    return any(part is not None and (loader.on_device or not adds_to_sums(part.device)) for part in added)


def _intermediate(batch: Batch, loader: Loader, width: int, *, with_ones: bool) -> tuple[Tensor, Tensor]:
    """Return where to write a batch's intermediate ``[r, width]``, and the operand of which it is all but the ones."""
    columns = width + (ADDED if with_ones else 0)
    operand_rI = loader.scratch.get("inter", (batch.size, columns), loader.compute.operand)
    if with_ones:
        operand_rI[:, width:].copy_(rows_with_ones(operand_rI[:1, :0]))
    return operand_rI[:, :width], operand_rI
