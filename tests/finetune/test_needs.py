"""What options need besides a model: packages, an account on the hub, a folder, processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.finetune import needs, read_options
from hf_neuron_moe.finetune.needs import check_needs
from tests.refusals import refused


def training_of(**changes: Any) -> Any:
    given = {"model": "m", "train_files": "none.txt", "use_cpu": "true", **changes}
    return read_options([word for key, value in given.items() for word in (f"--{key}", str(value))]).training


@pytest.mark.parametrize(
    ("changes", "argument", "says"),
    [
        ({"report_to": "wandbb"}, "report_to", r"got 'wandbb'.* Did you mean 'wandb'\?"),
        ({"report_to": "wandb"}, "report_to", r"got 'wandb', which is not. Install it .`pip install wandb`"),
        ({"report_to": "azure_ml"}, "report_to", "pip install azureml-sdk"),
        ({"method": "dpo", "loss_type": "sigmoyd"}, "loss_type", r"got 'sigmoyd'.* Did you mean 'sigmoid'\?"),
        ({"use_liger_kernel": "true"}, "use_liger_kernel", "pip install liger-kernel"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim, optim_args", "got sgd: not enough values"),
        ({"push_to_hub": "true"}, "push_to_hub", "got HF_HUB_OFFLINE, .*`hf upload`"),
        ({"torch_compile": "true", "torch_compile_backend": "inducter"}, "torch_compile_backend", "'inductor'"),
        ({"fsdp": "full_shard"}, "fsdp", "accelerate launch"),
        ({"activation_offloading": "true"}, "activation_offloading", "without an accelerator"),
        ({"lr_scheduler_kwargs": "abc"}, "lr_scheduler_kwargs", "lr_scheduler_type linear takes, got 'abc'"),
        ({"lr_scheduler_kwargs": '{"a": 1}'}, "lr_scheduler_kwargs", "unexpected keyword argument 'a'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs", "min_lr or min_lr_rate"),
    ],
)
def test_packages_and_accounts_that_are_not_here_are_named(
    changes: dict[str, Any], argument: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND", "FSDP_VERSION"):
        monkeypatch.setenv(name, "")  # set by TrainingArguments, and taken out again afterwards
    monkeypatch.setattr(needs, "get_available_reporting_integrations", lambda: ["trackio"])
    monkeypatch.setattr(needs, "is_liger_kernel_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with refused(ConfigError, argument, says):
        check_needs(training_of(**changes), {})


def test_an_optimizer_needs_its_package_and_one_that_needs_a_model_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs(training_of(optim="adamw_torch"), {})
    error: Exception = ImportError("You need `bitsandbytes`:\n`pip install -U bitsandbytes`.")

    def made(training: Any) -> None:
        raise error

    monkeypatch.setattr(needs.Trainer, "get_optimizer_cls_and_kwargs", made)
    for name in ("adamw_bnb_8bit", "galore_adamw"):
        says = f"got {name}: You need `bitsandbytes`: `pip install -U bitsandbytes`. Install"
        with refused(ConfigError, "optim, optim_args", says):
            check_needs(training_of(optim=name), {})
    error = ValueError("You need to pass a `model`")
    for name in ("galore_adamw_layerwise", "apollo_adamw", "adalomo"):
        check_needs(training_of(optim=name), {})


def status(kind: type[HfHubHTTPError], code: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, status_code=code, request=None)
    return kind("told by the hub", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("none"), "got no token: log in with `hf auth login`"),
        (status(HfHubHTTPError, 401), "a token that the hub does not take"),
        (needs.HTTP_ERROR("Name or service not known"), "cannot be reached: Name or service not known"),
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

    monkeypatch.setattr(needs.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(needs.HfApi, "whoami", whoami)
    if message is None:
        needs.check_upload("secret")
        return
    with refused(ConfigError, "push_to_hub", message):
        needs.check_upload("secret")


def test_an_output_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    needs.check_output(str(tmp_path / "new" / "folder"))
    for folder in ("file", "file/below"):
        with refused(ConfigError, "output_dir", "is no folder"):
            needs.check_output(str(tmp_path / folder))
    with refused(ConfigError, "output_dir"):
        needs.check_output("/proc/none")
    for folder, got in (("a" * 300, "a name too long"), ("a\0b", "characters that it cannot have")):
        with refused(ConfigError, "output_dir", rf"\({got}\)"):
            needs.check_output(str(tmp_path / folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
