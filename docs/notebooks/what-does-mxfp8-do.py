# %% [markdown]
# # What does MXFP8 do to my model?
#
# You quantize one weight and look at the error. Then the explorer measures a small model on its text. It ranks the blocks
# by what MXFP8 costs in each, and plans which of them stay in bf16. Everything runs on a CPU, without a download. Nothing
# here has run on Trainium.

# %%
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.explore.run import Options, explore
from hf_neuron_moe.formats import fake_quantize_mx, quantize_mx

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## One weight
#
# A matmul of `x` with a weight `[F, K]` sums over K. MXFP8 quantizes along K: 32 values share one power of two.

# %%
weight = torch.randn(256, 512)
quantized = quantize_mx(weight)
seen = fake_quantize_mx(weight)  # what the matmul sees
print("codes", list(quantized.codes.shape), "scales", list(quantized.scales.shape))
print(f"bytes per value: {(quantized.codes.numel() + quantized.scales.numel()) / weight.numel():.3f}")
error = (seen - weight).norm() / weight.norm()
print(f"relative error: {error:.4f}, signal over noise: {-20 * torch.log10(error):.1f} dB")

# %% [markdown]
# ## One outlier
#
# The largest value of a block sets its scale. If one value is far larger than the others, they lose bits.

# %%
others = torch.arange(512) != 7
for factor in (1, 100, 10_000, 1_000_000):
    one = weight.clone()
    one[:, 7] *= factor
    seen = fake_quantize_mx(one)
    noise = (seen - one)[:, others].norm() / one[:, others].norm()
    zeros = (seen[:, others] == 0).float().mean()
    print(f"outlier x {factor:>9,}: relative error of the other values {noise:.4f}, zeros {100 * zeros:.1f} %")

# %% [markdown]
# Only the 31 others of its block lose: one in sixteen values here. All other blocks have their own scales. And e4m3 has a
# wide range: an outlier of 100 costs nothing, one of 10,000 little.
#
# ## A model and its text
#
# This Llama is trained for some steps first, because nothing is at stake in an untrained one. Each byte is a token.

# %%
text = (
    "The largest value of a block decides its scale. Small values next to it keep few bits. "
    "So a channel with outliers costs its neighbors, and a precision per block can save the loss. "
) * 30
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator([""], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
rows = torch.tensor(fast(text)["input_ids"])[: 64 * 64].view(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(40):
    loss = model(rows[step % 8 * 8 :][:8], labels=rows[step % 8 * 8 :][:8]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss after 40 steps: {loss:.2f}")

# %% [markdown]
# One channel of the second block becomes an outlier: 2 to the 26th in `up_proj`, and its inverse in `down_proj`. The model
# computes the same function in fp32. Trained models can have such channels by themselves.

# %%
with torch.no_grad():
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight[5] *= 2.0**26
    mlp.down_proj.weight[:, 5] *= 2.0**-26
model.save_pretrained(folder)
fast.save_pretrained(folder)
(folder / "text.txt").write_text(text)

# %% [markdown]
# ## The explorer
#
# It runs the model in bf16 and asks what the loss would be if one block computed in MXFP8. `hf-neuron-moe explore` does the
# same from a shell and writes a page.

# %%
result = explore(
    folder, folder / "text.txt", Options(tokens=1024, length=64, formats=("mxfp8",), budget="0.05%", verify=3)
)
print(f"loss in bf16: {result.loss:.4f}")
for row in result.ranking["mxfp8"]:
    print(f"{row.block:20} predicted {row.predicted:+.1e}  measured {row.measured:+.1e}  {row.reason.text}")
print("plan:", result.plan.recipe)

# %% [markdown]
# ## Use the plan
#
# The plan is a precision per block. `patch_model`, the Trainer's arguments, `estimate` and `convert` take it.

# %%
report = patch_model(LlamaForCausalLM.from_pretrained(folder), NeuronMoEConfig(precision=result.plan.recipe))
for entry in report.patched:
    print(entry.name, entry.precision)
