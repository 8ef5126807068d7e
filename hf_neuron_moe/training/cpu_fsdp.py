"""FSDP2 and tensor parallelism over CPU processes, which accelerate does not switch on.

On CPUs ``accelerate.state.AcceleratorState`` (1.15) drops its FSDP settings without a word, and a run that asked for
FSDP becomes DDP. Everything behind that switch works: ``fully_shard`` over gloo, state dicts, clipping, checkpoints.
Its ``ParallelismConfig``, by which the Trainer gives the processes of a tensor-parallel group the same rows, refuses
CPU processes.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_neuron_moe.errors import ConfigError, public


class CpuFSDP2Mixin:
    """Makes a Trainer that runs in several CPU processes honour FSDP2, as asked for by accelerate or ``fsdp=True``.

    Put it before the Trainer class: ``class MyTrainer(CpuFSDP2Mixin, Trainer)``. On other devices, in one process and
    without FSDP it changes nothing. Start the processes with ``accelerate launch --use_fsdp`` (not ``--cpu``, which
    starts a single one) and set ``use_cpu=True`` in the training arguments.
    """

    args: Any

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """Set the process-wide state up front; the Trainer's Accelerator then finds it as it does on GPUs."""
        arguments: dict[str, Any] = super()._build_accelerator_args(**options)  # type: ignore[misc]
        asked = self.args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if asked and PartialState().distributed_type == DistributedType.MULTI_CPU:
            shard_on_cpu(arguments)
        return arguments


class _CpuParallelism(ParallelismConfig):
    """Accepts CPU processes. That sizes and processes agree was checked when the model was loaded."""

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        pass


class CpuTensorParallelMixin:
    """Lets a Trainer train a model with ``DistributedConfig(tp_size=...)`` in CPU processes.

    On other devices and for other models it changes nothing. :class:`NeuronMoETrainer` has it.
    """

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**options)  # type: ignore[misc]
        asked = arguments.get("parallelism_config")
        if asked is not None and PartialState().distributed_type == DistributedType.MULTI_CPU:
            sizes = {name: getattr(asked, name) for name in ("tp_size", "dp_shard_size", "dp_replicate_size")}
            arguments["parallelism_config"] = _CpuParallelism(**sizes)
        return arguments


@public("CpuFSDP2Mixin")
def shard_on_cpu(arguments: dict[str, Any]) -> None:
    """Switch accelerate's process-wide state from several CPU processes to FSDP2 over them.

    `arguments` are those of the ``Accelerator`` to be made afterwards; the default of ``fsdp_plugin`` is one from the
    environment that ``accelerate launch`` sets up.
    """
    plugin = arguments.get("fsdp_plugin") or FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        fix = "Set fsdp_version: 2 in accelerate's configuration."
        raise ConfigError.about("fsdp_version", "2 on CPUs", plugin.fsdp_version, fix)
    state = Accelerator(**arguments).state
    if arguments.get("mixed_precision") not in (None, "no"):
        plugin.set_mixed_precision(arguments["mixed_precision"])
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
