"""What can be told of a run of ``finetune.py`` before text or model is loaded, and of one on a Neuron chip beforehand.

B tokens per block of experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import fnmatch
import os
import tempfile
from pathlib import Path

import torch
from finetune_folder import CONFIG_FILE, FROZEN, check_frozen, check_weights, conversion_of, without_mark
from finetune_options import ModelOptions, Options
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from transformers.trainer import TRAINER_STATE_NAME

from hf_neuron_moe.backends import NEURON_BACKENDS, resolve_backend
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import BF16_TOKENS, MAX_TOKENS, Block, Device, this_device, why_not
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.device.usable import NO_TRAINING, BlockGroup, block_groups
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, refuse

HUB_TIMEOUT_S = 10.0
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""httpx's HTTPError, of the httpx that this huggingface_hub uses; errors of connections are among them."""

_ANY_SIZE = 1024
"""H and I that every kernel takes, for a model whose sizes are not known yet."""

_MADE_BY = {
    ".cache/smollm2-135m-instruct": "`bash scripts/demo.sh` makes it, and so does `python scripts/get_smollm2.py`; "
    "the head of configs/smollm2-135m.yaml has more.",
    ".cache/smollm2-mixtral": "`bash scripts/demo.sh` makes it, and so does `python scripts/upcycle_mixtral.py` after "
    "`python scripts/get_smollm2.py`; the head of configs/smollm2-mixtral.yaml has more.",
    ".cache/tiny-llama": "The head of configs/tiny-llama.yaml has the command that makes it.",
    ".cache/tiny-mixtral": "The head of configs/tiny-mixtral.yaml has the command that makes it.",
}
"""What makes the folders that files of configs/ name."""


def check_run(options: Options) -> None:
    """Refuse what cannot work on this machine, before anything is loaded.

    Raises:
        ConfigError: there is no such model, tokenizer or checkpoint to resume from, or the kernels of this machine
            compute a block neither nor may PyTorch, or options contradict each other or the model.
        SourceDamageError: the model's weights are cut off or missing.
        BackendUnavailableError: the backend cannot run here.
    """
    check_resume(options)
    backend = options.training.neuron_backend
    if options.training.neuron_patch:
        resolve_backend(backend, torch.device("cpu"))  # a named backend is refused whatever the device
    check_places(options.model)
    check_weights(options.model.model)
    check_training(options)
    if options.training.neuron_patch and backend in NEURON_BACKENDS:
        check_kernels(options, this_device(), Adapter())


def check_training(options: Options) -> None:
    """Refuse options that the Trainer, or the model once it is loaded, would refuse; the hub is not asked.

    Raises:
        ConfigError: weights in the kernels' layout, or adapters to merge, under FSDP; or a base of MX codes that is
            to be trained without adapters.
    """
    config = _config_of(options, online=False)
    frozen = isinstance(config, bytes) and conversion_of(config) in FROZEN
    if frozen:
        check_frozen(options.lora)
    if not options.training.fsdp and os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return
    training = options.training
    kernel_home = training.neuron_weights == "kernel" or (
        training.neuron_weights == "auto"
        and training.neuron_backend in NEURON_BACKENDS
        and training.neuron_fallback != "torch"  # blocks that PyTorch computes stay in the stock layout
    )
    if training.neuron_patch and not frozen and kernel_home:
        auto = "" if training.neuron_weights == "kernel" else f", which is kernel on backend {training.neuron_backend}"
        raise _bad(
            "neuron_weights",
            "'stock' under FSDP, whose checkpoints go by the stock names and shapes",
            f"{training.neuron_weights!r}{auto}",
            "Set neuron_weights: stock; the numbers are the same.",
        )
    if options.lora.lora_merge:
        remedy = "Load the saved adapter in one process and call merge_and_unload() there."
        raise _bad("lora_merge", "false under FSDP", "true", remedy)


