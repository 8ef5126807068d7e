"""Memory of a training step from a model's shapes: parameters, gradients, optimizer states, saved activations.

Counted is what lives from one pass to the next. Temporaries inside an operator, an allocator's slack and a device's own
needs come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_neuron_moe.config import MOST_RANK, MOST_TOKENS, OPTIMIZERS, NeuronMoEConfig
from hf_neuron_moe.errors import (
    BackendUnavailableError,
    ConfigError,
    NeuronMoEError,
    NothingToPatchError,
    UnsupportedModelError,
    not_one_of,
    public,
)
from hf_neuron_moe.patching import patch_model, unpatch_model
from hf_neuron_moe.training.fake_forward import SavedActivations, fake_saved_activations
from hf_neuron_moe.training.one_rank import Held, Layout, OneRank, Prepared, RankEstimate, numbers_of

STOCK = "stock"
_STEP_BYTES = 4


@dataclass(frozen=True)
class PolicyEstimate:
    """Saved activations of one policy, in bytes, and the step's sum."""

    name: str  # the policy as it was asked for, or ``"stock"`` for the unpatched model
    saved_blocks: int
    """Kept by the blocks that are patched (or would be), their inputs included. Under gradient checkpointing: by those
    of the layer that is recomputed at the peak; 0 where the peak is before the first recomputation."""
    saved_rest: int
    """Kept by the rest of the model. Under gradient checkpointing: the layers' inputs, and the rest of the layer that
    is recomputed at the peak, or what lies outside of the layers."""
    blocks_bytes_per_token: float  # what the blocks keep per token without gradient checkpointing
    total: int  # parameters, buffers, gradients, optimizer states, saved activations; what a layout's rank moves
    worst_total: int | None = None
    """The total where all tokens choose experts of this rank, if ranks exchange tokens; `total` is of even shares."""

    @property
    def saved(self) -> int:
        """All saved activations."""
        return self.saved_blocks + self.saved_rest


