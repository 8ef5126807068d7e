"""The estimate against what real models, optimizers and forward passes hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.optimization import Adafactor

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.activation_policy import PRESETS
from hf_neuron_moe.backends.torch.compute import release_scratch
from hf_neuron_moe.config import MOST_TOKENS
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, ShapeError, public
from hf_neuron_moe.training import memory_estimate
from hf_neuron_moe.training.fake_forward import fake_saved_activations
from hf_neuron_moe.training.memory_estimate import TrainingEstimate, estimate_training, optimizer_bytes
from hf_neuron_moe.training.one_rank import Layout
from tests.refusals import refused
from tests.tiny_models import tiny_config, tokens

BATCH, LENGTH = 2, 48
WITHIN = 0.05
"""What is promised. Most counts agree to the byte; stock experts save a few bytes of offsets more."""


def meta_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def estimated(family: str, dtype: torch.dtype, policies: tuple[str, ...], **options: Any) -> TrainingEstimate:
    configs = {policy: NeuronMoEConfig(precision="bf16", activations=policy) for policy in policies}
    model = meta_model(tiny_config(family), dtype)
    return estimate_training(model, configs, batch=BATCH, length=LENGTH, **options)


def real_model(family: str, dtype: torch.dtype, policy: str) -> nn.Module:
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    if policy != "stock":
        patch_model(model, {"precision": "bf16", "activations": policy})
    return model.train()


class Allocations(TorchDispatchMode):
    """Every storage that an operator returns, held weakly; what is alive afterwards is what somebody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.seen[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return output

    def alive(self, *, without: list[Tensor]) -> int:
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in without}
        return sum(size for ref, size in self.seen.items() if not ref.expired() and ref not in known)


def kept_between_passes(model: nn.Module) -> int:
    """Bytes that are alive after a forward pass of which only the loss is held."""
    ids = tokens(BATCH, LENGTH)
    model(input_ids=ids, labels=ids.clone(), use_cache=False).loss.backward()  # fills caches that stay anyway
    model.zero_grad()
    with Allocations() as allocations:
        loss = model(input_ids=ids, labels=ids.clone(), use_cache=False).loss
        release_scratch()  # temporaries that a thread keeps for its next call
        return allocations.alive(without=[*model.parameters(), *model.buffers(), loss])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saved_activations_are_what_a_real_forward_keeps(family: str, dtype: torch.dtype) -> None:
    result = estimated(family, dtype, PRESETS)
    assert [policy.name for policy in result.policies] == [*PRESETS, "stock"]
    for policy in result.policies:
        measured = kept_between_passes(real_model(family, dtype, policy.name))
        assert policy.saved == pytest.approx(measured, rel=WITHIN), policy.name
        assert policy.total == result.parameter_bytes + result.gradient_bytes + result.optimizer_bytes + policy.saved
    saved = {policy.name: policy.saved_blocks for policy in result.policies}
    assert saved["recompute"] < saved["fp8"] < saved["minimal"] < saved["stock"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_a_block_says_of_itself_is_what_its_part_comes_to(family: str) -> None:
    result = estimated(family, torch.bfloat16, ("minimal", "recompute"))
    for policy in result.policies[:2]:
        model = meta_model(tiny_config(family), torch.bfloat16)
        report = patch_model(model, {"precision": "bf16", "activations": policy.name})
        blocks = [model.get_submodule(entry.name) for entry in report.patched]
        # Routing indices are counted in both; a share of a byte per token may be rounded in one of them.
        shown = sum(block.saved_bytes_per_token for block in blocks)
        assert policy.blocks_bytes_per_token == pytest.approx(shown, rel=0.02)


class SavedAlive:
    """Storages that anybody packed for a backward and that are still alive, and their most bytes at one time."""

    def __init__(self, owned: list[Tensor]) -> None:
        self.owned = {StorageWeakRef(tensor.untyped_storage()) for tensor in owned}
        self.seen: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def note(self, tensor: Tensor) -> Tensor:
        ref = StorageWeakRef(tensor.untyped_storage())
        if ref not in self.owned:
            self.seen[ref] = tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.alive())
        return tensor

    def alive(self) -> int:
        return sum(size for ref, size in self.seen.items() if not ref.expired())


