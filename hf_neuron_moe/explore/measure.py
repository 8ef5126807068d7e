"""One pass over a text, forward and backward: what each format does to every block, product and operand.

The model computes in bf16. In the backward each block's call is computed again at the other formats, and the
difference of its output, times the gradient there, is the first-order change of the loss. The second order takes
gradients of labels drawn from the model's own predictions: their squares estimate the curvature (Fisher).

Legend: N rows of the text, L tokens per row, T tokens at a time, E experts, R rows of an expert, H hidden,
I intermediate, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_neuron_moe.errors import NonFiniteLossError
from hf_neuron_moe.explore.measures import PRODUCTS, BlockMeasures, Measures, Score
from hf_neuron_moe.explore.operand_sums import MXFP4, mx_values
from hf_neuron_moe.explore.rows import measure_rows, measure_weights
from hf_neuron_moe.training.block_calls import BlockCalls, Call, Projections

IGNORED = -100  # torch's label of positions without a loss


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy of next tokens; logits ``[N, L, V]``, labels ``[N, L]``, not shifted."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


class Pass:
    """Measures a model patched in bf16 with ``activations="recompute"``, whose parameters want no gradient.

    `draws` are the sets of labels per row for the second order. `sampled` rows also have their products measured.
    """

    def __init__(
        self, model: nn.Module, formats: Sequence[str], measures: Measures, draws: int = 1, sampled: int = 1
    ) -> None:
        self.model, self.formats, self.measures = model, tuple(formats), measures
        self.draws, self.sampled = draws, sampled

    def run(self, row_L: Tensor) -> None:
        """Measure on one row of the text."""
        rows_NL, measures = row_L.unsqueeze(0), self.measures
        embed: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        seen: list[Call] = []
        drawn: list[list[Call]] = [[] for _ in range(self.draws)]
        with BlockCalls(self.model, outputs=True) as calls:
            inputs = embed(rows_NL).requires_grad_()
            logits = self.model(inputs_embeds=inputs, use_cache=False).logits
            loss = loss_sum(logits, rows_NL)
            draws = drawn if math.isfinite(loss.item()) else []
            calls.seen = seen
            torch.autograd.grad(loss, inputs, retain_graph=bool(draws))
            for draw, calls.seen in enumerate(draws):
                generator = torch.Generator().manual_seed(measures.rows * 1000 + draw)
                labels_NL = drawn_labels(logits.detach(), generator)
                torch.autograd.grad(loss_sum(logits, labels_NL), inputs, retain_graph=draw + 1 < self.draws)
        del logits, inputs
        if not math.isfinite(loss.item()):
            raise _not_finite(seen, measures.rows + 1)
        with torch.no_grad():
            for place, call in enumerate(seen):
                self._see(call, [other[place].dout_TH for other in drawn])
        measures.rows += len(rows_NL)
        measures.tokens += rows_NL[:, 1:].numel()
        measures.loss += loss.item()
        measures.losses.append(loss.item() / rows_NL[:, 1:].numel())

    def _see(self, call: Call, drawn: Sequence[Tensor]) -> None:
        """Measure one call; `drawn` are the gradients of drawn labels where the call has that of the text's."""
        block = self._block_of(call)
        known = call.out_TH is not None and call.spec.precision == "bf16"
        base_TH = (call.out_TH if known else call.forward("bf16")).float()  # type: ignore[union-attr]
        for name, change_TH in self._changes(call, base_TH):
            score, first = block.scores.setdefault(name, Score()), (call.dout_TH * change_TH).sum().item()
            score.first += first
            score.square += first**2
            for gradient_TH in drawn:
                along_T = (gradient_TH * change_TH).sum(-1)
                score.second += along_T.square().sum().item() / (2 * len(drawn))
        if not block.operands:
            measure_weights(block, call, self.formats)
        start = self.measures.rows * len(call.x_TH)
        for rows in call.experts():
            block.tokens_E[rows.expert] += len(rows.token_R)
            measure_rows(block, call, rows, self.formats, start, products=self.measures.rows < self.sampled)

    def _block_of(self, call: Call) -> BlockMeasures:
        known = self.measures.blocks.get(call.block)
        if known is None:
            E, H, I = call.projections.down_EHI.shape  # noqa: E741
            kind, gate = "mlp" if call.routing is None else "experts", call.spec.gate
            tokens_E = torch.zeros(E, dtype=torch.int64)
            known = BlockMeasures(kind, E, H, I, tokens_E, halves=gate.halves, linear_up=gate.reads_up_as_it_is)
            self.measures.blocks[call.block] = known
        return known

    def _changes(self, call: Call, base_TH: Tensor) -> Iterator[tuple[str, Tensor]]:
        """By format, and by format and product, how the block's output changes."""
        if "bf16" in self.formats:
            yield "bf16", base_TH - call.forward("fp32").float()
        if "mxfp8" not in self.formats and "mxfp4" not in self.formats:
            return
        eight_TH = call.forward("mxfp8").float() - base_TH
        if "mxfp8" in self.formats:
            first = _rounded(call.projections, PRODUCTS[0])
            gate_up_TH = call.forward("bf16", mx_values(call.x_TH, 1), first).float() - base_TH
            yield "mxfp8", eight_TH
            yield "mxfp8 gate_up", gate_up_TH
            yield "mxfp8 down", eight_TH - gate_up_TH
        if "mxfp4" in self.formats:
            for product in PRODUCTS:
                narrow = _rounded(call.projections, product, MXFP4)
                yield f"mxfp4 {product}", call.forward("mxfp8", weights=narrow).float() - base_TH
            both = _rounded(_rounded(call.projections, PRODUCTS[0], MXFP4), PRODUCTS[1], MXFP4)
            yield "mxfp4", call.forward("mxfp8", weights=both).float() - base_TH


def _not_finite(seen: Sequence[Call], row: int) -> NonFiniteLossError:
    """The error that names the first block whose input is not finite, in the order of the forward."""
    blocks = [call.block for call in reversed(seen) if not call.x_TH.isfinite().all()]
    where = f"from the input of {blocks[0]} on" if blocks else "behind the input of the last block"
    fix = "The weights are finite: look for values above the dtype's range, as of float16, or use another checkpoint."
    return NonFiniteLossError.about(f"the loss of row {row} of the text", "finite", f"values that are not {where}", fix)


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels ``[N, L]`` drawn from the predictions `logits` ``[N, L, V]`` make of each next token."""
    N, L, V = logits.shape
    # torch.multinomial takes 15 times as long.
    below_TV = logits[:, :-1].reshape(-1, V).float().softmax(-1).cumsum(-1)
    level_T1 = torch.rand(len(below_TV), 1, generator=generator) * below_TV[:, -1:]
    drawn_T1 = torch.searchsorted(below_TV, level_T1, right=True)
    return F.pad(drawn_T1.view(N, L - 1), (1, 0), value=IGNORED)


def _rounded(projections: Projections, product: str, fmt: str = "e4m3fn") -> Projections:
    """Return the weights with those of one product as its MX operands, copies in their dtype; others stay views."""

    def values(weight: Tensor | None) -> Tensor | None:
        if weight is None:
            return None
        rows = mx_values(weight.reshape(-1, weight.shape[-1]), 1, fmt)
        return rows.view(weight.shape).to(torch.bfloat16)

    gate, up, down = projections
    if product == PRODUCTS[1]:
        rounded = values(down)
        assert rounded is not None
        return Projections(gate, up, rounded)
    rounded = values(up)
    assert rounded is not None
    return Projections(values(gate), rounded, down)
