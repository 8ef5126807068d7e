#!/usr/bin/env bash
# Train a tiny Mixtral on chats with axolotl and this package's plugin, and open the result in stock transformers.
# Needs an environment with both: axolotl 0.21 wants Python 3.12 or later, torch 2.13 and transformers 5.20.1.
#
#   PYTHON=env/bin/python bash scripts/check_axolotl.sh
#
# Of axolotl's pins one may have to be lifted: zstandard 0.22.0 has no wheels for Python 3.13.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
found="$(command -v "${PYTHON:-python}")" || { echo "no Python: ${PYTHON:-python}" >&2; exit 1; }
python="$(cd "$(dirname "$found")" && pwd)/$(basename "$found")"
folder="$(mktemp -d)"
finish() {
    local status=$?
    if [ "$status" != 0 ] && [ -f "$folder/log" ]; then tail -40 "$folder/log" >&2; fi
    rm -rf "$folder"
}
trap finish EXIT
cd "$folder"
export PATH="$(dirname "$python"):$PATH" # for the accelerate that axolotl starts
export PYTHONPATH="$root:$root/examples/axolotl" HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 DO_NOT_TRACK=1

"$python" - <<'PY'
import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

pairs = [(f"What is {a} plus {b}?", str(a + b)) for a in range(6) for b in range(6)]
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<unk>", "<s>", "</s>"]
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
tokenizer.train_from_iterator([text for pair in pairs for text in pair], trainer)
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
)
fast.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
fast.save_pretrained("model")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
MixtralForCausalLM(MixtralConfig(vocab_size=len(fast), **sizes, **heads)).save_pretrained("model")
with open("chats.jsonl", "w") as file:
    for asked, answered in pairs:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        file.write(json.dumps({"messages": turns}) + "\n")
PY
cat >run.yaml <<'YAML'
base_model: ./model
plugins: [neuron_moe_plugin.NeuronMoEPlugin]
neuron_moe: {precision: mxfp8, activations: minimal}
datasets: [{path: ./chats.jsonl, type: chat_template}]
chat_template: tokenizer_default
sequence_len: 128
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 20
learning_rate: 0.005
lr_scheduler: constant
optimizer: adamw_torch
bf16: false
fp16: false
tf32: false
flash_attention: false
logging_steps: 1
save_strategy: "no"
output_dir: ./out
YAML
timeout 280 "$python" -m axolotl.cli.main train run.yaml >log 2>&1
grep -E "patched, .* refused" log
"$python" - <<'PY'
import re
from importlib.metadata import version
from pathlib import Path

from transformers import AutoModelForCausalLM

losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", Path("log").read_text())]
assert "2 patched, 0 skipped, 0 refused (precision mxfp8" in Path("log").read_text()
assert len(losses) == 20 and sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
_, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
print(f"axolotl {version('axolotl')}: loss {losses[0]:.2f} to {losses[-1]:.2f}, opened in stock transformers")
PY
