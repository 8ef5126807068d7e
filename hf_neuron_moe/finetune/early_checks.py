"""What can be told of a run before data or model is loaded."""

from __future__ import annotations

import ast
import inspect
import json
import os
import tempfile
import textwrap
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
)

from hf_neuron_moe.backends import NEURON_BACKENDS, resolve_backend, trains_quantized
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.device.kernel_support import NO_TRAINING
from hf_neuron_moe.errors import NeuronMoEError, SourceDamageError, naming, nearest, not_one_of
from hf_neuron_moe.finetune import configs
from hf_neuron_moe.finetune.data_sources import files_of
from hf_neuron_moe.finetune.mistakes import pass_all
from hf_neuron_moe.finetune.model_files import (
    CONFIG_FILE,
    FROZEN,
    MARK,
    check_config,
    check_weights,
    content_of,
    conversion_of,
    folder_of,
    longest_input,
    read_config,
)
from hf_neuron_moe.finetune.needs import check_needs
from hf_neuron_moe.finetune.resumed import check_resume, check_resumed
from hf_neuron_moe.finetune.train_options import LoraOptions, ModelOptions, Options, bad, one_line
from hf_neuron_moe.training.prepare import refuse_for_frozen

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers for which transformers makes a mask from position ids."""

WHOLE_MODEL = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""Files that a whole model is saved in, pickled ones too."""


def check_run(options: Options) -> bytes | str:
    """Refuse what cannot work on this machine, before anything is loaded.

    Returns:
        The bytes of the model's ``config.json``, or why it cannot be looked at.

    Raises:
        ConfigError: there is no such file, model, tokenizer or checkpoint to resume from. Options contradict each other
            or the model, or need a package or an account that is not here.
        SourceDamageError: the model's weights are cut off or missing.
        BackendUnavailableError: the backend cannot run here.
    """
    *_, folder = pass_all(
        options.places,
        partial(check_resume, options),
        partial(check_files, options),
        partial(check_needs, options.training, options.places),
        partial(check_leftovers, options),
        partial(check_loading, options),
        partial(_check_backend, options.training),
        *([partial(folder_of, "tokenizer", options.model.tokenizer, "main")] if options.model.tokenizer else []),
        partial(_check_model, options.model, options.places.get("model", "train")),
    )
    config = read_config(folder)
    check_training(options, config)
    return config


def _check_backend(training: Any) -> None:
    """A named backend is refused whatever the device."""
    if training.neuron_patch:
        try:
            resolve_backend(training.neuron_backend, torch.device("cpu"))
        except NeuronMoEError as error:
            raise error.prefixed("neuron_") from None


def _check_model(model: ModelOptions, place: str) -> Path:
    """Return the model's folder, that of the hub's cache for a hub id; `place` is where it was given."""
    folder = folder_of("model", model.model, model.revision)
    if Path(model.model).is_dir():
        check_no_adapter(folder)
        try:
            check_weights(folder)
        except SourceDamageError as error:
            if error.argument != "model":  # but a file of it
                error.prefixed(f"{folder}/").where = place
            raise
        check_config(folder)
    return folder


