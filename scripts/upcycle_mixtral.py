#!/usr/bin/env python3
"""Build a Mixtral checkpoint with real weights from a Llama checkpoint, by sparse upcycling (demo/upcycle.py)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_neuron_moe.demo.upcycle import LAYER_CHOICES, Experts, choose_layers, upcycle


def upcycled(parser: argparse.ArgumentParser, upcycle: Callable[..., Any]) -> tuple[argparse.Namespace, Any]:
    """Load the Llama that the command line names, and write its tokenizer; return the options and the new model."""
    parser.add_argument("--model", required=True, help="Llama checkpoint: a local folder or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--layers", type=int, help="take only N layers (default: all)")
    parser.add_argument("--layer-choice", choices=LAYER_CHOICES, default="ends", help="which ones (default: ends)")
    parser.add_argument("--experts", type=int, default=4, help="experts per layer (default: 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: 2)")
    parser.add_argument("--noise", type=float, default=0.02, help="perturbation relative to weight RMS (default: 0.02)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llama = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if not isinstance(llama, LlamaForCausalLM):
        parser.error(f"--model must be a LlamaForCausalLM, got {type(llama).__name__}")
    layers = choose_layers(llama.config.num_hidden_layers, args.layers, args.layer_choice)
    model = upcycle(llama, Experts(layers, args.experts, args.top_k, args.noise, args.seed))
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers")
    return args, model


def main() -> None:
    """Write a Mixtral."""
    args, mixtral = upcycled(argparse.ArgumentParser(description=__doc__, allow_abbrev=False), upcycle)
    mixtral.save_pretrained(args.out)


if __name__ == "__main__":
    main()
