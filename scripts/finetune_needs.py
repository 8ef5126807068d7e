"""What options of ``finetune.py`` need besides this package: packages, an account on the hub."""

from __future__ import annotations

from finetune_places import HTTP_ERROR, one_line
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import Trainer, TrainingArguments
from transformers.integrations import (
    get_available_reporting_integrations,
    is_dagshub_available,
    is_flytekit_available,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_liger_kernel_available

from hf_neuron_moe.errors import ConfigError, nearest

_DISTRIBUTIONS = {"azure_ml": "azureml-sdk", "flyte": "flytekit"}
"""What is installed for an integration, where its name is another."""

_UNAUTHORIZED = (401, 403)

_OF_THE_MODEL = ("galore", "apollo", "lomo")
"""Parts of the names of optimizers that are made for a model."""


def check_needs(training: TrainingArguments) -> None:
    """Refuse reporting, optimizers and uploads that cannot work here, before anything is loaded.

    Raises:
        ConfigError: ``report_to`` names something unknown or not installed, ``use_liger_kernel`` or ``optim`` needs a
            package that is not, ``optim_args`` do not fit, or ``push_to_hub`` is on and the hub is not to be reached,
            or not with an account.
    """
    check_reporting(training.report_to or [])
    check_packages(training)
    if training.push_to_hub:
        check_upload(training.hub_token)


def check_reporting(names: list[str]) -> None:
    """Refuse integrations that transformers does not know, or whose package is not installed.

    Raises:
        ConfigError: as above.
    """
    installed = set(get_available_reporting_integrations())
    # These two are not in that list.
    installed |= {
        name for name, here in (("dagshub", is_dagshub_available), ("flyte", is_flytekit_available)) if here()
    }
    known = sorted(INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            remedy = f"Correct the name, or set report_to: none.{nearest(name, known)}"
            raise _bad("report_to", f"none, all, or of {', '.join(known)}", repr(name), remedy)
        if name not in installed:
            remedy = f"Install it (`pip install {_DISTRIBUTIONS.get(name, name)}`), or set report_to: none."
            raise _bad("report_to", "none, or what is installed", f"{name!r}, which is not", remedy)


def check_packages(training: TrainingArguments) -> None:
    """Refuse Liger's kernels and optimizers whose package is not installed.

    Raises:
        ConfigError: as above, or the optimizer's arguments do not fit.
    """
    if training.use_liger_kernel and not is_liger_kernel_available():
        remedy = "Install it (`pip install liger-kernel`), or set use_liger_kernel: false."
        raise _bad("use_liger_kernel", "false where the package liger-kernel is not installed", "true", remedy)
    try:
        Trainer.get_optimizer_cls_and_kwargs(training)
    except (ImportError, ValueError) as error:
        name = str(training.optim.value)
        if isinstance(error, ValueError) and any(part in name for part in _OF_THE_MODEL):
            return  # there is no model yet
        expected = "optimizers that transformers can make here"
        remedy = "Install what it needs, or correct them: optim: adamw_torch needs no other package."
        raise _bad("optim, optim_args", expected, f"{name}: {one_line(error)}", remedy) from error


def check_upload(token: str | None) -> None:
    """Refuse ``push_to_hub`` where the hub cannot be asked, or knows no account for the token.

    Raises:
        ConfigError: as above.
    """
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
        if error.response.status_code in _UNAUTHORIZED:
            why = "a token that the hub does not take: log in with `hf auth login --force`, or correct HF_TOKEN"
    except HTTP_ERROR as error:
        why = f"a hub that cannot be reached: {one_line(error)}"
    if why is not None:
        remedy = "Or leave push_to_hub out, and upload OUTPUT_DIR/final later: `hf upload`."
        raise _bad("push_to_hub", "used with a hub that can be reached and an account there", why, remedy)


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("finetune")
