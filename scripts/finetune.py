#!/usr/bin/env python3
"""Fine-tune with TRL's SFTTrainer in a script of your own; `hf-neuron-moe train CONFIG.yaml` needs no script.

hf-neuron-moe tiny-model mixtral .cache/tiny-mixtral
python scripts/finetune.py .cache/tiny-mixtral data/sotu/eval.jsonl run
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from hf_neuron_moe import NeuronMoEArguments, NeuronMoETrainerMixin


@dataclass
class Arguments(NeuronMoEArguments, SFTConfig):
    """SFTConfig with the neuron_* options."""


class NeuronSFTTrainer(NeuronMoETrainerMixin, SFTTrainer):
    """SFTTrainer that patches the model and logs the metrics."""


def main(model: str, text: str, output_dir: str) -> None:
    data = load_dataset("json", data_files=text, split="train")
    options = {"neuron_precision": "mxfp8", "packing": True, "packing_strategy": "bfd_split", "max_length": 128}
    args = Arguments(output_dir, max_steps=10, logging_steps=1, use_cpu=True, bf16=False, report_to="none", **options)
    trainer = NeuronSFTTrainer(model, args, train_dataset=data)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python scripts/finetune.py MODEL DATA.jsonl OUTPUT_DIR")
    main(*sys.argv[1:])
