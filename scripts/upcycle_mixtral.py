#!/usr/bin/env python3
"""Build a Mixtral checkpoint with real weights from a Llama checkpoint, by sparse upcycling (demo/upcycle.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_neuron_moe.demo.upcycle import LAYER_CHOICES, choose_layers, upcycle


def main() -> None:
    """Load a Llama, upcycle it, save it with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Llama checkpoint: a local folder or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--layers", type=int, help="take only N layers (default: all)")
    parser.add_argument("--layer-choice", choices=LAYER_CHOICES, default="ends", help="which ones (default: ends)")
    parser.add_argument("--experts", type=int, default=4, choices=(4, 8), help="experts per layer (default: 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: 2)")
    parser.add_argument("--noise", type=float, default=0.02, help="perturbation relative to weight RMS (default: 0.02)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llama = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if not isinstance(llama, LlamaForCausalLM):
        parser.error(f"--model must be a LlamaForCausalLM, got {type(llama).__name__}")
    layers = choose_layers(llama.config.num_hidden_layers, args.layers, args.layer_choice)
    mixtral = upcycle(llama, layers=layers, experts=args.experts, top_k=args.top_k, noise=args.noise, seed=args.seed)
    mixtral.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    print(f"{args.out}: {mixtral.num_parameters():,} parameters, {mixtral.config.num_hidden_layers} layers")


if __name__ == "__main__":
    main()
