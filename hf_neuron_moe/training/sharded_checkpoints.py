"""Step checkpoints of models that transformers' engine sharded while loading: every process writes and reads its part.

The stock Trainer refuses to write them. Here a checkpoint holds the weights as
``save_pretrained(..., distributed_checkpoint=True)`` writes them, and the optimizer's state by parameter names in a
folder of its own. Both can be read on another layout, and in one process.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from torch.optim import Optimizer

from hf_neuron_moe.errors import IncompleteCheckpointError, UnsupportedModelError, public
from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.patching.ranks import OneAnswer
from hf_neuron_moe.training.prepare import refuse_sharded_kernel_layout

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

OPTIMIZER = "optimizer"
"""Folder in a checkpoint: the optimizer's state, a file of each process."""
LAYOUT_FILE = "neuron_moe_layout.json"
"""File in a checkpoint: in which numbers processes shared the model. Those of one process have none."""

_SIZES = ("pp_size", "tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
_RATES = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""What a scheduler keeps per parameter group, and where the group has it."""


class ShardedCheckpointMixin(_Base):
    """Lets a Trainer save and resume models that were loaded with a ``distributed_config``."""

    _neuron_arguments: list[Any] | None = None  # whose ``save_only_model`` is set while the Trainer is made

    def __init__(self, *positional: Any, **named: Any) -> None:
        self._neuron_arguments = []
        try:
            super().__init__(*positional, **named)
        finally:
            arguments, self._neuron_arguments = self._neuron_arguments, None
            for each in arguments:
                each.save_only_model = False

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        # A Trainer calls this first, and refuses a sharded model later unless only the model is to be saved.
        if self._neuron_arguments is not None and self._is_sharded and not self.args.save_only_model:
            self._neuron_arguments.append(self.args)
            self.args.save_only_model = True
        found: dict[str, Any] = super()._build_accelerator_args(**options)
        return found

    @property
    def _is_sharded(self) -> bool:
        """Whether the model is sharded by a transformers that can save the optimizer of such a one."""
        from transformers import distributed

        able = hasattr(distributed, "save_optimizer_distributed")
        return able and isinstance(self.model, nn.Module) and is_sharded_at_loading(self.model)

    @contextmanager
    def _saving_shards(self) -> Iterator[None]:
        """Let ``save_pretrained`` write the parts of the weights, not the whole; adapters are small, and stay whole."""
        from transformers import PreTrainedModel

        model: Any = self.model
        if not self._is_sharded or self.args.save_only_model or not isinstance(model, PreTrainedModel):
            yield
            return
        model.__dict__["save_pretrained"] = functools.partial(model.save_pretrained, distributed_checkpoint=True)
        try:
            yield
        finally:
            del model.__dict__["save_pretrained"]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        from transformers.distributed import save_optimizer_distributed

        folder, scheduler = Path(output_dir), cast(Any, self.lr_scheduler)
        save_optimizer_distributed(self.model, _unwrapped(self.optimizer), str(folder / OPTIMIZER))
        if self.args.should_save:
            torch.save(scheduler.state_dict(), folder / "scheduler.pt")
            (folder / LAYOUT_FILE).write_text(json.dumps(layout_of(self.model)) + "\n", encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with OneAnswer():
            if not self._load_shards(Path(resume_from_checkpoint)):
                self._refuse_other_fsdp(Path(resume_from_checkpoint))
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with OneAnswer():
            if not self._load_shards(Path(str(self.state.best_model_checkpoint))):
                super()._load_best_model()

    @public("train")
    def _load_shards(self, folder: Path) -> bool:
        """Load sharded weights if `folder` has any; a sharded model needs a sharded checkpoint."""
        from transformers import PreTrainedModel

        if self._is_sharded and not (folder / LAYOUT_FILE).is_file():
            expected = "the checkpoint of a model that was sharded while loading, as this one is"
            fix = (
                "Load it with from_pretrained(CHECKPOINT, distributed_config=...) and start a new run with its weights."
            )
            raise IncompleteCheckpointError.about("resume_from_checkpoint", expected, str(folder), fix)
        model: Any = self.model
        if not isinstance(model, PreTrainedModel) or not any(folder.glob("shard-*-model-*.safetensors")):
            return False
        from transformers.distributed.checkpoint import _load_model_checkpoint_distributed

        refuse_sharded_kernel_layout(model)
        _refuse_other_model(model, folder)
        _load_model_checkpoint_distributed(model, folder)
        return True

    @public("train")
    def _refuse_other_fsdp(self, folder: Path) -> None:
        """Raise for a checkpoint that accelerate's FSDP cannot read: its first process would, in front of a broadcast.

        The others would wait there for the weights.
        """
        if not self.is_fsdp_enabled:
            return
        kind = self.accelerator.state.fsdp_plugin.state_dict_type.name
        name = {"FULL_STATE_DICT": f"{FSDP_MODEL_NAME}.bin", "SHARDED_STATE_DICT": f"{FSDP_MODEL_NAME}_0"}.get(kind)
        if name is not None and not (folder / name).exists():
            expected = f"a checkpoint with {name}, which a run with FSDP and {kind} writes"
            fix = (
                "Resume with the FSDP settings of the run that saved it, or without FSDP. Or load the model with "
                "from_pretrained(CHECKPOINT), and start a new run with its weights."
            )
            raise IncompleteCheckpointError.about("resume_from_checkpoint", expected, str(folder), fix)

    @public("train")
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / LAYOUT_FILE).is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        from torch.distributed.checkpoint.api import CheckpointException
        from transformers.distributed import load_optimizer_distributed

        folder, optimizer, scheduler = Path(checkpoint), _unwrapped(self.optimizer), cast(Any, self.lr_scheduler)
        with OneAnswer():
            try:
                with _without_empty_groups(optimizer):
                    load_optimizer_distributed(self.model, optimizer, str(folder / OPTIMIZER))
            except CheckpointException as error:
                cause = next(iter(error.failures.values()))[0]
                expected = "one whose optimizer has a state for every parameter that is trained now"
                fix = "Make the same parameters trainable, and the same optimizer, as in the run that saved it."
                got = f"{cause} ({folder})"
                raise UnsupportedModelError.about("resume_from_checkpoint", expected, got, fix) from error
            state = torch.load(folder / "scheduler.pt", weights_only=True)
            groups = optimizer.param_groups  # other ones on another layout; their rates came with the parameters
            state |= {key: [each[name] for each in groups] for key, name in _RATES.items() if key in state}
            if "lr_lambdas" in state:
                state["lr_lambdas"] = state["lr_lambdas"][: len(groups)]
            scheduler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load this process's random state; on another layout the first one's: those who share a batch must agree."""
        written = None if checkpoint is None else Path(checkpoint) / LAYOUT_FILE
        if written is None or not written.is_file() or json.loads(written.read_text()) == layout_of(self.model):
            super()._load_rng_state(checkpoint)
            return
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(written.with_name("rng_state_0.pth"), Path(folder) / name)
            super()._load_rng_state(folder)


def layout_of(model: Any) -> dict[str, int]:
    """Return in which numbers processes share a model by its ``distributed_config``; empty for any other model."""
    if not is_sharded_at_loading(model):
        return {}
    return {name: getattr(model.config.distributed_config, name) for name in _SIZES}


def content_of(folder: Path) -> str:
    """Return how much of a checkpoint this process sees."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return f"{len(files)} files of {sum(path.stat().st_size for path in files)} bytes in {folder}"


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer within accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Hide groups without parameters, which Trainers make for adapters and torch cannot load."""
    every = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group for group in every if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in every]


def _refuse_other_model(model: nn.Module, folder: Path) -> None:
    """Raise for a checkpoint of other parameters; torch would pass over those that the model lacks."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    saved = {name: list(getattr(each, "size", ())) for name, each in metadata.items()}
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    for name in {**own, **saved}:
        if saved.get(name) != own.get(name):
            expected = f"a checkpoint of this model, in which {name} has shape {own.get(name, 'none')}"
            got = f"{saved.get(name, 'none')} in {folder}"
            fix = "Load the model that the run was started with. Nothing was loaded."
            raise UnsupportedModelError.about("resume_from_checkpoint", expected, got, fix)