@dataclass(frozen=True)
class TrainingEstimate:
    """Result of :func:`estimate_training`; all sizes in bytes, with a layout those of one rank."""

    parameters: int  # number of parameters, adapters included
    trainable: int  # number of those that are trained
    parameter_bytes: int  # bytes of parameters and buffers, tied ones once
    gradient_bytes: int  # one gradient per trained parameter, in its dtype
    optimizer_bytes: int
    batch: int  # sequences per step and device
    length: int  # tokens per sequence
    optimizer: str
    gradient_checkpointing: bool  # whether every layer is recomputed
    lora_rank: int  # rank of the adapters; 0 trains everything
    patched: int  # blocks that are patched
    policies: tuple[PolicyEstimate, ...]
    """One entry per policy, then the stock model's, which is alone if no block can be patched.

    There is none of a stock model whose forward reads values, where shapes say nothing."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why, of the policies that the model's blocks cannot have, such as a budget below what they need.

    Also of the stock model, if it has no entry."""
    rank: RankEstimate | None = None  # what is particular to a rank; None without a layout

    @property
    def tokens(self) -> int:
        """Tokens per step and device."""
        return self.batch * self.length

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values that ``json.dumps`` accepts."""
        policies = [asdict(policy) | {"saved": policy.saved} for policy in self.policies]
        return asdict(self) | {"tokens": self.tokens, "policies": policies}


@public
def estimate_training(
    model: nn.Module,
    configs: Mapping[str, NeuronMoEConfig],
    *,
    batch: int,
    length: int,
    optimizer: str = "adamw",
    lora_rank: int = 0,
    gradient_checkpointing: bool = False,
    layout: Layout | None = None,
) -> TrainingEstimate:
    """Estimate the memory of a training step under several activation policies, and of the stock model.

    With a layout it is the memory of one rank. transformers' pipeline stages only run inference: they hold parameters.
    Blocks that cannot be patched stay stock and count as the rest of the model; where no block can be patched, only the
    stock model is estimated. Raises ConfigError where all policies are refused.

    Args:
        model: a causal language model on the meta device, unpatched, in the dtype it is trained in:
            ``with torch.device("meta"): model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)``. With
            `lora_rank` it gets adapters; otherwise it is left as it was.
        configs: configuration by the name that the result uses.
        batch: sequences per step and device (B), without padding.
        length: tokens per sequence (L).
        optimizer: ``"adamw"`` (two states per parameter, in its dtype), ``"adafactor"`` (factored second moments in
            fp32, no momentum) or ``"sgd"`` (none).
        lora_rank: rank of LoRA adapters on every linear layer outside of the patched blocks and the head, as peft makes
            them; everything else is frozen. 0: everything is trained that requires gradients.
        gradient_checkpointing: whether transformers recomputes every layer. Then the peak is counted, which is one of
            two: the layers' inputs and what lies outside of the layers (last norm, head, loss), when the backward
            begins; or the layers' inputs and one recomputed layer. Head and loss are gone before a layer is recomputed.
        layout: how transformers cuts the model, which then stays as it was. The ranks of one tensor-parallel group
            share a batch.
    """
    _check(model, configs, batch, length, optimizer, lora_rank)
    if layout is not None:  # whose plans know the weights by their stock names
        configs = {name: replace(config, weights="stock") for name, config in configs.items()}
    names, refused = _patched_names(model, configs)
    prepared: Prepared = partial(_with_adapters, blocks=names, rank=lora_rank) if lora_rank else _unchanged
    shape: dict[str, Any] = {"batch": batch, "length": length}
    share: OneRank | OneDevice
    if layout is None:
        share = OneDevice(model, prepared, shape)
    else:
        share = OneRank(model, prepared, shape, layout)

    def entry(name: str) -> PolicyEstimate:
        counts = [share.saved(names, worst=worst) for worst in ((False, True) if share.exchanges else (False,))]
        totals = [counted.checkpointed if gradient_checkpointing else counted.total for counted in counts]
        blocks = counts[0].checkpointed_blocks if gradient_checkpointing else counts[0].blocks
        per_token = counts[0].blocks / (batch * length)
        worst = rest + totals[1] if share.exchanges else None
        return PolicyEstimate(name, blocks, totals[0] - blocks, per_token, rest + totals[0], worst)

    policies = []
    with share:
        fixed = {
            "parameter_bytes": share.held.parameters,
            "gradient_bytes": share.held.gradients,
            "optimizer_bytes": optimizer_bytes(share.held.trained, optimizer),
        }
        rest = sum(fixed.values()) + share.moved  # of the stock model, so before it is patched
        for name in [name for name in configs if names and name not in refused]:
            try:
                patch_model(share.home, configs[name], strict=False)
            except (ConfigError, NothingToPatchError) as error:
                refused[name] = error
                continue
            try:
                policies.append(entry(name))
            finally:
                unpatch_model(share.home)
        try:
            policies.append(entry(STOCK))
        except UnsupportedModelError as error:  # stock experts may read values that the patched ones do not
            if not policies:
                raise
            refused[STOCK] = error
        return TrainingEstimate(
            parameters=share.held.numbers[0],
            trainable=share.held.numbers[1],
            **fixed,
            batch=batch,
            length=length,
            optimizer=optimizer,
            gradient_checkpointing=gradient_checkpointing,
            lora_rank=lora_rank,
            patched=len(names),
            policies=tuple(policies),
            refused={name: str(error) for name, error in refused.items()},
            rank=share.estimate,
        )


class OneDevice:
    """The whole model's share of the memory."""

    exchanges = False
    moved = 0
    estimate = None

    def __init__(self, model: Any, prepared: Prepared, shape: Mapping[str, Any]) -> None:
        self.home, self._shape = model, shape
        self._model = prepared(model)  # a wrapper puts something in front of the names, and leaves `model` as it is
        trained = tuple(param for param in self._model.parameters() if param.requires_grad)
        held = nbytes([*self._model.parameters(), *self._model.buffers()])
        self.held = Held(held, nbytes(trained), trained, numbers_of(self._model))

    def __enter__(self) -> OneDevice:
        return self

    def __exit__(self, *_: object) -> None: ...

    def saved(self, names: Sequence[str], *, worst: bool = False) -> SavedActivations:
        """Count what a forward saves, as the model is patched at present."""
        blocks = [self.home.get_submodule(name) for name in names]
        return fake_saved_activations(self._model, blocks, **self._shape)