def check_no_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter: transformers would load it frozen, and TRL would put another one over it."""
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        base = content_of(read_config(folder, ADAPTER_CONFIG_NAME)).get("base_model_name_or_path")
        named = f", {base!r}," if base else ""
        fix = f"Name its base{named} and continue the run with --resume; or save a merged model: lora_merge: true."
        raise bad("model", f"a folder without {ADAPTER_CONFIG_NAME}", f"{str(folder)!r}, which has an adapter", fix)


def check_leftovers(options: Options) -> None:
    """Refuse to write over the model, and a whole model next to an adapter, or the reverse.

    ``from_pretrained`` opens only one of the two.
    """
    folder, adapters = options.training.output_dir, bool(options.lora.lora_rank)
    model = Path(options.model.model)
    if os.path.isdir(model) and model.resolve() == Path(folder).resolve():
        fix = "Name another folder, or continue the run in it with --resume and the model that it began with."
        raise bad("output_dir", "another folder than the model's, which the run reads", repr(folder), fix)
    if not adapters and (Path(folder) / ADAPTER_CONFIG_NAME).is_file():
        fix = "Name another folder, or set lora_rank as that run did."
        raise bad("output_dir", "a folder without an adapter when a whole model is trained", repr(folder), fix)
    whole = any((Path(folder) / name).is_file() for name in WHOLE_MODEL)
    if adapters and whole and not options.training.resume_from_checkpoint:  # which is compared with the run later
        fix = "Name another folder, or train the whole model as that run did (lora_rank: 0)."
        raise bad("output_dir", "a folder without a whole model when adapters are trained", repr(folder), fix)


def check_loading(options: Options) -> None:
    """Refuse ways of attention that transformers does not know, and data that nobody would prepare."""
    way = options.model.attn_implementation
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if way and "/" not in way and way.rpartition("|")[2] not in known:  # a kernel of the Hub is a name with a slash
        raise not_one_of("attn_implementation", way, known).named("train")
    _check_attention(way or "")
    kwargs = getattr(options.training, "dataset_kwargs", None) or {}
    if others := sorted(set(kwargs) - {"skip_prepare_dataset"}):
        fix = "Leave it out: TRL reads skip_prepare_dataset alone."
        raise bad("dataset_kwargs", "left out", ", ".join(others), fix)
    if getattr(options.training, "model_init_kwargs", None):
        fix = "Use the options model, revision, dtype and attn_implementation."
        raise bad("model_init_kwargs", "left out, since the model is loaded by options of their own", "some", fix)
    packs, cuts = getattr(options.training, "packing", False), options.training.max_length is not None
    if getattr(options.training, "padding_free", False) and cuts and not packs:
        fix = "Set packing: true, or max_length: null, which cuts no row."
        raise bad("padding_free", "used with packing, or with max_length: null", "neither", fix)
    if kwargs.get("skip_prepare_dataset"):
        fix = "Leave it out. For data that is tokenized already, use TRL's SFTTrainer in a script of your own."
        raise bad("dataset_kwargs", "without skip_prepare_dataset, since this command reads text", "true", fix)


def _check_attention(way: str) -> None:
    """Refuse ways of attention that need a package or a device which is not here."""
    here = torch.accelerator.is_available()
    name = way.rpartition("|")[2]
    needed = {
        "flash_attention_2": ("the package flash-attn and a GPU", here and is_flash_attn_2_available()),
        "flash_attention_3": ("the package flash-attn-3 and a GPU", here and is_flash_attn_3_available()),
        "flex_attention": ("a GPU, since on CPUs it has no backward", here),
    }
    if "/" in name:
        needed[name] = ("the package kernels", find_spec("kernels") is not None)
    expected, met = needed.get(name, ("", True))
    if not met:
        raise bad("attn_implementation", f"one that works here: {name} needs {expected}", repr(way), "Use sdpa.")


def check_files(options: Options) -> None:
    """Refuse files of data, or of a chat template, that are not there."""
    template = getattr(options.training, "chat_template_path", None)
    given = {name: getattr(options.data, name) for name in ("train_files", "eval_files")}
    if template and template.endswith((".jinja", ".j2")):
        given["chat_template_path"] = [template]
    pass_all(options.places, *(partial(files_of, names, argument) for argument, names in given.items()))


def check_training(options: Options, config: bytes | str) -> None:
    """Refuse options that the Trainer, or the model once it is loaded, would refuse.

    Args:
        options: of the run.
        config: what ``read_config`` returned.
    """
    frozen = conversion_of(config) in FROZEN
    pass_all(
        options.places,
        partial(check_length, options, config),
        partial(check_merging, options.lora, sharded=bool(options.model.layout)),
        partial(_check_precomputed, options),
        partial(check_resumed, options, config),
        partial(check_targets, options, config),
        *([partial(check_quantized, options.lora), partial(_check_frozen, options)] if frozen else []),
        partial(_check_sharded, options, frozen=frozen),
    )


def _check_frozen(options: Options) -> None:
    """Refuse what was asked of patched blocks for a base of MX codes; the package's files are for other models too."""
    training, own = options.training, str(configs.FOLDER)
    asked = {key.removeprefix("neuron_") for key, place in options.places.items() if not place.startswith(own)}
    refuse_for_frozen(training.neuron_config(), training.neuron_include, training.neuron_exclude, asked)


def _check_precomputed(options: Options) -> None:
    """Refuse reference values before training for a sharded model, whose weights TRL cannot hash."""
    if options.model.layout and getattr(options.training, "precompute_ref_log_probs", False):
        sizes = ", ".join(f"{key} {size}" for key, size in options.model.layout.items() if size != 1)
        fix = "Leave it out: the reference then computes in each step. Or train without a layout."
        raise bad("precompute_ref_log_probs", f"false with {sizes}", "true", fix)


def _check_sharded(options: Options, *, frozen: bool) -> None:
    """Refuse kernel layouts, and merging, under FSDP."""
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
        expected = "'stock' under FSDP, whose checkpoints go by the stock names and shapes"
        got = f"{training.neuron_weights!r}{auto}"
        raise bad("neuron_weights", expected, got, "Set neuron_weights: stock; the values are the same.")
    check_merging(options.lora, sharded=True)


def check_length(options: Options, config: bytes | str) -> None:
    """Refuse rows that may be longer than the model's positions; a default is lowered to these."""
    longest, training = longest_input(config), options.training
    if longest is None or training.max_length is None or training.max_length <= longest:
        return
    if "max_length" in options.places:
        expected = f"at most {longest}, the positions of {options.model.model}"
        raise bad("max_length", expected, str(training.max_length), f"Set max_length: {longest} or less.")
    training.max_length = longest