def peak_under_checkpointing(model: nn.Module, *, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes of saved tensors between the passes, and their peak over both passes."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tokens(BATCH, LENGTH)
    labels = ids.clone()
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()  # fills caches that stay anyway
    model.zero_grad()
    saved = SavedAlive([*model.parameters(), *model.buffers(), ids, labels])
    start = checkpoint._recomputation_hook.__init__

    def noted(hooks: Any, *args: Any) -> None:  # what is recomputed without reentrance is packed by hooks of its own
        start(hooks, *args)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: pack(saved.note(tensor))

    monkeypatch.setattr(checkpoint._recomputation_hook, "__init__", noted)
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        between = saved.alive()
        loss.backward()
    return between, saved.peak


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("vocabulary", [97, 4000])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_gradient_checkpointing_has_the_peak_of_a_real_step(
    family: str, reentrant: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few words the peak is a recomputed layer, long after the head; with many it is the head and the loss."""
    config = tiny_config(family, vocab_size=vocabulary, num_hidden_layers=4)
    configs = {"minimal": NeuronMoEConfig()}
    shape = {"batch": BATCH, "length": LENGTH}
    result = estimate_training(meta_model(config, torch.bfloat16), configs, gradient_checkpointing=True, **shape)
    for policy in result.policies:
        real = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if policy.name != "stock":
            patch_model(real, {"activations": policy.name})
        between, peak = peak_under_checkpointing(real, reentrant=reentrant, monkeypatch=monkeypatch)
        assert policy.saved == pytest.approx(peak, rel=WITHIN), policy.name
        assert (peak > between, policy.saved_blocks > 0) == ((True, True) if vocabulary == 97 else (False, False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_layers_inputs(reentrant: bool) -> None:
    real = real_model("mixtral", torch.float32, "minimal")
    real.gradient_checkpointing_enable({"use_reentrant": reentrant})
    meta = meta_model(tiny_config("mixtral"))
    names = [entry.name for entry in patch_model(meta, {"precision": "bf16"}).patched]
    counted = fake_saved_activations(meta, [meta.get_submodule(n) for n in names], batch=BATCH, length=LENGTH)
    assert counted.between_passes == pytest.approx(kept_between_passes(real), rel=WITHIN)
    assert counted.between_passes <= counted.checkpointed < counted.total


def test_the_peak_is_at_the_layer_where_it_is_highest() -> None:
    """A mixture's layers are not equal: the first, largest one is recomputed when the others' inputs are gone."""
    peaks = {}
    for dense in ([0], [3]):
        shapes = {"num_hidden_layers": 4, "num_experts_per_tok": 1, "intermediate_size": 480, "mlp_only_layers": dense}
        model = meta_model(tiny_config("qwen3_moe", **shapes))
        peaks[dense[0]] = fake_saved_activations(model, [], batch=BATCH, length=LENGTH).checkpointed
    hidden = BATCH * LENGTH * 32 * 4
    assert peaks[3] - peaks[0] == 3 * hidden


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters)
    return torch.optim.SGD(parameters) if name == "sgd" else Adafactor(parameters, scale_parameter=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parameters_gradients_and_optimizer_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    model = real_model("mixtral", dtype, "minimal")
    optimizer = _optimizer(name, list(model.parameters()))
    ids = tokens(BATCH, LENGTH)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    result = estimated("mixtral", dtype, ("minimal",), optimizer=name)
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    measured = sum(value.numel() * value.element_size() for value in held)
    assert result.optimizer_bytes == pytest.approx(measured, rel=WITHIN, abs=8 * len(held))
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    assert result.gradient_bytes == sum(grad.numel() * grad.element_size() for grad in gradients)
    own = {id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    assert result.parameter_bytes == sum(own.values())
    assert result.parameters == sum(param.numel() for param in model.parameters())


def test_adapters_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    result = estimated("llama", torch.bfloat16, ("minimal",), lora_rank=4)
    model = real_model("llama", torch.bfloat16, "minimal")
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=linears)).train()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert result.trainable == sum(param.numel() for param in trained) > 0
    assert result.gradient_bytes == sum(param.numel() * param.element_size() for param in trained)
    assert result.optimizer_bytes == optimizer_bytes(trained, "adamw")
    assert result.policies[0].saved == pytest.approx(kept_between_passes(model), rel=WITHIN)


def test_budgets_and_untouched_models() -> None:
    model = meta_model(tiny_config("llama"))
    before = {name: type(module) for name, module in model.named_modules()}
    configs = {"1KiB/token": NeuronMoEConfig(activations="1KiB/token")}
    result = estimate_training(model, configs, batch=1, length=16)
    assert result.policies[0].blocks_bytes_per_token <= 1024
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash"])
def test_stock_experts_that_read_values_leave_the_policies(family: str) -> None:
    """Shapes say nothing of their forward; the patched ones need no more."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    found = estimate_training(model, {"minimal": NeuronMoEConfig(activations="minimal")}, batch=2, length=16)
    assert [policy.name for policy in found.policies] == ["minimal"] and found.policies[0].total > 0
    assert set(found.refused) == {"stock"} and "asks for a tensor's values" in found.refused["stock"]


def test_refusals() -> None:
    configs = {"minimal": NeuronMoEConfig()}
    with refused(ConfigError, "model", got="a model whose"):
        estimate_training(real_model("llama", torch.float32, "stock"), configs, batch=1, length=8)
    model = meta_model(tiny_config("llama"))
    with refused(ConfigError, "optimizer", "Did you mean 'adamw'"):
        estimate_training(model, configs, batch=1, length=8, optimizer="adam")
    with refused(ConfigError, "batch"):
        estimate_training(model, configs, batch=0, length=8)
    for argument, shape in (
        ("batch", {"batch": 10**30, "length": 8}),
        ("length", {"batch": 1, "length": 2**31}),
        ("batch * length", {"batch": 2**20, "length": 2**20}),
        ("lora_rank", {"batch": 1, "length": 8, "lora_rank": 10**30}),
    ):
        with refused(ConfigError, argument):
            estimate_training(model, configs, **shape)
    with refused(ConfigError, "configs"):
        estimate_training(model, {}, batch=1, length=8)
    gpt = meta_model(tiny_config("llama"))
    gpt.model.embed_tokens = nn.Embedding(4, 7, device="meta")  # a width that no layer takes
    with refused(ShapeError, "batch and length", "LlamaForCausalLM stops with"):
        estimate_training(gpt, configs, batch=1, length=8)


LARGE = {
    "llama-3-8b": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        8_030_261_248,
        64.2 * 32,
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
        ),
        30_532_122_624,
        28.2 * 48,
    ),
    "mixtral-8x7b": (MixtralConfig(), 46_702_792_704, 120.5 * 32),
}
"""Configuration, number of parameters as published, and the most KiB per token that all blocks may keep in minimal."""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_models_take_seconds_and_no_memory(name: str) -> None:
    config, parameters, kib = LARGE[name]
    configs = {policy: NeuronMoEConfig(activations=policy) for policy in ("minimal", "recompute")}
    result = estimate_training(meta_model(config, torch.bfloat16), configs, batch=1, length=4096)
    assert result.parameters == parameters
    assert result.gradient_bytes == 2 * parameters
    minimal, recompute, stock = result.policies
    assert recompute.blocks_bytes_per_token < minimal.blocks_bytes_per_token <= 1024 * kib
    assert minimal.blocks_bytes_per_token < 0.55 * stock.blocks_bytes_per_token


