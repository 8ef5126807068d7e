"""TRL's SFTTrainer on chats, with the numerics of the MXFP8 kernels. A tiny model, no download, seconds on a CPU."""

from dataclasses import dataclass

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_neuron_moe import NeuronMoEArguments, NeuronMoETrainerMixin


@dataclass
class Arguments(NeuronMoEArguments, SFTConfig):
    """SFTConfig with the neuron_* options."""


class NeuronSFTTrainer(NeuronMoETrainerMixin, SFTTrainer):
    """SFTTrainer that patches the model and logs the metrics."""


bytes_only = Tokenizer(models.BPE())
bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
training = trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet, special_tokens=["<end>"])
bytes_only.train_from_iterator([""], training)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>", pad_token="<end>")
tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 257}
model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4))
chats = [
    [{"role": "user", "content": f"{n} plus one?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(3)
]
trainer = NeuronSFTTrainer(
    model=model,
    args=Arguments(output_dir="sft", neuron_precision="mxfp8", max_steps=2, use_cpu=True, report_to="none"),
    train_dataset=Dataset.from_dict({"messages": chats}),
    processing_class=tokenizer,
)
trainer.train()
print(model.model.layers[0].mlp.experts)  # NeuronExperts(precision=mxfp8, ...
