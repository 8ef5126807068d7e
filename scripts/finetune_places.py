"""Where a run's model and tokenizer are: a folder here, or a name that the hub knows."""

from __future__ import annotations

from pathlib import Path

from finetune_folder import CONFIG_FILE
from finetune_options import ModelOptions
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from hf_neuron_moe.errors import ConfigError

HUB_TIMEOUT_S = 10.0
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""httpx's HTTPError, of the httpx that this huggingface_hub uses; errors of connections are among them."""

_MADE_BY = {
    ".cache/smollm2-135m-instruct": "`bash scripts/demo.sh` makes it, and so does `python scripts/get_smollm2.py`; "
    "the head of configs/smollm2-135m.yaml has more.",
    ".cache/smollm2-mixtral": "Run `python scripts/get_smollm2.py` (or `bash scripts/demo.sh`), and then the command "
    "that makes it of that, at the head of configs/smollm2-mixtral.yaml.",
    ".cache/tiny-llama": "The head of configs/tiny-llama.yaml has the command that makes it.",
    ".cache/tiny-mixtral": "The head of configs/tiny-mixtral.yaml has the command that makes it.",
}
"""What makes the folders that files of configs/ name."""


def check_places(options: ModelOptions, *, needed: bool = True) -> list[str]:
    """Refuse a model or tokenizer that is neither a folder here nor a name that the hub knows.

    The hub is asked about a name that is not in its cache: once, without the retries that loading makes.

    Args:
        options: with the names.
        needed: whether the run follows; otherwise a hub that cannot be asked is told and not refused.

    Returns:
        Names that could not be asked about, a line each.

    Raises:
        ConfigError: it is neither.
    """
    unknown = []
    for argument, name in (("model", options.model), ("tokenizer", options.tokenizer)):
        if not name or Path(name).is_dir():
            continue
        if is_spelled_as_path(name):
            remedy = _MADE_BY.get(name.rstrip("/"), "Correct the path; a hub id is OWNER/NAME.")
            got = f"{name!r}, a folder that does not exist"
            raise _bad(argument, "an existing folder or a hub id", got, remedy)
        why = _ask_hub(argument, name, options.revision if argument == "model" else "main")
        if why is not None and needed:
            raise _no_such(argument, name, why)
        if why is not None:
            unknown.append(f"{argument} {name!r} is no folder here, and {why}")
    return unknown


def is_spelled_as_path(name: str) -> bool:
    """Whether `name` cannot be a hub id, which has at most one slash and begins with neither that nor a dot."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _ask_hub(argument: str, name: str, revision: str) -> str | None:
    """Refuse a name that the hub does not know; return why it cannot be asked, or None."""
    try:
        # Any file will do; a checkpoint has the first, and a tokenizer by itself the second.
        kept = [
            try_to_load_from_cache(name, file, revision=revision) for file in (CONFIG_FILE, "tokenizer_config.json")
        ]
        if any(isinstance(path, str) for path in kept):
            return None
        if constants.HF_HUB_OFFLINE:
            return "not in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub"
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise _no_such(argument, name, f"not of the form that ids have ({one_line(error)})") from error
    except RevisionNotFoundError as error:
        raise _no_such(argument, name, f"known to the hub without a revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        why = "unknown to the hub, or private and not open to your token (`hf auth login`)"
        raise _no_such(argument, name, why) from error
    except HfHubHTTPError:
        return None  # the hub is busy, or a mirror does not know this question: loading will show
    except HTTP_ERROR as error:
        return f"not in the hub's cache, and the hub cannot be reached: {one_line(error)}"
    return None


def read_config(options: ModelOptions, *, online: bool) -> bytes | str:
    """Return the bytes of the model's ``config.json``, or why it cannot be looked at.

    Args:
        options: with the model's name.
        online: whether the hub may be asked.
    """
    name = options.model
    if not online and not Path(name).is_dir():
        return f"the blocks of {name} cannot be looked at without its config.json"
    try:
        if Path(name).is_dir():
            return (Path(name) / CONFIG_FILE).read_bytes()
        return Path(hf_hub_download(name, CONFIG_FILE, revision=options.revision)).read_bytes()
    except (OSError, ValueError) as error:
        return f"the blocks of {name} cannot be looked at before it is loaded: {one_line(error)}"


def one_line(error: Exception) -> str:
    """Return what an error says, without line breaks and the full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _no_such(argument: str, name: str, why: str) -> ConfigError:
    return _bad(
        argument,
        "an existing folder or a hub id",
        f"{name!r}: as a folder it does not exist here, and as a hub id it is {why}",
        "Correct the path, or the id; without a network name a folder, or one that is in the hub's cache with "
        "HF_HUB_OFFLINE=1.",
    )


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("finetune")
