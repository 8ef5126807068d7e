"""What options of ``finetune.py`` need besides this package: packages that report, an account on the hub."""

from __future__ import annotations

from finetune_places import HTTP_ERROR, one_line
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import TrainingArguments
from transformers.integrations import (
    get_available_reporting_integrations,
    is_dagshub_available,
    is_flytekit_available,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_neuron_moe.errors import ConfigError, nearest, refuse

_DISTRIBUTIONS = {"azure_ml": "azureml-sdk", "flyte": "flytekit"}
"""What is installed for an integration, where its name is another."""

_UNAUTHORIZED = (401, 403)


def check_needs(training: TrainingArguments) -> None:
    """Refuse reporting and uploads that cannot work here, before anything is loaded.

    Raises:
        ConfigError: ``report_to`` names something unknown or not installed, or ``push_to_hub`` is on and the hub is
            not to be reached, or not with an account.
    """
    check_reporting(training.report_to or [])
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
    return refuse(ConfigError, where="finetune", argument=argument, expected=expected, got=got, remedy=remedy)
