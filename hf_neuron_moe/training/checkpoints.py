"""Checkpoints that a kill at any moment cannot spoil, and that never hold NaN.

The stock Trainer writes ``checkpoint-N`` in place and resumes from the folder with the highest step, finished or not.
:class:`SafeCheckpointMixin` marks finished ones, resumes from marked ones, and removes old ones after that only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.errors import IncompleteCheckpointError, NonFiniteWeightsError, public
from hf_neuron_moe.patching.ranks import OneAnswer
from hf_neuron_moe.training import checkpoint_files as files
from hf_neuron_moe.training.checkpoint_files import find_last_complete, mark_complete
from hf_neuron_moe.training.sharded_checkpoints import ShardedCheckpointMixin, content_of

_PART = 1 << 24  # elements of a one-byte tensor that are looked at together


class SafeCheckpointMixin(ShardedCheckpointMixin):
    """Put before a Trainer class: ``class MyTrainer(SafeCheckpointMixin, Trainer)``. Its checkpoints survive kill -9.

    * A checkpoint is marked as complete when all processes have written it and it is on the disk.
    * ``train(resume_from_checkpoint=True)`` takes the complete checkpoint that was written last. A path is taken if the
      folder is complete or was written without marks (by the stock Trainer).
    * ``save_total_limit`` counts complete checkpoints, and the last complete one is never removed.
    * A run that has ended trains nothing when it is resumed; the stock Trainer looks at its end after a step only.
    * Weights with NaN or infinity are neither trained nor written: the run stops before its first step, or before the
      folder is made.
    """

    _neuron_limit: tuple[int | None] | None = None  # ``save_total_limit`` as asked for, while a checkpoint is saved
    _neuron_push: str | None = None  # folder to be pushed to the Hub once it is complete

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, from a complete checkpoint if asked to resume."""
        resume: str | bool | None = resume_from_checkpoint
        if resume is True:
            resume = self._last_complete()
        elif resume:
            with OneAnswer():
                _check_complete(Path(resume))
        elif self.model is not None and getattr(self, "model_init", None) is None:
            self._check_finite("train")
        return super().train(resume, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the Trainer does, if its weights are finite."""
        if not self._is_saving:  # then it has been looked at
            self._check_finite("save_model")
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self._check_finite("save_model")
        run = self._get_output_dir(trial=trial)
        folder = Path(run) / f"checkpoint-{self.state.global_step}"
        with OneAnswer():  # of which each waits for all processes
            if self.args.should_save:
                files.begin(folder)
        self._neuron_limit = (self.args.save_total_limit,)
        try:
            # The Trainer rotates before anyone can mark the new checkpoint, and might remove the only complete one.
            with OneAnswer(), self._total_limit(None):
                super()._save_checkpoint(model, trial)
        finally:
            self._neuron_limit = None
        with OneAnswer() as facts:
            if self._is_sharded:
                facts[f"content of {folder.name}"] = content_of(folder)
        with OneAnswer():
            if self.args.should_save:
                mark_complete(folder)
                files.rotate(run, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self._neuron_push is not None:
            pushed, self._neuron_push = self._neuron_push, None
            self._push_from_checkpoint(pushed)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Writes training_args.bin among others, which is to say what was asked for.
        asked = self._neuron_limit or (self.args.save_total_limit,)
        with self._total_limit(asked[0]), self._saving_shards() if self._is_saving else nullcontext():
            super()._save(output_dir, state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._is_saving:
            self._neuron_push = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    @property
    def _is_saving(self) -> bool:
        return self._neuron_limit is not None

    @contextmanager
    def _total_limit(self, limit: int | None) -> Iterator[None]:
        held, self.args.save_total_limit = self.args.save_total_limit, limit
        try:
            yield
        finally:
            self.args.save_total_limit = held

    @public("train")
    def _last_complete(self) -> str:
        """The folder to resume from; all processes take the one that the main process found."""
        output_dir = str(self.args.output_dir)
        found = [find_last_complete(output_dir)] if self.args.process_index == 0 else [None]
        if self.args.world_size > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(found)
        if found[0] is None:
            expected = f"used with a complete checkpoint in {output_dir}"
            fix = "Start without it, or give the path of a checkpoint that the stock Trainer wrote."
            raise IncompleteCheckpointError.about("resume_from_checkpoint=True", expected, "none", fix)
        return str(found[0])

    def _check_finite(self, where: str) -> None:
        """Stop all processes if one of them has non-finite weights: alone it would leave the others waiting."""
        assert self.model is not None  # a Trainer that saves has one
        problems = [_first_nonfinite(self.model)]
        if self.args.world_size > 1:
            from accelerate.utils import gather_object

            problems = gather_object(problems)
        _raise_nonfinite(problems, where)


def refuse_nonfinite(model: nn.Module) -> None:
    """Raise for weights that must not be saved; the error names the first such parameter and its module.

    Parameters must be finite, and floating-point buffers that are saved must not be NaN (some models mask with
    infinity). Of sharded parameters, this process's part is looked at; meta tensors are passed over.
    """
    _raise_nonfinite([_first_nonfinite(model)], "save_model")


_REMEDIES = {
    "train": "Nothing was trained. Load or initialise this module again; the model came with these weights.",
    "save_model": "Nothing was written and earlier checkpoints are as they were. Resume from the last one with a lower "
    "learning rate or gradient clipping; `torch.autograd.detect_anomaly` finds the operation.",
}


def _raise_nonfinite(problems: list[str | None], where: str) -> None:
    for problem in problems:
        if problem is not None:
            raise NonFiniteWeightsError.about("the model's weights", "finite", problem, _REMEDIES[where]).named(where)


@torch.no_grad()
def _first_nonfinite(model: nn.Module) -> str | None:
    """Say which of the model's weights is not finite; None if all are. Waits for each device once, not per tensor."""
    bounds: dict[Any, list[Tensor]] = {}
    owners: dict[Any, list[tuple[str, str, bool]]] = {}
    for module_name, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        buffers = {key: buffer for key, buffer in module._buffers.items() if key not in unsaved}
        for tensors, is_buffer in ((module._parameters, False), (buffers, True)):
            for key, tensor in tensors.items():
                for part in _parts(tensor):
                    kind = (part.device, part.dtype)
                    # NaN passes through both, and infinity is one of them; no copy of the tensor is made.
                    bounds.setdefault(kind, []).append(torch.stack(part.aminmax()))
                    owners.setdefault(kind, []).append((module_name, key, is_buffer))
    for kind, pairs in bounds.items():
        for (module_name, key, is_buffer), (low, high) in zip(owners[kind], torch.stack(pairs).tolist()):
            if math.isnan(low) or (not is_buffer and (math.isinf(low) or math.isinf(high))):
                found = "NaN" if math.isnan(low) else "infinity"
                return f"{found} in {key} of module {module_name!r} ({type(model.get_submodule(module_name)).__name__})"
    return None


def _parts(tensor: Tensor | None) -> tuple[Tensor, ...]:
    """Return what this process holds of a floating-point tensor, in pieces of a dtype that has an order."""
    if tensor is None or not tensor.is_floating_point():
        return ()
    local = getattr(tensor, "ds_tensor", tensor).detach()  # DeepSpeed ZeRO-3 leaves its parameters empty
    local = local.to_local() if hasattr(local, "to_local") else local
    if local.is_meta or not local.numel():
        return ()
    if local.element_size() > 1:
        return (local,)
    return tuple(piece.float() for piece in local.flatten().split(_PART))


@public("train")
def _check_complete(folder: Path) -> None:
    found = files.inspect(folder)
    if found.state is files.State.INCOMPLETE:
        expected = "a checkpoint that was written to its end"
        fix = "resume_from_checkpoint=True takes the last complete one."
        raise IncompleteCheckpointError.about("resume_from_checkpoint", expected, f"{folder}: {found.problem}", fix)
