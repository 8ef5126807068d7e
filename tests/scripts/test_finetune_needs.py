"""What finetune.py needs beside a model: packages, an account on the hub, positions for the blocks."""

from __future__ import annotations

import json
from typing import Any

import finetune_needs
import finetune_places
import pytest
from finetune_folder import longest_input
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import TrainingArguments

from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused
from tests.scripts.test_finetune_checks import check_run, options, status


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"report_to": "wandbb"}, "report_to", r"got 'wandbb'.* Did you mean 'wandb'\?"),
        (
            {"report_to": "wandb"},
            "report_to",
            r"got 'wandb', which is not. Install it .`pip install wandb`",
        ),
        ({"report_to": "azure_ml"}, "report_to", "pip install azureml-sdk"),
        ({"use_liger_kernel": "true"}, "use_liger_kernel", "pip install liger-kernel"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim, optim_args", "got sgd: not enough values"),
        ({"push_to_hub": "true"}, "push_to_hub", "got HF_HUB_OFFLINE, .*`hf upload`"),
    ],
)
def test_packages_and_accounts_that_are_not_here_are_named_before_loading(
    changes: dict[str, Any], argument: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_needs, "get_available_reporting_integrations", lambda: ["trackio"])
    monkeypatch.setattr(finetune_needs, "is_liger_kernel_available", lambda: False)
    with refused(ConfigError, argument, says):
        check_run(options("./none", **changes))


def test_an_optimizer_needs_its_package_and_one_that_needs_a_model_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    finetune_needs.check_packages(options("./none", optim="adamw_torch").training)
    error: Exception = ImportError("You need `bitsandbytes`:\n`pip install -U bitsandbytes`.")

    def made(training: TrainingArguments) -> None:
        raise error

    monkeypatch.setattr(finetune_needs.Trainer, "get_optimizer_cls_and_kwargs", made)
    for name in ("adamw_bnb_8bit", "galore_adamw"):
        says = f"got {name}: You need `bitsandbytes`: `pip install -U bitsandbytes`. Install"
        with refused(ConfigError, "optim, optim_args", says):
            check_run(options("./none", optim=name))
    error = ValueError("You need to pass a `model`")
    with refused(ConfigError, "optim, optim_args", got="adamw_bnb_8bit"):
        finetune_needs.check_packages(options("./none", optim="adamw_bnb_8bit").training)
    for name in ("galore_adamw_layerwise", "apollo_adamw", "adalomo"):
        finetune_needs.check_packages(options("./none", optim=name).training)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("none"), "got no token: log in with `hf auth login`"),
        (status(HfHubHTTPError, 401), "a token that the hub does not take"),
        (finetune_places.HTTP_ERROR("Name or service not known"), "cannot be reached: Name or service not known"),
        (status(HfHubHTTPError, 503), None),
        (None, None),
    ],
)
def test_an_upload_needs_an_account(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, message: str | None
) -> None:
    def whoami(self: object, token: str | None) -> dict[str, str]:
        assert token == "secret"
        if error is not None:
            raise error
        return {"name": "me"}

    monkeypatch.setattr(finetune_needs.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(finetune_needs.HfApi, "whoami", whoami)
    if message is None:
        finetune_needs.check_upload("secret")
        return
    with refused(ConfigError, "push_to_hub", message):
        finetune_needs.check_upload("secret")


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 256}, "vocab_size": 9}, 256),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_positions_are_read_from_the_configuration(config: dict[str, Any], longest: int | None) -> None:
    assert longest_input(json.dumps(config).encode()) == longest