def check_packing(options: Options, config: bytes | str) -> None:
    """Refuse to pack documents for a model that would let them see each other.

    Layers with a state carry it on, whatever attention does. Attention keeps documents apart if its mask is made with
    the position ids, which not every model of transformers passes on. Flash attention gets the lengths.
    """
    training = options.training
    if not getattr(training, "packing", False) or training.packing_strategy == "wrapped":
        return
    content = content_of(config)
    kinds = content.get("layer_types")
    found = sorted({str(kind) for kind in kinds} - ATTENTION) if isinstance(kinds, list) else []
    found += [key for key in content if key.startswith(("mamba", "ssm_", "linear_conv", "conv_"))]
    got = f"{', '.join(found[:3])} in {CONFIG_FILE}"
    if not found and isinstance(config, bytes) and "flash" not in options.model.attn_implementation:
        model = meta_model(options.model.model, config)
        if isinstance(model, str) or masks_with_positions(model):
            return
        found, got = ["mask"], f"{type(model).__name__}, whose mask is made without position ids"
    if found:
        fix = "Set packing: false; or packing_strategy: wrapped, with which documents of a row see each other."
        raise bad("packing", "false for a model that would let documents see each other", f"true, and {got}", fix)


def masks_with_positions(model: PreTrainedModel) -> bool:
    """Whether every mask that the model's decoder makes is made with position ids, by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(model.get_decoder()).forward)))
    nodes = list(ast.walk(tree))
    together = any(
        isinstance(key, ast.Constant) and key.value == "position_ids"
        for node in nodes
        if isinstance(node, ast.Dict)
        for key in node.keys
    )
    calls = (node for node in nodes if isinstance(node, ast.Call) and "mask" in getattr(node.func, "id", ""))
    made = [{word.arg for word in call.keywords} for call in calls]
    made = [words for words in made if words & {"inputs_embeds", None}]
    return bool(made) and all("position_ids" in words or (None in words and together) for words in made)


def check_targets(options: Options, config: bytes | str) -> None:
    """Refuse adapters none of whose target layers the model has.

    As in peft, a target is a module's whole name or its last parts, and one that is found is enough. Models that
    cannot be built by their configuration alone, and what patching takes away, are left to peft.
    """
    lora = options.lora
    if isinstance(config, str) or not lora.lora_rank or lora.lora_parameters or lora.lora_targets == ["all-linear"]:
        return
    model = meta_model(options.model.model, config)
    if isinstance(model, str):
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    if any(name.endswith(f".{target}") for name in names for target in lora.lora_targets):
        return
    layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D))
    linear = sorted({name.rpartition(".")[2] for name in layers})
    near = next(filter(None, (nearest(target, linear) for target in lora.lora_targets)), "")
    expected, got = f"linear layers of {options.model.model}, or all-linear", ", ".join(lora.lora_targets) or "none"
    raise bad("lora_targets", expected, got, f"It has {', '.join(linear)}.{near}")


def meta_model(name: str, config: bytes) -> PreTrainedModel | str:
    """The model of a configuration, a conversion's as its source's was, without weights; or why it cannot be built."""
    if conversion_of(config) is not None:
        config = json.dumps({key: value for key, value in content_of(config).items() if key != MARK}).encode()
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-") as folder:
        (Path(folder) / CONFIG_FILE).write_bytes(config)
        try:
            with naming("train"):
                return build_meta_model(Path(folder))
        except NeuronMoEError as error:
            return one_line(error).replace(folder, name)


def check_quantized(lora: LoraOptions) -> None:
    """Refuse to train a base of MX codes without adapters, or to merge adapters into it."""
    if lora.lora_rank and not lora.lora_merge:
        return
    argument, expected = ("lora_merge", "off") if lora.lora_rank else ("lora_rank", "positive")
    fix = "Train adapters on it and keep them apart, or `hf-neuron-moe export` it first."
    raise bad(argument, expected, "a checkpoint whose blocks are frozen MX codes", fix)


def check_quantized_backend(backend: str, fallback: str) -> None:
    """Refuse to train on a base of MX codes by kernels alone: none trains through them."""
    if fallback == "torch" or (
        backend != "auto" and trains_quantized(backend)
    ):  # auto: of a Neuron device, not here yet
        return
    fix = (
        "Set neuron_fallback: torch, with which PyTorch computes its blocks on the device in training; or train from "
        "the original checkpoint, or from a conversion in bf16."
    )
    expected = f"torch for a frozen MX base on backend {backend}"
    raise bad("neuron_fallback", expected, f"{fallback!r}, and {NO_TRAINING}", fix)


def check_merging(lora: LoraOptions, *, sharded: bool) -> None:
    """Refuse to merge adapters into weights that are spread over processes: no process has them."""
    if sharded and lora.lora_merge:
        fix = "Load the saved adapter in one process and call merge_and_unload() there."
        raise bad("lora_merge", "false where weights are sharded", "true", fix)