def _unchanged(model: Any) -> nn.Module:
    return model


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors; a tied one counts once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def optimizer_bytes(parameters: Iterable[Tensor], optimizer: str) -> int:
    """Return the bytes of an optimizer's states for the trained parameters after its first step.

    AdamW is torch's (two moments in the parameter's dtype and a step count), Adafactor transformers' (one mean over
    rows and one over columns, in fp32; vectors in full).
    """
    if optimizer == "sgd":
        return 0
    if optimizer == "adamw":
        return sum(2 * param.numel() * param.element_size() + _STEP_BYTES for param in parameters)
    return sum(4 * _adafactor_elements(param.shape) for param in parameters)


def _adafactor_elements(shape: Iterable[int]) -> int:
    sizes = list(shape)
    if len(sizes) < 2:
        return math.prod(sizes)
    return math.prod(sizes[:-1]) + math.prod([*sizes[:-2], sizes[-1]])


def _patched_names(
    model: nn.Module, configs: Mapping[str, NeuronMoEConfig]
) -> tuple[list[str], dict[str, NeuronMoEError]]:
    """Names of the blocks that are patched, and the configurations that were refused before one was taken."""
    refused: dict[str, NeuronMoEError] = {}
    for name, config in configs.items():
        try:
            report = patch_model(model, config, strict=False)
        except NothingToPatchError:
            return [], {}
        except ConfigError as error:
            refused[name] = error
            continue
        unpatch_model(model)
        return [entry.name for entry in report.patched], refused
    raise next(iter(refused.values()))


def _with_adapters(model: nn.Module, blocks: list[str], rank: int) -> nn.Module:
    """Put LoRA adapters on the linear layers outside of the blocks and the head, with peft itself."""
    try:
        import peft
    except ImportError as error:
        expected, fix = "0 where peft is not installed", "pip install peft"
        raise BackendUnavailableError.about("lora_rank", expected, str(rank), fix) from error
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    inside = tuple(f"{name}." for name in blocks)
    targets = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not name.startswith(inside)
    ]
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets))


def _check(
    model: nn.Module, configs: Mapping[str, NeuronMoEConfig], batch: int, length: int, optimizer: str, rank: int
) -> None:
    limits = (("batch", batch, 1, MOST_TOKENS), ("length", length, 1, MOST_TOKENS), ("lora_rank", rank, 0, MOST_RANK))
    for argument, value, least, most in limits:
        if type(value) is not int or not least <= value <= most:
            raise ConfigError.about(argument, f"an integer from {least} to {most:,}", repr(value), "Correct it.")
    if batch * length > MOST_TOKENS:
        expected = f"at most {MOST_TOKENS:,} tokens"
        raise ConfigError.about("batch * length", expected, f"{batch * length:,}", "Take fewer.")
    if optimizer not in OPTIMIZERS:
        raise not_one_of("optimizer", optimizer, OPTIMIZERS)
    if not configs or STOCK in configs:
        expected = f"at least one configuration, none of them named {STOCK!r}"
        fix = "Name the configurations after their policies; the stock model is always estimated too."
        raise ConfigError.about("configs", expected, repr(dict(configs)), fix)
    real = [name for name, param in model.named_parameters() if not param.is_meta]
    if real:
        fix = "Build it inside `with torch.device('meta'):`; loading weights is not needed."
        raise ConfigError.about("model", "on the meta device", f"a model whose {real[0]} has values", fix)