def test_a_layout_with_a_transformers_that_has_no_such_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_5_17(*, tp_size: int | None = None, fsdp_size: int | None = None) -> None:
        """Take what release 5.17 takes."""

    monkeypatch.setattr("transformers.distributed.configuration_utils.DistributedConfig", of_5_17)
    with refused(BackendUnavailableError, "layout", r"pip install 'transformers>="):
        public("estimate")(Layout)(tp=2)


def test_what_blocks_keep_per_token_is_told_without_checkpointing() -> None:
    found = []
    for again in (False, True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        options: dict[str, Any] = {"batch": 2, "length": 64, "gradient_checkpointing": again}
        found.append(estimate_training(model, {"minimal": NeuronMoEConfig()}, **options).policies[0])
    assert found[0].blocks_bytes_per_token == found[1].blocks_bytes_per_token > 0
    assert found[0].saved_blocks > found[1].saved_blocks


def test_a_step_has_at_most_so_many_tokens() -> None:
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    configs = {"minimal": NeuronMoEConfig()}
    memory_estimate._check(model, configs, 1, MOST_TOKENS, "adamw", 0)
    with pytest.raises(ConfigError, match=r"batch \* length must be at most 2,147,483,647 tokens"):
        memory_estimate._check(model, configs, 2, 2**30, "adamw", 0)
