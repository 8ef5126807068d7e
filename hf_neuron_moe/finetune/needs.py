"""What options need besides this package: packages, an account on the hub, a folder to write to."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import Trainer, get_scheduler
from transformers.integrations import (
    get_available_reporting_integrations,
    is_dagshub_available,
    is_flytekit_available,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import ParallelMode
from transformers.utils import is_liger_kernel_available
from trl import DPOTrainer

from hf_neuron_moe.errors import not_one_of
from hf_neuron_moe.finetune.mistakes import pass_all
from hf_neuron_moe.finetune.train_options import DPOArguments, bad, one_line
from hf_neuron_moe.output_files import WRITABLE_FOLDER, why_no_folder

HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""httpx's HTTPError, of the httpx that this huggingface_hub uses; errors of connections are among them."""

_DISTRIBUTIONS = {"azure_ml": "azureml-sdk", "flyte": "flytekit"}
_OF_THE_MODEL = ("galore", "apollo", "lomo")
"""Parts of the names of optimizers that are made for a model."""


def check_needs(training: Any, places: Mapping[str, str]) -> None:
    """Refuse what cannot work on this machine, before anything is loaded.

    Raises:
        ConfigError: ``output_dir`` cannot be written. ``report_to``, ``optim`` or another option needs a package that
            is not installed or has an unknown name. ``push_to_hub`` is on without a hub or an account, or ``fsdp`` is
            asked for in one process.
    """
    pass_all(
        places,
        partial(check_output, training.output_dir),
        *(partial(check_reporting, name) for name in training.report_to or []),
        partial(check_compiler, training),
        partial(check_processes, training),
        partial(check_packages, training),
        partial(check_optimizer, training),
        *(partial(check_preference_loss, kind) for kind in _preference_losses(training)),
        partial(check_schedule, training),
        *([partial(check_upload, training.hub_token)] if training.push_to_hub else []),
    )


def check_compiler(training: Any) -> None:
    """Refuse a backend of ``torch.compile`` that nobody knows."""
    backend, known = training.torch_compile_backend, sorted(found.value.lower() for found in DynamoBackend)
    if training.torch_compile and backend and backend.lower() not in known:
        raise not_one_of("torch_compile_backend", backend, known).named("train")


def check_processes(training: Any) -> None:
    """Refuse FSDP in a run of one process."""
    settings = training.fsdp_config if isinstance(training.fsdp_config, dict) else {}
    if training.fsdp and not settings.get("xla") and training.parallel_mode is not ParallelMode.DISTRIBUTED:
        fix = "Leave it out, or start several processes: `accelerate launch ... -m hf_neuron_moe train CONFIG.yaml`."
        raise bad("fsdp", "unset in a run of one process", "set", fix)


def check_packages(training: Any) -> None:
    """Refuse what a package or a device is missing for."""
    if training.use_liger_kernel and not is_liger_kernel_available():
        fix = "Install it (`pip install liger-kernel`), or set use_liger_kernel: false."
        raise bad("use_liger_kernel", "false where the package liger-kernel is not installed", "true", fix)
    if getattr(training, "activation_offloading", False) and not torch.accelerator.is_available():
        raise bad("activation_offloading", "false without an accelerator to offload from", "true", "Remove it.")


def check_optimizer(training: Any) -> None:
    """Refuse an optimizer that cannot be made here."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(training)
    except (ImportError, ValueError) as error:
        name = str(training.optim.value)
        if not (isinstance(error, ValueError) and any(part in name for part in _OF_THE_MODEL)):
            fix = "Install what it needs, or correct them: optim: adamw_torch needs no other package."
            got = f"{name}: {one_line(error)}"
            raise bad("optim, optim_args", "optimizers that transformers can make here", got, fix) from error


def _preference_losses(training: Any) -> list[str]:
    """Return the losses that a run of DPO adds up."""
    return training.loss_type if isinstance(training, DPOArguments) else []


def check_preference_loss(kind: str) -> None:
    """Refuse a loss that TRL's trainer, by its source, compares with no name; it says so after the model is loaded."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(DPOTrainer)))
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name))
    values = (node.comparators[0] for node in compared if ast.unparse(node.left) == "loss_type")
    known = sorted({str(value.value) for value in values if isinstance(value, ast.Constant)})
    if known and kind not in known:
        raise not_one_of("loss_type", kind, known).named("train")


def check_schedule(training: Any) -> None:
    """Refuse what the schedule of the learning rate does not take."""
    kind, more = training.lr_scheduler_type, training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    try:
        get_scheduler(kind, optimizer, 1, 2, scheduler_specific_kwargs=more)
    except (TypeError, ValueError) as error:
        expected = f"a mapping that lr_scheduler_type {getattr(kind, 'value', kind)} takes"
        raise bad("lr_scheduler_kwargs", expected, f"{more!r}: {one_line(error)}", "Correct it.") from error


def check_output(folder: str) -> None:
    """Refuse an output folder that cannot be made or written to; nothing of the probe stays behind."""
    if (why := why_no_folder(folder)) is not None:
        raise bad("output_dir", WRITABLE_FOLDER, f"{folder!r} ({why})", "Name another folder.")


def check_reporting(name: str) -> None:
    """Refuse an integration that transformers does not know, or whose package is not installed."""
    installed = set(get_available_reporting_integrations())
    # These two are not in that list.
    more = (("dagshub", is_dagshub_available), ("flyte", is_flytekit_available))
    installed |= {name for name, here in more if here()}
    if name not in INTEGRATION_TO_CALLBACK:
        raise not_one_of("report_to", name, ("none", "all", *sorted(INTEGRATION_TO_CALLBACK))).named("train")
    if name not in installed:
        fix = f"Install it (`pip install {_DISTRIBUTIONS.get(name, name)}`), or set report_to: none."
        raise bad("report_to", "none, or what is installed", f"{name!r}, which is not", fix)


def check_upload(token: str | None) -> None:
    """Refuse ``push_to_hub`` where the hub cannot be asked, or knows no account for the token."""
    why = None
    try:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE, which forbids to ask the hub"
        else:
            HfApi().whoami(token=token)
    except LocalTokenNotFoundError:
        why = "no token: log in with `hf auth login`, or set HF_TOKEN"
    except HfHubHTTPError as error:
        # A hub that is busy is left to the upload.
        if error.response.status_code in (401, 403):
            why = "a token that the hub does not take: log in with `hf auth login --force`, or correct HF_TOKEN"
    except HTTP_ERROR as error:
        why = f"a hub that cannot be reached: {one_line(error)}"
    if why is not None:
        fix = "Or leave push_to_hub out, and upload OUTPUT_DIR later: `hf upload`."
        raise bad("push_to_hub", "used with a hub that can be reached and an account there", why, fix)
