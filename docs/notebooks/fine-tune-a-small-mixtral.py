# %% [markdown]
# # Fine-tune a small Mixtral and look inside
#
# You train a Mixtral with a few hundred thousand parameters on text, once stock and once with the numerics of Trainium's
# MXFP8 kernels. Then you look at what the patched blocks saved, where the tokens went, and what the checkpoint holds.
# Everything runs on a CPU in seconds, without a download. Nothing here has run on Trainium.

# %%
import copy
import json
import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments

folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)

# %% [markdown]
# ## The text and the model
#
# The text is one paragraph, repeated. Each byte is a token, so there is no tokenizer to fetch.

# %%
paragraph = (
    "A mixture of experts has many small networks, the experts, and a router that sends every token to a few of them. "
    "So a model can hold many parameters and compute with few of them. "
)
tokens = torch.tensor(list(paragraph.encode() * 24))
rows = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // 64 * 64].view(-1, 64)]

config = MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config)
start = copy.deepcopy(model.state_dict())
print(f"{model.num_parameters():,} parameters, {len(rows)} rows of 64 tokens")

# %% [markdown]
# ## Two runs from the same weights
#
# The stock run uses transformers' `Trainer`. The other one uses `NeuronMoETrainer`, which patches the model first. Both see
# the same batches.

# %%
common = {
    "max_steps": 24,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "logging_steps": 4,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 0,
    "log_level": "error",
}


def losses(trainer):
    """Train, and return the logged losses."""
    trainer.pop_callback(next(c for c in trainer.callback_handler.callbacks if "Print" in type(c).__name__))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


stock = losses(Trainer(model=model, args=TrainingArguments(output_dir=folder / "stock", **common), train_dataset=rows))
model.load_state_dict(start)
arguments = NeuronMoETrainingArguments(output_dir=folder / "mxfp8", neuron_precision="mxfp8", **common)
trainer = NeuronMoETrainer(model=model, args=arguments, train_dataset=rows)
mxfp8 = losses(trainer)
print("step  stock   mxfp8")
for step, pair in enumerate(zip(stock, mxfp8, strict=True), start=1):
    print(f"{4 * step:4}  {float(pair[0]):.3f}   {float(pair[1]):.3f}")

# %% [markdown]
# The curves nearly coincide. MXFP8 keeps 4 bits of significand and one scale per 32 values. That is enough for a model to
# learn here. [60 longer runs](../parity.md) say more.
#
# ## What was patched
#
# `run.json` has the report of the patch. `KiB/token` is what a block saves from forward to backward. The kernels pad sizes
# to multiples of 128, and this model has 64. So their padding would be large here.

# %%
run = json.loads((folder / "mxfp8" / "neuron_moe" / "run.json").read_text())
for block in run["patch"]["entries"]:
    print(block["name"], block["status"], f"{block['saved_bytes_per_token'] / 1024:.2f} KiB/token")

# %% [markdown]
# ## Where the tokens went
#
# `metrics.jsonl` has the load of every expert at every logging step. The bars show the last one.

# %%
lines = (folder / "mxfp8" / "neuron_moe" / "metrics.jsonl").read_text().splitlines()
for name, experts in json.loads(lines[-1])["experts"].items():
    print(name)
    for expert, load in enumerate(experts["load"]):
        print(f"  expert {expert} {'#' * (load // 32):32} {load}")

# %% [markdown]
# Some experts get more tokens than others. Pass
# `output_router_logits=True` to `MixtralConfig` to add transformers' balancing loss.
#
# ## The checkpoint is an ordinary one
#
# Names and shapes are those of transformers. A program that does not know this package opens it.

# %%
trainer.save_model(folder / "final")
again = MixtralForCausalLM.from_pretrained(folder / "final")
equal = all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
print("loaded by stock transformers, every tensor equal:", equal)