def check_resume(options: Options) -> None:
    """Refuse a checkpoint to resume from that is none.

    Raises:
        ConfigError: it is none.
    """
    wish = options.training.resume_from_checkpoint
    if not wish or wish is True or wish in ("auto", "true", "True"):
        return
    folder = Path(wish)
    if (folder / TRAINER_STATE_NAME).is_file():
        return
    got = f"{wish!r} without one" if folder.is_dir() else f"{wish!r}, which does not exist"
    raise _bad(
        "resume_from_checkpoint",
        f"a checkpoint folder (with {TRAINER_STATE_NAME}), true or auto",
        got,
        "Name a checkpoint-N folder; auto takes the newest of output_dir, or starts anew.",
    )


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
        raise _no_such(argument, name, f"not of the form that ids have ({_line(error)})") from error
    except RevisionNotFoundError as error:
        raise _no_such(argument, name, f"known to the hub without a revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        why = "unknown to the hub, or private and not open to your token (`hf auth login`)"
        raise _no_such(argument, name, why) from error
    except HfHubHTTPError:
        return None  # the hub is busy, or a mirror does not know this question: loading will show
    except _HTTP_ERROR as error:
        return f"not in the hub's cache, and the hub cannot be reached: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _no_such(argument: str, name: str, why: str) -> ConfigError:
    return _bad(
        argument,
        "an existing folder or a hub id",
        f"{name!r}: as a folder it does not exist here, and as a hub id it is {why}",
        "Correct the path, or the id; without a network name a folder, or one that is in the hub's cache with "
        "HF_HUB_OFFLINE=1.",
    )


def check_kernels(options: Options, device: Device, adapter: Adapter, *, online: bool = True) -> list[str]:
    """Refuse a run whose blocks the kernels cannot compute, where PyTorch may not either.

    Args:
        options: of a run that patches for the Neuron backend.
        device: the chip that it is for.
        adapter: the kernels there.
        online: whether the hub may be asked for the model's configuration.

    Returns:
        What was found, a line each.

    Raises:
        ConfigError: blocks have no kernel and ``neuron_fallback`` is ``"refuse"``.
    """
    training = options.training
    config = _config_of(options, online)
    converted = conversion_of(config) if isinstance(config, bytes) else None
    if converted in FROZEN:
        return _check_codes(options, device, converted)
    found, note = _blocks_of(options.model.model, config)
    notes = [note] if note else []
    if found is None:
        judged, prefix = _judge_kinds(options, device, adapter), "if it has "
        without = judged if all(judged.values()) else {}
    else:
        chosen = [group for group in found if _is_chosen(group, training.neuron_include, training.neuron_exclude)]
        judged, prefix = {group.label: _judge(_block(group, options), options, device, adapter) for group in chosen}, ""
        without = {label: why for label, why in judged.items() if why}
        if not training.neuron_strict and len(without) < len(judged):
            without = {}
    may_fall_back = training.neuron_fallback == "torch"
    of_lnc = device.lnc == 1 and any("LNC" in why for why in without.values() if why)
    if without and not may_fall_back:
        raise _bad(
            "neuron_precision, neuron_block_size and the length of batches",
            f"ones that the {device.platform} kernels compute (backend {training.neuron_backend})",
            "; ".join(f"{label} ({training.neuron_precision}): {why}" for label, why in without.items()),
            f"{'Set NEURON_LOGICAL_NC_CONFIG=2, change' if of_lnc else 'Change'} the option, or set neuron_fallback: "
            "torch, with which PyTorch computes such blocks on the device.",
        )
    outcome = (
        "PyTorch computes them"
        if may_fall_back
        else "the run is refused"
        if training.neuron_strict
        else "they stay stock"
    )
    for label, why in judged.items():
        notes.append(f"{prefix}{label}: " + (f"{outcome}: {why}" if why else "the kernels compute them"))
    return notes


def _config_of(options: Options, online: bool) -> bytes | str:
    """The model's ``config.json``, or why it cannot be looked at."""
    name = options.model.model
    if not online and not Path(name).is_dir():
        return f"the blocks of {name} cannot be looked at without its config.json"
    try:
        if Path(name).is_dir():
            return (Path(name) / CONFIG_FILE).read_bytes()
        return Path(hf_hub_download(name, CONFIG_FILE, revision=options.model.revision)).read_bytes()
    except (OSError, ValueError) as error:
        return f"the blocks of {name} cannot be looked at before it is loaded: {_line(error)}"


def _blocks_of(name: str, config: bytes | str) -> tuple[list[BlockGroup] | None, str]:
    """The blocks that could be patched by the model's configuration, or None where nobody has that; and a note.

    Blocks of families that transformers does not know are left to the loading. A conversion in bf16 is patched anew.
    """
    if isinstance(config, str):
        return None, config
    if conversion_of(config) is not None:
        config = without_mark(config)
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-") as folder:
        (Path(folder) / CONFIG_FILE).write_bytes(config)
        try:
            found = block_groups(build_meta_model(Path(folder), "finetune"))
        except NeuronMoEError as error:
            told = _line(error).replace(folder, name)
            return [], f"the blocks of {name} cannot be judged before it is loaded: {told}"
    return [group for group in found if group.reason is None], ""


def _check_codes(options: Options, device: Device, precision: str) -> list[str]:
    """Refuse to train through MX codes where PyTorch may not: no kernel does that."""
    why = f"{options.model.model} is a conversion in {precision}; {NO_TRAINING}"
    if options.training.neuron_fallback != "torch":
        raise _bad(
            "neuron_fallback",
            f"torch for a frozen MX base on {device.platform} (backend {options.training.neuron_backend})",
            f"{options.training.neuron_fallback!r}: {why}",
            "Set neuron_fallback: torch, with which PyTorch computes its blocks on the device in training; or train "
            "from the original checkpoint, or from a conversion in bf16.",
        )
    return [f"frozen MX blocks: in training PyTorch computes them on the device: {why}"]


def _is_chosen(group: BlockGroup, include: list[str] | None, exclude: list[str] | None) -> bool:
    def matches(name: str, globs: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

    return any((not include or matches(name, include)) and not matches(name, exclude or []) for name in group.names)


def _block(group: BlockGroup, options: Options) -> Block:
    return group.block(options.training.neuron_precision, options.training.neuron_block_size)


def _judge_kinds(options: Options, device: Device, adapter: Adapter) -> dict[str, str | None]:
    """The same by kind of block, for a model that nothing is known of."""
    training = options.training
    kinds = {"dense MLPs": "mlp", "experts": "experts"}
    size = (training.neuron_precision, _ANY_SIZE, _ANY_SIZE, training.neuron_block_size)
    return {words: _judge(Block(kind, *size), options, device, adapter) for words, kind in kinds.items()}


def _judge(block: Block, options: Options, device: Device, adapter: Adapter) -> str | None:
    """Why no kernel computes `block` in this run."""
    reason = why_not(block, device, adapter)
    if reason is not None or block.kind != "experts":
        return reason
    most = BF16_TOKENS if block.precision == "bf16" else MAX_TOKENS
    batches = {"per_device_train_batch_size": options.training.per_device_train_batch_size}
    if options.data.eval_files or options.data.eval_split or options.data.eval_share:
        batches["per_device_eval_batch_size"] = options.training.per_device_eval_batch_size
    for name, size in batches.items():
        tokens = size * options.data.block_length
        if tokens > most:
            asked = f"{name} {size} x block_length {options.data.block_length} = {tokens:,}"
            return f"a call takes at most {most:,} tokens, and {asked}"
    return None


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return refuse(ConfigError, where="finetune", argument=argument, expected=expected, got=got, remedy=remedy)
