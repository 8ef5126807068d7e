"""What is measured while a patched model trains: tokens, expert load, padding, saved bytes, quantization health.

Forward hooks count into tensors on the model's device; values come to the host when they are logged.
Legend: T tokens, K experts per token, E experts, M tensors measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_neuron_moe.patching.model_methods import routing_replay_stats
from hf_neuron_moe.training import blocks
from hf_neuron_moe.training.figures import (
    INPUT,
    SAMPLED_ROWS,
    TENSORS,
    health_record,
    load_figures,
    padding_overhead,
    peak_memory,
    quantization_health,
)


class ExpertCount:
    """Token-expert pairs per expert of one module, and how many of its `processes` each token goes to.

    `device` is where the routing indices are.
    """

    def __init__(self, experts: int, block_size: int, device: torch.device, processes: int = 1) -> None:
        self.block_size, self.processes = block_size, processes
        self.copies = torch.zeros(1, dtype=torch.int64, device=device)
        self.load_E = torch.zeros(experts, dtype=torch.int64, device=device)
        self.padded_rows = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, index_TK: Tensor) -> None:
        """Count one call's indices; those of E and above belong to other ranks."""
        experts, block = len(self.load_E), self.block_size
        pairs = index_TK.reshape(-1).to(torch.int64).clamp(max=experts)
        # Not bincount: that waits for the device, and its shape is unknown to a compiler.
        counts_E = pairs.new_zeros(experts + 1).scatter_add_(0, pairs, torch.ones_like(pairs))[:experts]
        padded = (torch.div(counts_E + (block - 1), block, rounding_mode="floor") * block).sum()
        self.load_E.add_(counts_E.to(self.load_E.device))  # a replica of nn.DataParallel is on another device
        self.padded_rows.add_(padded.to(self.padded_rows.device))
        if self.processes > 1:
            home_TK = torch.div(pairs.view(index_TK.shape), experts // self.processes, rounding_mode="floor")
            goes_TP = counts_E.new_zeros(len(home_TK), self.processes + 1).scatter_(1, home_TK, 1)
            self.copies.add_(goes_TP[:, : self.processes].sum().to(self.copies.device))


class TrainingMonitor:
    """Counts what the patched blocks of a model do in training forwards, until :meth:`detach`.

    A training forward is a call of `model` in training mode with gradients enabled: not evaluation, generation, or the
    recomputation of checkpointed layers within backward. Under ``torch.compile`` the inputs' quantization health is not
    measured, since sampled steps would need a graph of their own; everything else is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = blocks.patched_blocks(model)
        self.device = blocks.device_of(next(iter(self.blocks.values())))
        self.sizes = {name: blocks.block_sizes(block) for name, block in self.blocks.items()}
        self.inside, self.sampling = 0, False
        self.inputs: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        self.counts = {
            name: ExpertCount(
                self.sizes[name][0],
                block.neuron_config.block_size,
                blocks.device_of(block),
                blocks.expert_processes(block),
            )
            for name, block in self.blocks.items()
            if blocks.gets_ids(block)
        }
        self.tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._counters = [self.tokens, self.positions]
        for count in self.counts.values():
            self._counters += [count.padded_rows, count.copies, count.load_E]
        self._start_interval()

    def _reset(self) -> None:
        """Start anew, in the same tensors: a compiled model goes on writing to them."""
        for counter in self._counters:
            counter.zero_()
        self._start_interval()

    def _start_interval(self) -> None:
        self.health_M4: Tensor | None = None
        self.replayed = routing_replay_stats(self.model)
        self.elapsed = 0.0
        self.restart_clock()

    def attach(self) -> None:
        """Begin to count."""
        model = self.model
        self.handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))
        self.handles.append(model.register_forward_hook(self._leave, always_call=True))
        for name, block in self.blocks.items():
            hook = functools.partial(self._see_block, name)
            self.handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Take all hooks off the model."""
        while self.handles:
            self.handles.pop().remove()
        self.inputs.clear()

    def restart_clock(self) -> None:
        """Leave out what happened since the last step: evaluation, saving, logging."""
        self.mark = time.perf_counter()

    def begin_step(self, *, sample: bool) -> None:
        """Begin an optimizer step; with `sample` its first inputs and its weights are looked at."""
        self.sampling = sample
        self.inputs.clear()

    def end_step(self) -> None:
        """End an optimizer step."""
        if self.sampling:
            self.sampling = False
            self.health_M4 = self._measure_health()
            self.inputs.clear()
        now = time.perf_counter()
        self.elapsed += now - self.mark
        self.mark = now

    def take(self) -> dict[str, Any]:
        """Return a line of ``metrics.jsonl``: what was counted since the last call. All ranks call it together."""
        replayed = torch.tensor(routing_replay_stats(self.model)) - torch.tensor(self.replayed)
        counted = torch.cat([counter.to(self.device) for counter in (*self._counters, replayed)])
        summed = _gathered(counted).sum(dim=0) // blocks.processes_with_one_batch(self.model)
        *counts, decisions, changed = summed.tolist()
        totals = iter(counts)
        # Now that the device has caught up, the time it took is known.
        passed_s = self.elapsed + time.perf_counter() - self.mark
        spent = torch.tensor([passed_s, peak_memory(self.device)], dtype=torch.float32)
        elapsed_s, memory = _gathered(spent.to(self.device)).amax(dim=0).tolist()
        tokens, positions = next(totals), next(totals)
        padded_rows, copies, loads = {}, {}, {}
        for name in self.counts:
            padded_rows[name], copies[name] = next(totals), next(totals)
            loads[name] = [next(totals) for _ in range(self.sizes[name][0])]
        record: dict[str, Any] = {
            "tokens_per_second": tokens / elapsed_s if elapsed_s > 0 else 0.0,
            "peak_memory_bytes": memory or None,
            "saved_bytes_per_token": sum(block.saved_bytes_per_token for block in self.blocks.values()),
            "padding_overhead": padding_overhead(self.sizes, positions, loads, padded_rows),
            "experts": {
                name: load_figures(load, self.counts[name].processes, copies[name], positions)
                for name, load in loads.items()
            },
        }
        if decisions:
            record["routing_kept"] = changed
        if self.health_M4 is not None:
            record["health"] = health_record(self.blocks, _gathered(self.health_M4))
        self._reset()
        return record

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.inside += 1  # nn.DataParallel runs several at once
            tokens, positions = _token_counts(args, kwargs)
            self.tokens.add_(tokens.to(self.device) if isinstance(tokens, Tensor) else tokens)
            self.positions.add_(positions)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.inside:
            self.inside -= 1

    def _see_block(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.inside:
            return
        if name in self.counts:
            index_TK = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            self.counts[name].add(index_TK)
        if torch.compiler.is_compiling() or not self.sampling or name in self.inputs:
            return
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.inputs[name] = blocks.spread_rows(hidden.reshape(-1, hidden.shape[-1]), SAMPLED_ROWS)

    def _measure_health(self) -> Tensor:
        nothing = torch.empty(0, 0, device=self.device)
        figures = []
        for name, block in self.blocks.items():
            rows = blocks.sampled_weights(block, SAMPLED_ROWS)
            rows[INPUT] = self.inputs.get(name, nothing)
            figures += [quantization_health(rows.get(tensor, nothing)).to(self.device) for tensor in TENSORS]
        return torch.stack(figures)


def _token_counts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | int, int]:
    """Tokens without padding, and positions with it, of a call of a model; 0 where it has no text."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        embeddings = kwargs.get("inputs_embeds")
        ids = None if embeddings is None else embeddings[..., 0]
    if not isinstance(ids, Tensor):
        return 0, 0
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask != 0).sum(), ids.numel()
    return ids.numel(), ids.numel()


def _gathered(values: Tensor) -> Tensor:
    """Return the tensor of every rank, stacked in front; one alone where training is not distributed."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return values.unsqueeze(0)
    parts = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, values.contiguous())
    return torch.stack(parts)
